"""Which tokens' log-probabilities come with the text of a response."""

import json

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.api.outputs import CompletionOutput, Logprob, RequestOutput
from jpaged.frontend.inputs import ProcessedInput
from jpaged.serving.answers import AnswerContext
from jpaged.serving.dialects import responses
from jpaged.serving.dialects.response_store import ResponseStore
from jpaged.serving.dialects.responses import ResponsesRequest
from jpaged.serving.dialects.responses_answer import ResponsesAnswer
from jpaged.serving.dialects.text_logprobs import TextTokens
from jpaged.serving.errors import ApiError
from jpaged.serving.turns import Reading, turn_of
from jpaged.text.tokenizer import Tokenizer
from jpaged.text.turns.declarations import Tool
from jpaged.text.turns.formats import HERMES, REASONING_FORMATS
from jpaged.text.turns.parser import TurnParser
from tests.serving.server_process import KEY
from tests.text.tokenizers_for_tests import tokenizer

pytestmark = pytest.mark.xdist_group("tools server")

MODEL = Tokenizer(tokenizer("byte-level"), "some/model")
THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}<think></think>"
INCLUDE = ["message.output_text.logprobs"]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "t"}}\n</tool_call>'
THINK = next(form for form in REASONING_FORMATS if form.name == "think")


def cut(text, at):
    """The text in pieces that end at these places."""
    ends = sorted({min(place, len(text)) for place in at} | {len(text)})
    return [piece for begin, end in zip([0, *ends], ends, strict=False) if (piece := text[begin:end])]


@given(
    thought=st.text("thinko< >", max_size=6),
    said=st.text("thinko<_ >", max_size=12),
    calls=st.booleans(),
    at=st.lists(st.integers(1, 80), max_size=30),
    lag=st.integers(0, 3),
)
def test_the_tokens_of_a_text_are_those_that_touch_it(thought, said, calls, at, lag):
    """Each character is told apart by its place, and text comes as many tokens late as a stop string may hold it."""
    whole = f"<think>{thought}</think>{said}{CALL if calls else ''}"
    parser = TurnParser(HERMES, [Tool("f", {"type": "object"}, False)], THINK, "free")
    pieces = cut(whole, at)
    tokens = TextTokens[tuple[int, int]]()
    found, places, late = [], [], []
    news = [(piece, [(piece, place)]) for piece, place in zip(pieces, ranges(pieces), strict=True)] + [("", [])] * lag
    for number, (piece, new) in enumerate(news):
        late.append(piece)
        text = late.pop(0) if len(late) > lag else ""
        tokens.add(text, new)
        delta = parser.feed(text, final=number + 1 == len(news))
        assert delta.content == "".join(whole[a:b] for a, b in delta.places)
        places += delta.places
        found += tokens.taken(delta.places, parser.num_read)
    assert parser.num_read == len(whole)
    assert found == [(a, b) for a, b in ranges(pieces) if any(a < end and b > begin for begin, end in places)]


def ranges(pieces):
    place = 0
    for piece in pieces:
        yield place, place + len(piece)
        place += len(piece)


def answer_of(body):
    """The answer to a model that marks its reasoning."""
    chat = responses.chat_of(body, ResponseStore())
    chat.chat_template = THINKS
    reading = Reading(turn_of(chat, MODEL), "free")
    context = AnswerContext("chatcmpl-12", "m", [ProcessedInput("hi", [5], ())], MODEL, reading)
    return ResponsesAnswer(chat, context, body, ResponseStore())


def output(text, tokens, reason=None):
    """tokens: ids and texts."""
    logprobs = [{i: Logprob(-i / 8, 1, own), 99: Logprob(-20.0, 2, "x")} for i, own in tokens]
    ids = [i for i, _ in tokens]
    return RequestOutput("id", "hi", [5], [CompletionOutput(0, text, ids, None, logprobs, reason)], reason is not None)


SAID = [(1, "<think>"), (2, "why"), (3, "</think>"), (4, ""), (5, "é"), (6, " so"), (7, "<|im_end|>")]


@pytest.mark.parametrize("num_top", [0, 1, 2])
def test_a_text_has_its_own_tokens_whole_and_streamed(num_top):
    body = ResponsesRequest(input="hi", include=INCLUDE, top_logprobs=num_top)
    text = "".join(own for _, own in SAID[:-1])
    whole = json.loads(answer_of(body).whole([output(text, SAID, "stop")]))
    (part,) = whole["output"][1]["content"]
    assert [entry["logprob"] for entry in part["logprobs"]] == [-4 / 8, -5 / 8, -6 / 8]
    assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {num_top}
    assert whole["top_logprobs"] == num_top
    assert "logprobs" not in whole["output"][0]["content"][0]
    streamed = answer_of(body)
    data = b"".join(streamed.chunk(0, output(own, [(i, own)])) for i, own in SAID[:-1])
    data += streamed.chunk(0, output("", SAID[-1:], "stop")) + streamed.end()
    events = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data")]
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert [entry for e in deltas for entry in e["logprobs"]] == part["logprobs"]
    (done,) = [e for e in events if e["type"] == "response.output_text.done"]
    assert done["logprobs"] == part["logprobs"]
    assert events[-1]["response"]["output"] == whole["output"]


def test_bytes_that_make_no_character_and_spaces_that_a_tokenizer_drops_lose_no_token():
    tokens = TextTokens()
    tokens.add("Once\ufffd upon", [(" Once", 1), ("", 2), ("", 3), (" upon", 4)])
    tokens.add(" end", [("<|skipped|>", 5), (" end", 6)])
    assert tokens.taken([(0, 10)], 10) == [1, 2, 3, 4]
    assert tokens.taken([(10, 14)], 14) == [6]


def test_top_logprobs_need_the_logprobs():
    with pytest.raises(ApiError, match="top_logprobs needs include") as caught:
        responses.chat_of(ResponsesRequest(input="a", top_logprobs=2), ResponseStore())
    assert (caught.value.status, caught.value.param) == (400, "top_logprobs")


def test_openais_client_gets_the_logprobs_that_chats_have(thinking_server):
    client = openai.OpenAI(base_url=thinking_server.url + "/v1", api_key=KEY)
    asked = {"model": "model", "temperature": 0}
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": "A fox"}], max_tokens=12, logprobs=True, top_logprobs=2, **asked
    )
    wanted = [entry.model_dump() for entry in chat.choices[0].logprobs.content]
    asked |= {"input": "A fox", "max_output_tokens": 12, "include": INCLUDE, "top_logprobs": 2}
    made = client.responses.create(**asked)
    found = [entry.model_dump() for entry in made.output[0].content[0].logprobs]
    assert [entry["token"] for entry in found] == [entry["token"] for entry in wanted]
    assert [len(entry["top_logprobs"]) for entry in found] == [2] * 12
    assert [e["logprob"] for e in found] == pytest.approx([e["logprob"] for e in wanted], abs=1e-3)
    events = list(client.responses.create(stream=True, **asked))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert all(delta.logprobs for delta in deltas)
    streamed = [entry.token for delta in deltas for entry in delta.logprobs]
    assert "".join(streamed) == made.output_text == events[-1].response.output_text


def test_too_many_logprobs_are_refused_though_they_are_streamed(thinking_server):
    body = {"input": "A fox", "include": INCLUDE, "top_logprobs": 21, "stream": True}
    answer = thinking_server.client.post("/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_logprobs")
