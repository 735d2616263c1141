"""Requests that are aborted return what they have generated, whatever they report while they run."""

import asyncio
import contextlib
import os
import signal

import pytest

from jpaged.api.config import EngineArgs
from jpaged.api.errors import SlowConsumerError
from jpaged.api.sampling_params import RequestOutputKind, SamplingParams
from jpaged.processes.async_llm_engine import AsyncLLMEngine
from tests.tiny_models import DEMO_ENGINE

pytestmark = pytest.mark.xdist_group("aborts")  # one worker, which starts one engine

PROMPT = "Once upon a time"
LONG = {"temperature": 0.0, "max_tokens": 900, "ignore_eos": True}
NUM_COMPARED = 60
"""First tokens of an aborted answer, which are those that a whole one has."""


@pytest.fixture(scope="module")
def run():
    """Runs a coroutine function of an engine that is ready."""
    with asyncio.Runner() as runner:
        engine = AsyncLLMEngine(EngineArgs(**DEMO_ENGINE, verbose=False))
        runner.run(engine.ready())
        yield lambda scene: runner.run(asyncio.wait_for(scene(engine), 120))
        runner.run(engine.shutdown())


async def last(outputs):
    async for output in outputs:
        latest = output
    return latest


def generate(engine, name, **fields):
    params = SamplingParams(**LONG | {"output_kind": RequestOutputKind.FINAL_ONLY} | fields)
    return asyncio.ensure_future(last(engine.generate(PROMPT, params, name)))


async def until_tokens(engine, num_tokens):
    before = (await engine.get_metrics()).generated_tokens
    while (await engine.get_metrics()).generated_tokens < before + num_tokens:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"logprobs": 1}, {"n": 1, "best_of": 2}], ids=str)
def test_a_request_that_reports_only_its_end_returns_its_tokens_when_it_is_aborted(run, fields):
    async def scene(engine):
        whole = await generate(engine, "whole", **fields, max_tokens=NUM_COMPARED)
        asked = generate(engine, "a", **fields)
        await until_tokens(engine, 40)
        await engine.abort("a")
        output = await asked
        assert output.finished
        for completion, expected in zip(output.outputs, whole.outputs, strict=True):
            num_tokens = len(completion.token_ids)
            assert completion.finish_reason == "abort"
            assert 10 <= num_tokens < 900
            assert completion.token_ids[:NUM_COMPARED] == expected.token_ids[:num_tokens]
            assert completion.text
            if "logprobs" in fields:
                assert len(completion.logprobs) == num_tokens
        while (await engine.get_metrics()).num_running:
            await asyncio.sleep(0.01)
        assert engine.num_unfinished == 0

    run(scene)


def test_a_stream_whose_log_probabilities_nobody_takes_ends_and_gives_back_what_it_holds(run):
    async def scene(engine):
        params = SamplingParams(**LONG | {"max_tokens": 300}, logprobs=20, output_kind=RequestOutputKind.DELTA)
        # Less than it holds in all, so what is taken must be given back.
        read = engine.generate(PROMPT, params, "read", max_backlog_bytes=1 << 20)
        unread = engine.generate(PROMPT, params, "unread", max_backlog_bytes=1 << 16)
        async with contextlib.aclosing(unread):
            await anext(unread)
            (stream,) = engine._requests.streams.values()
            seen = [position async for output in read for position in output.outputs[0].logprobs]
            assert len(seen) == 300  # each of them once
            assert all(seen)
            assert not any(stream.request.logprobs)
            with pytest.raises(SlowConsumerError, match="More than 65536 bytes"):
                await anext(unread)
        assert engine.num_unfinished == 0
        while (await engine.get_metrics()).num_running:
            await asyncio.sleep(0.01)

    run(scene)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_one_id_or_several_are_aborted_and_others_go_on(run, kind):
    async def scene(engine):
        asked = {name: generate(engine, name, output_kind=kind) for name in "abcd"}
        await until_tokens(engine, 20)
        await engine.abort(["a", "b", "unknown"])
        assert {(await asked[name]).outputs[0].finish_reason for name in "ab"} == {"abort"}
        assert not asked["c"].done()
        await engine.abort("c")
        assert (await asked["c"]).outputs[0].finish_reason == "abort"
        await engine.abort_all()
        assert (await asked["d"]).outputs[0].finish_reason == "abort"

    run(scene)


def test_a_request_that_waits_returns_nothing_generated(run):
    async def scene(engine):
        running = generate(engine, "r", n=16)
        await until_tokens(engine, 16)
        waiting = generate(engine, "w")
        while not (await engine.get_metrics()).num_waiting:
            await asyncio.sleep(0.01)
        await engine.abort("w")
        output = await waiting
        assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("abort", [])
        await engine.abort_all()
        await running

    run(scene)


def test_an_abort_beside_the_end_of_the_engine_process_returns_what_came_of_it_once(run):
    async def scene(engine):
        async def kill():
            pid = engine._fleet.processes.pids[0]
            os.kill(pid, signal.SIGKILL)
            while engine._fleet.processes.pids[0] == pid or engine.is_restarting:
                await asyncio.sleep(0.01)

        whole = await generate(engine, "whole", max_tokens=300)
        resumed, aborted = generate(engine, "resumed"), generate(engine, "aborted")
        await until_tokens(engine, 40)
        await engine.abort("aborted")
        await kill()
        assert (await aborted).outputs[0].finish_reason == "abort"
        await until_tokens(engine, 40)
        await engine.abort("resumed")
        (completion,) = (await resumed).outputs
        assert completion.finish_reason == "abort"
        assert len(completion.token_ids) >= 10
        assert completion.token_ids[:300] == whole.outputs[0].token_ids[: len(completion.token_ids)]

    run(scene)
