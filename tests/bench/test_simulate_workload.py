"""The simulation of whole runs (benchmarks/simulate_workload.py): it makes the steps that the requests need."""

import numpy as np

from benchmarks.simulate_workload import MODELS, simulate
from jpaged.bench.workloads import BenchRequest


def test_every_token_is_computed_once_and_the_longest_output_counts_the_steps():
    rng = np.random.default_rng()
    lengths = rng.integers(1, 60, (40, 2)).tolist()
    steps = simulate(
        [BenchRequest(rng.integers(0, 1000, i).tolist(), o) for i, o in lengths], max_num_seqs=64, budget=4096
    )
    # The first step computes all prompts and samples; a step each follows for every further token of the longest.
    # Rows planned before the host has read that a sequence ended compute nothing, yet they are rows.
    needed = sum(i + o - 1 for i, o in lengths)
    assert needed <= sum(step.rows for step in steps) <= needed + 2 * len(lengths)
    assert len(steps) == max(o for _, o in lengths)
    assert steps[0].rows == sum(i for i, _ in lengths)
    assert abs(steps[0].pairs - sum(i * i / 2 for i, _ in lengths)) < 1


def test_requests_beyond_the_slots_wait_and_a_longer_step_takes_longer():
    requests = [BenchRequest([1, 2, 3], 20)] * 30
    all_at_once = simulate(requests, max_num_seqs=32, budget=128)
    ten_by_ten = simulate(requests, max_num_seqs=10, budget=128)
    assert len(ten_by_ten) >= 3 * 20 > len(all_at_once)
    time = MODELS["llama-3.1-8b"]
    assert time(all_at_once[5], 1024) > time(all_at_once[5], 256) > time(all_at_once[5], 8)
