"""Rerankers that answer yes or no, of `LLM.score` and of a server, against transformers' logits in float32."""

import json
import shutil

import numpy as np
import pytest

from jpaged import LLM
from jpaged.api.errors import InvalidParameterError, InvalidPromptError
from jpaged.assets import demo_model_path
from jpaged.frontend import reranking
from jpaged.frontend.reranking import Reranker
from jpaged.text.tokenizer import Tokenizer
from tests.serving.server_process import Server
from tests.tiny_models import DEMO_ENGINE

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.xdist_group("reranker")

QUERY = "Which animal is quick?"
DOCUMENTS = ["The fox is quick.", "A snail.", "I was told <|end|> by a cat.", "The fox is quick."]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The demo model with a token "no" in place of one that it does not need; it has "yes"."""
    path = shutil.copytree(demo_model_path(), tmp_path_factory.mktemp("reranker") / "model")
    text = json.loads((path / "tokenizer.json").read_text())
    for token in text["added_tokens"]:
        if token["content"] == "<|system|>":
            token |= {"content": "no", "special": False, "single_word": True}
    vocabulary = text["model"]["vocab"]
    text["model"]["vocab"] = {("no" if one == "<|system|>" else one): index for one, index in vocabulary.items()}
    (path / "tokenizer.json").write_text(json.dumps(text))
    config = json.loads((path / "tokenizer_config.json").read_text())
    kept = [one for one in config.get("extra_special_tokens") or [] if one != "<|system|>"]
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"extra_special_tokens": kept}))
    return path


@pytest.fixture(scope="module")
def expected(directory):
    """Scores of the documents, as the makers of Qwen3-Reranker compute them."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = Tokenizer.load(directory)
    before, behind = (
        tokenizer.encode(text, add_special_tokens=False) for text in (reranking._BEFORE, reranking._BEHIND)
    )
    answers = [tokenizer.encode(word, add_special_tokens=False)[0] for word in ("no", "yes")]

    def score(document, instruction=reranking._INSTRUCTION):
        body = tokenizer.encode_plain(f"<Instruct>: {instruction}\n<Query>: {QUERY}\n<Document>: {document}")
        with torch.no_grad():
            logits = model(torch.tensor([before + body + behind])).logits[0, -1]
        return torch.softmax(logits[answers], 0)[1].item()

    return score


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_scores_are_probabilities_of_yes_among_yes_and_no(directory, expected, mode):
    options = DEMO_ENGINE | {"verbose": False, "logprobs_mode": mode}
    with LLM(directory, reranker="qwen3", **options) as llm:
        found = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        scores = [one.outputs.score for one in found]
        np.testing.assert_allclose(scores, [expected(document) for document in DOCUMENTS], atol=1e-5)
        assert scores[0] == scores[3] != scores[1]
        end = llm.engine.tokenizer.control_tokens["<|end|>"]
        assert end not in found[2].prompt_token_ids
        (asked,) = llm.score(QUERY, DOCUMENTS[1], instruction="Find snails", use_tqdm=False)
        assert asked.outputs.score == pytest.approx(expected(DOCUMENTS[1], "Find snails"), abs=1e-5)
        with pytest.raises(InvalidPromptError, match="takes texts, and the document is"):
            llm.score(QUERY, [[3, 4]], use_tqdm=False)


def test_a_server_scores_and_ranks(directory, expected, tmp_path):
    options = ("--model", str(directory), "--reranker", "qwen3")
    server = Server(tmp_path / "log", *options)
    scores = [expected(document) for document in DOCUMENTS]
    found = server.client.post("/v1/score", json={"text_1": QUERY, "text_2": DOCUMENTS}).json()
    np.testing.assert_allclose([one["score"] for one in found["data"]], scores, atol=1e-5)
    assert found["usage"]["prompt_tokens"] > 0
    body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2, "instruction": "Find snails"}
    ranked = server.client.post("/v1/rerank", json=body).json()["results"]
    asked = [expected(document, "Find snails") for document in DOCUMENTS]
    assert [one["index"] for one in ranked] == sorted(range(4), key=lambda i: -asked[i])[:2]
    np.testing.assert_allclose([one["relevance_score"] for one in ranked], sorted(asked)[:1:-1], atol=1e-5)
    for changes, param in (({"truncate_prompt_tokens": 4}, "truncate_prompt_tokens"), ({"top_n": 0}, "top_n")):
        refused = server.client.post("/v1/rerank", json=body | changes)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert len(server.client.post("/v1/embeddings", json={"input": "a"}).json()["data"]) == 1
    assert server.metric("num_requests_running") == 0
    server.close()


def test_a_model_that_cannot_answer_is_refused_by_name(directory):
    with pytest.raises(InvalidParameterError, match="has no token 'no'"):
        Reranker(Tokenizer.load(demo_model_path()))
    with pytest.raises(InvalidParameterError, match="reranker needs a tokenizer"):
        Reranker(None)
    with pytest.raises(InvalidParameterError, match="reranker must be"):
        LLM(directory, reranker="bert")
