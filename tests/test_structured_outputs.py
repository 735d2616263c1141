"""Answers under constraints, with the embedded model: each is what its constraint says, beside every other feature."""

import gc
import json
import re
import time
import weakref
from dataclasses import replace

import jsonschema
import numpy as np
import pytest

from jpaged import LLM, BeamSearchParams, EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from jpaged import StructuredOutputsParams as Structured
from jpaged.api.errors import InvalidParameterError
from jpaged.engine.constraints.grammars import ConstrainedRows
from tests.support.random_schemas import random_schema
from tests.tiny_models import DEMO_ENGINE

pytestmark = pytest.mark.xdist_group("structured")  # one worker, which compiles once

PROMPT = "Once upon a time"
ANYTHING = 1e4
"""A temperature at which the model samples as one with random weights would."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["fox", "snail"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm():
    return LLM(**DEMO_ENGINE, verbose=False)


def sampling(constraint: Structured, **changes) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "max_tokens": 300, "structured_outputs": constraint} | changes))


def answers(llm, params) -> list:
    params = params if isinstance(params, list) else [params]
    return [output.outputs[0] for output in llm.generate([PROMPT] * len(params), params, use_tqdm=False)]


def check_json(text: str, schema: dict) -> None:
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def mixed_requests() -> list[SamplingParams]:
    rng = np.random.default_rng(5)
    params = []
    for i in range(24):
        extra = ({}, {"n": 2}, {"ignore_eos": True}, {"stop_token_ids": list(range(300, 1200, 7))[:8]}, {"top_k": 9})
        params.append(
            sampling(
                Structured(json=random_schema(rng) if i % 3 else SCHEMA, disable_any_whitespace=i % 2 == 0),
                temperature=(0.0, 1.0, ANYTHING)[i % 3] if i % 5 != 1 else 1.0,
                max_tokens=int(rng.integers(1, 120)),
                seed=i,
                **extra[i % 5],
            )
        )
    return params


def test_what_is_guessed_and_checked_afterwards_is_what_masks_would_have_led_to(llm, monkeypatch):
    def found():
        outputs = llm.generate([PROMPT] * 24, mixed_requests(), use_tqdm=False)
        return [(one.token_ids, one.finish_reason, one.stop_reason) for output in outputs for one in output.outputs]

    before = llm.get_metrics()
    guessed = found()
    after = llm.get_metrics()
    num_guesses = after.num_guesses - before.num_guesses
    num_kept = after.num_kept_guesses - before.num_kept_guesses
    assert num_kept > 20
    assert num_guesses - num_kept > 20
    monkeypatch.setattr(ConstrainedRows, "_may_guess", lambda self, request: False)
    assert found() == guessed
    assert llm.get_metrics().num_guesses == after.num_guesses


def test_a_table_leads_to_the_answers_that_the_host_leads_to(llm):
    constraints = [
        Structured(json=SCHEMA),
        Structured(json=SCHEMA, disable_any_whitespace=True),
        Structured(regex=r"(yes|no), [0-9]{1,4}!"),
        Structured(choice=["a red fox", "a red snail", "an owl"]),
    ]
    options = ({}, {"n": 2}, {"logprobs": 2}, {"top_k": 9, "temperature": 2.0}, {"presence_penalty": 0.5})
    params = [sampling(one, seed=i, max_tokens=60, **extra) for one in constraints for i, extra in enumerate(options)]

    def found():
        before = llm.get_metrics().num_requests_by_table
        outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
        every = [(one.token_ids, one.finish_reason, one.stop_reason) for output in outputs for one in output.outputs]
        return every, llm.get_metrics().num_requests_by_table - before

    of_host, num_requests_by_table = found()
    assert num_requests_by_table < len(params)
    wait_for_tables(llm.engine, constraints)
    for one in constraints:  # with nothing beside it, the device gets the whole table
        answers(llm, sampling(one, max_tokens=1))
    assert found() == (of_host, len(params))


def test_engines_that_take_turns_each_find_their_own_tables(llm):
    """What the device has of the one's tables is lost when the other has run."""
    patterns = "(yes|no), [0-9]{4}!", "[a-c]{3}x{9,12}"
    args = EngineArgs(**DEMO_ENGINE, verbose=False)
    engines = {pattern: LLMEngine(args, llm.engine.startup) for pattern in patterns}

    def check(pattern: str) -> None:
        params = sampling(Structured(regex=pattern), temperature=ANYTHING, seed=1, n=8)
        engines[pattern].add_request("0", PROMPT, params)
        while engines[pattern].has_unfinished_requests():
            outputs = engines[pattern].step()
        assert all(re.fullmatch(pattern, one.text) for one in outputs[0].outputs)

    for pattern, engine in engines.items():
        check(pattern)
        wait_for_tables(engine, [Structured(regex=pattern)])
    for pattern in (*patterns, patterns[0]):
        check(pattern)
    assert [engine.get_metrics().num_requests_by_table for engine in engines.values()] == [2, 1]


