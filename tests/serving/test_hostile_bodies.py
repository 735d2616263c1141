"""What a hostile client may put into a body: an answer or a refusal, and never a defect of the server."""

import json

import pytest

pytestmark = pytest.mark.xdist_group("tools server")

DEEP = "deep"
"""What is replaced by a value that nests."""
FIELDS = {
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "a", "x": DEEP}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": DEEP}]}]},
        {"messages": [{"role": "user", "content": DEEP}]},
        {"messages": [{"role": "assistant", "content": "a", "x": DEEP}]},
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "a", "arguments": DEEP}}]}
            ]
        },
        {"chat_template_kwargs": {"x": DEEP}},
        {"documents": [{"x": DEEP}]},
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"properties": {"x": DEEP}}}}]},
        {"tools": [{"type": "function", "function": {"name": "a"}, "x": DEEP}]},
        {"tools": [{"type": "function", "function": {"name": "a"}}], "tool_choice": {"type": DEEP}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": DEEP}}},
        {"response_format": {"type": "structural_tag", "format": DEEP}},
        {"structured_outputs": {"json": DEEP}},
        {"guided_json": DEEP},
        {"reasoning": {"effort": DEEP}},
        {"functions": DEEP},
    ),
    "/v1/responses": (
        {"input": [{"role": "user", "content": DEEP}]},
        {"input": [{"role": "user", "content": "a", "x": DEEP}]},
        {"input": [{"type": "function_call_output", "call_id": "a", "output": DEEP}]},
        {"tools": [{"type": "function", "name": "a", "parameters": DEEP}]},
        {"text": {"format": DEEP}},
        {"reasoning": {"summary": DEEP}},
        {"tool_choice": {"type": DEEP}},
    ),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": DEEP}]},
        {"messages": [{"role": "user", "content": [{"type": DEEP, "text": "a"}]}]},
        {"tools": [{"name": "a", "input_schema": {"type": "object", "properties": {"x": DEEP}}}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": DEEP}]}]},
        {"system": DEEP},
        {"metadata": DEEP},
        {"output_config": {"format": {"type": "json_schema", "schema": DEEP}}},
    ),
    "/tokenize": ({"messages": [{"role": "user", "content": "a", "x": DEEP}]},),
}
BASES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"model": "model", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/tokenize": {},
}


@pytest.mark.parametrize("path", FIELDS)
def test_values_that_nest_deeply_are_taken_or_refused_wherever_they_stand(thinking_server, path):
    for fields in FIELDS[path]:
        text = json.dumps(BASES[path] | fields)
        for depth in (60, 200, 330, 480, 700, 960, 5000):
            for begin, end in (("[", "]"), ('{"a":', "}"), ('{"items":', "}")):
                middle = "1" if begin == "[" else "{}"
                body = text.replace(f'"{DEEP}"', begin * depth + middle + end * depth)
                answer = thinking_server.client.post(path, content=body)
                assert answer.status_code in (200, 400, 413), (fields, depth, begin, answer.text)
