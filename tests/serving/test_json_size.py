"""What a body holds is counted before it is decoded, since decoding lets nobody else run."""

import json
import random
from types import FunctionType

import msgspec
import pytest

from jpaged.api.beam_search_params import BeamSearchParams
from jpaged.api.errors import PromptTooLongError
from jpaged.api.sampling_params import SamplingParams
from jpaged.engine.limits import RequestLimits
from jpaged.frontend.inputs import InputProcessor
from jpaged.serving import json_size
from jpaged.serving.errors import ApiError
from jpaged.serving.json_size import check_size
from jpaged.serving.limits import ServerLimits
from jpaged.serving.protocol import CompletionRequest, json_decoder

HOSTILE = {
    "numbers": b'{"tokens":[' + b"1," * (json_size.MAX_VALUES + 1) + b"1]}",
    "strings": b'{"prompt":[' + b'"a",' * json_size.MAX_STRINGS + b'"a"]}',
    "keys": b'{"messages":[{' + b'"a":1,' * json_size.MAX_STRINGS + b'"a":1}]}',
    "digits": b'{"prompt":[' + b"1" * json_size.MAX_BYTES_OUTSIDE + b"]}",
    "all of it": b'{"prompt":[' + b"1," * 400_000 + b'"a",' * 50_000 + b"[]," * 15_000 + b"1]}",
    "escapes": b'{"prompt":"' + b"\\n" * 5_000_000 + b'"}',
    "lists": b'{"prompt":[' + b"[]," * (json_size.MAX_CONTAINERS + 1) + b"[]]}".ljust(json_size.SMALL_BYTES),
    "objects": b'{"messages":[' + b"{}," * (json_size.MAX_CONTAINERS + 1) + b"{}]}".ljust(json_size.SMALL_BYTES),
    "quotes": b'{"prompt":"' + b'\\"' * (json_size.MAX_QUOTES + 1) + b'"}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_body_that_takes_long_to_decode_is_refused_by_its_count(name):
    with pytest.raises(ApiError, match="The body holds more than") as refused:
        check_size(HOSTILE[name])
    assert refused.value.status == 413


@pytest.mark.parametrize(
    "text", ["[1, {2}], " * 400_000, '\\"[,' * 200_000, "\\\\" * 400_000, '"' * 200_000, "no end"], ids=lambda t: t[:9]
)
def test_what_stands_inside_strings_counts_as_one_string(text):
    body = json.dumps({"prompt": [text, "b", text]}).encode()
    check_size(body)
    check_size(body[:-3])  # a string without its end is for the decoder to refuse


@pytest.mark.parametrize("seed", range(20))
def test_counts_are_those_of_the_decoded_value(seed, monkeypatch):
    """Just at the limit it passes, and just below that it does not."""
    draw = random.Random(seed)

    def value(depth):
        kind = draw.randrange(5 if depth < 4 else 2)
        if kind == 0:
            return draw.randrange(1000)
        if kind == 1:
            return "".join(draw.choice('ab,[{"\\}]: é') for _ in range(draw.randrange(6)))
        if kind == 2:
            return {str(i): value(depth + 1) for i in range(draw.randrange(5))}
        return [value(depth + 1) for _ in range(draw.randrange(5))]

    def count(value):
        """Commas, quotes, strings and containers."""
        if isinstance(value, str):
            return 0, 2 + value.count('"'), 1, 0
        if not isinstance(value, list | dict):
            return 0, 0, 0, 0
        parts = [count(one) for one in (value.values() if isinstance(value, dict) else value)]
        commas, quotes, strings, containers = (sum(column) for column in zip((0, 0, 0, 0), *parts, strict=True))
        keys = len(value) if isinstance(value, dict) else 0
        return commas + max(0, len(value) - 1), quotes + 2 * keys, strings + keys, containers + 1

    given = [value(0) for _ in range(30)]
    body = json.dumps(given, ensure_ascii=False).encode()
    monkeypatch.setattr(json_size, "SMALL_BYTES", 0)
    monkeypatch.setattr(json_size, "_SLICE", 7)
    names = ("MAX_VALUES", "MAX_QUOTES", "MAX_STRINGS", "MAX_CONTAINERS")
    for name, most in zip(names, count(given), strict=True):
        monkeypatch.setattr(json_size, name, most)
        check_size(body)
        if most:
            monkeypatch.setattr(json_size, name, most - 1)
            with pytest.raises(ApiError):
                check_size(body)
        monkeypatch.setattr(json_size, name, 10**9)


def test_numbers_that_take_long_to_decode_are_left_to_python_which_lets_others_run():
    body = b'{"prompt":["a",1e1],"logit_bias":{"5":1e1},"suffix":[1e1],"guided_json":{"a":1e1}}'
    told = msgspec.json.Decoder(CompletionRequest, float_hook=lambda _: "told").decode(body)
    assert (told.prompt, told.logit_bias, told.suffix) == (["a", "told"], {"5": "told"}, ["told"])
    assert told.guided_json == {"a": "told"}
    decoder = json_decoder(CompletionRequest)
    assert isinstance(decoder.float_hook, FunctionType)  # not `float` itself, which lets nobody in
    assert decoder.decode(body).logit_bias == {"5": 10.0}


class Counted(list):
    """A list that only tells its length."""

    def __init__(self, length):
        super().__init__()
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        raise AssertionError("it was walked")

    __getitem__ = index = count = __iter__


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "bad_words", "stop", "logit_bias"])
def test_lists_are_counted_before_they_are_walked(field):
    request = CompletionRequest(prompt="a", **{field: Counted(8_000_000)})
    with pytest.raises(ApiError, match=f"{field}: 8000000 .*this server takes at most") as refused:
        ServerLimits().check(request)
    assert refused.value.param == field


def test_tokens_to_detokenize_are_counted():
    with pytest.raises(ApiError, match="tokens: 70000 tokens given"):
        ServerLimits().check_detokenized(70_000, 4096)
    ServerLimits().check_detokenized(70_000, 131_072)


@pytest.mark.parametrize("params", [SamplingParams(), BeamSearchParams(beam_width=2, max_tokens=4)])
def test_a_prompt_of_too_many_tokens_is_refused_by_its_length(params):
    limits = RequestLimits(1000, 16, 16, 16, 100)
    inputs = InputProcessor(None, 100, limits)
    for prompt in (Counted(8_000_000), {"prompt_token_ids": Counted(8_000_000)}):
        with pytest.raises(PromptTooLongError, match="8000000 tokens"):
            inputs.process(prompt, params)


def test_token_ids_of_parameters_are_checked_at_once_and_one_by_one_alike():
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)
    for wrong in ([1, 2.5], [1, "a"], [1, True], [-1], [2**63]):
        with pytest.raises(ValueError, match="allowed_token_ids"):
            SamplingParams(allowed_token_ids=wrong)
