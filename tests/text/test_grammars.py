"""Constraints compiled for the embedded model's tokenizer: what is forced, what may follow, and what is refused."""

import json
import os
import shutil
import signal
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers

from jpaged.api.errors import InvalidParameterError, JPagedError
from jpaged.api.structured_outputs import FEW_TOKENS
from jpaged.api.structured_outputs import StructuredOutputsParams as Structured
from jpaged.assets import demo_model_path
from jpaged.text import grammar_compiler, grammars
from jpaged.text.grammar_compiler import GrammarCompiler
from jpaged.text.grammar_shards import take_all
from jpaged.text.grammars import GrammarCheck, GrammarTokenizer
from jpaged.text.guides import FollowedGrammar, Guide, Vocabulary
from jpaged.text.tokenizer import Tokenizer
from tests.support.random_schemas import random_schema

VOCAB_SIZE, EOS = 2816, 2
COMPACT = {"disable_any_whitespace": True}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(demo_model_path())


@pytest.fixture(scope="module")
def given(tokenizer):
    return GrammarTokenizer.of(tokenizer, VOCAB_SIZE, (EOS,))


@pytest.fixture(scope="module")
def compiler(given):
    compiler = GrammarCompiler(lambda: given, VOCAB_SIZE, num_shards=2)
    yield compiler
    compiler.close()


@pytest.fixture
def fresh_compiler(given):
    """A compiler whose process draws the same random tokens each time, whatever other tests have had."""
    compiler = GrammarCompiler(lambda: given, VOCAB_SIZE, num_shards=1)
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def check(given):
    return GrammarCheck(lambda: given, VOCAB_SIZE)


def masks_of(compiler, *guides) -> list[np.ndarray]:
    """Masks, whether tokens are listed or not."""
    masks = []
    for made in compiler.make_masks(guides):
        mask = made
        if made.dtype == np.int32:
            assert len(made) <= FEW_TOKENS
            bits = np.zeros((32 * compiler.num_words,), np.bool_)
            bits[made] = True
            mask = np.packbits(bits, bitorder="little").view(np.uint32)
        else:
            assert len(allowed(made)) > FEW_TOKENS
        masks.append(mask)
    return masks


