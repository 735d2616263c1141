"""What code written for vLLM does with parameters and outputs."""

import asyncio
import copy
import inspect
from dataclasses import fields, replace

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.api import unknown_names
from jpaged.api.beam_search_params import BeamSearchParams
from jpaged.api.config import EngineArgs
from jpaged.api.errors import (
    InvalidParameterError,
    InvalidPromptError,
    UnknownParameterError,
    UnsupportedParameterError,
)
from jpaged.api.outputs import CompletionOutput, Logprob, RequestOutput
from jpaged.api.pooling_params import PoolingParams
from jpaged.api.prompts import TextPrompt, TokensPrompt
from jpaged.api.sampling_params import RequestOutputKind, SamplingParams
from jpaged.api.structured_outputs import StructuredOutputsParams
from jpaged.engine.limits import RequestLimits
from jpaged.engine.scheduler.scheduler import RequestUpdate
from jpaged.engine.sequences.group import SequenceGroup
from jpaged.frontend.inputs import InputProcessor
from jpaged.frontend.output_processor import OutputProcessor
from jpaged.processes.async_llm_engine import AsyncLLMEngine
from jpaged.text.token_decoders import TokenTexts, token_bytes
from jpaged.text.tokenizer import Tokenizer
from tests.text.tokenizers_for_tests import BYTE_EXACT, tokenizer


def test_sampling_parameters_can_be_changed_and_a_change_is_checked():
    params = SamplingParams(max_tokens=5)
    params.max_tokens, params.stop, params.top_k = 7, "end", 3
    assert params == SamplingParams(max_tokens=7, stop=["end"], top_k=3)
    with pytest.raises(InvalidParameterError, match="top_p must be in"):
        params.top_p = 2.0
    with pytest.raises(AttributeError, match="no parameter 'max_token'"):
        params.max_token = 1
    assert params == SamplingParams(max_tokens=7, stop=["end"], top_k=3)
    assert replace(params, n=2) == copy.replace(params, n=2) if hasattr(copy, "replace") else True


def test_copies_with_other_values_are_those_of_replace_and_checked_alike():
    params = SamplingParams(max_tokens=5, seed=3)
    values = {"temperature": 0, "stop": "end", "top_k": 3}
    assert params.changed(values) == replace(params, **values)
    assert params.changed(values).stop == ("end",)
    assert params.seeded(2**60) == replace(params, seed=2**60)
    assert copy.copy(params) == params
    for wrong in ({"top_p": 2.0}, {"n": "two"}, {"min_tokens": 6}):
        with pytest.raises(InvalidParameterError, match=next(iter(wrong))):
            params.changed(wrong)
    assert params == SamplingParams(max_tokens=5, seed=3)


def test_a_request_keeps_the_parameters_that_it_was_made_with():
    params = SamplingParams(max_tokens=5)
    inputs = InputProcessor(None, 100, RequestLimits(1000, 16, 16, 16, 100))
    request, _ = inputs.request("a", [1, 2], params)
    params.max_tokens = 9
    assert request.sampling.max_tokens == 5


PARAMETERS = [
    (SamplingParams, unknown_names.SAMPLING),
    (BeamSearchParams, unknown_names.BEAM_SEARCH),
    (PoolingParams, unknown_names.POOLING),
    (StructuredOutputsParams, unknown_names.STRUCTURED_OUTPUTS),
    (EngineArgs, unknown_names.ENGINE),
]
"""What takes parameters, and those of others that it has not."""


@pytest.mark.parametrize(("kind", "elsewhere"), PARAMETERS)
def test_a_parameter_that_only_others_have_is_refused_with_what_to_do(kind, elsewhere):
    assert not set(elsewhere) & {one.name for one in fields(kind)}
    for name, instead in elsewhere.items():
        with pytest.raises(UnknownParameterError) as caught:
            kind(**{name: None})
        called = "option" if kind is EngineArgs else "parameter"
        assert str(caught.value) == f"{kind.__name__} has no {called} {name!r}: {instead}."
    assert issubclass(UnknownParameterError, TypeError)  # as Python raises for unknown keywords
    assert list(inspect.signature(kind).parameters) == [one.name for one in fields(kind)]


