"""Scores against transformers' own, float32: texts, completions, choices, and sequences longer than the context."""

import numpy as np
import pytest

from jpaged import EngineArgs
from jpaged.api.errors import InvalidParameterError, InvalidPromptError, MalformedRowError
from jpaged.assets import demo_model_path
from jpaged.frontend.for_scoring import for_scoring
from jpaged.scoring import Scorer
from jpaged.scoring.encoding import Encoder
from jpaged.scoring.rows import parse_row
from tests.scoring.test_windows import guide
from tests.tiny_models import VOCAB_SIZE, tiny_model, torch_model, write_tiny_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = {
    "dtype": "float32",
    "block_size": 4,
    "num_gpu_blocks_override": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "decode_buckets": (8,),
    "token_buckets": (64,),
    "verbose": False,
}
TINY = {"llama-gqa-d64-tied": "paged", "mistral-window": "virtual", "opt-350m-style": "paged"}
"""Models, and the layouts that they run in."""


def reference(model, tokens, first: int, windows=None) -> tuple[np.ndarray, np.ndarray]:
    """float64 log-probabilities of tokens[first:], and whether each is the argmax, window by window."""
    logprobs, greedy = [], []
    for begin, start, end in windows or [(0, first, len(tokens))]:
        with torch.no_grad():
            logits = model(torch.tensor([tokens[begin:end]])).logits[0].double()
        at = torch.arange(start, end)
        rows = logits[at - begin - 1]
        targets = torch.tensor(tokens[start:end])
        logprobs.append(torch.log_softmax(rows, -1).gather(1, targets[:, None])[:, 0].numpy())
        greedy.append((rows.argmax(-1) == targets).numpy())
    return np.concatenate(logprobs), np.concatenate(greedy)


def assert_scores(score, model, tokens, first, windows=None) -> None:
    logprobs, greedy = reference(model, tokens, first, windows)
    np.testing.assert_array_equal(score.token_ids, tokens[first:])
    np.testing.assert_allclose(score.logprobs, logprobs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(score.logprob, logprobs.sum(), rtol=1e-4)
    np.testing.assert_array_equal(score.greedy_tokens, greedy)
    assert score.perplexity == pytest.approx(np.exp(-logprobs.mean()), rel=1e-4)


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=pytest.mark.xdist_group(f"scoring-{n}"), id=n) for n in TINY]
)
def tiny(request, tmp_path_factory):
    case = tiny_model(request.param)
    directory = write_tiny_model(case, tmp_path_factory.mktemp(case.name))
    options = SMALL | {"kv_cache_layout": TINY[request.param], "skip_tokenizer_init": True}
    return Scorer(str(directory), max_model_len=48, **options), torch_model(case)


def random_ids(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, count).tolist()


def test_tiny_models_score_as_transformers_does(tiny):
    scorer, model = tiny
    texts = [random_ids(i, n) for i, n in enumerate([2, 3, 4, 5, 17, 47, 48])]
    prompts = [(random_ids(50 + i, 21), random_ids(60 + i, n)) for i, n in enumerate([1, 4, 20])]
    question, choices = random_ids(70, 30), [random_ids(71 + i, n) for i, n in enumerate([1, 3, 3, 8])]
    rows = [{"text": text} for text in texts]
    rows += [{"prompt": prompt, "completion": completion} for prompt, completion in prompts]
    rows.append({"prompt": question, "choices": choices})
    hits = scorer.engine.get_metrics().prefix_cache_hits
    scores = scorer.score(rows, use_tqdm=False)
    for text, score in zip(texts, scores, strict=False):
        assert_scores(score.score, model, text, 1)
    for (prompt, completion), score in zip(prompts, scores[len(texts) :], strict=False):
        assert_scores(score.score, model, prompt + completion, len(prompt))
    for choice, sequence in zip(choices, scores[-1].sequences, strict=True):
        assert_scores(sequence, model, question + choice, len(question))
    sums = [reference(model, question + choice, len(question))[0].sum() for choice in choices]
    assert scores[-1].best == int(np.argmax(sums))
    assert scores[-1].best_per_token == int(np.argmax([s / len(c) for s, c in zip(sums, choices, strict=True)]))
    assert scorer.engine.get_metrics().prefix_cache_hits - hits == 3 * 28  # the question's full blocks, but once


def test_sequences_longer_than_the_context_are_scored_in_the_guides_windows(tiny):
    scorer, model = tiny
    text, prompt, completion = random_ids(1, 131), random_ids(2, 90), random_ids(3, 11)
    rows = [{"text": text}, {"prompt": prompt, "completion": completion}]
    long, short = scorer.score(rows, use_tqdm=False)
    assert_scores(long.score, model, text, 1, guide(131, 48, 24))
    assert_scores(short.score, model, prompt + completion, 90, [(101 - 48, 90, 101)])


def test_greedy_completions_are_recognised(tiny):
    scorer, model = tiny
    prompt = random_ids(5, 9)
    with torch.no_grad():
        tokens = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=6, eos_token_id=None)[
            0
        ].tolist()
    completion = tokens[len(prompt) :]
    other = [*completion[:-1], (completion[-1] + 1) % VOCAB_SIZE]
    rows = [{"prompt": prompt, "completion": c} for c in (completion, other)]
    assert [score.score.greedy for score in scorer.score(rows, use_tqdm=False)] == [True, False]