def wait_for_tables(engine: LLMEngine, constraints: list[Structured]) -> None:
    compiled = [engine._grammars.compile(one).result() for one in constraints]
    ends = time.monotonic() + 60
    while any(grammar.table is None for grammar in compiled):
        assert time.monotonic() < ends, "there is no table"
        time.sleep(0.05)


def test_answers_validate_against_random_schemas_at_every_temperature(llm):
    rng = np.random.default_rng()
    schemas = [random_schema(rng) for _ in range(60)]
    temperatures = [(0.0, 1.0, ANYTHING)[i % 3] for i in range(60)]
    found = answers(
        llm,
        [
            sampling(Structured(json=schema), temperature=temperature, max_tokens=110)
            for schema, temperature in zip(schemas, temperatures, strict=True)
        ],
    )
    for schema, answer in zip(schemas, found, strict=True):
        if answer.finish_reason == "stop":
            check_json(answer.text, schema)
        else:
            assert (answer.finish_reason, len(answer.token_ids)) == ("length", 110), (schema, answer)
    assert sum(answer.finish_reason == "stop" for answer in found) > 40


EXPRESSIONS = ["[a-c]{3,8}x", "(yes|no), [0-9]{1,4}!", r"[a-z]{1,9}@[a-z]{1,9}\.(com|org)", "(é|ß|狐){2,5}"]


@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_match_regular_expressions_in_full(llm, expression, temperature):
    params = [sampling(Structured(regex=expression), temperature=temperature, seed=seed) for seed in range(3)]
    for answer in answers(llm, params):
        assert answer.finish_reason == "stop"
        assert re.fullmatch(expression, answer.text)


ARITHMETIC = 'start: sum\nsum: product ("+" product){0,2}\nproduct: atom ("*" atom){0,1}\natom: /[0-9]{1,3}/\n'


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        (Structured(choice=["a red fox", "a snail", 'a "quoted" one\n']), 'a red fox|a snail|a "quoted" one\n'),
        (Structured(grammar='root ::= ("yes" | "no") " " [0-9] [0-9]'), r"(yes|no) \d\d"),
        (Structured(grammar=ARITHMETIC), r"\d{1,3}(\*\d{1,3})?(\+\d{1,3}(\*\d{1,3})?){0,2}"),
        (Structured(json=SCHEMA, disable_any_whitespace=True), r'\{"name": ".*", "age": \d+, "kind": "(fox|snail)"\}'),
        (Structured(json=SCHEMA, whitespace_pattern="~"), r'~?\{~?"name"~?:~?".*"~?,~?"age"~?:~?\d+~?,.*\}'),
    ],
    ids=["choice", "gbnf", "lark", "compact", "whitespace"],
)
def test_choices_grammars_and_white_space(llm, constraint, pattern):
    for answer in answers(llm, [sampling(constraint, temperature=t, seed=3) for t in (0.0, 1.0, ANYTHING)]):
        assert answer.finish_reason == "stop"
        assert re.fullmatch(pattern, answer.text, re.DOTALL)


def test_an_engine_that_nobody_has_any_more_is_freed_at_once(llm):
    """Its weights and KV pool can be gigabytes, and no collection visits what there was when an engine started."""
    own = LLMEngine(EngineArgs(**DEMO_ENGINE, verbose=False), llm.engine.startup)
    own.add_request("0", PROMPT, sampling(Structured(choice=["a", "b"]), max_tokens=9))
    while own.has_unfinished_requests():
        own.step()
    gone = weakref.ref(own), weakref.ref(own.tokenizer)
    gc.disable()
    try:
        del own
        assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()


def test_any_json_object(llm):
    (answer,) = answers(llm, sampling(Structured(json_object=True), max_tokens=80))
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.text), dict)
    assert answer.text.startswith("{")