def test_a_misspelt_parameter_comes_with_the_one_that_was_meant():
    with pytest.raises(UnknownParameterError, match=r"no parameter 'max_token'; did you mean max_tokens\?$"):
        replace(SamplingParams(), max_token=3)
    with pytest.raises(UnknownParameterError, match=r"no parameter 'q'; it has pooling, dimensions, normalize\.$"):
        PoolingParams(q=1)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'max_tokens'"):
        BeamSearchParams(beam_width=2)


def test_methods_that_only_vllms_engine_has_are_named_with_what_takes_their_place():
    engine = object.__new__(AsyncLLMEngine)
    with pytest.raises(AttributeError, match=r"AsyncLLMEngine has no 'pause_generation'; it is `pause`\.$"):
        engine.pause_generation()
    with pytest.raises(AttributeError, match=r"AsyncLLMEngine has no 'generat'\.$"):
        _ = engine.generat
    with pytest.raises(UnsupportedParameterError, match="lora_request is not supported: adapters are not loaded"):
        asyncio.run(anext(engine.generate("Once", lora_request="style")))


def test_a_prompts_salt_is_that_of_its_request():
    inputs = InputProcessor(None, 100, RequestLimits(1000, 16, 16, 16, 100))
    prompt = TokensPrompt(prompt_token_ids=[1, 2], cache_salt="a")
    params = SamplingParams()
    assert inputs.request("a", prompt, params)[0].cache_salt == "a"
    assert inputs.request("a", prompt, params, cache_salt="a")[0].cache_salt == "a"
    assert inputs.request("a", [1, 2], params, cache_salt="b")[0].cache_salt == "b"
    nothing = {"prompt_token_ids": [1, 2], "cache_salt": None, "multi_modal_data": None}
    assert inputs.request("a", nothing, params)[0].cache_salt is None
    with pytest.raises(InvalidParameterError, match="cache_salt='b' is not the 'a' that the prompt has"):
        inputs.request("a", prompt, params, cache_salt="b")
    with pytest.raises(InvalidParameterError, match="cache_salt must be a non-empty string"):
        inputs.request("a", {**prompt, "cache_salt": ""}, params)
    with pytest.raises(InvalidPromptError, match="'multi_modal_data', which is not supported"):
        inputs.request("a", {**prompt, "multi_modal_data": {}}, params)
    assert TextPrompt(prompt="a") == {"prompt": "a"}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("half", "float16"),
        ("float", "float32"),
        ("bfloat16", "bfloat16"),
        (jnp.bfloat16, "bfloat16"),
        (jnp.dtype("bfloat16"), "bfloat16"),
        (np.float32, "float32"),
    ],
)
def test_other_names_of_types_and_types_themselves_are_taken(given, meant):
    assert type(EngineArgs(dtype=given).dtype) is str
    assert EngineArgs(dtype=given).dtype == meant


class PyTorchType:
    """Looks like one. Importing PyTorch takes seconds."""

    __module__ = "torch"

    def __init__(self, name):
        self.is_called = name

    def __str__(self):
        return f"torch.{self.is_called}"


def test_pytorchs_types_are_taken():
    assert EngineArgs(dtype=PyTorchType("bfloat16")).dtype == "bfloat16"
    with pytest.raises(InvalidParameterError, match=r"dtype must be one of .* got 'int8'"):
        EngineArgs(dtype=PyTorchType("int8"))


def test_beams_have_vllms_names_too():
    ended = CompletionOutput(1, " is", [7], -2.0, finish_reason="stop", stop_reason=7)
    beams = [CompletionOutput(0, " was", [8, 9], -1.5, finish_reason="length"), ended]
    output = RequestOutput("a", "It", [5, 6], beams, True)
    assert [(s.tokens, s.text, s.cum_logprob) for s in output.sequences] == [
        ([5, 6, 8, 9], "It was", -1.5),
        ([5, 6, 7], "It is", -2.0),
    ]
    assert [(s.finish_reason, s.stop_reason) for s in output.sequences] == [("length", None), ("stop", 7)]


