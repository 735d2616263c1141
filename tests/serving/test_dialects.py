"""Anthropic's Messages and OpenAI's Responses: translated requests, answers whole and streamed."""

import json
import time
from typing import Any

import jsonschema
import openai
import pytest

from jpaged.api.outputs import CompletionOutput, RequestOutput
from jpaged.frontend.inputs import ProcessedInput
from jpaged.serving.answers import AnswerContext
from jpaged.serving.dialects import messages, response_store, responses
from jpaged.serving.dialects.messages import MessagesRequest
from jpaged.serving.dialects.response_store import ResponseStore
from jpaged.serving.dialects.responses import ResponsesRequest
from jpaged.serving.dialects.responses_answer import ResponsesAnswer
from jpaged.serving.errors import ApiError
from jpaged.serving.protocol import ChatCompletionRequest
from tests.serving.server_process import KEY

pytestmark = pytest.mark.xdist_group("tools server")

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
STORY = "A story about a fox"


@pytest.fixture(scope="module")
def server(thinking_server):
    return thinking_server


def events_of(answer):
    """Names and bodies of a stream's events."""
    assert answer.status_code == 200, answer.text
    found = []
    for block in answer.text.split("\n\n"):
        if block:
            name, _, data = block.partition("\n")
            body = json.loads(data.removeprefix("data: "))
            assert name == f"event: {body['type']}"
            found.append(body)
    return found


def ask(server, **body):
    body = {"max_tokens": 40, "temperature": 0, "messages": [{"role": "user", "content": STORY}]} | body
    headers = {"authorization": "", "x-api-key": KEY, "anthropic-version": "2023-06-01"}
    return server.client.post("/v1/messages", json=body, headers=headers)


CALLS = {"tools": [{"name": "weather", "description": "Looks.", "input_schema": WEATHER}]}
CALLS |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 150}
THINKS = {"thinking": {"type": "enabled", "budget_tokens": 5}}


@pytest.mark.parametrize(
    ("body", "kinds", "reason"),
    [
        ({"max_tokens": 9}, ["text"], "max_tokens"),
        (CALLS, ["tool_use"], "tool_use"),
        (THINKS, ["thinking", "text"], "max_tokens"),
        (CALLS | THINKS, ["thinking", "tool_use"], "tool_use"),
    ],
    ids=["text", "call", "thinking", "thinking and call"],
)
def test_a_message_has_blocks_and_streams_them_one_after_the_other(server, body, kinds, reason):
    whole = ask(server, **body).json()
    assert [block["type"] for block in whole["content"]] == kinds
    assert (whole["type"], whole["role"], whole["stop_reason"]) == ("message", "assistant", reason)
    assert whole["usage"]["output_tokens"] > 0
    for block in whole["content"]:
        if block["type"] == "tool_use":
            jsonschema.validate(block["input"], WEATHER)
    events = events_of(ask(server, stream=True, **body))
    assert events[0]["type"] == "message_start"
    assert events[0]["message"]["usage"]["input_tokens"] + events[0]["message"]["usage"]["cache_read_input_tokens"] > 0
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] == reason
    assert events[-2]["usage"].keys() == whole["usage"].keys()
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    blocks, is_open = [], False
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "joined": ""})
            is_open = True
            continue
        assert is_open
        assert event["index"] == len(blocks) - 1
        is_open = event["type"] != "content_block_stop"
        if is_open:
            delta = event["delta"]
            if delta["type"] == "signature_delta":
                blocks[-1]["signature"] = delta["signature"]
            else:
                blocks[-1]["joined"] += delta.get("text") or delta.get("thinking") or delta.get("partial_json")
    assert not is_open
    for block, other in zip(blocks, whole["content"], strict=True):
        joined = json.loads(block["joined"]) if block["type"] == "tool_use" else block["joined"]
        assert joined == other.get("text") or joined == other.get("thinking") or joined == other.get("input")
        assert block.get("signature") == other.get("signature") != ""


