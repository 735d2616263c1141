"""Tools and reasoning over HTTP, with a model that knows neither and is led by the grammar."""

import json
import time

import jsonschema
import openai
import pytest

from jpaged.text.grammars import CHECK_S
from tests.serving.server_process import KEY

pytestmark = pytest.mark.xdist_group("tools server")

MESSAGES = [{"role": "user", "content": "A story about a fox"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["celsius", "kelvin"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}


def tool(name, parameters=None, **fields):
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters, **fields}}


TOOLS = [tool("get_weather", WEATHER), tool("clock", None)]
ANSWER = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(thinking_server):
    return thinking_server


def chat(server, **body):
    body = {"messages": MESSAGES, "max_tokens": 150, "temperature": 0, "seed": 3} | body
    return server.client.post("/v1/chat/completions", json=body)


def choice_of(server, **body):
    answer = chat(server, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def streamed(server, **body):
    """The message and the end of a choice, joined from a stream."""
    answer = chat(server, stream=True, **body)
    assert answer.status_code == 200, answer.text
    message, reason = {"content": "", "reasoning_content": "", "tool_calls": []}, None
    for line in answer.text.split("\n\n"):
        if not line or line.endswith("[DONE]"):
            continue
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        delta, reason = choice["delta"], choice["finish_reason"] or reason
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        assert delta["reasoning_content"] == delta.get("reasoning")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append({"id": call["id"], "type": call["type"], "function": call["function"]})
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message, reason


def functions(message):
    return [call["function"] for call in message.get("tool_calls", [])]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["required", "named"]
)
def test_a_required_call_has_arguments_that_fit_and_streams_as_it_comes_whole(server, choice, temperature):
    body = {"tools": TOOLS, "tool_choice": choice, "temperature": temperature, "parallel_tool_calls": False}
    whole = choice_of(server, **body)
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] is None
    (call,) = whole["message"]["tool_calls"]
    assert (call["type"], call["id"][:5]) == ("function", "call_")
    if choice != "required":
        assert call["function"]["name"] == "get_weather"
    schema = WEATHER if call["function"]["name"] == "get_weather" else {"maxProperties": 0}
    jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
    message, reason = streamed(server, **body)
    assert reason == "tool_calls"
    assert functions(message) == functions(whole["message"])
    assert message["content"] == ""


def test_several_calls_come_with_their_indexes_and_ids_of_their_own(server):
    tools = [tool("clock", None)]
    for seed in range(20):
        body = {"tools": tools, "tool_choice": "required", "temperature": 2, "seed": seed, "max_tokens": 300}
        message, _ = streamed(server, **body)
        if len(message["tool_calls"]) > 1:
            break
    assert len({call["id"] for call in message["tool_calls"]}) == len(message["tool_calls"]) > 1
    assert {call["function"]["name"] for call in message["tool_calls"]} == {"clock"}


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_a_model_that_does_not_call_answers_with_text(server, choice):
    body = {"tools": TOOLS, "max_tokens": 20} | ({} if choice is None else {"tool_choice": choice})
    whole = choice_of(server, **body)
    assert whole["message"]["content"]
    assert "tool_calls" not in whole["message"]
    assert whole["finish_reason"] == "length"
    assert streamed(server, **body)[0]["content"] == whole["message"]["content"]


@pytest.mark.parametrize("most", [1, 4, 8, 16, 24])
def test_a_call_that_max_tokens_cuts_says_so_and_shows_none_of_its_marks(server, most):
    body = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    whole = choice_of(server, max_tokens=most, **body)
    assert whole["finish_reason"] == "length"
    assert not whole["message"]["content"]
    assert [call["name"] for call in functions(whole["message"])] == (["get_weather"] if most == 24 else [])
    message, reason = streamed(server, max_tokens=most, **body)
    assert (functions(message), message["content"], reason) == (functions(whole["message"]), "", "length")


