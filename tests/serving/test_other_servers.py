"""What clients of SGLang and vLLM send: served as they expect, or refused by name."""

import json
import re

import pytest

from jpaged.api.outputs import CompletionOutput, Logprob, RequestOutput
from jpaged.frontend.inputs import ProcessedInput
from jpaged.serving.answers import AnswerContext, ChatAnswer, CompletionAnswer
from jpaged.serving.constraints import Constraint, constraint_of
from jpaged.serving.errors import ApiError
from jpaged.serving.protocol import ChatCompletionRequest, CompletionRequest, refuse_unsupported
from jpaged.serving.turns import reading_of, turn_of
from jpaged.text.tokenizer import Tokenizer
from tests.text.tokenizers_for_tests import tokenizer

pytestmark = pytest.mark.xdist_group("tools server")

MODEL = Tokenizer(tokenizer("byte-level"), "some/model")
MESSAGES = [{"role": "user", "content": "hi"}]
THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}<think></think>"
SWITCHES = THINKS + "{{ enable_thinking }}"
CHANNELS = "{% for m in messages %}{{ m.content }}{% endfor %}{# <|channel|>analysis<|message|><|call|> #}"
TOOL = {"function": {"name": "f", "parameters": {"type": "object"}}}


def chat(**fields):
    return ChatCompletionRequest(messages=MESSAGES, **fields)


def ask(server, **body):
    asked = {"messages": [{"role": "user", "content": "A fox"}], "max_tokens": 40, "temperature": 0} | body
    return server.client.post("/v1/chat/completions", json=asked)


@pytest.mark.parametrize(
    ("field", "value", "kind", "pattern"),
    [
        ("regex", "[a-c]{3}", "regex", "[a-c]{3}"),
        ("ebnf", 'root ::= "Hello" | "Hi"', "grammar", "Hello|Hi"),
        ("json_schema", '{"enum": [1, "a"]}', "json", '1|"a"'),
    ],
)
def test_sglangs_constraints_hold(thinking_server, field, value, kind, pattern):
    assert constraint_of(chat(**{field: value})) == Constraint(field, {kind: value})
    answer = ask(thinking_server, **{field: value}, chat_template_kwargs={"enable_thinking": False}).json()
    assert re.fullmatch(pattern, answer["choices"][0]["message"]["content"])
    with pytest.raises(ApiError, match=f"guided_regex and {field} constrain the same text"):
        constraint_of(chat(guided_regex="a", **{field: value}))


def test_an_error_of_sglangs_constraint_names_its_field(thinking_server):
    error = ask(thinking_server, regex="((").json()["error"]
    assert (error["param"], error["message"][:21]) == ("regex", "regex cannot be used:")


REFUSED = [
    *({"stop_regex": "a"}, {"lora_path": "a"}, {"custom_logit_processor": "a"}, {"custom_params": {"a": 1}}),
    *({"return_hidden_states": True}, {"no_stop_trim": True}, {"return_prompt_token_ids": True}),
    *({"logprob_token_ids": [1]}, {"stream_reasoning": False}),
]


@pytest.mark.parametrize("field", REFUSED, ids=lambda field: next(iter(field)))
def test_what_would_change_an_answer_and_is_not_served_is_refused_by_name(field):
    (name,) = field
    with pytest.raises(ApiError, match=f"^{name} is not supported; ") as caught:
        refuse_unsupported(chat(**field))
    assert caught.value.param == name
    default = {"stream_reasoning": True}.get(name, False if field[name] is True else None)
    refuse_unsupported(chat(**{name: default}))


def output(said, reason="stop", logprobs=None):
    completion = CompletionOutput(0, said, [1], None, logprobs, reason)
    return RequestOutput("id", "hi", [5], [completion], reason is not None)