def test_anthropics_clients_get_models_ids_and_errors_in_their_form(server):
    headers = {"authorization": "", "x-api-key": KEY, "anthropic-version": "2023-06-01"}
    answer = server.client.get("/v1/models", headers=headers)
    (model,) = answer.json()["data"]
    assert (model["type"], model["lifecycle"]) == ("model", "active")
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert server.client.get(f"/v1/models/{model['id']}", headers=headers).json() == model
    plain = server.client.get("/v1/models")
    assert plain.json()["object"] == "list"
    assert "request-id" not in plain.headers
    for path, key, kind in (("/v1/messages", "wrong", "authentication_error"), ("/v1/message", KEY, "not_found_error")):
        answer = server.client.post(path, json={}, headers=headers | {"x-api-key": key})
        assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", kind)
    unknown = server.client.get("/v1/models/unknown", headers=headers).json()
    assert (unknown["type"], unknown["error"]["type"]) == ("error", "not_found_error")
    assert server.client.get("/v1/models/unknown").json()["error"]["code"] == "model_not_found"


def test_an_answer_goes_on_from_the_assistants_last_message(server):
    said = [{"role": "user", "content": STORY}, {"role": "assistant", "content": "Once upon a"}]
    body = {"messages": said, "max_tokens": 6, "temperature": 0}
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    fields["chat_template_kwargs"] = {"enable_thinking": False}
    chat = server.client.post("/v1/chat/completions", json=body | fields).json()
    answer = ask(server, **body).json()
    assert answer["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert answer["usage"]["output_tokens"] == 6
    refused = ask(server, **body, thinking={"type": "enabled", "budget_tokens": 5})
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "the last message is the assistant's" in refused.json()["error"]["message"]


def test_calls_and_users_messages_are_not_gone_on_from():
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    for content, continues in (("Once", True), ([call], None), ([{"type": "text", "text": "I look."}, call], None)):
        told = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
        assert messages.chat_of(MessagesRequest(messages=told, max_tokens=3)).continue_final_message is continues
    assert messages.chat_of(MessagesRequest(messages=told[:1], max_tokens=3)).continue_final_message is None


def test_results_of_tools_are_told_and_counted(server):
    (call,) = ask(server, **CALLS).json()["content"]
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": STORY, "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, call]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    body = {"messages": conversation, "system": [{"type": "text", "text": "Be kind."}], "tools": CALLS["tools"]}
    usage = ask(server, **body).json()["usage"]
    counted = server.client.post("/v1/messages/count_tokens", json=body).json()
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    asked = messages.chat_of(MessagesRequest(max_tokens=1, **{"messages": conversation}))
    assert [message["role"] for message in asked.messages] == ["user", "assistant", "tool", "user"]
    assert json.loads(asked.messages[1]["tool_calls"][0]["function"]["arguments"]) == call["input"]


def test_a_stop_sequence_is_named(server):
    text = ask(server).json()["content"][0]["text"]
    stop = text.split()[2]
    cut = ask(server, stop_sequences=[stop]).json()
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", stop)
    assert text.startswith(cut["content"][0]["text"])


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_a_message_keeps_to_a_schema(server, field):
    form = {"type": "json_schema", "schema": WEATHER}
    asked = {field: {"format": form} if field == "output_config" else form}
    whole = ask(server, max_tokens=150, **asked).json()
    (block,) = whole["content"]
    jsonschema.validate(json.loads(block["text"]), WEATHER)
    assert whole["stop_reason"] == "end_turn"
    events = events_of(ask(server, max_tokens=150, stream=True, **asked))
    assert (
        "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == block["text"]
    )


def ended_by(reason, why):
    """An output that ended for a reason."""
    completion = CompletionOutput(0, "So", [10], None, None, reason, why)
    return RequestOutput("id", "hi", [5], [completion], True)


def answers_of(kind):
    """Two answers to one request, to be given whole and streamed."""
    chat = ChatCompletionRequest(messages=[{"role": "user", "content": "hi"}])
    context = AnswerContext("chatcmpl-1", "model", [ProcessedInput("hi", [5], ())], None)
    if kind == "messages":
        return [messages.MessagesAnswer(chat, context) for _ in range(2)]
    body, store = ResponsesRequest(input="hi"), ResponseStore()
    return [ResponsesAnswer(chat, context, body, store) for _ in range(2)]


