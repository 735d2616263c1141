"""What keeps engine processes running, with processes that do nothing."""

import asyncio
import contextlib
import logging
import signal
import subprocess
import time

import pytest

from jpaged.api.config import EngineArgs, RestartOptions
from jpaged.api.errors import EngineDeadError
from jpaged.processes import handover, keeper, launch
from jpaged.processes.async_llm_engine import AsyncLLMEngine
from jpaged.processes.keeper import EngineKeeper
from jpaged.processes.launch import EngineProcesses, ended_how
from jpaged.processes.pulse import Pulse
from jpaged.serving.server import LOG_FORMAT
from tests.support.pauses import parts_of


@pytest.fixture
def starts(monkeypatch):
    """Engine processes only sleep. What is put into this list is raised by the next starts, one each."""
    errors: list[OSError] = []

    def start(fds, environment):
        if errors:
            raise errors.pop(0)
        return subprocess.Popen(["sleep", "600"], pass_fds=fds)

    monkeypatch.setattr(launch, "_start", start)
    monkeypatch.setattr(keeper, "_FIRST_WAIT_S", 0.01)
    return errors


def run(scene, options=RestartOptions()):  # noqa: B008  # it is frozen
    """Runs a scene with processes, their keeper, and what it has told: sockets to new processes, and errors."""

    async def all_of_it():
        processes, told = EngineProcesses(EngineArgs()), asyncio.Queue()
        kept = EngineKeeper(
            processes, options, lambda _, sock: told.put_nowait(sock), lambda _, error: told.put_nowait(error)
        )
        kept.watch_start()
        kept.start(on_gpu=False)
        try:
            await scene(processes, kept, told)
        finally:
            kept.stop()
            processes.kill()
            processes.wait(10)

    asyncio.run(asyncio.wait_for(all_of_it(), 30))


def test_a_process_that_cannot_be_started_at_the_moment_is_tried_again(starts):
    async def scene(processes, kept, told):
        (before,) = processes.pids
        starts.extend([BlockingIOError(11, "no processes"), OSError(24, "no files")])
        kept.kill(0)
        with contextlib.closing(await told.get()):
            assert processes.pids != [before]
            assert not starts

    run(scene)


def test_a_process_that_ends_while_no_thread_can_be_started_is_started_again(starts, monkeypatch):
    async def no_thread(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(asyncio, "to_thread", no_thread)

    async def scene(processes, kept, told):
        kept.kill(0)
        (await told.get()).close()

    run(scene)


def test_a_process_that_can_never_be_started_is_given_up_and_all_are_told_however_long_the_error(starts):
    async def scene(processes, kept, told):
        ours, theirs = handover.socket_pair()
        kept.add_client(1, ours)
        starts.extend([OSError(12, "no memory " + "x" * 1_000_000)] * 3)
        kept.kill(0)
        error = await told.get()
        assert isinstance(error, EngineDeadError)
        assert str(error).startswith("The engine process cannot be started ([Errno 12] no memory xxx")
        packet, _ = handover.receive(theirs)
        assert (packet.replica, packet.message) == (0, str(error)[:10_000])
        late, its_end = handover.socket_pair()
        kept.add_client(2, late)
        assert handover.receive(its_end)[0] == packet

    run(scene, RestartOptions(max_restarts=3))


def test_a_process_that_does_not_serve_in_time_is_killed_and_the_error_says_so(starts):
    async def scene(processes, kept, told):
        error = await told.get()
        assert "did not serve within 0.2 s of its start (--start-timeout) and was killed" in str(error)
        assert processes.exit_code(0, 1.0) in (-signal.SIGUSR1, -signal.SIGKILL)

    run(scene, RestartOptions(max_restarts=0, start_timeout_s=0.2))


def test_a_process_that_hung_and_is_gone_is_not_taken_for_hung_again(starts, monkeypatch):
    monkeypatch.setattr(keeper, "write_last_steps", lambda *_: time.sleep(0.3))  # meanwhile its pulse is as silent

    async def scene(processes, kept, told):
        with contextlib.closing(await told.get()):
            assert kept.why_hung(0) is None

    run(scene, RestartOptions(start_timeout_s=0.1))


def test_the_first_start_is_watched_like_the_others(starts):
    async def never_ready():
        async with AsyncLLMEngine(EngineArgs(), restarts=RestartOptions(start_timeout_s=0.2)):
            pass

    with pytest.raises(EngineDeadError, match=r"did not serve within 0\.2 s of its start"):
        asyncio.run(asyncio.wait_for(never_ready(), 120))


def test_a_process_that_serves_may_go_on_for_longer_than_a_start_may_take():
    pulse = Pulse.create()
    pulse.rest()
    assert pulse.starting_s() > 0
    pulse.beat()
    assert pulse.starting_s() == 0
    pulse.rest()
    assert pulse.starting_s() == 0


@pytest.mark.parametrize(
    ("code", "words"),
    [(3, "ended with exit code 3"), (-9, "was killed by SIGKILL"), (-signal.SIGRTMIN - 1, "was killed by signal 35")],
)
def test_how_a_process_ended_is_said_of_every_exit_code(code, words):
    assert ended_how(code) == words


def test_the_log_tells_the_parts_of_a_pause_as_the_drill_reads_them(starts, caplog):
    async def scene(processes, kept, told):
        kept.kill(0)
        with contextlib.closing(await told.get()):
            kept.serves(0, {"open devices": 0.4, "load weights": 0.75})

    begun = time.time()  # noqa: TID251  # the log has dates
    with caplog.at_level(logging.WARNING, "jpaged.engine"):
        run(scene)
    (record,) = [one for one in caplog.records if "serves again" in one.message]
    parts = parts_of(begun, 10.0, logging.Formatter(LOG_FORMAT).format(record))
    assert parts.keys() == {
        *("pause_s", "noticed", "gone", "import", "open devices", "load weights", "next token"),
    }
    assert (parts["pause_s"], parts["open devices"], parts["load weights"]) == (10.0, 0.4, 0.75)
    assert 0.0 <= parts["noticed"] < 10.0
    assert parts_of(begun, 10.0, "") == {"pause_s": 10.0}
