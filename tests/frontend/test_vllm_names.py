"""What code written for vLLM does with parameters and outputs."""

import copy
from dataclasses import replace

import pytest

from jpaged.api.config import EngineArgs
from jpaged.api.errors import InvalidParameterError
from jpaged.api.outputs import CompletionOutput, Logprob, RequestOutput
from jpaged.api.sampling_params import SamplingParams
from jpaged.engine.limits import RequestLimits
from jpaged.engine.scheduler.scheduler import RequestUpdate
from jpaged.engine.sequences.group import SequenceGroup
from jpaged.frontend.inputs import InputProcessor
from jpaged.frontend.output_processor import OutputProcessor
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


@pytest.mark.parametrize(("given", "meant"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_pytorchs_names_of_types_are_taken(given, meant):
    assert EngineArgs(dtype=given).dtype == meant


def test_beams_have_vllms_names_too():
    beams = [CompletionOutput(0, " was", [8, 9], -1.5), CompletionOutput(1, " is", [7], -2.0)]
    output = RequestOutput("a", "It", [5, 6], beams, True)
    assert [(s.tokens, s.text, s.cum_logprob) for s in output.sequences] == [
        ([5, 6, 8, 9], "It was", -1.5),
        ([5, 6, 7], "It is", -2.0),
    ]


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