def test_a_format_beside_a_required_call_is_for_content_that_does_not_come(server):
    body = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER, "strict": True}}
    whole = choice_of(server, response_format=form, **body)
    assert (whole["finish_reason"], whole["message"]["content"]) == ("tool_calls", None)
    assert functions(whole["message"]) == functions(choice_of(server, **body)["message"])
    bad = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"not": {}}, "strict": True}}
    answer = chat(server, response_format=bad, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
    message = choice_of(server, tools=TOOLS, response_format=form)["message"]
    jsonschema.validate(json.loads(message["content"]), ANSWER)


def test_an_agent_calls_two_tools_in_turn_and_answers(server):
    client = openai.OpenAI(base_url=server.url + "/v1", api_key=KEY)
    messages = [{"role": "system", "content": "Be kind."}, *MESSAGES]
    for name in ("get_weather", "clock"):
        named = {"type": "function", "function": {"name": name}}
        answer = client.chat.completions.create(
            model="model", messages=messages, tools=TOOLS, tool_choice=named, max_tokens=100, temperature=0
        )
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == name
        messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": f"{name}: 20"}]
    answer = client.chat.completions.create(model="model", messages=messages, tools=TOOLS, max_tokens=10)
    assert answer.choices[0].message.content
    told = {"messages": [m if isinstance(m, dict) else m.model_dump() for m in messages], "tools": TOOLS}
    tokens = server.client.post("/tokenize", json=told).json()["tokens"]
    text = server.client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert '"name": "get_weather", "arguments": {"city"' in text
    assert "<tool_response>clock: 20</tool_response>" in text
    assert "Be kind." in text


def test_reasoning_comes_apart_and_its_budget_ends_it(server):
    body = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 6, "max_tokens": 20}
    whole = choice_of(server, **body)["message"]
    assert whole["reasoning_content"] == whole["reasoning"] != ""
    assert whole["content"]
    assert "think>" not in whole["content"] + whole["reasoning"]
    message, _ = streamed(server, **body)
    assert (message["reasoning_content"], message["content"]) == (whole["reasoning"], whole["content"])
    hidden = choice_of(server, include_reasoning=False, **body)["message"]
    assert (hidden["content"], hidden["reasoning_content"], hidden["reasoning"]) == (whole["content"], None, None)
    none = choice_of(server, **(body | {"thinking_token_budget": 0}))["message"]
    assert none["reasoning_content"] is None


def test_usage_counts_reasoning_tokens_shown_or_not_and_streamed(server):
    thinks = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 6, "max_tokens": 20}
    several = {"chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 700, "n": 2, "temperature": 1}
    (end,) = server.client.post("/tokenize", json={"prompt": "</think>", "add_special_tokens": False}).json()["tokens"]
    counted = []
    for body in (thinks, several, thinks | {"include_reasoning": False}):
        whole = chat(server, **body, return_token_ids=True).json()
        details = whole["usage"]["completion_tokens_details"]
        counted.append(details)
        shown = [choice["message"]["reasoning"] for choice in whole["choices"]]
        if body.get("include_reasoning", True):
            counts = []
            for choice in whole["choices"]:
                ids = choice["token_ids"]
                generated = len(ids) - (choice["finish_reason"] == "stop")  # what ends an answer is no thought
                counts.append(ids.index(end) if end in ids else generated)
            assert 0 < details["reasoning_tokens"] == sum(counts) <= whole["usage"]["completion_tokens"]
        else:
            assert (shown, details) == ([None], counted[0])
        options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        lines = chat(server, **body, **options).text.split("\n\n")[:-2]
        usages = [json.loads(line.removeprefix("data: "))["usage"] for line in lines]
        assert usages[-1]["completion_tokens_details"] == details
        counts = [usage["completion_tokens_details"]["reasoning_tokens"] for usage in usages]
        assert counts[0] == 0
        assert counts == sorted(counts)
        assert len(set(counts)) > (2 if body is several else 1)
    plain = chat(server, chat_template_kwargs={"enable_thinking": False}, max_tokens=5).json()
    assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_equal_efforts_pass_and_contradicting_ones_are_both_named(server):
    for fields in (
        {"reasoning_effort": "high", "reasoning": {"effort": "high"}},
        {"reasoning_effort": "high", "reasoning": {"enabled": True}},
        {"reasoning_effort": "none", "reasoning": {"enabled": False, "effort": "none"}},
    ):
        answer = chat(server, max_tokens=1, **fields)
        assert answer.status_code == 200, answer.text
    for fields, names in (
        ({"reasoning_effort": "high", "reasoning": {"effort": "none"}}, ["reasoning_effort", "reasoning.effort"]),
        ({"reasoning_effort": "none", "reasoning": {"enabled": True}}, ["reasoning_effort", "reasoning.enabled"]),
        ({"reasoning": {"enabled": False, "effort": "high"}}, ["reasoning.effort", "reasoning.enabled"]),
    ):
        answer = chat(server, max_tokens=1, **fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "reasoning"
        assert all(name in answer.json()["error"]["message"] for name in names)
    for enabled in (0, 1, 0.0, "false"):
        answer = chat(server, max_tokens=1, reasoning={"enabled": enabled})
        assert answer.status_code == 400, enabled
        assert '"enabled": true or false' in answer.json()["error"]["message"]


def test_a_schema_holds_for_what_follows_the_reasoning(server):
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER, "strict": True}}
    for fields in (
        {"response_format": schema},
        {"structured_outputs": {"json": ANSWER}, "tools": TOOLS},
        {"structured_outputs": {"regex": r"\{\"ok\": (true|false)\}"}},
        {"structured_outputs": {"grammar": 'root ::= "{\\"ok\\": " ("true" | "false") "}"'}},
        {"structured_outputs": {"choice": ['{"ok": true}', '{"ok": false}']}},
    ):
        body = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 5, **fields}
        message = choice_of(server, **body)["message"]
        assert message["reasoning"], fields
        jsonschema.validate(json.loads(message["content"]), ANSWER)


