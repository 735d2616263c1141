"""Several sequences for each prompt, through the whole engine on a tiny random model."""

from dataclasses import replace

import numpy as np
import pytest

from jpaged import LLM, EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from jpaged.api.errors import InvalidParameterError
from jpaged.engine.sequences.seeds import sample_seed
from tests.tiny_models import TINY_ENGINE, VOCAB_SIZE, tiny_model, write_tiny_model

pytestmark = pytest.mark.xdist_group("parallel sampling")  # one worker, which compiles once

SEEDED = SamplingParams(seed=11, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    model = tiny_model("llama-gqa-d64-tied")
    return {"model": str(write_tiny_model(model, tmp_path_factory.mktemp("model"), use_torch=False)), **TINY_ENGINE}


@pytest.fixture(scope="module")
def llm(options):
    return LLM(**options)


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB_SIZE, rng.integers(1, 40)).tolist() for _ in range(count)]


def signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


@pytest.mark.parametrize("temperature", [1.0, 0.0], ids=["random", "greedy"])
def test_samples_are_the_tokens_of_single_requests_with_the_samples_seeds(llm, temperature):
    prompts = [*prompts_of(5), [7], [5, 6, 7, 8]]
    params = replace(SEEDED, temperature=temperature)
    several = llm.generate(prompts, replace(params, n=4), use_tqdm=False)
    for i in range(4):
        single = llm.generate(prompts, replace(params, seed=signed(sample_seed(11, i))), use_tqdm=False)
        assert [output.outputs[i].token_ids for output in several] == [output.outputs[0].token_ids for output in single]
    assert all([c.index for c in output.outputs] == [0, 1, 2, 3] for output in several)


def test_samples_with_penalties_and_logprobs_are_those_of_single_requests(llm):
    prompts = prompts_of(3, seed=1)
    params = replace(SEEDED, frequency_penalty=0.7, repetition_penalty=1.2, logprobs=2, prompt_logprobs=1)
    several = llm.generate(prompts, replace(params, n=3), use_tqdm=False)
    for i in range(3):
        single = llm.generate(prompts, replace(params, seed=signed(sample_seed(11, i))), use_tqdm=False)
        for a, b in zip(several, single, strict=True):
            assert a.outputs[i].token_ids == b.outputs[0].token_ids
            assert a.outputs[i].cumulative_logprob == pytest.approx(b.outputs[0].cumulative_logprob, abs=1e-4)
            assert [list(position) for position in a.outputs[i].logprobs] == [list(p) for p in b.outputs[0].logprobs]
            assert len(a.prompt_logprobs) == len(a.prompt_token_ids)


def test_a_samples_stop_token_ends_only_that_sample(llm):
    prompt = prompts_of(1, seed=2)
    free = llm.generate(prompt, replace(SEEDED, n=4), use_tqdm=False)[0]
    stop = free.outputs[2].token_ids[3]
    stopped = llm.generate(prompt, replace(SEEDED, n=4, stop_token_ids=[stop]), use_tqdm=False)[0]
    for before, after in zip(free.outputs, stopped.outputs, strict=True):
        tokens = before.token_ids
        expected = tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
        assert after.token_ids == expected
        assert after.finish_reason == ("stop" if stop in tokens else "length")


def test_best_of_returns_the_likeliest_best_first(llm):
    prompts = prompts_of(3, seed=3)
    all_six = llm.generate(prompts, replace(SEEDED, n=6, logprobs=0), use_tqdm=False)
    best_two = llm.generate(prompts, replace(SEEDED, n=2, best_of=6), use_tqdm=False)
    for every, best in zip(all_six, best_two, strict=True):
        ranked = sorted(every.outputs, key=lambda completion: -completion.cumulative_logprob)
        assert [c.token_ids for c in best.outputs] == [c.token_ids for c in ranked[:2]]
        assert [c.index for c in best.outputs] == [0, 1]
        expected = [completion.cumulative_logprob for completion in ranked[:2]]
        assert [completion.cumulative_logprob for completion in best.outputs] == pytest.approx(expected, abs=1e-4)
        assert all(c.logprobs is None for c in best.outputs)


@pytest.mark.parametrize("depth", [0, 2])
def test_streamed_samples_join_to_the_whole_and_best_of_comes_once(llm, options, depth):
    engine = LLMEngine(EngineArgs(**options, pipeline_depth=depth), llm.engine.startup)
    prompt = prompts_of(1, seed=4)[0]
    for kind in RequestOutputKind:
        engine.add_request(kind.name, prompt, replace(SEEDED, n=3, output_kind=kind))
    engine.add_request("best", prompt, replace(SEEDED, n=1, best_of=3, output_kind=RequestOutputKind.DELTA))
    joined: dict[int, list[int]] = {0: [], 1: [], 2: []}
    outputs: dict[str, list] = {"CUMULATIVE": [], "DELTA": [], "FINAL_ONLY": [], "best": []}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id].append(output)
            if output.request_id == "DELTA":
                for completion in output.outputs:
                    joined[completion.index] += completion.token_ids
    whole = [completion.token_ids for completion in outputs["FINAL_ONLY"][0].outputs]
    assert len(outputs["FINAL_ONLY"]) == len(outputs["best"]) == 1
    assert list(joined.values()) == whole == [c.token_ids for c in outputs["CUMULATIVE"][-1].outputs]
    assert all(len(output.outputs) == 3 for output in outputs["CUMULATIVE"])
    assert outputs["best"][0].outputs[0].token_ids in whole
    assert [output.finished for output in outputs["CUMULATIVE"]] == [False] * 9 + [True]
    engine.core.check_integrity()


@pytest.mark.parametrize("depth", [0, 2])
def test_groups_under_pressure_give_the_same_tokens(llm, options, depth):
    prompts = prompts_of(12, seed=5)
    params = [replace(SEEDED, n=1 + i % 4, max_tokens=30, seed=i) for i in range(12)]
    expected = llm.generate(prompts, params, use_tqdm=False)
    few = options | {"num_gpu_blocks_override": 40, "watermark": 0.0, "pipeline_depth": depth}
    engine = LLMEngine(EngineArgs(**few), llm.engine.startup)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, replace(params[i], output_kind=RequestOutputKind.FINAL_ONLY))
    found = {}
    while engine.has_unfinished_requests():
        found.update((output.request_id, output) for output in engine.step())
    for i, output in enumerate(expected):
        assert [c.token_ids for c in found[str(i)].outputs] == [c.token_ids for c in output.outputs]
    assert engine.get_metrics().num_preemptions > 0
    assert engine.get_metrics().num_used_blocks == 0


def test_more_sequences_than_slots_are_refused_by_name(llm):
    with pytest.raises(InvalidParameterError, match=r"n=33 .*max_num_seqs=32"):
        llm.generate([[3, 4]], replace(SEEDED, n=33), use_tqdm=False)
    assert len(llm.generate([[3, 4]], replace(SEEDED, n=32), use_tqdm=False)[0].outputs) == 32