def answer_to(request, prompt="hi"):
    reading = reading_of(turn_of(request, MODEL), request, prompt)
    return ChatAnswer(request, AnswerContext("id", "m", [ProcessedInput("hi", [5], ())], MODEL, reading))


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_reasoning_that_is_not_separated_is_content_with_its_marks(tools):
    said = "<think>why</think>so" + (CALL if tools else "")
    request = chat(chat_template=THINKS, separate_reasoning=False, tools=tools)
    (choice,) = json.loads(answer_to(request).whole([output(said)]))["choices"]
    assert choice["message"]["content"] == "<think>why</think>so"
    assert choice["message"]["reasoning_content"] is None
    assert choice["finish_reason"] == ("tool_calls" if tools else "stop")
    streamed = answer_to(request)
    data = b"".join(streamed.chunk(0, output(piece, None)) for piece in (said[:9], said[9:20], said[20:]))
    chunks = [json.loads(line[6:]) for line in data.decode().splitlines() if line]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "<think>why</think>so"


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": CHANNELS},
        {"chat_template": THINKS, "tools": [TOOL], "tool_choice": "required"},
        {"chat_template": THINKS, "include_reasoning": False},
    ],
    ids=["channels", "required call", "left out"],
)
def test_reasoning_that_cannot_be_content_is_refused(fields):
    with pytest.raises(ApiError, match="separate_reasoning: false needs") as caught:
        answer_to(chat(separate_reasoning=False, **fields))
    assert caught.value.param == "separate_reasoning"


@pytest.mark.parametrize(
    ("given", "switched"),
    [({"enabled": True}, True), ({"enabled": False}, False), ({"effort": "high"}, True), ({"effort": "none"}, False)],
)
def test_reasoning_may_be_asked_for_as_an_object(given, switched):
    assert turn_of(chat(chat_template=SWITCHES, reasoning=given), MODEL).variables["enable_thinking"] is switched


@pytest.mark.parametrize("given", [{"max_tokens": 5}, {"enabled": "yes"}, {"exclude": True, "enabled": True}])
def test_an_object_that_asks_for_more_than_reasoning_is_refused(given):
    with pytest.raises(ApiError, match=r"^reasoning must be") as caught:
        turn_of(chat(chat_template=SWITCHES, reasoning=given), MODEL)
    assert caught.value.param == "reasoning"


def test_a_tool_without_a_type_is_a_function():
    assert [tool.name for tool in turn_of(chat(tools=[TOOL]), MODEL).tools] == ["f"]
    with pytest.raises(ApiError, match=r"tools\[0\].function must be"):
        turn_of(chat(tools=[{"type": "function", "name": "f"}]), MODEL)


def test_a_chunk_has_text_though_it_is_empty_and_null_for_no_reasoning():
    request = chat(logprobs=True, stream=True)
    answer = ChatAnswer(request, AnswerContext("id", "m", [ProcessedInput("hi", [5], ())], MODEL))
    outputs = [output("", None, [{1: Logprob(-1.0, 1, "")}]), output("a", None), output("")]
    data = b"".join(answer.chunk(0, one) for one in outputs)
    first, second, third, last = (json.loads(line[6:])["choices"][0] for line in data.decode().splitlines() if line)
    assert first["delta"] == {"role": "assistant", "content": "", "reasoning_content": None}
    assert len(second["logprobs"]["content"]) == 1
    deltas = [choice["delta"] for choice in (second, third, last)]
    assert deltas == [{"content": text, "reasoning_content": None} for text in ("", "a", "")]
    assert last["finish_reason"] == "stop"


def test_a_stream_that_failed_ends_as_others_do():
    answer = ChatAnswer(chat(stream=True), AnswerContext("id", "m", [ProcessedInput("hi", [5], ())], MODEL))
    error, done = answer.failed(ApiError(500, "It broke.")).decode().split("\n\n")[:-1]
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == "It broke."
    assert done == "data: [DONE]"


def test_a_budget_of_minus_one_is_none_and_completions_have_none():
    assert turn_of(chat(chat_template=THINKS, thinking_token_budget=-1), MODEL).budget is None
    refuse_unsupported(CompletionRequest(prompt="a", thinking_token_budget=-1))
    with pytest.raises(ApiError, match=r"^thinking_token_budget is not supported"):
        refuse_unsupported(CompletionRequest(prompt="a", thinking_token_budget=5))


@pytest.mark.parametrize(("skips", "echoed"), [(None, ""), (False, MODEL.special_texts[0])])
def test_an_echo_of_token_ids_leaves_special_tokens_out_as_the_answer_does(skips, echoed):
    ids = [*MODEL.encode(MODEL.special_texts[0], add_special_tokens=False), *MODEL.encode("hi")]
    request = CompletionRequest(prompt=ids, echo=True, skip_special_tokens=skips)
    answer = CompletionAnswer(request, AnswerContext("id", "m", [ProcessedInput(None, ids, ())], MODEL))
    (choice,) = json.loads(answer.whole([output(" so")]))["choices"]
    assert choice["text"] == echoed + "hi so"