def test_a_structural_tag_constrains_what_stands_in_the_tag_and_leaves_the_rest_free(llm):
    tag = {
        "type": "structural_tag",
        "triggers": ["<call="],
        "structures": [{"begin": "<call=f>", "schema": SCHEMA, "end": "</call>"}],
    }
    free, begun = answers(llm, [sampling(Structured(structural_tag=tag), temperature=0.0, max_tokens=40)] * 2)
    (plain,) = answers(llm, SamplingParams(temperature=0.0, max_tokens=40))
    assert free.text == begun.text == plain.text
    bias = {llm.get_tokenizer().encode("<", add_special_tokens=False)[-1]: 100.0}
    (called,) = answers(llm, sampling(Structured(structural_tag=tag), logit_bias=bias, stop=["</call>"]))
    for body in re.findall("<call=(.*)", called.text, re.DOTALL):
        assert "f>".startswith(body[:2])


def test_the_model_ends_only_where_the_constraint_is_fulfilled_and_there_for_good(llm):
    eos = llm.engine.eos_token_ids[0]
    (answer,) = answers(llm, sampling(Structured(regex="[a-z ]{20}"), logit_bias={eos: 100.0}))
    assert answer.finish_reason == "stop"
    assert re.fullmatch("[a-z ]{20}", answer.text)
    (ignoring,) = answers(llm, sampling(Structured(regex="[a-z ]{1,30}"), logit_bias={eos: 100.0}, ignore_eos=True))
    assert ignoring.finish_reason == "stop"
    assert re.fullmatch("[a-z ]{30}", ignoring.text)
    (short,) = answers(llm, sampling(Structured(regex="[a-z ]{1,30}"), logit_bias={eos: 100.0}))
    assert len(short.text) < 30


@pytest.mark.parametrize("min_tokens", [20, 300], ids=["min_tokens", "as many as max_tokens"])
def test_a_fulfilled_constraint_ends_the_answer_whatever_min_tokens_says(llm, min_tokens):
    eos, end = llm.engine.eos_token_ids, {"logit_bias": {llm.engine.eos_token_ids[0]: 100.0}}
    changes = {"min_tokens": min_tokens, "skip_special_tokens": False}
    schema_only = Structured(json=SCHEMA, disable_any_whitespace=True)
    kinds = (Structured(regex="[ab]{3}"), Structured(choice=["a fox"]), schema_only)
    params = [sampling(kind, seed=1, **changes) for kind in kinds]
    three, chosen, schema = answers(llm, params)
    assert re.fullmatch("[ab]{3}", three.text)
    assert chosen.text == "a fox"
    check_json(schema.text, SCHEMA)
    for answer in (three, chosen, schema):
        assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
        assert [token in eos for token in answer.token_ids] == [False] * (len(answer.token_ids) - 1) + [True]
    # Where the constraint allows more, the end waits; where it is last in time as well, it is no cut.
    (late,) = answers(llm, sampling(Structured(regex="[ab]{1,40}"), temperature=0.0, **end, **changes))
    assert len(late.token_ids) > 20 or len(late.text) == 40
    (last,) = answers(llm, sampling(kinds[0], temperature=0.0, min_tokens=4, max_tokens=4, skip_special_tokens=False))
    assert re.fullmatch("[ab]{3}", last.text)
    assert last.finish_reason == "stop"
    (plain,) = answers(llm, SamplingParams(max_tokens=9, min_tokens=9, temperature=0.0))  # in a slot that was ended
    assert len(plain.token_ids) == 9


def test_max_tokens_cuts_honestly(llm):
    (answer,) = answers(llm, sampling(Structured(json=SCHEMA), max_tokens=5))
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 5)
    (longer,) = answers(llm, sampling(Structured(json=SCHEMA), temperature=0.0))
    (shorter,) = answers(llm, sampling(Structured(json=SCHEMA), temperature=0.0, max_tokens=7))
    assert longer.text.startswith(shorter.text)


def test_a_stop_string_ends_the_text_before_the_constraint_does(llm):
    (answer,) = answers(llm, sampling(Structured(json=SCHEMA), stop=['"age"']))
    assert (answer.finish_reason, answer.stop_reason) == ("stop", '"age"')
    assert "name" in answer.text
    assert "age" not in answer.text