@pytest.mark.parametrize("why", ["the grammar takes too much", None])
def test_an_answer_that_was_aborted_does_not_say_that_it_is_complete(why):
    output = ended_by("abort", why)
    said = why or "it was aborted"
    whole, streamed = answers_of("messages")
    with pytest.raises(ApiError, match=said) as caught:
        whole.whole([output])
    assert (caught.value.status, caught.value.code) == (500, "answer_failed") if why else (503, "aborted")
    events = (streamed.chunk(0, output) + streamed.end()).decode()
    assert events.splitlines()[-3].removeprefix("event: ") == "error"
    assert said in events
    assert "message_stop" not in events
    assert "stop_sequence" not in events.replace('"stop_sequence":null', "")

    whole, streamed = answers_of("responses")
    made = json.loads(whole.whole([output]))
    assert (made["status"], made["completed_at"], made["output"][0]["status"]) == ("failed", None, "incomplete")
    assert made["error"]["code"] == "server_error"
    assert said in made["error"]["message"]
    assert (streamed.chunk(0, output) + streamed.end()).decode().splitlines()[-3] == "event: response.failed"
    with pytest.raises(ApiError):
        streamed._store.get(streamed.response_id)


BAD = [
    ({"output_config": {"task_budget": {}}}, "output_config.task_budget"),
    ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format"),
    ({"output_format": {"type": "json_schema", "schema": {"not": {}}}}, "output_config.format"),
    ({"output_format": {}, "output_config": {"format": {}}}, "give one"),
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tool_choice": {"type": ["some"]}}, "tool_choice.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"temperature": -1}, "temperature"),
]


@pytest.mark.parametrize(("field", "message"), BAD, ids=[message for _, message in BAD])
def test_what_messages_cannot_do_gets_an_error_in_their_form(server, field, message):
    answer = ask(server, **field)
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert message in answer.json()["error"]["message"]


def respond(server, **body):
    body = {"input": STORY, "max_output_tokens": 40, "temperature": 0} | body
    return server.client.post("/v1/responses", json=body)


FUNCTIONS = {"tools": [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}]}
FUNCTIONS |= {"tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 150}


@pytest.mark.parametrize(
    ("body", "kinds", "status"),
    [
        ({}, ["message"], "incomplete"),
        (FUNCTIONS, ["function_call"], "completed"),
        (FUNCTIONS | {"text": {"format": {"type": "json_object"}}}, ["function_call"], "completed"),
        ({"text": {"format": {"type": "json_schema", "name": "w", "schema": WEATHER}}}, ["message"], "completed"),
    ],
    ids=["text", "call", "call beside a format", "schema"],
)
def test_a_response_has_items_and_streams_them_as_they_come(server, body, kinds, status):
    whole = respond(server, **body).json()
    assert [item["type"] for item in whole["output"]] == kinds
    assert whole["status"] == status
    item = whole["output"][-1]
    text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
    if status == "completed":
        jsonschema.validate(json.loads(text), WEATHER)
    events = events_of(respond(server, stream=True, **body))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{status}"
    last = events[-1]["response"]
    assert last["usage"] == whole["usage"] | {"input_tokens_details": last["usage"]["input_tokens_details"]}
    deltas = [event["delta"] for event in events if event["type"].endswith(".delta")]
    assert "".join(deltas) == text
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["id"] for item in added] == [item["id"] for item in done]