def test_the_same_rows_give_the_same_bits_whatever_was_scored_before(tiny):
    scorer, _ = tiny
    rows = [{"prompt": random_ids(i // 3, 20), "completion": random_ids(100 + i, 1 + i % 7)} for i in range(12)]
    first = scorer.score(rows, use_tqdm=False)
    scorer.score([{"text": random_ids(9, 40)}, *rows[:5]], use_tqdm=False)
    again = scorer.score(rows, use_tqdm=False)
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.score.logprobs, other.score.logprobs)


def test_rows_that_cannot_be_scored_are_named(tiny):
    scorer, _ = tiny
    good = {"text": [3, 4]}
    for bad, message in (
        ({"text": [3]}, "two are needed"),
        ({"text": [3, VOCAB_SIZE]}, "outside the vocabulary"),
        ({"text": "words"}, "no tokenizer"),
        ({"prompt": [], "completion": [3]}, "the prompt is empty"),
        ({"prompt": [3]}, 'needs "text"'),
        ({"text": [3, 10**5000]}, "list of token ids"),
    ):
        with pytest.raises(MalformedRowError, match=rf"rows\[1\]: .*{message}"):
            scorer.score([good, bad], use_tqdm=False)
    assert len(scorer.score([good], use_tqdm=False)) == 1
    for no_rows in (None, 5, "words", good):
        with pytest.raises(InvalidParameterError, match="rows must be a list of rows"):
            scorer.score(no_rows)


def test_the_engine_checks_what_it_is_to_score(tiny):
    engine = tiny[0].engine
    for tokens, first, error, message in (
        ([3], 1, InvalidPromptError, "at least two tokens"),
        ([3] * 49, 1, InvalidPromptError, "max_model_len=48"),
        ([3, -1], 1, InvalidPromptError, r"token_ids\[1\] is -1"),
        ([3.5, 1], 1, InvalidPromptError, "list of integers"),
        ([3, 4], 0, InvalidParameterError, "first_scored must be from 1 to 1"),
        ([3, 4], 2, InvalidParameterError, "first_scored must be from 1 to 1"),
    ):
        with pytest.raises(error, match=message):
            engine.add_score_request("x", tokens, first)
    assert not engine.has_unfinished_requests()


@pytest.fixture(scope="module")
def demo():
    path = str(demo_model_path())
    options = SMALL | {"block_size": 16, "max_num_batched_tokens": 128, "token_buckets": (128,)}
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    return Scorer(max_model_len=96, **options), model, tokenizer


@pytest.mark.xdist_group("scoring-demo")
def test_the_demo_model_scores_words_as_transformers_does(demo):
    scorer, model, tokenizer = demo
    story = "Once upon a time there was a fox who lived in a little house near the sea. " * 12
    question = "Once upon a time there was a little fox. She lived in a"
    choices = [" house", " tree near the river", " lantern"]
    rows = [
        {"text": story},
        {"prompt": question, "choices": choices},
        {"prompt": question + " ", "completion": "house"},  # the blank goes to the completion
        {"prompt": "", "completion": "Once upon a time"},
    ]
    text, answers, blank, bare = scorer.score(rows, use_tqdm=False)
    tokens = tokenizer(story).input_ids
    assert len(tokens) > 2 * 96
    assert_scores(text.score, model, tokens, 1, guide(len(tokens), 96, 48))
    for choice, sequence in zip(choices, answers.sequences, strict=True):
        assert_scores(sequence, model, tokenizer(question + choice).input_ids, len(tokenizer(question).input_ids))
    np.testing.assert_allclose(blank.score.logprobs, answers.sequences[0].logprobs, rtol=1e-4, atol=1e-5)
    ids = [tokenizer.bos_token_id, *tokenizer("Once upon a time", add_special_tokens=False).input_ids]
    assert_scores(bare.score, model, ids, 1)


@pytest.mark.xdist_group("scoring-demo")
def test_a_batch_of_texts_encodes_as_one_by_one(demo):
    scorer = demo[0]
    tokenizer = scorer.engine.tokenizer
    texts = ["", "One fox.", "Once upon a time\n", "é 狐 🦊"]
    for special in (True, False):
        one_by_one = [tokenizer.encode(text, add_special_tokens=special) for text in texts]
        assert tokenizer.encode_batch(texts, add_special_tokens=special) == one_by_one


def test_a_completion_that_adds_no_token_is_reported():
    class OneToken:
        hf = None

        def encode_batch(self, texts, add_special_tokens):
            return [[5] for _ in texts]

    [error] = Encoder(OneToken(), 10).encode([parse_row({"prompt": "a", "completion": "b"})])
    assert isinstance(error, MalformedRowError)
    assert "adds no token" in str(error)


def test_a_scorer_is_one_engine():
    with pytest.raises(InvalidParameterError, match=r"data_parallel_size=2; score_files"):
        Scorer(data_parallel_size=2)
    with pytest.raises(InvalidParameterError, match="reranker='qwen3' judges pairs of texts"):
        Scorer(reranker="qwen3")
    with pytest.raises(InvalidParameterError, match="Scorer has no option 'enforce_eager': steps are always compiled"):
        Scorer(enforce_eager=True)


def test_a_gpu_gets_large_steps_unless_other_shapes_are_asked_for(monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    args = for_scoring(EngineArgs())
    assert (args.max_num_batched_tokens, args.max_num_seqs, args.decode_buckets) == (16384, 1024, (1024,))
    assert args.token_buckets[0] == 2048
    assert args.token_buckets[-1] == 16384
    asked = EngineArgs(max_num_batched_tokens=64, max_num_seqs=4, token_buckets=(16, 64), decode_buckets=(1, 4))
    assert for_scoring(asked) == asked
