"""Constraints over HTTP: OpenAI's response_format, vLLM's structured_outputs and its older guided fields."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import openai
import pytest

from jpaged.text.grammars import CHECK_S
from tests.serving.server_process import KEY, Server

pytestmark = pytest.mark.xdist_group("structured server")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "kind": {"enum": ["fox", "snail"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "A story about a fox"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server") / "log")
    yield server
    server.close()


def chat(server, **body):
    return server.client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 150} | body)


def text_of(answer) -> str:
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"]


def schema_format(schema, **fields):
    return {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema, **fields}}


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    "field",
    [
        {"response_format": schema_format(SCHEMA, strict=True)},
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
    ],
    ids=["response_format", "structured_outputs", "guided_json", "guided_json as text"],
)
def test_an_answer_validates_against_its_schema_whole_and_streamed(server, field, temperature):
    whole = text_of(chat(server, temperature=temperature, seed=5, **field))
    jsonschema.validate(json.loads(whole), SCHEMA)
    client = openai.OpenAI(base_url=server.url + "/v1", api_key=KEY)
    chunks = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=MESSAGES,
        max_tokens=150,
        temperature=temperature,
        seed=5,
        stream=True,
        extra_body=field,
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


@pytest.mark.parametrize(
    ("field", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{4}"}}, "[ab]{4}"),
        ({"guided_regex": "[cd]{4}"}, "[cd]{4}"),
        ({"guided_choice": ["a fox", "a snail"]}, "a fox|a snail"),
        ({"guided_grammar": 'root ::= "yes" | "no" [0-9]'}, r"yes|no\d"),
        ({"response_format": {"type": "text"}}, ".*"),
    ],
)
def test_the_other_kinds_of_constraints(server, field, pattern):
    answer = server.client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 20, "seed": 1} | field)
    assert answer.status_code == 200, answer.text
    assert re.fullmatch(pattern, answer.json()["choices"][0]["text"], re.DOTALL)


def test_a_json_object(server):
    text = chat(server, temperature=0, response_format={"type": "json_object"}, max_tokens=30).json()
    assert text["choices"][0]["message"]["content"].startswith("{")


def test_without_strict_keywords_that_cannot_be_enforced_are_left_out(server):
    schema = {**SCHEMA, "not": {"type": "string"}}
    jsonschema.validate(json.loads(text_of(chat(server, response_format=schema_format(schema)))), schema)
    answer = chat(server, response_format=schema_format(schema, strict=True))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"
    assert "not" in answer.json()["error"]["message"]


BAD = [
    ({"response_format": {"type": "xml"}}, "response_format", "xml"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
    ({"response_format": schema_format({}, strict=1)}, "response_format", "strict"),
    ({"response_format": "json"}, "response_format", "object"),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs", "xml"),
    ({"structured_outputs": {}}, "structured_outputs", "none is given"),
    ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    ({"guided_choice": []}, "guided_choice", "empty"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "guided_choice"),
    ({"guided_regex": "a", "use_beam_search": True, "n": 2}, "guided_regex", "beam search"),
]


@pytest.mark.parametrize(("field", "param", "message"), BAD, ids=[str(field) for field, *_ in BAD])
def test_a_field_that_is_no_constraint_gets_a_400_that_names_it(server, field, param, message):
    answer = chat(server, **field)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert message in answer.json()["error"]["message"]


def test_hostile_schemas_get_a_400_and_leave_others_their_pace(server):
    deep: dict = {}
    for _ in range(200):
        deep = {"properties": {"a": deep}}
    schemas = [
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(6000)}},
        deep,
        {"enum": [f"value {i}" for i in range(60_000)]},
    ]
    begun = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        attacks = [pool.submit(chat, server, guided_json=schema) for schema in schemas]
        friendly = text_of(chat(server, guided_json=SCHEMA, seed=2))
        answers = [attack.result() for attack in attacks]
    jsonschema.validate(json.loads(friendly), SCHEMA)
    assert answers[0].status_code in (200, 400), answers[0].text  # a fast machine compiles it in time
    assert [answer.status_code for answer in answers[1:]] == [400] * 2, [answer.text[:200] for answer in answers]
    busy_s = 45.0  # for all else, on a machine that runs other tests
    assert time.monotonic() - begun < (len(schemas) + 1) * CHECK_S + busy_s
    assert server.client.get("/health").status_code == 200
