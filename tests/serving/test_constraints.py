"""Which constraints are checked in a thread."""

from typing import Any

import pytest

from jpaged.serving.constraints import takes_long
from jpaged.serving.protocol import ChatCompletionRequest

LARGE = {"type": "object", "properties": {f"field{i}": {"type": "string"} for i in range(300)}}


def request(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(messages=[], **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": LARGE},
        {"json_schema": '{"enum": [' + "1, " * 10_000 + "1]}"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": LARGE}}},
        {"structured_outputs": {"json": {"enum": list(range(1000))}}},
    ],
)
def test_large_schemas_take_long(fields):
    assert takes_long(request(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "text"}},
        {"guided_regex": "a" * 10_000},
        {"guided_json": {"type": "object", "properties": {"a": {"type": "string"}}}},
    ],
)
def test_others_do_not(fields):
    assert not takes_long(request(**fields))
