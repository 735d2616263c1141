"""Embeddings, scores and rankings of a server and of batch files, against transformers' hidden states."""

import base64
import json

import numpy as np
import openai
import pytest

from jpaged.assets import demo_model_path
from jpaged.cli import main
from jpaged.serving.embedding_protocol import EmbeddingRequest
from jpaged.serving.jobs import truncated
from jpaged.text.tokenizer import Tokenizer
from tests.serving.server_process import KEY
from tests.tiny_models import DEMO_OPTIONS

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.xdist_group("tools server")

TEXTS = ["Once upon a time there was a fox.", "A cat sat in the sun.", "The end"]


@pytest.fixture(scope="module")
def server(thinking_server):
    return thinking_server


@pytest.fixture(scope="module")
def reference():
    """Vectors of texts or token ids: the last token's state, of length 1."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model_path())

    def vector(prompt):
        ids = tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        with torch.no_grad():
            state = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1].double().numpy()
        return state / np.linalg.norm(state)

    return vector


def ask(server, path, **body):
    answer = server.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


CLOSE = {"atol": 1e-4, "rtol": 0}
"""On a CPU the server computes in float32."""


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_texts_and_token_ids_are_embedded(server, reference, encoding):
    ids = [[3, 4, 5, 6], [7, 8]]
    for given, prompts in ((TEXTS[0], TEXTS[:1]), (TEXTS, TEXTS), (ids, ids), (ids[0], ids[:1])):
        found = ask(server, "/v1/embeddings", input=given, encoding_format=encoding)
        assert [one["index"] for one in found["data"]] == list(range(len(prompts)))
        for prompt, one in zip(prompts, found["data"], strict=True):
            vector = one["embedding"]
            if encoding == "base64":
                vector = np.frombuffer(base64.b64decode(vector), "<f4")
            np.testing.assert_allclose(vector, reference(prompt), **CLOSE)
        assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] > 0


def test_the_openai_client_embeds(server, reference):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        found = client.embeddings.create(model="model", input=TEXTS)  # in base64, as it asks by itself
    np.testing.assert_allclose(found.data[1].embedding, reference(TEXTS[1]), **CLOSE)


def test_a_conversation_is_embedded_as_the_chat_template_writes_it(server, reference):
    messages = [{"role": "user", "content": "Tell me of a fox."}]
    for fields in ({}, {"add_generation_prompt": True}, {"chat_template_kwargs": {"enable_thinking": False}}):
        asked = {"add_generation_prompt": False} | fields
        tokens = ask(server, "/tokenize", messages=messages, **asked)["tokens"]
        found = ask(server, "/v1/embeddings", messages=messages, **fields)
        np.testing.assert_allclose(found["data"][0]["embedding"], reference(tokens), **CLOSE)
        assert found["usage"]["prompt_tokens"] == len(tokens)
    cut = ask(server, "/v1/embeddings", messages=messages, truncate_prompt_tokens=4)
    assert cut["usage"]["prompt_tokens"] == 4


def test_prompts_are_cut_where_asked(server, reference):
    tokens = list(range(3, 23))
    for side, kept in (("left", tokens[-5:]), ("right", tokens[:5])):
        found = ask(server, "/v1/embeddings", input=tokens, truncate_prompt_tokens=5, truncation_side=side)
        np.testing.assert_allclose(found["data"][0]["embedding"], reference(kept), **CLOSE)
        assert found["usage"]["prompt_tokens"] == 5
    body = EmbeddingRequest(input="", truncate_prompt_tokens=-1)
    assert truncated(body, tokens, 7) == tokens[-7:]  # as many as the model takes


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores_are_cosines(server, reference, path):
    first, second = TEXTS[0], TEXTS[1:]
    expected = [reference(first) @ reference(one) for one in second]
    for body in ({"text_1": first, "text_2": second}, {"queries": [first] * 2, "documents": second}):
        scores = [one["score"] for one in ask(server, path, **body)["data"]]
        np.testing.assert_allclose(scores, expected, **CLOSE)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_ranked(server, reference, path):
    documents = [*TEXTS, {"text": TEXTS[0]}]
    found = ask(server, path, query=TEXTS[0], documents=documents)["results"]
    assert [one["index"] for one in found[:2]] == [0, 3]
    scores = [one["relevance_score"] for one in found]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == pytest.approx(1, abs=1e-5)
    assert [one["document"]["text"] for one in found[:2]] == [TEXTS[0]] * 2
    short = ask(server, path, query=TEXTS[0], documents=documents, top_n=1, return_documents=False)["results"]
    assert short == [{"index": 0, "relevance_score": scores[0]}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": [5] * 3000}, "input"),
        ("/v1/embeddings", {"input": [10**6]}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 8}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"messages": []}, "messages"),
        ("/v1/embeddings", {"messages": [{"role": "user"}], "chat_template": "x"}, "chat_template"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "priority": 3}, "priority"),
        ("/v1/score", {"text_1": "a"}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "queries": "c", "documents": "d"}, "text_1"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["text"]}, "rank_fields"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(server, path, body, param):
    answer = server.client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_embeddings_of_a_batch_file(tmp_path, reference):
    lines = [
        {"input": TEXTS},
        {"input": TEXTS[0], "dimensions": 8},
        {"input": [[3, 4, 5]], "encoding_format": "base64"},
        {"input": "a", "truncate_prompt_tokens": 4},
        {"messages": [{"role": "user", "content": "Hello"}]},
    ]
    requests = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/embeddings", "body": body} for i, body in enumerate(lines)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in requests))
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert main(["run-batch", *files, "-q", "--in-process", *DEMO_OPTIONS]) == 1
    answers = [json.loads(line)["response"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [answer["status_code"] for answer in answers] == [200, 400, 200, 400, 200]
    for text, one in zip(TEXTS, answers[0]["body"]["data"], strict=True):
        np.testing.assert_allclose(one["embedding"], reference(text), atol=1e-4, rtol=0)
    vector = np.frombuffer(base64.b64decode(answers[2]["body"]["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(vector, reference([3, 4, 5]), atol=1e-4, rtol=0)
    tokenizer = Tokenizer.load(demo_model_path())
    tokens = tokenizer.encode_prompt(tokenizer.chat_prompt(lines[4]["messages"], add_generation_prompt=False))
    np.testing.assert_allclose(answers[4]["body"]["data"][0]["embedding"], reference(tokens), atol=1e-4, rtol=0)
    assert [answers[i]["body"]["error"]["param"] for i in (1, 3)] == ["dimensions", "truncate_prompt_tokens"]
