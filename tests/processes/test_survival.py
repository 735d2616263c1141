"""Requests outlive the engine process: it is killed, hangs or raises, and all get the tokens of a calm run."""

import asyncio
import os
import random
import signal

import pytest

from jpaged.api.beam_search_params import BeamSearchParams
from jpaged.api.config import EngineArgs, RestartOptions
from jpaged.api.errors import EngineDeadError, EngineRestartingError, InvalidParameterError, SuspectRequestError
from jpaged.api.sampling_params import RequestOutputKind, SamplingParams
from jpaged.api.structured_outputs import StructuredOutputsParams
from jpaged.processes import wire
from jpaged.processes.async_llm_engine import AsyncLLMEngine
from jpaged.processes.keeper import RestartLimit
from tests.support.fragile_engine import VARIABLE
from tests.tiny_models import DEMO_ENGINE, TINY_ENGINE, tiny_model, write_tiny_model

pytestmark = pytest.mark.xdist_group("survival")

NUM_TOKENS = 60
WORDS = StructuredOutputsParams(regex="([a-z]{2,7} ){40}end")
KINDS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 5},
    "unseeded": {},
    "two": {"n": 2, "seed": 6},
    "two, whole": {"n": 2, "output_kind": RequestOutputKind.FINAL_ONLY},
    "deltas": {"seed": 7, "output_kind": RequestOutputKind.DELTA},
    "logprobs": {"seed": 8, "logprobs": 2, "prompt_logprobs": 1},
    "stop": {"seed": 9, "stop": [" the ", "and"], "include_stop_str_in_output": True, "min_tokens": 50},
    "penalties": {"seed": 10, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    "best of": {"seed": 11, "n": 1, "best_of": 3},
    "constrained": {"seed": 12, "n": 2, "ignore_eos": False, "structured_outputs": WORDS},
}
SEEDED = [name for name, params in KINDS.items() if params.keys() & {"seed", "temperature"}]
"""Those that bring the same whatever else the engine has served."""
FATAL_TOKEN = 77


def engine_args(**changes):
    return EngineArgs(**(DEMO_ENGINE | {"verbose": False} | changes))


async def collected(outputs):
    """All that a request brought, by sequence: tokens, text, log-probabilities and why it ended."""
    parts = {}
    async for output in outputs:
        is_delta = output.outputs and collected_kind(output) == RequestOutputKind.DELTA
        for one in output.outputs:
            token_ids, text, logprobs = parts.get(one.index, ([], "", []))[:3] if is_delta else ([], "", [])
            found = [list(position) for position in one.logprobs or ()]
            parts[one.index] = (
                token_ids + one.token_ids,
                text + one.text,
                logprobs + found,
                one.finish_reason,
                one.stop_reason,
            )
    prompt_logprobs = output.prompt_logprobs and [position and list(position) for position in output.prompt_logprobs]
    return parts, prompt_logprobs


def collected_kind(output):
    return RequestOutputKind.DELTA if output.request_id.startswith("deltas") else RequestOutputKind.CUMULATIVE


def ask(engine, name, number):
    params = SamplingParams(**({"max_tokens": NUM_TOKENS, "ignore_eos": True} | KINDS[name]))
    return collected(engine.generate(f"Once upon a time, number {number}", params, f"{name} {number}"))


def names_of(num_each):
    """Requests without a seed get one by their turn, those with a grammar when it is compiled: these come last."""
    free = [name for name in KINDS if name != "constrained"]
    return free * num_each + ["constrained"] * num_each


def ask_all(engine, num_each):
    """A request of each kind, so many times, and a beam search."""
    names = names_of(num_each)
    asked = [ask(engine, name, names[:i].count(name)) for i, name in enumerate(names)]
    asked.append(collected(engine.generate("The fox", BeamSearchParams(beam_width=3, max_tokens=40), "search")))
    return [asyncio.ensure_future(one) for one in asked]


async def until(condition, seconds=300):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def generated(engine):
    """Tokens that the open requests have."""
    streams = engine._requests.streams.values()
    return sum(len(member.output_token_ids) for stream in streams for member in stream.group.members)


async def killed(engine, index=0):
    """Kills a replica's process once all that serve have moved, and waits until it serves again."""
    before, pid = generated(engine), engine._fleet.processes.pids[index]
    await until(lambda: generated(engine) >= before + 40 or not engine._requests.streams)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: engine._fleet.processes.pids[index] != pid and not engine.is_restarting)