WEATHER_TOOL = {"type": "function", "name": "get_weather", "parameters": WEATHER}
PUBLISHED_CASES = {
    "basic": {"input": [{"type": "message", "role": "user", "content": "Say hello."}]},
    "system prompt": {
        "input": [
            {"type": "message", "role": "system", "content": "You are a pirate."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Say hello."}]},
        ]
    },
    "multi-turn": {
        "input": [
            {"type": "message", "role": "user", "content": "My name is Alice."},
            {"type": "message", "role": "assistant", "content": "Hello Alice!"},
            {"type": "message", "role": "user", "content": "What is my name?"},
        ]
    },
    "tool calling": {"input": STORY, "tools": [WEATHER_TOOL], "tool_choice": "required", "max_output_tokens": 150},
}
"""The requests of openresponses.org's compliance tests, but for images, and with a tool that has to be called."""

NULL, NUMBER = {"type": "null"}, {"type": "number"}
RESPONSE_FIELDS: dict[str, Any] = {
    **{name: {"type": "string"} for name in ("id", "model", "status", "service_tier")},
    **{name: {"type": ["string", "null"]} for name in ("previous_response_id", "instructions", "user")},
    **{name: {"type": ["string", "null"]} for name in ("safety_identifier", "prompt_cache_key")},
    **dict.fromkeys(("temperature", "top_p", "presence_penalty", "frequency_penalty"), NUMBER),
    **{name: {"type": "boolean"} for name in ("parallel_tool_calls", "store", "background")},
    **{name: {"type": ["integer", "null"]} for name in ("completed_at", "max_output_tokens", "max_tool_calls")},
    **{name: {"type": "integer"} for name in ("created_at", "top_logprobs")},
    **{name: {"type": ["object", "null"]} for name in ("incomplete_details", "error", "reasoning", "usage")},
    "object": {"const": "response"},
    "output": {"type": "array", "minItems": 1},
    "tools": {"type": "array", "items": {"required": ["type", "name", "description", "parameters", "strict"]}},
    "tool_choice": {"enum": ["auto", "required", "none"]},
    "truncation": {"enum": ["auto", "disabled"]},
    "text": {"type": "object", "required": ["format"]},
    "metadata": {"type": "object"},
}
"""What openresponses.org requires of a response."""


@pytest.mark.parametrize("name", PUBLISHED_CASES)
def test_a_response_has_every_field_that_openresponses_requires(server, name):
    schema = {"type": "object", "properties": RESPONSE_FIELDS, "required": list(RESPONSE_FIELDS)}
    asked = PUBLISHED_CASES[name]
    whole = respond(server, **asked).json()
    jsonschema.validate(whole, schema)
    assert whole["temperature"] == 0
    assert {item["type"] for item in whole["output"]} == {"function_call" if "tools" in asked else "message"}
    events = events_of(respond(server, stream=True, presence_penalty=0.5, user="me", **asked))
    last = events[-1]["response"]
    jsonschema.validate(last, schema)
    assert (last["presence_penalty"], last["user"]) == (0.5, "me")
    begun = RESPONSE_FIELDS | {"output": {"type": "array"}}
    for event in events[:2]:
        jsonschema.validate(event["response"], schema | {"properties": begun})
    if "tools" in asked:
        kinds = [event["type"] for event in events]
        of_calls = ["response.function_call_arguments.delta", "response.function_call_arguments.done"]
        assert {*of_calls, "response.output_item.added", "response.output_item.done"} <= {*kinds}
        assert events[kinds.index("response.output_item.added")]["item"]["type"] == "function_call"


def test_openais_client_calls_a_tool_and_goes_on_from_the_response(server):
    client = openai.OpenAI(base_url=server.url + "/v1", api_key=KEY)
    plain = ["reasoning.encrypted_content"]
    first = client.responses.create(model="model", input=STORY, temperature=0, include=plain, **FUNCTIONS)
    (call,) = first.output
    assert call.name == "weather"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = client.responses.create(
        model="model", input=[result], previous_response_id=first.id, max_output_tokens=10, instructions="Be kind."
    )
    assert second.output_text
    spelled = [{"role": "user", "content": STORY}, call.model_dump(), result]
    third = client.responses.create(model="model", input=spelled, max_output_tokens=10, instructions="Be kind.")
    assert third.usage.input_tokens == second.usage.input_tokens
    with client.responses.stream(model="model", input=STORY, max_output_tokens=10) as stream:
        kinds = [event.type for event in stream]
    assert kinds[-1] == "response.incomplete"
    with pytest.raises(openai.NotFoundError, match="previous_response_id"):
        client.responses.create(model="model", input="a", previous_response_id="resp_unknown")
    with pytest.raises(openai.BadRequestError, match="must begin with resp_"):
        client.responses.create(model="model", input="a", previous_response_id="msg_1")


def test_a_response_can_be_asked_for_again_until_it_is_deleted(server):
    client = openai.OpenAI(base_url=server.url + "/v1", api_key=KEY)
    made = client.responses.create(model="model", input=STORY, max_output_tokens=5)
    assert client.responses.retrieve(made.id) == made
    streamed = list(client.responses.create(model="model", input=STORY, max_output_tokens=5, stream=True))
    assert client.responses.retrieve(streamed[-1].response.id) == streamed[-1].response
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(made.id)
    with pytest.raises(openai.BadRequestError, match="stream needs a response"):
        client.get(f"/responses/{made.id}?stream=true", cast_to=object)
    client.responses.delete(made.id)
    forgotten = client.responses.create(model="model", input=STORY, max_output_tokens=5, store=False)
    for response_id in (made.id, forgotten.id, "resp_unknown"):
        for act in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError, match=r"Response with id '.*' not found"):
                act(response_id)
    with pytest.raises(openai.NotFoundError, match="previous_response_id"):
        client.responses.create(model="model", input="a", previous_response_id=made.id)


