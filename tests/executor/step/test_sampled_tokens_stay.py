"""Sampled tokens that are written over those of earlier steps, so that buffers stay where they are."""

from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import EngineArgs, LLMEngine
from jpaged.engine.interface import SamplingVariant
from jpaged.executor.start.started import Startup
from jpaged.executor.start.startup import start
from jpaged.executor.step.handle import DispatchedStep
from jpaged.executor.step.heads import Sample, SampleResult
from jpaged.executor.step.runner import Runner
from tests.parallel.tensor_parallel_runs import ARGS, FEW_BLOCKS, NUM_REQUESTS, prompts, run
from tests.tiny_models import tiny_model, write_tiny_model

pytestmark = pytest.mark.xdist_group("sampled-tokens")  # one worker, which compiles once


@pytest.fixture(scope="module")
def started(tmp_path_factory) -> tuple[EngineArgs, Startup]:
    directory = write_tiny_model(tiny_model("llama-gqa-d64-tied"), tmp_path_factory.mktemp("tokens"), use_torch=False)
    args = replace(ARGS, model=str(directory))
    return args, start(args, directory)


def test_a_head_updates_all_that_it_returns_in_place(started):
    program = started[1].runner._programs[Sample(NUM_REQUESTS, SamplingVariant.GREEDY)]
    pointers = 8 * len(jax.tree.leaves(program.executable.out_info))  # to the results; XLA counts them
    assert program.alias_bytes == program.output_bytes - pointers


@pytest.mark.parametrize("num_blocks", [ARGS.num_gpu_blocks_override, FEW_BLOCKS], ids=["enough", "preempted"])
@pytest.mark.parametrize("pipeline_depth", [0, 2])
def test_tokens_are_those_in_new_buffers_and_take_as_many_as_steps_in_flight_and_one(
    started, monkeypatch, num_blocks, pipeline_depth
):
    args, startup = started
    args = replace(args, num_gpu_blocks_override=num_blocks, pipeline_depth=pipeline_depth, preemption_mode="recompute")
    with mock.patch.object(Runner, "_earlier_tokens", lambda runner, words, rows: np.zeros((words, rows), np.int32)):
        expected = run(LLMEngine(args, startup), prompts())
    startup.runner._tokens_read.clear()

    given = []
    earlier_tokens = Runner._earlier_tokens

    def noted(runner: Runner, words: int, rows: int) -> jax.Array | np.ndarray:
        given.append(earlier_tokens(runner, words, rows))
        return given[-1]

    monkeypatch.setattr(Runner, "_earlier_tokens", noted)
    assert run(LLMEngine(args, startup), prompts()) == expected
    new = [array for array in given if isinstance(array, np.ndarray)]
    assert 1 <= len(new) <= pipeline_depth + 1
    assert len(given) > 5 * len(new)


def test_what_was_read_stands_when_other_tokens_are_written_over_it():
    given_back = []
    step = DispatchedStep(
        2, SampleResult(jnp.array([[7, 8, 0], [1, 0, 0]], jnp.int32), None), when_read=given_back.append
    )
    first = step.result()
    (array,) = given_back
    array.delete()  # as donating it does
    assert step.is_ready()
    again = step.result()
    assert first.token_ids.tolist() == again.token_ids.tolist() == [[7], [8]]
    assert len(given_back) == 1


def test_a_closed_runner_keeps_no_tokens(started):
    pool, read, read_late = jnp.zeros((2,)), jnp.zeros((2, 4), jnp.int32), jnp.ones((2, 4), jnp.int32)
    runner = Runner(started[1].setup, {}, {"pools": (pool,)})
    runner._keep_tokens(read)
    runner.close()
    runner._keep_tokens(read_late)
    assert read.is_deleted()
    assert read_late.is_deleted()
