"""Whole batches, as FasterTransformer serves them, against a step-by-step count by hand."""

import pytest

from jpaged.bench.memory.setups import SETUPS, StepTime
from jpaged.bench.memory.static_batches import batch_seconds, largest_batch, serve_batches
from jpaged.bench.memory.traces import TraceRequest

STEP = StepTime(fixed_s=1.0, per_sequence_s=0.1, per_context_token_s=0.01, per_prompt_token_s=0.02)


def test_a_batch_takes_a_step_for_its_prompts_and_one_for_each_further_token_of_the_longest_output():
    requests = [TraceRequest(0.0, 5, 4), TraceRequest(0.0, 7, 2)]
    expected = STEP(2, 0, 12)
    for step in (1, 2, 3):
        expected += STEP(2, 5 + step + 7 + step, 0)
    assert batch_seconds(requests, STEP) == pytest.approx(expected)


def test_memory_for_the_longest_sequences_bounds_the_batch():
    assert largest_batch(SETUPS["opt-13b"]) == 7


def test_who_comes_while_a_batch_runs_waits_for_its_end():
    setup = SETUPS["opt-66b"]  # batches of 4
    trace = [TraceRequest(0.0, 10, 1), *(TraceRequest(0.5, 10, 1 + i) for i in range(5))]
    alone = batch_seconds(trace[:1], STEP)
    four = batch_seconds(trace[1:5], STEP)
    last = batch_seconds(trace[5:], STEP)
    ends = [alone, *[alone + four] * 4, alone + four + last]
    expected = [(end - one.arrival_s) / one.output_len for end, one in zip(ends, trace, strict=True)]
    assert serve_batches(trace, setup, STEP) == pytest.approx(sum(expected) / len(expected))


def test_an_idle_device_waits_for_the_next_request():
    trace = [TraceRequest(0.0, 10, 1), TraceRequest(100.0, 10, 1)]
    assert serve_batches(trace, SETUPS["opt-13b"], STEP) == pytest.approx(batch_seconds(trace[:1], STEP))
