"""Tables of tokens: they say what llguidance says, token by token, or there is none."""

import json
import re
from contextlib import suppress

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from jpaged.api.structured_outputs import StructuredOutputsParams as Structured
from jpaged.bench.structured import SCHEMA
from jpaged.text import token_columns, token_moves, token_walk
from jpaged.text.grammars import GrammarTokenizer, grammar_text
from jpaged.text.guides import FollowedGrammar, Guide, Vocabulary
from jpaged.text.regular.automata import Automaton, NotCovered
from jpaged.text.regular.constraints import automaton_of
from jpaged.text.regular.expressions import compiled
from jpaged.text.regular.regexes import found, whole
from jpaged.text.regular.spellings import Spellings
from jpaged.text.token_tables import TokenTable, token_table
from tests.support.random_schemas import random_schema

CORPUS = [
    '{"name": "grün", "kind": [1, 22, 333], "größe": null}',
    '{"a b":true,"x":"cd","tags":["你好","😀"]}\n',
    "ab" * 30,
] * 9
COMPACT = {"disable_any_whitespace": True}
STRICT = {"type": "object", "additionalProperties": False}


class Following:
    """llguidance and tables with a tokenizer whose tokens are bytes, and what is frequent in JSON.

    splits: whether words are told apart first, so that no token has a word and what stands around it.
    """

    def __init__(self, splits: bool) -> None:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(CORPUS, trainer)
        tokenizer.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<pad>", special=True)])
        self.eos, self.size = tokenizer.token_to_id("</s>"), tokenizer.get_vocab_size() + 5
        self.tokenizer = GrammarTokenizer(tokenizer.to_str(), self.size, (self.eos,)).make()
        self.words = -(-self.size // 32)
        self.vocabulary = Vocabulary.of(self.size, (self.eos,), self.words)
        self.spell = Spellings(self.tokenizer, self.size)

    def table(self, params: Structured, automaton: Automaton | None = None) -> TokenTable:
        return token_table(
            automaton or automaton_of(params), self.grammar(params), self.tokenizer, self.vocabulary, self.spell
        )

    def grammar(self, params: Structured) -> FollowedGrammar:
        return FollowedGrammar(self.tokenizer, grammar_text(params))

    def walk(self, params: Structured, table: TokenTable, rng: np.random.Generator, most: int = 60) -> list[int]:
        """Follows a random text by both. Returns its tokens."""
        grammar = self.grammar(params)
        guide, mask = Guide(grammar, self.vocabulary, False, False), np.zeros((self.words,), np.uint32)
        state, forced, tokens = table.start, list(grammar.forced), []
        while len(tokens) < most:
            for token in forced:
                assert allowed(table, state) == [token]
                state = table.follow(state, [token])
                assert state >= 0
            guide.make_mask(mask)
            assert (table.masks[table.mask_of[state]] == mask).all()
            may = [token for token in allowed(table, state) if token != self.eos]
            assert all(table.follow(state, [token]) >= 0 for token in may[:: 1 + len(may) // 20])
            refused = rng.integers(self.size)
            assert refused in may or table.follow(state, [refused]) == -1
            if not may:
                break
            token = int(rng.choice(may))
            guide.matcher.consume_token(token)
            state, forced = table.follow(state, [token]), guide.take_forced()
            tokens += [token, *forced]
        return tokens


def allowed(table: TokenTable, state: int) -> list[int]:
    mask = table.masks[table.mask_of[state]]
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


@pytest.fixture(scope="module", params=[True, False], ids=["words", "no words"])
def following(request):
    return Following(request.param)


def test_the_vocabularies_have_tokens_of_all_kinds(following):
    texts = following.spell.texts
    assert sum(len(text) == 1 for text in texts) >= 250
    assert max(map(len, texts)) >= 16
    assert any(b"\xe5\xa5\xbd" in text for text in texts)
    assert any(text[:1] in b'":,' and len(text) > 2 for text in texts)
    assert texts[following.eos] == texts[-1] == b""


def test_tables_of_random_schemas_say_what_guides_do(following):
    rng = np.random.default_rng(11)
    lengths = []
    for i in range(12):
        params = Structured(json=random_schema(rng), disable_any_whitespace=bool(i % 2))
        table = following.table(params)
        lengths += [len(following.walk(params, table, rng)) for _ in range(4)]
    assert np.mean(lengths) > 8


ADDRESS = {"name": {"type": "string", "maxLength": 3}, "kind": {"type": "integer"}}
OPEN = {"exclusiveMinimum": -12, "maximum": 7}
LENIENT = {"lenient": True}
SEVENS = {
    "allOf": [{"items": {"type": "integer", "minimum": -7}}, {"minItems": 1, "items": {"maximum": 99, "multipleOf": 7}}]
}


@pytest.mark.parametrize(
    "params",
    [
        Structured(choice=["a", "ab", "abab", "grün", '\n"', 'name": "grün']),
        Structured(regex=r"[^a]{1,3}(?:ab|cd)+|\.[0-9]*\n?"),
        Structured(
            json=STRICT | {"properties": {"name": {"type": "string"}, "tags": {"type": "array", "maxItems": 0}}}
        ),
        Structured(json=STRICT | {"properties": ADDRESS, "required": ["name", "kind"]}, **COMPACT),
        Structured(
            json={"anyOf": [{"type": ["null", "integer"], "exclusiveMinimum": -12}, {"enum": ["\x7f/\\", [1]]}]}
        ),
        Structured(json={"type": "array"} | SEVENS, whitespace_pattern="[ \n]?"),
        Structured(
            json={"oneOf": [{"type": "string", "format": "date-time"}, {"type": "boolean"}, {"type": "number"} | OPEN]}
        ),
        Structured(json={"type": "string", "pattern": r"\d[äöü]$", "maxLength": 6, "not": {}, "x-guidance": LENIENT}),
    ],
)
def test_tables_of_all_kinds_say_what_guides_do(following, params):
    rng = np.random.default_rng(5)
    table = following.table(params)
    assert sum(len(following.walk(params, table, rng, 30)) for _ in range(6)) > 0
    columns = {column.tobytes() for column in table.next.T}
    assert len(columns) == table.next.shape[1]
    assert (table.next[:, 0] == -1).all()
    assert table.classes[following.eos] == 0
    assert len({mask.tobytes() for mask in table.masks}) == len(table.masks)


def test_forced_tokens_spell_what_is_forced_and_cannot_end_the_answer():
    following = Following(True)
    params = Structured(json=STRICT | {"properties": {"name": {"const": "x"}}, "required": ["name"]}, **COMPACT)
    table, grammar = following.table(params), following.grammar(params)
    start = table.follow(table.start, grammar.forced)
    assert start >= 0
    assert table.follow(table.start, [*grammar.forced, following.eos]) == -1
    texts = b"".join(following.spell.texts[token] for token in grammar.forced)
    assert b'{"name": "x"}'.startswith(texts)


RECURSIVE = {
    "$defs": {"node": STRICT | {"properties": {"next": {"$ref": "#/$defs/node"}}}},
    "$ref": "#/$defs/node",
}


@pytest.mark.parametrize(
    "params",
    [
        Structured(json=RECURSIVE),
        Structured(json={"type": "object", "properties": {"a": {"type": "integer"}}}),
        Structured(json={"type": "array"}),
        Structured(json={}),
        Structured(json={"type": "number", "minimum": 0.5}),
        Structured(json={"type": "string", "pattern": r"\s"}),
        Structured(json={"type": "string", "maxLength": 100_000}),
        Structured(json={"type": "string", "pattern": "^(a|b)*a(a|b){20}$"}),
        Structured(json_object=True),
        Structured(regex=r"\w+"),
        Structured(regex="a+?b"),
        Structured(regex="(?i)ab"),
        Structured(grammar='start: "a"'),
    ],
)
def test_what_is_not_regular_or_too_large_has_no_automaton(params):
    with pytest.raises(NotCovered):
        automaton_of(params)


@pytest.mark.parametrize(
    ("module", "bound"),
    [
        (token_walk, "MOST_STATES"),
        (token_moves, "MOST_MASKS"),
        (token_columns, "MOST_CLASSES"),
        (token_columns, "MOST_ENTRIES"),
    ],
)
def test_a_table_has_bounds(following, monkeypatch, module, bound):
    params = Structured(regex="[a-z]{3}")
    following.table(params)
    monkeypatch.setattr(module, bound, 2)
    with pytest.raises(NotCovered, match="more than 2"):
        following.table(params)


def assert_is_refused_or(table, following, params, wrong):
    """What is wrong where no token ever leads is right all the same."""
    with suppress(NotCovered):
        for one, other in zip(following.table(params, wrong), table, strict=True):
            assert np.array_equal(one, other)


def test_an_automaton_that_is_wrong_at_any_place_has_no_table(following):
    params = Structured(json={"type": "array", "items": {"enum": ["ab", 12]}, "maxItems": 2}, whitespace_pattern=" ?")
    right = automaton_of(params)
    table = following.table(params, right)
    for state, byte in np.argwhere(right.next >= 0).tolist():
        wrong = right.next.copy()
        wrong[state, byte] = -1
        assert_is_refused_or(table, following, params, Automaton(wrong, right.accepts))
        wrong[state, byte] = (right.next[state, byte] + 1) % len(right.accepts)
        assert_is_refused_or(table, following, params, Automaton(wrong, right.accepts))
    for state in range(len(right.accepts)):
        ends = right.accepts.copy()
        ends[state] ^= True
        assert_is_refused_or(table, following, params, Automaton(right.next, ends))


def matches(automaton: Automaton, text: str) -> bool:
    state = 0
    for byte in text.encode():
        state = int(automaton.next[state, byte])
        if state < 0:
            return False
    return bool(automaton.accepts[state])


@pytest.mark.parametrize(
    "regex", ["a(b|ca)*d{0,2}", "[^b-z]{2}|ä+b?", "(a|ab)(c|bcd)?", "[a\\-é]+\\.?", "(?:a{2,}b){1,2}"]
)
def test_regexes_match_what_pythons_do(regex):
    rng = np.random.default_rng(3)
    automata = compiled(whole(regex)), compiled(found(regex.replace("|", "")))
    for _ in range(300):
        text = "".join(rng.choice(list("aaabbcdéä-.😀"), rng.integers(7)))
        assert matches(automata[0], text) == bool(re.fullmatch(regex, text))
        assert matches(automata[1], text) == bool(re.search(regex.replace("|", ""), text))


def test_an_object_of_many_optional_fields_has_a_small_automaton():
    properties = {f"field_{i}": {"type": "boolean"} for i in range(60)}
    automaton = automaton_of(Structured(json=STRICT | {"properties": properties}, **COMPACT))
    assert len(automaton.accepts) < 60 * 40
    assert matches(automaton, '{"field_3": true, "field_57": false}')
    assert not matches(automaton, '{"field_57": true, "field_3": false}')


def test_the_schema_of_the_benchmark_has_an_automaton_within_the_bounds():
    automaton = automaton_of(Structured(json=SCHEMA))
    assert len(automaton.accepts) == 4422
    value = {"name": "ä" * 40, "summary": '"\n', "score": 100, "category": "praise", "tags": ["x"] * 5}
    assert matches(automaton, json.dumps(value, ensure_ascii=False, indent=2))
    assert not matches(automaton, json.dumps(value | {"score": 101}, ensure_ascii=False))
    assert not matches(automaton, json.dumps(value | {"name": "ä" * 41}, ensure_ascii=False))