def allowed(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def advance(compiler, guides, tokens, masks):
    """Moves guides past tokens that were sampled under masks. Returns what is forced, or why they cannot go on."""
    n = len(guides)
    places = compiler.advance(guides, np.array(tokens)[:, None], [False] * n, [0] * n)
    fine = [i for i in range(n) if not places[i].failure]
    assert all(places[i].needs_mask for i in fine)
    for i, made in zip(fine, masks_of(compiler, *(guides[i] for i in fine)), strict=True):
        masks[i] = made
    return [place.failure or place.forced for place in places]


def resume(compiler, guide, tokens, mask):
    place = compiler.resume(guide, tokens)
    if not place.failure:
        mask[:] = masks_of(compiler, guide)[0]
    return place.failure or place.forced


def follow(compiler, params, tokens, ignore_eos=False):
    """What is forced and allowed after each of these tokens, one after the other."""
    guide = compiler.compile(params).result().begin(ignore_eos)
    mask = np.zeros((1, compiler.num_words), np.uint32)
    return [(advance(compiler, [guide], [token], mask)[0], allowed(mask[0])) for token in tokens]


def test_a_tokenizer_is_read_without_transformers_where_its_file_says_all(tokenizer, given, tmp_path):
    def load():
        raise AssertionError("loaded")

    assert json.loads(GrammarTokenizer.read(demo_model_path(), load, VOCAB_SIZE, (EOS,)).json) == json.loads(given.json)
    shutil.copytree(demo_model_path(), tmp_path / "model")
    config = tmp_path / "model" / "tokenizer_config.json"
    config.write_text(json.dumps({"added_tokens_decoder": {"2815": {"content": "<late>"}}}))
    assert GrammarTokenizer.read(tmp_path / "model", lambda: tokenizer, VOCAB_SIZE, (EOS,)) == given
    config.unlink()
    assert GrammarTokenizer.read(tmp_path / "model", lambda: tokenizer, VOCAB_SIZE, (EOS,)) == given


def test_added_tokens_that_the_model_has_no_logits_for_are_left_out(given, tmp_path):
    shutil.copytree(demo_model_path(), tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    whole = json.loads(file.read_text())
    whole["added_tokens"].append(whole["added_tokens"][0] | {"id": VOCAB_SIZE, "content": "<image>"})
    file.write_text(json.dumps(whole))
    loaded = Tokenizer.load(tmp_path / "model")
    assert loaded.vocab_size == VOCAB_SIZE + 1
    of_files = GrammarTokenizer.read(tmp_path / "model", lambda: loaded, VOCAB_SIZE, (EOS,))
    for found in (of_files, GrammarTokenizer.of(loaded, VOCAB_SIZE, (EOS,))):
        assert json.loads(found.json) == json.loads(given.json)
        assert found.make().vocab_size == VOCAB_SIZE


def test_ids_that_no_token_has_are_never_allowed(given):
    """GPT-4's vocabulary has such holes."""
    whole = json.loads(given.json)
    whole["model"]["vocab"] = {text: i + 20 * (i > 2000) for text, i in whole["model"]["vocab"].items()}
    last = 1 + max(whole["model"]["vocab"].values())
    end = whole["added_tokens"][0] | {"id": last, "content": "<end>"}  # behind more tokens than there are
    whole["model"]["vocab"]["<end>"] = last
    whole["added_tokens"].append(end)
    holed = tokenizers.Tokenizer.from_str(json.dumps(whole))
    size = last + 5
    found = GrammarTokenizer.of(SimpleNamespace(to_json=holed.to_str), size, (last,))
    check = GrammarCheck(lambda: found, size)
    check.check(Structured(regex="(.|\n)+"))
    ll = found.make()
    vocabulary = Vocabulary.of(size, (last,), -(-size // 32))
    guide = Guide(FollowedGrammar(ll, grammars.grammar_text(Structured(regex="(.|\n)+"))), vocabulary, False, False)
    mask = np.zeros((-(-size // 32),), np.uint32)
    guide.make_mask(mask)
    every = allowed(mask)
    assert not set(every) & set(range(2001, 2021))
    assert {2000, 2021, last - 1} <= set(every)


@pytest.mark.parametrize("last", [1500, 3000])
def test_added_tokens_keep_their_ids_among_those_that_no_token_has(given, last):
    """An added token need not be in the vocabulary: here it is in its hole, or behind it."""
    whole = json.loads(given.json)
    whole["model"]["vocab"] = {text: i for text, i in whole["model"]["vocab"].items() if i < 1500 or 1505 < i < 2000}
    whole["added_tokens"] = [whole["added_tokens"][0] | {"id": last, "content": "<end>"}]
    found = GrammarTokenizer.of(SimpleNamespace(to_json=lambda: json.dumps(whole)), 3010, (last,))
    made = json.loads(found.json)
    of_vocab, added = made["model"]["vocab"], {token["content"]: token["id"] for token in made["added_tokens"]}
    assert added["<end>"] == last
    ids = [*of_vocab.values(), *(i for content, i in added.items() if content not in of_vocab)]
    assert sorted(ids) == list(range(max(2000, last + 1)))


def test_a_panic_of_the_grammar_library_is_a_sentence_about_the_tokenizer(given):
    whole = json.loads(given.json)
    whole["model"]["vocab"]["end"] = 5000  # behind more tokens than there are
    whole["added_tokens"].append(whole["added_tokens"][0] | {"id": 5000, "content": "end", "special": False})
    panicking = GrammarTokenizer(json.dumps(whole), 5010, (EOS,))
    with pytest.raises(InvalidParameterError, match="this tokenizer"):
        panicking.make()
    with pytest.raises(InvalidParameterError, match="this tokenizer"):
        GrammarCheck(lambda: panicking, 5010).check(Structured(regex="a"))


def test_what_can_only_come_one_way_is_forced_from_the_first_token_on(compiler, tokenizer):
    schema = {"type": "object", "properties": {"name": {"enum": ["fox", "frog"]}}, "required": ["name"]}
    grammar = compiler.compile(Structured(json=schema | {"additionalProperties": False}, **COMPACT)).result()
    assert tokenizer.decode(grammar.forced) == '{"name": "f'
    assert {tokenizer.token_text(token)[0] for token in allowed(grammar.mask)} == {"o", "r"}


def test_the_end_is_allowed_where_the_constraint_is_fulfilled_and_late_if_eos_is_ignored(compiler, tokenizer):
    (a,) = tokenizer.encode("a", add_special_tokens=False)[-1:]
    params = Structured(regex="[ab]{1,3}")
    ends = [EOS in may for _, may in follow(compiler, params, [a, a, a])]
    assert ends == [True, True, True]
    late = [EOS in may for _, may in follow(compiler, params, [a, a, a], ignore_eos=True)]
    assert late == [False, False, True]
    assert EOS not in allowed(compiler.compile(params).result().mask)


def test_a_token_that_is_not_allowed_is_an_error_of_that_sequence_alone(compiler, tokenizer):
    grammar = compiler.compile(Structured(regex="[ab]{9}")).result()
    (a,), (z,) = (tokenizer.encode(text, add_special_tokens=False)[-1:] for text in ("a", "z"))
    guides, masks = [grammar.begin(False) for _ in range(3)], np.zeros((3, compiler.num_words), np.uint32)
    first, wrong, last = advance(compiler, guides, [a, z, a], masks)
    assert first == last == ()
    assert isinstance(wrong, str)
    assert allowed(masks[0]) == allowed(masks[2])


def test_a_constraint_is_compiled_once_and_many_at_a_time(compiler):
    params = [Structured(regex=f"[a-z]{{{i},{i + 5}}}") for i in range(1, 30)]
    futures = [compiler.compile(one) for one in params]
    assert [compiler.compile(Structured(regex=one.regex)) for one in params] == futures
    assert len({id(future.result()) for future in futures}) == len(params)


def test_equal_schemas_are_one_constraint_however_they_are_given():
    assert Structured(json={"type": "object"}) == Structured(json='{"type": "object"}')
    assert len({Structured(choice=["a"]), Structured(choice=("a",))}) == 1


def test_what_was_checked_is_known_and_what_is_wrong_says_why(check):
    good, bad = Structured(regex="ab+"), Structured(regex="(ab")
    assert not check.knows(good)
    for _ in range(2):
        check.check(good)
        with pytest.raises(InvalidParameterError, match=r"(?s)structured_outputs\.regex cannot be used: .*unclosed"):
            check.check(bad)
    assert check.knows(good)
    assert check.knows(bad)


def test_a_check_that_takes_too_long_is_ended_and_keeps_no_other_waiting(given, monkeypatch):
    monkeypatch.setattr(grammars, "CHECK_S", 1.0)
    check = GrammarCheck(lambda: given, VOCAB_SIZE)
    for _ in range(2):  # the second check finds a process, too: starting one may take longer than the first may
        check._start_one()
    slow = Structured(json={"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(9000)}})
    with ThreadPoolExecutor(1) as pool:
        begun = time.monotonic()
        attack = pool.submit(check.check, slow)
        check.check(Structured(regex="quick"))
        assert not attack.done()
        with pytest.raises(InvalidParameterError, match="takes more than 1 s"):
            attack.result()
    assert time.monotonic() - begun < 60
    check.check(Structured(regex="after"))


def test_a_checking_process_that_dies_is_replaced(check):
    check.check(Structured(regex="x1"))
    (checker,) = check._idle
    os.kill(checker._process.pid, signal.SIGKILL)
    checker._process.wait()
    with pytest.raises(InvalidParameterError, match="too much memory"):
        check.check(Structured(regex="x2"))
    check.check(Structured(regex="x3"))


def test_whatever_a_compilation_raises_fails_it_and_the_next_one_runs(given):
    class Panic(BaseException):
        """As pyo3's PanicException is one."""

    tokenizers = iter([Panic("the library panicked")])

    def tokenizer():
        for panic in tokenizers:
            raise panic
        return given

    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE)
    with pytest.raises(JPagedError, match=r"^structured_outputs.regex cannot be compiled: the library panicked$"):
        compiler.compile(Structured(regex="a")).result(timeout=30)
    assert compiler.compile(Structured(regex="b")).result(timeout=30)
    compiler.close()


def test_two_threads_may_empty_a_queue_at_the_same_time():
    class Raced(deque):
        """Another thread has taken an entry since it was counted."""

        def __len__(self) -> int:
            return super().__len__() + 1

    queue = Raced([1, 2])
    assert take_all(queue) == [1, 2]
    assert take_all(queue) == []


def test_a_model_without_an_end_of_sequence_token_or_a_broken_tokenizer_is_refused(given):
    with pytest.raises(InvalidParameterError, match="end-of-sequence"):
        GrammarTokenizer(given.json, VOCAB_SIZE, ()).make()
    with pytest.raises(InvalidParameterError, match="this tokenizer"):
        GrammarTokenizer("{}", VOCAB_SIZE, (EOS,)).make()
    failing = GrammarCompiler(lambda: GrammarTokenizer("{}", VOCAB_SIZE, (EOS,)), VOCAB_SIZE)
    with pytest.raises(JPagedError, match="this tokenizer"):
        failing.compile(Structured(regex="a")).result()


def test_why_the_processes_do_not_start_is_logged(given, caplog):
    broken = GrammarTokenizer(given.json, VOCAB_SIZE, ("no token",))  # raises what a tokenizer's library may raise
    compiler = GrammarCompiler(lambda: broken, VOCAB_SIZE)
    with pytest.raises(JPagedError, match="did not start"):
        compiler.compile(Structured(regex="a")).result(timeout=30)
    assert "Traceback" in caplog.text
    compiler.close()


def test_sequences_of_one_grammar_are_followed_in_shards_and_get_the_masks_of_one_alone(compiler, tokenizer):
    params = Structured(regex="(?:[ab][cd]){40}")
    tokens = [tokenizer.encode(text, add_special_tokens=False)[-1] for text in "acbd"]
    alone = [may for _, may in follow(compiler, params, tokens)]
    grammar = compiler.compile(params).result()
    guides = [grammar.begin(False) for _ in range(300)]
    for token, may in zip(tokens, alone, strict=True):
        masks = np.zeros((len(guides), compiler.num_words), np.uint32)
        assert advance(compiler, guides, [token] * len(guides), masks) == [()] * len(guides)
        assert (masks == masks[0]).all()
        assert allowed(masks[0]) == may
        del guides[::3]  # these have ended


def test_a_guide_that_is_moved_past_many_tokens_at_once_stands_where_one_that_took_each_does(compiler, tokenizer):
    schema = {"type": "object", "properties": {"name": {"enum": ["fox", "frog"]}, "paws": {"type": "boolean"}}}
    params = Structured(json=schema | {"required": ["name", "paws"], "additionalProperties": False}, **COMPACT)
    grammar = compiler.compile(params).result()
    one, mask, tokens = grammar.begin(False), np.array([grammar.mask]), []
    while EOS not in allowed(mask[0]):
        tokens.append(allowed(mask[0])[0])
        (forced,) = advance(compiler, [one], tokens[-1:], mask)
        tokens += forced
        assert not set(forced) & {EOS}
        at_once = np.zeros_like(mask[0])
        assert resume(compiler, grammar.begin(False), tokens, at_once) == ()
        assert (at_once == mask[0]).all()
        if forced:
            assert resume(compiler, grammar.begin(False), tokens[:-1], at_once) == (tokens[-1],)
            assert (at_once == mask[0]).all()
    assert json.loads(tokenizer.decode([*grammar.forced, *tokens])) == {"name": "fox", "paws": False}
    assert isinstance(resume(compiler, grammar.begin(False), [EOS, EOS], mask[0]), str)


def some_constraints() -> list[Structured]:
    rng = np.random.default_rng(7)
    lark = 'start: "a" (INT | "(" start ")")*\nINT: /[0-9]+/'
    plain = [Structured(regex=r"(foo|bar)+[0-9]{2,5}(é|☃)*"), Structured(choice=["fox", "foxes"])]
    schemas = [Structured(json=random_schema(rng), disable_any_whitespace=bool(i % 2)) for i in range(8)]
    return [*plain, Structured(json_object=True), Structured(grammar=lark), *schemas]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_guess_is_refused_where_its_token_is_not_in_the_mask_and_nowhere_else(compiler, ignore_eos):
    """Two guides go the same way: one has all its masks made, the other says of each token whether it may follow."""
    rng = np.random.default_rng(3)
    num_refused = num_allowed = num_unneeded = 0
    compiler.compile(Structured(regex="a")).result()
    process = compiler._process
    for params in some_constraints():
        grammar = compiler.compile(params).result()
        masked, guide = grammar.begin(ignore_eos), grammar.begin(ignore_eos, True)
        (mask,) = masks_of(compiler, masked)
        for turn in range(30):
            may = allowed(mask)
            others = np.setdiff1d(np.arange(VOCAB_SIZE), may)
            tried = {EOS, *rng.choice(others, 2).tolist()} if turn % 15 > 7 else set()
            for wrong in tried - set(may):
                (place,) = compiler.advance([guide], np.array([[wrong]]), [True], [int(wrong == EOS)])
                assert place.is_refused
                assert (masks_of(compiler, guide)[0] == mask).all()
                num_refused += 1
            token = EOS if EOS in may and rng.random() < 0.3 else int(rng.choice(may))
            (place,) = compiler.advance([guide], np.array([[token]]), [True], [int(token == EOS)])
            assert (place.is_refused, place.failure) == (False, "")
            num_allowed += 1
            if token == EOS:
                assert not place.needs_mask
                break
            (expected,) = compiler.advance([masked], np.array([[token]]), [False], [0])
            assert (place.forced, expected.needs_mask) == (expected.forced, True)
            num_unneeded += not place.needs_mask
            (mask,) = masks_of(compiler, masked)
    assert min(num_refused, num_allowed, num_unneeded) > 30
    assert compiler._process is process


def test_a_guide_guesses_where_most_tokens_are_allowed_and_while_its_guesses_hold(fresh_compiler, tokenizer):
    compiler = fresh_compiler
    grammar = compiler.compile(Structured(regex="a[a-z]*1[^!]*!")).result()
    token_of = {text: tokenizer.encode(text, add_special_tokens=False)[-1] for text in ("b", "1", "?", "!")}
    guide = grammar.begin(False, True)

    def then(text, guessed):
        (place,) = compiler.advance([guide], np.array([[token_of[text]]]), [guessed], [0])
        return "refused" if place.is_refused else "mask" if place.needs_mask else "guess"

    compiler.advance([guide], np.array([tokenizer.encode("a", add_special_tokens=False)[-1:]]), [False], [0])
    assert then("b", True) == "guess"
    assert then("!", True) == "refused"
    masks_of(compiler, guide)
    few = [then("b", False) for _ in range(20)]  # a token at random is rarely one of letters alone
    assert few.count("mask") > 10
    assert "refused" not in few
    then("1", False)
    masks_of(compiler, guide)
    assert [then("?", False), then("?", True), then("?", True)] == ["guess"] * 3


@pytest.fixture
def tried(monkeypatch):
    """The tokens that guides try, in order, instead of random ones; no others may be tried."""
    tokens = deque()
    monkeypatch.setattr("jpaged.text.guides._random", SimpleNamespace(randrange=lambda size: tokens.popleft()))
    return tokens


def guessing_guide(given, regex):
    grammar = FollowedGrammar(given.make(), grammars.grammar_text(Structured(regex=regex)))
    return Guide(grammar, Vocabulary.of(VOCAB_SIZE, (EOS,), VOCAB_SIZE // 32), False, True)


def needs_mask(guide, tried, *tokens):
    """Whether a guide asks for a mask once it has tried all of these tokens."""
    tried.extend(tokens)
    needs = guide.needs_mask()
    assert not tried
    return needs


def test_the_third_guess_that_is_refused_at_a_place_always_needs_its_mask(given, tokenizer, tried):
    right, wrong = (tokenizer.encode(text, add_special_tokens=False)[-1] for text in ("b", "!"))
    guide = guessing_guide(given, "[^!]*")  # allows nearly all tokens
    assert not needs_mask(guide, tried)

    def refuse_three_times():
        for _ in range(2):
            assert guide.take_guess([wrong]) == -1
            assert needs_mask(guide, tried, wrong)
            assert not needs_mask(guide, tried, right)
        assert guide.take_guess([wrong]) == -1
        assert needs_mask(guide, tried)

    refuse_three_times()
    guide.heed_mask(VOCAB_SIZE * 9 // 10)
    assert needs_mask(guide, tried, wrong, wrong)
    assert not needs_mask(guide, tried, wrong, right)
    refuse_three_times()  # the mask has begun the count anew, and so does a guess that holds
    guide.heed_mask(VOCAB_SIZE * 9 // 10)
    assert guide.take_guess([wrong]) == -1
    assert guide.take_guess([right]) == 0
    refuse_three_times()


def test_after_a_refused_guess_32_must_hold_in_a_row_before_places_that_allow_few_are_guessed_at(
    given, tokenizer, tried
):
    right, wrong = (tokenizer.encode(text, add_special_tokens=False)[-1] for text in ("a", "z"))
    guide = guessing_guide(given, "[ab]*")
    for held_before in (0, 31):
        for _ in range(held_before):
            assert guide.take_guess([right]) == 0
        assert guide.take_guess([wrong]) == -1
        assert needs_mask(guide, tried, wrong)
        for _ in range(31):
            assert guide.take_guess([right]) == 0
            assert needs_mask(guide, tried, wrong, wrong)
    assert guide.take_guess([right]) == 0
    assert not needs_mask(guide, tried)
    guide.heed_mask(3)  # a mask that allows few is not trusted whatever held before
    assert needs_mask(guide, tried, wrong)
    assert not needs_mask(guide, tried, right)


@pytest.mark.parametrize("expression", ["[ab]+", "(?s:.*)"])
def test_an_equal_mask_is_the_same_array(compiler, tokenizer, expression):
    (a,) = tokenizer.encode("a", add_special_tokens=False)[-1:]
    guide = compiler.compile(Structured(regex=expression)).result().begin(False)
    compiler.advance([guide], np.array([[a]]), [False], [0])
    (first,) = compiler.make_masks([guide])
    compiler.advance([guide], np.array([[a]]), [False], [0])
    assert compiler.make_masks([guide])[0] is first


@pytest.mark.parametrize("is_allowed", [True, False])
def test_where_the_process_has_died_a_guess_is_checked_in_another(given, tokenizer, is_allowed):
    (a,), (z,) = (tokenizer.encode(text, add_special_tokens=False)[-1:] for text in ("a", "z"))
    compiler = GrammarCompiler(lambda: given, VOCAB_SIZE)
    guide = compiler.compile(Structured(regex="[ab]{3}")).result().begin(False, True)
    compiler.advance([guide], np.array([[a]]), [True], [0])
    os.kill(compiler._process.pid, signal.SIGKILL)
    (place,) = compiler.advance([guide], np.array([[a if is_allowed else z]]), [True], [0])
    assert (place.is_refused, place.failure) == (not is_allowed, "")
    os.kill(compiler._process.pid, signal.SIGKILL)
    (mask,) = masks_of(compiler, guide)
    ab = {token for token in allowed(mask) if tokenizer.token_text(token) in ("a", "b", "aa", "ab", "ba", "bb")}
    assert set(allowed(mask)) == ab
    assert ({len(tokenizer.token_text(token)) for token in ab} == {1}) == is_allowed
    compiler.close()


def test_where_the_process_has_died_sequences_go_on_in_another(given, tokenizer):
    """Killed before the first token and in the middle: what is forced and allowed stays the same."""
    params = Structured(json={"type": "object", "properties": {"name": {"enum": ["fox"]}, "paws": {"type": "boolean"}}})
    text = tokenizer.encode('{"name": "fox", "paws": true}', add_special_tokens=False)
    compiler = GrammarCompiler(lambda: given, VOCAB_SIZE)

    def seen(kill_before):
        """Of two sequences, what is forced and allowed after each token that is not forced."""
        grammar = compiler.compile(params).result()
        guides, masks = [grammar.begin(False) for _ in range(2)], np.zeros((2, compiler.num_words), np.uint32)
        forced, found = deque(grammar.forced), []
        for token in text:
            if forced and forced[0] == token:
                forced.popleft()
                continue
            if len(found) in kill_before:
                os.kill(compiler._process.pid, signal.SIGKILL)
            answers = advance(compiler, guides, [token] * 2, masks)
            assert answers[0] == answers[1]
            assert (masks[0] == masks[1]).all()
            forced = deque(answers[0])
            found.append((answers[0], allowed(masks[0])))
        late = np.zeros((compiler.num_words,), np.uint32)
        return found, resume(compiler, grammar.begin(False), text[len(grammar.forced) :], late), allowed(late)

    calm = seen(())
    assert len(calm[0]) > 2
    descriptors = len(os.listdir("/proc/self/fd"))
    assert seen((0, 2)) == calm
    compiler.compile(params).result()
    end = time.monotonic() + 10
    while len(os.listdir("/proc/self/fd")) > descriptors and time.monotonic() < end:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) == descriptors  # nothing is kept of processes that have ended
    compiler.close()


def test_a_sequence_that_ends_each_process_fails_by_name(given, tokenizer, monkeypatch):
    (a,) = tokenizer.encode("a", add_special_tokens=False)[-1:]
    compiler = GrammarCompiler(lambda: given, VOCAB_SIZE)
    guide, masks = compiler.compile(Structured(regex="[ab]+")).result().begin(False), np.zeros((1, 88), np.uint32)
    resume_there = GrammarCompiler._resume

    def resume_and_die(self, *arguments):
        os.kill(self._process.pid, signal.SIGKILL)
        return resume_there(self, *arguments)

    monkeypatch.setattr(GrammarCompiler, "_resume", resume_and_die)
    os.kill(compiler._process.pid, signal.SIGKILL)
    assert advance(compiler, [guide], [a], masks) == ["the process that follows grammars has ended"]
    monkeypatch.undo()
    another = compiler.compile(Structured(regex="[ab]+")).result().begin(False)
    assert advance(compiler, [another], [a], masks) == [()]
    compiler.close()


def test_no_tokenizer_for_grammars_is_made_in_this_process(given, monkeypatch):
    """It would keep all threads waiting, for seconds if the vocabulary is large."""
    monkeypatch.setattr(GrammarTokenizer, "make", lambda self: pytest.fail("made here"))
    for module in (grammars, grammar_compiler):
        monkeypatch.setattr(module, "LARGE_VOCABULARY", 0)
    check, compiler = GrammarCheck(lambda: given, VOCAB_SIZE), GrammarCompiler(lambda: given, VOCAB_SIZE)
    check.prepare()
    compiler.prepare()
    check.check(Structured(regex="[ab]+"))
    assert len(check._idle) == 1
    assert compiler.compile(Structured(regex="[ab]+")).result().forced == ()
    compiler.close()
