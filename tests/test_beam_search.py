"""Beam search through the whole engine, against transformers' own in float32: tokens and scores."""

from dataclasses import replace

import numpy as np
import pytest

from jpaged import LLM, BeamSearchParams, EngineArgs, LLMEngine, SamplingParams
from jpaged.api.errors import InvalidParameterError, OutOfMemoryError
from tests.tiny_models import VOCAB_SIZE, tiny_model, torch_model, write_tiny_model

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.xdist_group("beam search")  # one worker, which compiles once

MODELS = ["llama-gqa-d64-tied", "gpt2"]
OPTIONS = {
    "dtype": "float32",
    "block_size": 4,
    "num_gpu_blocks_override": 1024,
    "max_model_len": 128,
    "max_num_seqs": 48,
    "max_num_batched_tokens": 128,
    "decode_buckets": (48,),
    "token_buckets": (128,),
    "skip_tokenizer_init": True,
    "verbose": False,
}


@pytest.fixture(scope="module", params=MODELS)
def models(request, tmp_path_factory):
    """The engine and transformers' model."""
    case = tiny_model(request.param)
    return LLM(str(write_tiny_model(case, tmp_path_factory.mktemp("model"))), **OPTIONS), torch_model(case)


def prompts_of(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB_SIZE, rng.integers(1, 24)).tolist() for _ in range(count)]


def transformers_search(model, prompt: list[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
    """Tokens and score of each sequence. For width 1 transformers takes another path, that gives no scores."""
    eos = list(params.stop_token_ids) or None
    options = {"eos_token_id": eos, "pad_token_id": VOCAB_SIZE, "max_new_tokens": params.max_tokens, "do_sample": False}
    with torch.no_grad():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    sequences = [[t for t in row if t != VOCAB_SIZE] for row in found.sequences[:, len(prompt) :].tolist()]
    if params.beam_width > 1:
        return list(zip(sequences, found.sequences_scores.tolist(), strict=True))
    logprobs = [float(s[0].log_softmax(-1)[t]) for s, t in zip(found.scores, sequences[0], strict=True)]
    return [(sequences[0], sum(logprobs) / len(logprobs) ** params.length_penalty)]


def assert_same(output, expected: list[tuple[list[int], float]]) -> None:
    assert [completion.token_ids for completion in output.outputs] == [tokens for tokens, _ in expected]
    np.testing.assert_allclose(
        [c.score for c in output.outputs], [score for _, score in expected], atol=2e-5, rtol=2e-5
    )
    assert [completion.index for completion in output.outputs] == list(range(len(expected)))


@pytest.mark.parametrize("width", range(1, 9))
def test_tokens_and_scores_are_those_of_transformers(models, width):
    llm, reference = models
    prompts = prompts_of(6, seed=width)
    params = BeamSearchParams(beam_width=width, max_tokens=14, ignore_eos=True, stop_token_ids=[])
    for prompt, output in zip(prompts, llm.beam_search(prompts, params), strict=True):
        assert_same(output, transformers_search(reference, prompt, params))


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize(("width", "length_penalty"), [(1, 1.0), (2, 1.0), (3, 0.0), (4, -0.5), (6, 2.0)])
def test_stop_tokens_and_the_rules_to_stop_are_those_of_transformers(models, width, length_penalty, early_stopping):
    llm, reference = models
    prompts = prompts_of(5, seed=100 + width)
    params = BeamSearchParams(
        beam_width=width,
        max_tokens=16,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        ignore_eos=True,
        stop_token_ids=list(range(0, VOCAB_SIZE, 12)),
    )
    outputs = llm.beam_search(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same(output, transformers_search(reference, prompt, params))
        for completion in output.outputs:
            stopped = completion.token_ids[-1] in params.stop_token_ids
            assert completion.finish_reason == ("stop" if stopped else "length")
            assert completion.stop_reason == (completion.token_ids[-1] if stopped else None)
            length = len(completion.token_ids)
            assert completion.score == pytest.approx(completion.cumulative_logprob / length**length_penalty)


@pytest.mark.parametrize("depth", [0, 2])
def test_searches_among_other_requests_and_under_pressure_find_the_same(models, depth):
    llm, _ = models
    prompts = prompts_of(12, seed=7)
    searches = [BeamSearchParams(beam_width=1 + i % 4, max_tokens=8 + i, ignore_eos=True) for i in range(6)]
    others = [SamplingParams(seed=i, n=1 + i % 3, max_tokens=24, ignore_eos=True) for i in range(6)]
    expected = [llm.beam_search([prompts[i]], params)[0] for i, params in enumerate(searches)]
    expected += llm.generate(prompts[6:], others, use_tqdm=False)
    few = OPTIONS | {"num_gpu_blocks_override": 44, "watermark": 0.0, "pipeline_depth": depth}
    engine = LLMEngine(EngineArgs(model=llm.engine.args.model, **few), llm.engine.startup)
    for i, params in enumerate([*searches, *others]):
        engine.add_request(str(i), prompts[i], params)
    found = {}
    while engine.has_unfinished_requests():
        found.update((output.request_id, output) for output in engine.step() if output.finished)
        engine.core.check_integrity()
    for i, output in enumerate(expected):
        tokens = [completion.token_ids for completion in output.outputs]
        assert [completion.token_ids for completion in found[str(i)].outputs] == tokens, i
    assert engine.get_metrics().num_preemptions > 0
    assert engine.get_metrics().num_used_blocks == 0


def test_fewer_sequences_may_be_returned_than_beams(models):
    llm, _ = models
    prompts = prompts_of(2, seed=8)
    params = BeamSearchParams(beam_width=5, max_tokens=6)
    for every, best in zip(
        llm.beam_search(prompts, params), llm.beam_search(prompts, replace(params, n=2)), strict=True
    ):
        assert [c.token_ids for c in best.outputs] == [c.token_ids for c in every.outputs[:2]]


def test_what_cannot_be_searched_is_refused_by_name(models):
    llm, _ = models
    with pytest.raises(InvalidParameterError, match="params must be BeamSearchParams, got SamplingParams"):
        llm.beam_search([[3]], SamplingParams())
    with pytest.raises(InvalidParameterError, match="stop_token_ids names token 160"):
        llm.beam_search([[3]], BeamSearchParams(beam_width=2, max_tokens=4, stop_token_ids=[VOCAB_SIZE]))
    small = EngineArgs(model=llm.engine.args.model, **OPTIONS | {"num_gpu_blocks_override": 40})
    engine = LLMEngine(small, llm.engine.startup)
    with pytest.raises(OutOfMemoryError, match="beam_width=8"):
        engine.add_request("a", [3], BeamSearchParams(beam_width=8, max_tokens=100))
    assert not engine.has_unfinished_requests()