def run(scene, **options):
    async def all_of_it():
        async with AsyncLLMEngine(engine_args(), **options) as engine:
            await scene(engine)

    asyncio.run(all_of_it())


@pytest.fixture(scope="module")
def in_one_engine():
    """Runs scenes in an engine that tests share, where requests without a seed draw something else each time."""
    with asyncio.Runner() as runner:
        engine = AsyncLLMEngine(engine_args(), restarts=RestartOptions(step_timeout_s=6.0))
        runner.run(engine.__aenter__())
        yield lambda scene: runner.run(scene(engine))
        runner.run(engine.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def calm(in_one_engine):
    """What the requests bring when nothing happens."""

    async def undisturbed(engine):
        return await asyncio.gather(*ask_all(engine, 2))

    return in_one_engine(undisturbed)


def test_killed_twice_every_request_brings_what_it_would_have_brought(calm):
    async def scene(engine):
        asked = ask_all(engine, 2)
        await until(lambda: generated(engine) > 100)
        seen = await engine.get_requests()
        assert {"running", "waiting"} <= {one["status"] for one in seen}
        assert any(one["known"] > one["prompt_tokens"] and one["blocks"] > 0 for one in seen)
        for _ in range(2):
            await killed(engine)
        assert await asyncio.gather(*asked) == calm
        assert engine.metrics.counted("engine_restarts", 0) == 2
        assert engine.metrics.counted("requests_resumed", 0) > 0
        assert engine.metrics.counted("requests_suspected", 0) == 0
        assert (engine.num_unfinished, engine.num_queued, engine.num_queued_tokens) == (0, 0, 0)
        await engine.check_integrity()
        assert (await engine.get_metrics()).num_used_blocks == 0

    run(scene)


def test_a_process_that_stands_still_counts_as_hung(calm, in_one_engine):
    async def scene(engine):
        before = engine.metrics.counted("engine_restarts", 0)
        asked = ask_all(engine, 2)
        await until(lambda: generated(engine) > 100)
        os.kill(engine._fleet.processes.pids[0], signal.SIGSTOP)
        assert await engine.get_replica_metrics() == {}  # it does not wait for the process
        assert engine.metrics.counted("engine_restarts", 0) == before
        found = await asyncio.gather(*asked)
        names = [*names_of(2), "search"]
        for name, one, undisturbed in zip(names, found, calm, strict=True):
            if name in (*SEEDED, "search"):
                assert one == undisturbed
            else:
                assert {len(token_ids) for token_ids, *_ in one[0].values()} == {NUM_TOKENS}
        assert engine.metrics.counted("engine_restarts", 0) == before + 1

    in_one_engine(scene)


def test_requests_wait_while_the_engine_is_started_again_and_fail_when_it_is_not(calm):
    async def scene(engine):
        await engine.check_health()
        spare = engine._fleet.processes._spares[0].pid
        os.kill(spare, signal.SIGSTOP)  # until all requests wait, which those with grammars take a while to
        os.kill(engine._fleet.processes.pids[0], signal.SIGKILL)
        await until(lambda: engine.is_restarting)
        asked = ask_all(engine, 2)
        with pytest.raises(EngineRestartingError, match="being started again"):
            await engine.check_health()
        assert engine.is_alive
        assert await engine.get_replica_metrics() == {}
        await until(lambda: engine.num_queued == len(asked))
        gone = asyncio.ensure_future(ask(engine, "greedy", 99))
        await until(lambda: engine.num_queued == len(asked) + 1)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert engine.num_queued == len(asked)
        os.kill(spare, signal.SIGCONT)
        assert await asyncio.gather(*asked) == calm
        await engine.check_health()
        assert engine._fleet.processes.pids == [spare]

        asked = ask_all(engine, 1)
        await until(lambda: generated(engine) > 100)
        os.kill(engine._fleet.processes.pids[0], signal.SIGKILL)
        assert "was killed by SIGKILL" in str(await engine.failed())
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert any(isinstance(answer, EngineDeadError) for answer in answers)
        assert all(isinstance(answer, EngineDeadError | tuple) for answer in answers)
        with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
            await ask(engine, "greedy", 1)
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        assert not engine._fleet.processes._spares

    run(scene, restarts=RestartOptions(max_restarts=1, spare_processes=True))


@pytest.fixture
def fragile(fragile_processes, monkeypatch):
    """Engine processes break at requests whose prompt ends with FATAL_TOKEN, as `how` says, at so many tokens."""
    return lambda length, how: monkeypatch.setenv(VARIABLE, f"{FATAL_TOKEN}:{length}:{how}")


def test_a_request_that_breaks_the_engine_each_time_is_refused_and_the_others_go_on(calm, fragile):
    fragile(30, "raise")

    async def scene(engine):
        asked = ask_all(engine, 2)
        await until(lambda: generated(engine) > 100)
        params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
        fatal = asyncio.ensure_future(collected(engine.generate([5, 6, FATAL_TOKEN], params)))
        with pytest.raises(SuspectRequestError, match="each time that this request was running"):
            await fatal
        assert await asyncio.gather(*asked) == calm
        assert engine.metrics.counted("requests_suspected", 0) == 1
        assert engine.metrics.counted("engine_restarts", 0) == 4  # all together twice, then on trial twice

    run(scene)


def test_requests_of_a_dead_replica_move_to_a_living_one_at_once():
    async def scene():
        async with AsyncLLMEngine(engine_args(data_parallel_size=2)) as engine:
            calm = await asyncio.gather(*(ask(engine, name, 0) for name in SEEDED))
            asked = [asyncio.ensure_future(ask(engine, name, 0)) for name in SEEDED]
            await until(lambda: generated(engine) > 100)
            assert {stream.replica.index for stream in engine._requests.streams.values()} == {0, 1}
            assert not await engine.sleep()
            asleep = await engine._fleet.ask(
                wire.Sleep(1), wire.Changed
            )  # as if requests had come after it was looked at
            assert [answer.value for answer in asleep.values()] == [0, 0]
            dead = random.randrange(2)
            os.kill(engine._fleet.processes.pids[dead], signal.SIGKILL)
            await until(lambda: engine.is_restarting)
            with pytest.raises(EngineRestartingError, match="cannot sleep"):
                await engine.sleep()
            assert {stream.replica.index for stream in engine._requests.streams.values()} == {1 - dead}
            await engine.check_health()
            assert await asyncio.gather(*asked) == calm
            await until(lambda: not engine.is_restarting)
            assert await asyncio.gather(*(ask(engine, name, 0) for name in SEEDED)) == calm
            assert engine._board.by_replica("unfinished") == engine._board.by_replica("owed_tokens") == [0, 0]

    asyncio.run(scene())


def test_a_killed_engine_of_a_hybrid_goes_on_from_states_that_it_computes_again(tmp_path):
    """Prompts share beginnings, whose snapshots of states end with the process."""
    directory = write_tiny_model(tiny_model("qwen3.5"), tmp_path, use_torch=False)

    async def one(engine, number):
        params = SamplingParams(max_tokens=100, ignore_eos=True, n=1 + number % 2, seed=number)
        async for output in engine.generate([*range(3, 11 + number % 5), 20 + number % 7], params):
            latest = output
        return [sequence.token_ids for sequence in latest.outputs]

    async def scene():
        args = EngineArgs(model=str(directory), **TINY_ENGINE, state_snapshot_tokens=4)
        async with AsyncLLMEngine(args) as engine:
            for _ in range(2):
                calm = await asyncio.gather(*(one(engine, number) for number in range(12)))
            assert (await engine.get_metrics()).prefix_cache_hits > 0
            asked = [asyncio.ensure_future(one(engine, number)) for number in range(12)]
            while generated(engine) < 30:
                await asyncio.sleep(0)
            await engine.pause()  # so that it is killed amid them
            pid = engine._fleet.processes.pids[0]
            os.kill(pid, signal.SIGKILL)
            await until(lambda: engine._fleet.processes.pids[0] != pid and not engine.is_restarting)
            await engine.resume()
            assert await asyncio.gather(*asked) == calm
            assert engine.metrics.counted("requests_resumed", 0) > 0

    asyncio.run(scene())


def test_what_ends_before_it_is_of_use_waits_longer_each_time_and_what_ends_too_often_is_given_up():
    limit = RestartLimit(6)
    assert [limit.wait_s(was_of_use) for was_of_use in (True, True, False, False, False)] == [0, 0, 1, 2, 4]
    assert limit.wait_s(was_of_use=True) == 0
    assert limit.wait_s(was_of_use=True) is None


@pytest.mark.parametrize(
    "options",
    [
        {"step_timeout_s": 0},
        {"step_timeout_s": 1.0},
        {"start_timeout_s": -1.0},
        {"step_timeout_s": float("nan")},
        {"max_restarts": -1},
        {"spare_processes": "yes"},
    ],
)
def test_restart_options_out_of_range_are_refused_by_name(options):
    with pytest.raises(InvalidParameterError, match=next(iter(options)).removesuffix("_s")):
        RestartOptions(**options)
