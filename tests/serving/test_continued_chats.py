"""Answers that go on from the last message, and other fields of a chat that its template decides about."""

import copy
import json
from dataclasses import replace

import pytest

from jpaged.api.outputs import CompletionOutput, RequestOutput
from jpaged.api.sampling_params import SamplingParams
from jpaged.frontend.inputs import ProcessedInput
from jpaged.serving.answers import AnswerContext, answer_to
from jpaged.serving.batch_requests import CHAT, parse_request
from jpaged.serving.chat_template import template_arguments
from jpaged.serving.dialects.response_store import ResponseStore
from jpaged.serving.dialects.responses import ResponsesRequest, chat_of
from jpaged.serving.dialects.responses_answer import ResponsesAnswer
from jpaged.serving.errors import ApiError
from jpaged.serving.protocol import ChatCompletionRequest, TokenizeRequest
from jpaged.serving.turns import reading_of, turn_of
from jpaged.text.tokenizer import Tokenizer
from tests.text.tokenizers_for_tests import tokenizer

MODEL = Tokenizer(tokenizer("byte-level"), "some/model")
"""One for all tests: it starts a process when it renders first."""
THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}<think></think>"
FUNCTION = {"type": "function", "function": {"name": "f"}}
PROMPT = ProcessedInput("hi", [5], ())


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def with_template(template):
    hf = copy.deepcopy(tokenizer("byte-level"))
    hf.chat_template = template
    return Tokenizer(hf, "some/model")


def chat_turn(template, *messages, tools=None):
    return turn_of(ChatCompletionRequest(messages=list(messages), chat_template=template, tools=tools), MODEL)


def output(said):
    return RequestOutput("id", "hi", [5], [CompletionOutput(0, said, [1], None, None, "stop")], True)


COHERE = "{% for m in messages %}<|START_RESPONSE|>{{ m.content }}{% endfor %}{# <|START_THINKING|><|START_ACTION|> #}"
CHANNELS = "{% for m in messages %}<|channel|>final<|message|>{{ m.content }}{% endfor %}"
CHANNELS += "{# <|channel|>analysis<|message|><|call|> #}"


@pytest.mark.parametrize(
    ("template", "end"), [(COHERE, "<|START_RESPONSE|>So the"), (CHANNELS, "<|channel|>final<|message|>So the")]
)
def test_an_answer_that_goes_on_inside_a_channel_is_text_to_the_channels_end(template, end):
    turn = chat_turn(template, user("When?"), assistant("So the "), tools=[FUNCTION])
    request = ChatCompletionRequest(messages=[], continue_final_message=True)
    found = reading_of(turn, request, end)
    assert found.reasons == "said"
    news = found.parser().feed(" answer is 4" + ("<|END_RESPONSE|>" if template == COHERE else ""), final=True)
    assert (news.reasoning, news.content) == ("", " answer is 4")
    assert turn.reasons("<|start|>When?") == "free"
    with pytest.raises(ApiError, match="the prompt does not end in an answer's text") as refused:
        turn.reasons("<|CHATBOT_TOKEN|>So the", continues=True)
    assert (refused.value.status, refused.value.param) == (400, "messages")
    said = "<|START_RESPONSE|>a<|END_RESPONSE|>" if template == COHERE else "<|channel|>analysis<|message|>a"
    with pytest.raises(ApiError, match="does not end in an answer's text"):
        replace(turn, messages=[assistant(said)]).reasons(end.replace("So the", said), continues=True)
    with pytest.raises(ApiError, match="cannot be made to call tools"):
        replace(turn, calls="required").reasons(end, continues=True)


@pytest.mark.parametrize(
    ("template", "takes"),
    [
        ("{{ messages }}{# documents #}", False),
        ("{{ messages }} Read the documents.", False),
        ("{{ documents }}", True),
    ],
)
def test_documents_are_refused_by_a_template_that_only_spells_the_word(template, takes):
    asked = ChatCompletionRequest(messages=[user("hi")], documents=[{"text": "a"}])
    if takes:
        assert turn_of(asked, with_template(template)).variables["documents"] == asked.documents
        return
    with pytest.raises(ApiError, match="documents has no effect"):
        turn_of(asked, with_template(template))


def test_a_batch_reads_an_answer_that_goes_on_as_the_server_does():
    hf = with_template("{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}")
    body = {"messages": [user("When?"), assistant("<think>First I")], "continue_final_message": True}
    line = {"custom_id": "a", "url": CHAT, "body": body}
    found = parse_request(line, hf, SamplingParams()).reading
    assert found is not None
    assert (found.reasons, found.continues) == ("open", True)
    assert found == reading_of(found.turn, ChatCompletionRequest(**body), "When?<think>First I")


@pytest.mark.parametrize("shows", [True, False])
def test_an_echo_has_the_reasoning_that_was_begun_apart(shows):
    fields = {"continue_final_message": True, "echo": True, "include_reasoning": shows}
    turn = chat_turn(THINKS, user("When?"), assistant("<think>First I"))
    asked = ChatCompletionRequest(messages=turn.messages, **fields)
    context = AnswerContext("id", "m", [PROMPT], None, reading_of(turn, asked, "When?<think>First I"))
    (whole,) = json.loads(answer_to(asked, context).whole([output(" think.</think>4")]))["choices"]
    expected = "First I think." if shows else None
    assert (whole["message"]["content"], whole["message"].get("reasoning_content")) == ("4", expected)
    events = answer_to(asked, context).chunk(0, output(" think.</think>4")).decode().split("\n\n")
    deltas = [json.loads(one.removeprefix("data: "))["choices"][0]["delta"] for one in events if one]
    assert "".join(delta.get("content") or "" for delta in deltas) == "4"
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == (expected or "")


@pytest.mark.parametrize("name", ["documents", "timeout_s"])
def test_an_option_among_a_templates_variables_is_refused_with_advice_that_can_be_followed(name):
    asked = TokenizeRequest(messages=[user("hi")], chat_template="{{ x }}", chat_template_kwargs={name: 1})
    with pytest.raises(ApiError, match=f"'{name}' is an option, not a variable; leave it out") as refused:
        template_arguments(asked, turn_of(asked, MODEL), MODEL)
    assert ("/v1/chat/completions" in refused.value.message) is (name == "documents")


@pytest.mark.parametrize("streams", [True, False])
def test_a_response_is_kept_once_where_it_ends(streams):
    kept = []

    class Store(ResponseStore):
        def put(self, messages, response, record=None):
            kept.append(response["status"])

    store, body = Store(), ResponsesRequest(input="hi")
    answer = ResponsesAnswer(chat_of(body, store), AnswerContext("chatcmpl-1", "m", [PROMPT], None), body, store)
    if streams:
        answer.chunk(0, output("a"))
        answer.message()
        assert kept == []
        answer.end()
    else:
        answer.whole([output("a")])
    assert kept == ["completed"]
