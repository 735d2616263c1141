"""The JSON of answers, whole and in chunks, from outputs of an engine."""

import json

import pytest

from jpaged.api.outputs import CompletionOutput, Logprob, RequestOutput
from jpaged.frontend.inputs import ProcessedInput
from jpaged.serving.answers import AnswerContext, answer_to
from jpaged.serving.protocol import ChatCompletionRequest, CompletionRequest, StreamOptions
from jpaged.text.tokenizer import Tokenizer
from tests.text.tokenizers_for_tests import tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
PROMPT = ProcessedInput("hi", [5, 6, 7], ())


def body_of(kind, **fields):
    if kind == "text":
        return CompletionRequest(prompt="hi", **fields)
    return ChatCompletionRequest(messages=MESSAGES, **fields)


def answer(body, model=None):
    return answer_to(body, AnswerContext("id", "model", [PROMPT], model))


def output(*texts, finished=False, logprobs=None, first_token=10):
    """An output whose sequences each have a text and a token."""
    completions = [
        CompletionOutput(i, text, [first_token + i], None, logprobs, "stop" if finished else None)
        for i, text in enumerate(texts)
    ]
    return RequestOutput("id", "hi", PROMPT.prompt_token_ids, completions, finished)


def chunks(data):
    parts = [part.removeprefix("data: ") for part in data.decode().split("\n\n")]
    return [json.loads(part) for part in parts if part not in ("", "[DONE]")]


@pytest.mark.parametrize("kind", ["text", "chat"])
@pytest.mark.parametrize("include", [True, False, None])
def test_usage_comes_with_every_chunk_only_where_usage_is_asked_for(kind, include):
    options = StreamOptions(include_usage=include, continuous_usage_stats=True)
    made = answer(body_of(kind, stream=True, stream_options=options))
    events = chunks(made.chunk(0, output("a")) + made.chunk(0, output("b", finished=True)) + made.end())
    assert all(("usage" in event) == bool(include) for event in events)
    if include:
        assert events[-1]["usage"]["completion_tokens"] == 2


def test_the_first_chunk_of_a_chat_counts_no_tokens_that_it_does_not_hold():
    options = StreamOptions(include_usage=True, continuous_usage_stats=True)
    made = answer(body_of("chat", stream=True, n=2, stream_options=options))
    events = chunks(made.chunk(0, output("a", "b")))
    counts = [(event["choices"][0]["delta"].get("content"), event["usage"]["completion_tokens"]) for event in events]
    assert counts == [("", 0), ("a", 1), ("", 1), ("b", 2)]


@pytest.mark.parametrize("kind", ["text", "chat"])
@pytest.mark.parametrize("asked", [False, True])
def test_what_is_not_asked_for_is_null_and_not_absent(kind, asked):
    fields = {"return_token_ids": asked, "prompt_logprobs": 0 if asked else None}
    finished = output("a", finished=True)
    finished.prompt_logprobs = [None, {6: Logprob(-1.0, 1)}, {7: Logprob(-1.0, 1)}] if asked else None
    whole = json.loads(answer(body_of(kind, **fields)).whole([finished]))
    choice = whole["choices"][0]
    of_prompt = whole if kind == "chat" else choice
    assert choice["token_ids"] == ([10] if asked else None)
    assert of_prompt["prompt_token_ids"] == (PROMPT.prompt_token_ids if asked else None)
    assert (of_prompt["prompt_logprobs"] is not None) == asked
    made = answer(body_of(kind, stream=True, return_token_ids=asked))
    for event in chunks(made.chunk(0, output("a"))):
        assert "token_ids" in event["choices"][0]
        assert "prompt_token_ids" in (event if kind == "chat" else event["choices"][0])


def test_the_bytes_of_tokens_can_be_joined():
    model = Tokenizer(tokenizer("byte-level"), "some/model")
    text = "naïve 😀"
    ids = model.encode(text, add_special_tokens=False)
    logprobs = [{token: Logprob(-1.0, 1)} for token in ids]
    completion = CompletionOutput(0, text, ids, None, logprobs, "stop")
    finished = RequestOutput("id", "hi", PROMPT.prompt_token_ids, [completion], True)
    whole = json.loads(answer(body_of("chat", logprobs=True), model).whole([finished]))
    content = whole["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == text