def test_sampling_parameters_work_within_the_constraint(llm):
    tokenizer = llm.get_tokenizer()
    (fox,) = tokenizer.encode("b", add_special_tokens=False)[-1:]
    biased = sampling(Structured(regex="[a-e]{6}"), temperature=0.0, logit_bias={fox: 100.0})
    assert answers(llm, biased)[0].text.count("b") >= 4
    for changes in ({"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}, {"repetition_penalty": 1.5}, {"min_tokens": 4}):
        for answer in answers(llm, [sampling(Structured(json=SCHEMA), seed=i, **changes) for i in range(2)]):
            check_json(answer.text, SCHEMA)


def test_a_seed_gives_the_same_answer_whatever_runs_beside_it(llm):
    mine = sampling(Structured(json=SCHEMA), seed=7)
    others = [sampling(Structured(json=SCHEMA), seed=i) for i in range(5)] + [SamplingParams(max_tokens=30)] * 3
    (alone,) = answers(llm, mine)
    assert answers(llm, [*others, mine])[-1].token_ids == alone.token_ids
    assert answers(llm, replace(mine, logprobs=1))[0].token_ids == alone.token_ids  # each token sampled by itself


def test_log_probabilities_are_the_models_own_and_cover_every_token(llm):
    (output,) = llm.generate([PROMPT], sampling(Structured(json=SCHEMA), logprobs=3), use_tqdm=False)
    answer = output.outputs[0]
    assert len(answer.logprobs) == len(answer.token_ids)
    tokens = [*output.prompt_token_ids, *answer.token_ids]
    llm.engine.add_score_request("raw", tokens, len(output.prompt_token_ids))
    (scored,) = [one for _ in iter(llm.engine.has_unfinished_requests, False) for one in llm.engine.step()]
    found = [position[token].logprob for token, position in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert found == pytest.approx(
        scored.scores.logprobs.tolist(), abs=0.2
    )  # no mask is in them; they differ by rounding
    for token, position in zip(answer.token_ids, answer.logprobs, strict=True):
        assert position[token].logprob <= max(one.logprob for one in position.values())
    assert any(position[t].rank > 3 for t, position in zip(answer.token_ids, answer.logprobs, strict=True))


def test_several_sequences_of_a_prompt_each_follow_the_constraint(llm):
    for changes in ({"n": 4}, {"n": 2, "best_of": 4}):
        (output,) = llm.generate([PROMPT], sampling(Structured(json=SCHEMA), seed=1, **changes), use_tqdm=False)
        assert len(output.outputs) == changes["n"]
        for one in output.outputs:
            check_json(one.text, SCHEMA)
        assert len({one.text for one in output.outputs}) > 1


def test_deltas_of_a_stream_join_to_what_comes_at_once(llm):
    params = sampling(Structured(json=SCHEMA), seed=11)
    (whole,) = answers(llm, params)
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
        engine = LLMEngine(EngineArgs(**DEMO_ENGINE, verbose=False), llm.engine.startup)
        engine.add_request("a", PROMPT, params.reporting(kind))
        text, tokens = "", []
        while engine.has_unfinished_requests():
            for output in engine.step():
                one = output.outputs[0]
                is_delta = kind == RequestOutputKind.DELTA
                text, tokens = (text + one.text, [*tokens, *one.token_ids]) if is_delta else (one.text, one.token_ids)
        assert (text, tokens) == (whole.text, whole.token_ids)


def test_a_cached_prompt_changes_nothing(llm):
    prompt, params = PROMPT * 12, sampling(Structured(json=SCHEMA), seed=3)
    first, second = (llm.generate([prompt], params, use_tqdm=False)[0] for _ in range(2))
    assert second.num_cached_tokens > 0
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_answers_are_those_of_a_large_pool(llm, mode):
    params = [sampling(Structured(json=SCHEMA), seed=i, max_tokens=100) for i in range(8)]
    expected = [answer.token_ids for answer in answers(llm, params)]
    args = EngineArgs(**DEMO_ENGINE | {"num_gpu_blocks_override": 12}, preemption_mode=mode, verbose=False)
    engine = LLMEngine(args, llm.engine.startup)
    for i, one in enumerate(params):
        engine.add_request(str(i), PROMPT, one)
    found = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
    assert engine.get_metrics().num_preemptions > 0
    assert [found[str(i)] for i in range(8)] == expected


BAD = [
    ({"json": '{"type": '}, "no JSON"),
    ({"json": '{"const": NaN}'}, "no JSON"),
    ({"json": '{"const": "\\ud800"}'}, "lone surrogate"),
    ({"json": {"x-guidance": 5}}, "x-guidance must be an object"),
    ({"structural_tag": '{"format": {"type": "const_string", "value": "\\ud800"}}'}, "lone surrogate"),
    ({"json": [1]}, "dictionary or JSON text"),
    ({"json": {"not": {"type": "string"}}}, "not"),
    ({"json": {"type": "nothing"}}, "structured_outputs.json"),
    ({"regex": "(a|b"}, "unclosed group"),
    ({"regex": "(?=a)b"}, "structured_outputs.regex"),
    ({"choice": []}, "empty"),
    ({"choice": "abc"}, "list of strings"),
    ({"grammar": "start: missing"}, "missing"),
    ({"grammar": 'root ::= "a" b'}, "b"),
    ({"structural_tag": {"type": "structural_tag", "format": {}}}, "format.type"),
    ({"json": {}, "regex": "a"}, "json and regex"),
    ({}, "none is given"),
    ({"json_object": 1}, "True or False"),
    ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace is for json"),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=[str(given)[:40] for given, _ in BAD])
def test_what_is_no_constraint_is_refused_by_name(llm, given, message):
    with pytest.raises(InvalidParameterError, match=re.escape(message)):
        llm.generate([PROMPT], SamplingParams(structured_outputs=given), use_tqdm=False)


@pytest.mark.parametrize(
    "given",
    [{"json": {"$ref": "#"}}, {"grammar": "root ::= root"}, {"regex": "[a&&b]"}],
    ids=["schema", "gbnf", "regex"],
)
def test_a_constraint_that_no_text_fits_is_refused_in_a_sentence(llm, given):
    with pytest.raises(InvalidParameterError) as caught:
        llm.generate([PROMPT], SamplingParams(structured_outputs=given), use_tqdm=False)
    [kind] = given
    said = f"structured_outputs.{kind} cannot be used: no text fits it."
    assert str(caught.value) == said


LARK = 'start: "a" item\nitem: /[z-a]/\n'
BAD_REGEXES = [
    ({"regex": "(a|b"}, 'regex cannot be used: the regex "(a|b" is not valid: unclosed group'),
    ({"regex": "(a/\n"}, 'regex cannot be used: the regex "(a/\\n" is not valid: unclosed group'),
    ({"regex": "x" * 500 + "("}, f'regex cannot be used: the regex "{"x" * 199}..." is not valid: unclosed group'),
    ({"grammar": LARK}, 'grammar cannot be used: the regex "[z-a]" is not valid: invalid character class range'),
]


@pytest.mark.parametrize(("given", "message"), BAD_REGEXES, ids=["plain", "escaped", "long", "in a grammar"])
def test_a_bad_regex_is_named_with_the_reason_and_nothing_of_the_grammar_around_it(llm, given, message):
    with pytest.raises(InvalidParameterError) as caught:
        llm.generate([PROMPT], SamplingParams(structured_outputs=given), use_tqdm=False)
    assert str(caught.value).startswith(f"structured_outputs.{message}")
    assert "start:" not in str(caught.value)
    assert "\n" not in str(caught.value)


def references(count: int) -> dict:
    parts = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"type": "null"}]} for i in range(count)}
    return {"$defs": parts | {f"d{count}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def nested(depth: int) -> dict:
    return {"properties": {"a": nested(depth - 1)}} if depth else {}


HOSTILE = {
    "many properties": {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(9000)}}},
    "a megabyte of references": {"json": references(20_000)},
    "deep": {"json": nested(200)},
    "deep text": {"json": '{"a":' * 100_000},
    "a long enumeration": {"json": {"enum": [f"value {i}" for i in range(100_000)]}},
    "nested groups": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "long": {"regex": "a" * 300_000},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_constraint_is_refused_within_seconds_and_the_next_one_is_taken(llm, kind):
    with pytest.raises(InvalidParameterError, match="structured_outputs"):
        llm.generate([PROMPT], SamplingParams(structured_outputs=HOSTILE[kind]), use_tqdm=False)
    (answer,) = answers(llm, sampling(Structured(regex="[ab]{3}")))
    assert re.fullmatch("[ab]{3}", answer.text)


def test_beams_and_engines_without_a_tokenizer_refuse_constraints():
    with pytest.raises(TypeError, match="structured_outputs"):
        BeamSearchParams(beam_width=2, max_tokens=4, structured_outputs=Structured(regex="a"))
    llm = LLM(**DEMO_ENGINE, skip_tokenizer_init=True, verbose=False)
    with pytest.raises(InvalidParameterError, match="structured_outputs needs a tokenizer"):
        llm.generate({"prompt_token_ids": [5, 6]}, SamplingParams(structured_outputs={"regex": "a"}), use_tqdm=False)


@pytest.mark.parametrize(
    "value",
    [
        {"minimum": 10**30, "maximum": 1e300, "multipleOf": 1.5, "default": -0.0},
        {"enum": ["é", "\n\u2028", '"', "", None, True, [], {}]},
        {"1": {"2": [1, [2, [3]]]}},
    ],
)
def test_a_schema_says_the_same_as_a_dictionary_as_text_and_of_other_types(value):
    """The latter go by another encoder."""

    class Text(str):
        pass

    for given in (value, json.dumps(value), {Text(key): one for key, one in value.items()}):
        assert json.loads(Structured(json=given).json) == value
