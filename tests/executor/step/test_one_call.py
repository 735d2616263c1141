"""Decode steps that are one program: the tokens of body and head, whatever runs beside them and whatever the model."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from jpaged import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams, StructuredOutputsParams
from jpaged.api.errors import InvalidParameterError
from jpaged.engine.interface import SamplingVariant
from jpaged.executor import config as executor_config
from jpaged.executor.config import ExecutorConfig
from jpaged.executor.start import startup
from jpaged.executor.start.shapes import ONE_CALL_ROWS, one_call_rows
from jpaged.executor.step.bodies import Decode
from jpaged.executor.step.heads import Sample
from jpaged.executor.step.kinds import step_programs
from jpaged.executor.step.one_call import DecodeAndSample
from jpaged.executor.step.program import Setup
from jpaged.models import ModelConfig, build
from tests.support.small_demo import small_demo
from tests.tiny_models import DEMO_ENGINE, TINY_ENGINE, VOCAB_SIZE, tiny_model, write_tiny_model

ROWS = 4
"""Rows of the smaller of two decode programs, which is one call."""
SIZES: dict[str, Any] = {"decode_buckets": (ROWS, 32), "token_buckets": (128,)}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("qwen3-moe", {"expert_load": True, "shared_prefix_attention": True}),
    "recurrent": ("qwen3.5", {"state_snapshot_tokens": 4, "num_state_snapshots": 16}),
}


def started(args: EngineArgs) -> LLMEngine:
    with mock.patch.object(startup, "one_call_rows", return_value=ROWS):
        return LLMEngine(args)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.xdist_group(f"one call, {name}")) for name in CASES],
)
def engine(request, tmp_path_factory) -> LLMEngine:
    """With decode steps of one call up to `ROWS` rows."""
    name, options = CASES[request.param]
    directory = write_tiny_model(tiny_model(name), tmp_path_factory.mktemp("tiny"), use_torch=False)
    return started(EngineArgs(**TINY_ENGINE | SIZES | {"model": str(directory)} | options))


def any_kind(index: int) -> SamplingParams:
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9, "stop_token_ids": list(range(0, VOCAB_SIZE, 7))},
        {"temperature": 1.0, "top_k": 5, "n": 2},
        {"temperature": 0, "presence_penalty": 0.5, "logprobs": 2},
        {"temperature": 0, "stop_token_ids": list(range(0, VOCAB_SIZE, 5))},
    )
    kind = kinds[index % len(kinds)]
    return SamplingParams(seed=index, max_tokens=3 if "logprobs" in kind else 4 + index, **kind)


def run(engine: LLMEngine, params: Callable[[int], SamplingParams]) -> dict[str, Any]:
    """What becomes of requests that come one by one, some with a common prefix: steps have few rows and many."""
    rng = np.random.default_rng(3)
    prefix = rng.integers(3, VOCAB_SIZE, 24).tolist()
    waiting = [(i, prefix * (i % 2) + rng.integers(3, VOCAB_SIZE, 3 + i).tolist()) for i in range(12)]
    found: dict[str, Any] = {}
    turn = 0
    while waiting or engine.has_unfinished_requests():
        if waiting and (turn % 2 == 0 or not engine.has_unfinished_requests()):
            index, prompt = waiting.pop(0)
            sampling = replace(params(index), output_kind=RequestOutputKind.FINAL_ONLY)
            engine.add_request(str(index), prompt, sampling)
        for output in engine.step():
            found[output.request_id] = [
                (list(one.token_ids), one.finish_reason, one.stop_reason) for one in output.outputs
            ]
        turn += 1
    engine.core.check_integrity()
    return found


def kinds_called(
    engine: LLMEngine, params: Callable[[int], SamplingParams], one_call: bool
) -> tuple[dict[str, Any], list[str]]:
    """As `run`; and the kinds of the programs called, in order. one_call: steps of few rows may be one call."""
    called, call = [], engine.startup.runner._run

    def noted(program, **inputs):
        called.append(program.kind)
        return call(program, **inputs)

    engine.reset_prefix_cache()
    with ExitStack() as changed:
        changed.enter_context(mock.patch.object(engine.startup.runner, "_run", noted))
        if not one_call:
            changed.enter_context(mock.patch.object(ExecutorConfig, "is_one_call", return_value=False))
        return run(engine, params), called


def test_tokens_and_ends_are_those_of_two_calls(engine, monkeypatch):
    monkeypatch.setattr(executor_config, "LEAST_SAVED_TOKENS", 1)
    expected, of_two = kinds_called(engine, any_kind, one_call=False)
    load = engine.get_metrics().expert_load
    found, of_one = kinds_called(engine, any_kind, one_call=True)
    assert found == expected
    assert any(reason == "length" for outputs in found.values() for _, reason, _ in outputs)
    assert any(isinstance(stopped_by, int) for outputs in found.values() for _, _, stopped_by in outputs)
    assert "decode_and_sample" not in of_two
    num_whole = of_one.count("decode_and_sample")
    assert num_whole > 4  # few where most steps read a shared prefix once
    assert len(of_two) - len(of_one) == num_whole
    num_split = of_one.count("decode") + of_one.count("shared_decode")
    assert num_split > 0  # of many rows
    assert of_one.count("decode") == of_two.count("decode") - num_whole
    for name in ("shared_decode", "copy_states"):
        assert of_one.count(name) == of_two.count(name)
    if load is not None:  # the engine has counted both runs
        twice = tuple(tuple(2 * count for count in layer) for layer in load.tokens)
        assert engine.get_metrics().expert_load.tokens == twice


def test_all_that_is_kept_on_the_device_is_updated_in_place(engine):
    runner = engine.startup.runner
    compiled = runner._programs[DecodeAndSample(ROWS, SamplingVariant.GREEDY)]
    donated = sum(leaf.nbytes for name in compiled.signature.updates for leaf in jax.tree.leaves(runner._held[name]))
    assert compiled.alias_bytes == donated + 2 * ROWS * 4  # and tokens, over earlier ones
    body = runner._programs[Decode(ROWS)]
    assert set(compiled.signature.updates) == {*body.signature.updates, "state"}


@pytest.mark.xdist_group("one call, constraints")
def test_rows_under_constraints_and_what_runs_ahead_of_them_are_two_calls(tmp_path):
    engine = started(EngineArgs(**DEMO_ENGINE, model=str(small_demo(tmp_path / "model")), verbose=False))

    def params(index: int) -> SamplingParams:
        followed_by_host = StructuredOutputsParams(regex=r"[a-z]{3,9} \d+")  # \d has no table
        constraint = followed_by_host if index % 3 == 1 else None
        return SamplingParams(temperature=0.7, seed=index, max_tokens=4 + index, structured_outputs=constraint)

    expected, _ = kinds_called(engine, params, one_call=False)
    found, called = kinds_called(engine, params, one_call=True)
    assert found == expected
    # How many of each depends on how long masks take.
    assert called.count("decode_and_sample") > 4 < called.count("decode")


def test_a_start_has_them_for_few_rows_of_usual_variants_where_the_environment_asks_for_them(monkeypatch):
    assert one_call_rows(80 * 2**30) == 0
    monkeypatch.setenv(ONE_CALL_ROWS, "128")
    model = build(ModelConfig.from_dict(tiny_model("llama-gqa-d64-tied").config), "bfloat16")
    config = ExecutorConfig(
        max_num_seqs=256,
        max_model_len=64,
        block_size=16,
        num_blocks=8,
        decode_buckets=(8, 96, 128, 192, 256),
        token_buckets=(512,),
        one_call_rows=one_call_rows(80 * 2**30),
    )
    setup = Setup.of(model, config)
    whole = {program for program in step_programs(setup) if isinstance(program, DecodeAndSample)}
    usual = {one.variant for one in Sample.programs(setup) if one.variant <= SamplingVariant.TRUNCATED}
    assert whole == {DecodeAndSample(rows, variant) for rows in (8, 96, 128) for variant in usual}
    assert one_call_rows(None) == 0  # a CPU
    monkeypatch.setenv(ONE_CALL_ROWS, "all")
    with pytest.raises(InvalidParameterError, match=f"{ONE_CALL_ROWS} must be a number of rows, 0 for none, got 'all'"):
        one_call_rows(80 * 2**30)
    without = Setup.of(model, replace(config, one_call_rows=0))
    assert set(step_programs(setup)) - whole == set(step_programs(without))