COHERE = (
    "{% for m in messages %}{% if m.tool_calls %}<|START_THINKING|>{{ m.tool_plan }}<|END_THINKING|>"
    "<|START_ACTION|>{{ m.tool_calls | tojson }}<|END_ACTION|>"
    "{% else %}{{ m.reasoning_content }}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}{% endfor %}"
)


def test_reasoning_in_front_of_calls_stands_where_coheres_template_looks_for_it():
    said = {"role": "assistant", "content": "", "reasoning_content": "why"}
    call = {"id": "0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [said | {"tool_calls": [call]}, said, said | {"tool_calls": [call], "tool_plan": "the client's"}]
    turn = turn_of(ChatCompletionRequest(messages=messages, chat_template=COHERE), MODEL)
    assert [message.get("tool_plan") for message in turn.messages] == ["why", None, "the client's"]
    plain = COHERE.replace("tool_plan", "reasoning_content")
    turn = turn_of(ChatCompletionRequest(messages=messages[:2], chat_template=plain), MODEL)
    assert [message.get("tool_plan") for message in turn.messages] == [None, None]


def test_no_effort_is_what_a_model_without_reasoning_makes():
    assert turn_of(chat(reasoning_effort="none", chat_template="{{ messages }}"), MODEL).variables == {}
    for effort, template in (("low", "{{ messages }}"), ("none", THINKS)):
        with pytest.raises(ApiError, match="reasoning_effort has no effect"):
            turn_of(chat(reasoning_effort=effort, chat_template=template), MODEL)


def test_responses_take_vllms_constraints_and_count_their_tokens(thinking_server):
    body = {"input": "A fox", "instructions": "Be brief.", "temperature": 0}
    asked = body | {"structured_outputs": {"choice": ["yes", "no"]}, "reasoning": {"effort": "none"}}
    answer = thinking_server.client.post("/v1/responses", json=asked).json()
    assert answer["output"][-1]["content"][0]["text"] in ("yes", "no")
    body["chat_template_kwargs"] = {"enable_thinking": False}
    counted = thinking_server.client.post("/v1/responses/input_tokens", json=body).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": answer["usage"]["input_tokens"]}
    for name, value in (("enable_response_messages", True), ("vllm_xargs", {"a": 1})):
        error = thinking_server.client.post("/v1/responses", json=body | {name: value}).json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    unknown = body | {"previous_response_id": "resp_unknown"}
    assert thinking_server.client.post("/v1/responses/input_tokens", json=unknown).status_code == 404


BAD_TOOLS = [
    ("/v1/chat/completions", {"messages": MESSAGES}, {"function": {"name": "a b"}}, "tools[0].function.name must"),
    ("/v1/responses", {"input": "a"}, {"type": "function", "name": "a b"}, "tools[0].name must"),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}, {"name": "a b"}, "tools[0].name must"),
    (
        *("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
        *({"name": "a", "input_schema": {"type": "string"}}, "tools[0].input_schema must"),
    ),
]


@pytest.mark.parametrize(("path", "body", "tool", "said"), BAD_TOOLS)
def test_a_bad_tool_is_named_as_the_dialect_has_it(thinking_server, path, body, tool, said):
    answer = thinking_server.client.post(path, json=body | {"tools": [tool]})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(said)


TAG = {"type": "structural_tag", "format": {"type": "sequence", "elements": [{"type": "regex", "pattern": "[ab]{3}"}]}}


def test_a_structural_tag_holds_behind_the_reasoning_and_not_beside_tools(thinking_server):
    asked = {"response_format": TAG, "thinking_token_budget": 4, "max_tokens": 60}
    answer = ask(thinking_server, **asked, chat_template_kwargs={"enable_thinking": True}).json()
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"]
    assert re.fullmatch("[ab]{3}", message["content"])
    for field in ({"response_format": TAG}, {"structured_outputs": {"structural_tag": TAG}}):
        error = ask(thinking_server, **field, tools=[TOOL]).json()["error"]
        (name,) = field
        assert error["param"] == name
        assert error["message"].startswith(name)
        assert "is not supported beside tools" in error["message"]