@pytest.mark.parametrize("name", BYTE_EXACT)
@pytest.mark.parametrize("text", ["naïve 😀🎉 café", "你好 世界", "a😀", "plain"])
def test_the_texts_of_tokens_add_up_with_whole_characters(name, text):
    hf = tokenizer(name)
    ids = hf.encode(text, add_special_tokens=False)
    texts, found = TokenTexts(hf), []
    for token in ids:
        found.append(texts.text(token))
        texts.advance(token)
    assert "".join(found).lstrip() == text
    assert not any("\ufffd" in one for one in found)
    assert b"".join(token_bytes(hf, token) for token in ids).decode().lstrip() == text


def test_a_character_that_is_never_completed_does_not_spoil_what_follows():
    hf = tokenizer("byte-level")
    first, *_ = hf.encode("😀", add_special_tokens=False)
    texts = TokenTexts(hf)
    assert texts.text(first) == ""
    texts.advance(first)
    (a,) = hf.encode("a", add_special_tokens=False)
    assert texts.text(a) == "\ufffda"
    texts.advance(a)
    assert texts.text(a) == "a"


class Core:
    """Ends nothing."""

    def finish(self, request_id, stop_reason, index=0):
        return None


@pytest.mark.parametrize("detokenize", [True, False])
def test_without_detokenizing_log_probabilities_have_no_text(detokenize):
    model = Tokenizer(tokenizer("byte-level"), "some/model")
    inputs = InputProcessor(model, model.vocab_size, RequestLimits(1000, 16, 16, 16, 100))
    params = SamplingParams(logprobs=0, prompt_logprobs=0, detokenize=detokenize)
    request, checked = inputs.request("a", "hello", params)
    SequenceGroup.form(request)
    outputs = OutputProcessor(Core(), model)
    outputs.add(request, checked.prompt, checked.prompt_token_ids)
    (token, *_) = model.encode("hello")
    request.output_token_ids.append(token)
    request.logprobs.append({token: Logprob(-1.0, 1)})
    request.prompt_logprobs += [{t: Logprob(-1.0, 1)} for t in checked.prompt_token_ids[1:]]
    (output,) = outputs.process([RequestUpdate(request, [token])])
    expected = model.token_text(token) if detokenize else None
    assert output.outputs[0].logprobs[0][token].decoded_token == expected
    of_prompt = zip(output.prompt_logprobs[1:], checked.prompt_token_ids[1:], strict=True)
    assert all((position[token].decoded_token is not None) == detokenize for position, token in of_prompt)


def test_streamed_log_probabilities_of_the_prompt_come_with_a_sequences_first_tokens():
    model = Tokenizer(tokenizer("byte-level"), "some/model")
    inputs = InputProcessor(model, model.vocab_size, RequestLimits(1000, 16, 16, 16, 100))
    params = SamplingParams(n=2, prompt_logprobs=0, output_kind=RequestOutputKind.DELTA)
    request, checked = inputs.request("a", "hello", params)
    first, second = SequenceGroup.form(request).members
    outputs = OutputProcessor(Core(), model)
    outputs.add(request, checked.prompt, checked.prompt_token_ids)
    request.prompt_logprobs += [{t: Logprob(-1.0, 1)} for t in checked.prompt_token_ids[1:]]
    (token, *_) = model.encode("hello")
    found = []
    for sequence in (first, second, first, second):
        sequence.output_token_ids.append(token)
        found += outputs.process([RequestUpdate(sequence, [token])])
    of_prompt = [output.prompt_logprobs for output in found]
    assert of_prompt == [request.prompt_logprobs, request.prompt_logprobs, [], []]
    assert all(one.decoded_token for position in of_prompt[0][1:] for one in position.values())
