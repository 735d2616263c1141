"""Memory pressure: whatever is preempted, swapped and computed again, every request gets the tokens it gets alone."""

from dataclasses import dataclass

import numpy as np
import pytest

from jpaged import BeamSearchParams, EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from jpaged.executor.start.started import Startup
from tests.tiny_models import VOCAB_SIZE, tiny_model, write_tiny_model

pytestmark = pytest.mark.xdist_group("pressure")  # one worker, which compiles once

NUM_REQUESTS = 80
BLOCK_SIZE = 4
LARGEST_BLOCKS = 23
"""What the largest beam search may need at once. How many blocks are in use at most depends on the device's pace."""


@dataclass
class Case:
    """What the tests share: how the engine was started, and what each request gets in a pool with room for all."""

    args: dict
    startup: Startup
    expected: dict[str, list[list[int]]]
    peak_blocks: int


def requests(count: int) -> list[tuple[str, list[int], SamplingParams | BeamSearchParams]]:
    """Greedy requests, random ones, groups of four and beams of four; half of them share one of three prefixes."""
    rng = np.random.default_rng(3)
    prefixes = [rng.integers(3, VOCAB_SIZE, 16).tolist() for _ in range(3)]
    made = []
    for i in range(count):
        own = rng.integers(3, VOCAB_SIZE, rng.integers(1, 16)).tolist()
        prompt = prefixes[i % 3] + own if rng.random() < 0.5 else own
        max_tokens = int(rng.integers(4, 24))
        common = {"max_tokens": max_tokens, "ignore_eos": True, "output_kind": RequestOutputKind.FINAL_ONLY}
        params: SamplingParams | BeamSearchParams
        match i % 8:
            case 0:
                params = BeamSearchParams(beam_width=4, max_tokens=min(max_tokens, 12))
            case 1 | 2:
                params = SamplingParams(n=4, seed=i, **common)
            case 3:
                params = SamplingParams(n=2, seed=i, presence_penalty=0.5, **common)
            case 4:
                params = SamplingParams(seed=i, temperature=0.8, top_k=20, **common)
            case _:
                params = SamplingParams(temperature=0.0, **common)
        made.append((str(i), prompt, params))
    return made


def run(engine: LLMEngine, count: int = NUM_REQUESTS) -> tuple[dict[str, list[list[int]]], int]:
    """Tokens of every sequence, and the most blocks that were in use."""
    for request in requests(count):
        engine.add_request(*request)
    found, peak, step = {}, 0, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = [completion.token_ids for completion in output.outputs]
        step += 1
        peak = max(peak, engine.get_metrics().num_used_blocks)
        if step % 50 == 0:
            engine.core.check_integrity()
    engine.core.check_integrity()
    return found, peak


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    args = {
        "model": str(
            write_tiny_model(tiny_model("llama-gqa-d64-tied"), tmp_path_factory.mktemp("model"), use_torch=False)
        ),
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": 2048,
        "max_model_len": 64,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 64,
        "decode_buckets": (32,),
        "token_buckets": (64,),
        "skip_tokenizer_init": True,
        "verbose": False,
    }
    engine = LLMEngine(EngineArgs(**args))
    expected, peak = run(engine)
    assert engine.get_metrics().num_preemptions == 0
    return Case(args, engine.startup, expected, peak)


@pytest.mark.parametrize(("mode", "host_prefix_cache"), [("auto", False), ("swap", True), ("recompute", True)])
def test_mixed_requests_in_a_tenth_of_the_blocks_they_would_use(case, mode, host_prefix_cache):
    few = max(case.peak_blocks // 10, LARGEST_BLOCKS)
    args = case.args | {"num_gpu_blocks_override": few + 1, "preemption_mode": mode, "watermark": 0.0}
    engine = LLMEngine(EngineArgs(**args, host_prefix_cache=host_prefix_cache), case.startup)
    found, peak = run(engine)
    metrics = engine.get_metrics()
    assert engine.args.pipeline_depth == 2
    assert found == case.expected
    assert peak <= few
    swapped, computed_again = metrics.num_swap_preemptions, metrics.num_preemptions - metrics.num_swap_preemptions
    assert (swapped > 20) == (mode != "recompute")
    assert mode == "swap" or computed_again > 20
    assert metrics.num_swapped_in == metrics.num_swapped_out
    assert (metrics.prefix_cache_host_hits > 0) == host_prefix_cache
    assert (metrics.num_used_blocks, metrics.num_used_swap_blocks, metrics.num_running) == (0, 0, 0)


def test_a_swap_space_that_is_full_makes_the_rest_compute_again(case):
    tiny = 3 * 16 * case.startup.memory.block / 2**30
    args = case.args | {"num_gpu_blocks_override": 40, "preemption_mode": "swap", "swap_space": tiny, "watermark": 0.0}
    engine = LLMEngine(EngineArgs(**args), case.startup)
    found, _ = run(engine, 40)
    metrics = engine.get_metrics()
    assert found == {name: case.expected[name] for name in found}
    assert len(found) == 40
    assert metrics.num_swap_blocks == 48
    assert 0 < metrics.num_swapped_out < metrics.num_preemptions * 40
    assert metrics.num_used_swap_blocks == 0