def test_responses_take_the_sampling_fields_of_chats():
    fields: dict[str, Any] = {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5, "seed": 7, "stop": ["x"]}
    fields |= {"logit_bias": {"5": 1}, "ignore_eos": True, "priority": 2, "cache_salt": "s"}
    fields |= {"chat_template_kwargs": {"enable_thinking": False}}
    chat = responses.chat_of(ResponsesRequest(input="a", **fields), ResponseStore())
    assert {name: getattr(chat, name) for name in fields} == fields


def test_conversations_are_kept_within_bounds(monkeypatch):
    monkeypatch.setattr(response_store, "MAX_STORED", 2)
    store = ResponseStore()
    for i in range(3):
        store.put([{"role": "user", "content": "a"}], {"id": f"resp_{i}", "output": []})
    with pytest.raises(ApiError, match="resp_0"):
        store.get("resp_0")
    assert store.get("resp_1")
    store._max_bytes = 200
    store.put([{"role": "user", "content": "b" * 100}], {"id": "resp_4", "output": []})
    with pytest.raises(ApiError):
        store.get("resp_1")
    assert store.get("resp_4")


UNSUPPORTED = [
    ({"background": True, "store": False}, "background"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"input": [{"type": "custom_tool_call", "id": "a"}]}, "input"),
    ({"reasoning": {"summary": "concise"}}, "reasoning.summary"),
    ({"truncation": "auto"}, "truncation"),
    ({"include": ["reasoning.encrypted_content", "file_search_call.results"]}, "include"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
]


@pytest.mark.parametrize(("field", "param"), UNSUPPORTED, ids=[param for _, param in UNSUPPORTED])
def test_what_responses_cannot_do_is_named(field, param):
    with pytest.raises(ApiError) as caught:
        responses.chat_of(ResponsesRequest(**({"input": "a"} | field)), ResponseStore())
    assert (caught.value.status, caught.value.param) == (400, param)
    if param == "include":
        assert "'file_search_call.results' is not supported" in str(caught.value)


def test_encrypted_reasoning_may_be_asked_for_and_changes_nothing():
    body = ResponsesRequest(input="a", include=["reasoning.encrypted_content"])
    chat = responses.chat_of(body, ResponseStore())
    assert chat == responses.chat_of(ResponsesRequest(input="a"), ResponseStore())


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"text": {"format": {"type": "some"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}, "strict": True}}}, "text.format"),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_errors_of_responses_name_the_fields_as_they_were_given(server, field, param):
    answer = respond(server, **field)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert "response_format" not in error["message"]


def counted(server):
    """Tokens generated and requests aborted, as /metrics counts them."""
    lines = server.client.get("/metrics").text.splitlines()
    tokens = next(line for line in lines if line.startswith("jpaged:generation_tokens_total"))
    aborted = next(line for line in lines if 'finished_reason="abort"' in line)
    return float(tokens.split()[-1]), float(aborted.split()[-1])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": STORY}], "max_tokens": 900}),
        ("/v1/responses", {"input": STORY, "max_output_tokens": 900}),
    ],
)
def test_a_client_that_goes_away_in_mid_stream_aborts_its_request(server, path, body):
    tokens, aborted = counted(server)
    with server.client.stream("POST", path, json=body | {"stream": True, "temperature": 0}) as answer:
        assert "event:" in next(answer.iter_lines())
        with server.engines_standing_still():  # so that the request cannot end by itself
            answer.close()
            end = time.monotonic() + 120
            while server.client.get("/load").json() != {"server_load": 0}:
                assert time.monotonic() < end, server.client.get("/load").text
    assert server.client.get("/debug/requests").json()["requests"] == []
    tokens_after, aborted_after = counted(server)
    assert aborted_after == aborted + 1
    assert tokens_after - tokens < 200