def test_calls_follow_reasoning(server):
    body = {"tools": TOOLS, "tool_choice": "required", "reasoning_effort": "high", "thinking_token_budget": 5}
    whole = choice_of(server, parallel_tool_calls=False, **body)
    assert whole["message"]["reasoning"]
    assert len(whole["message"]["tool_calls"]) == 1
    message, _ = streamed(server, parallel_tool_calls=False, **body)
    assert functions(message) == functions(whole["message"])


def test_effort_switches_reasoning(server):
    asked = [server.client.post("/tokenize", json={"messages": MESSAGES}).json()["count"]]
    for effort in ("none", "high"):
        answer = chat(server, reasoning_effort=effort, max_tokens=1)
        asked.append(answer.json()["usage"]["prompt_tokens"])
    assert [count - asked[0] for count in asked] == [0, 2, 1]


BAD = [
    ({"tools": [{"type": "custom"}]}, "tools", "tools[0].type"),
    ({"tools": [tool("a b")]}, "tools", "tools[0].function.name"),
    ({"tools": [tool("a"), tool("a")]}, "tools", "tools[1].function.name"),
    ({"tools": [tool("a", {"type": "string"})]}, "tools", "tools[0].function.parameters"),
    ({"tools": [tool("b"), tool("a", {"properties": {"x": {"type": "sting"}}})]}, "tools", "tools[1].function"),
    ({"tools": [tool("a", {"properties": {"x": {"not": {}}}}, strict=True)]}, "tools", "tools[0].function"),
    ({"tools": "a"}, "tools", "array"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "any"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "c"}}}, "tool_choice", "'c'"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "guided_regex", "tool_choice"),
    ({"tools": TOOLS, "use_beam_search": True, "n": 2, "seed": None}, "use_beam_search", "tools"),
    ({"reasoning_effort": "some"}, "reasoning_effort", "some"),
    ({"thinking_token_budget": -2}, "thinking_token_budget", "-2"),
    (
        {"thinking_token_budget": 3, "chat_template_kwargs": {"enable_thinking": False}},
        "thinking_token_budget",
        "switched off",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[]"}}]}]},
        "messages",
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"tools": TOOLS, "messages": [{"role": "user", "content": {"a": 1}}]}, "messages", "content"),
    ({"functions": [{"name": "a"}]}, "functions", "not supported"),
]


@pytest.mark.parametrize(("field", "param", "message"), BAD, ids=[str(field)[:60] for field, *_ in BAD])
def test_what_cannot_be_done_gets_a_400_that_names_it(server, field, param, message):
    answer = chat(server, **field)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert message in answer.json()["error"]["message"]


NUM_CHECKED = 4
"""Schemas that the test below has compiled, at most."""
BUSY_S = 45.0
"""For all else, on a machine that runs other tests."""


def test_hostile_tools_are_refused_in_bounded_time(server):
    nested: dict = {"type": "object"}
    for _ in range(300):
        nested = {"type": "object", "properties": {"a": nested}}
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(6000)}}
    begun = time.monotonic()
    assert chat(server, tools=[tool(f"t{i}") for i in range(10_000)]).status_code == 413
    for tools in ([tool(f"t{i}") for i in range(5_000)], [tool("a", nested)]):
        answer = chat(server, tools=tools)
        assert answer.status_code == 400, answer.text[:200]
        assert answer.json()["error"]["param"] == "tools"
        assert answer.json()["error"]["message"].startswith("tools")
    answer = chat(server, tools=[tool("b"), tool("a", wide)])
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert time.monotonic() - begun < NUM_CHECKED * CHECK_S + BUSY_S
    assert server.client.get("/health").status_code == 200
