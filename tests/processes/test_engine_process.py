"""The engine process's loop, in a thread, before a fake executor: what it does between requests."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from jpaged.api.errors import EngineDeadError
from jpaged.api.sampling_params import SamplingParams
from jpaged.engine.loop import EngineCore
from jpaged.engine.pace import Pace
from jpaged.engine.scheduler.scheduler import Scheduler
from jpaged.processes import engine_process
from jpaged.processes import pulse as pulses
from jpaged.processes.client_requests import StepRequests
from jpaged.processes.connection import Connection
from jpaged.processes.engine_process import EngineProcess
from jpaged.processes.pulse import Pulse
from jpaged.processes.wire import (
    Add,
    Answer,
    Call,
    Changed,
    FrameReader,
    FromEngine,
    GetStats,
    Shutdown,
    Sleep,
    Stats,
    Step,
    UpdateWeights,
    WakeUp,
    frame,
)
from tests.engine.fake_executor import FakeExecutor
from tests.engine.helpers import make_config


def wait_until(happens: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.001)


class Clock:
    """Stands still unless it is told otherwise."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Client:
    """The other end of the engine process's connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._reader, self._messages = sock, FrameReader(FromEngine), []

    def send(self, message) -> None:
        self._sock.sendall(frame(message))

    def receive(self):
        while not self._messages:
            self._messages.extend(self._reader.feed(self._sock.recv(1 << 16)))
        return self._messages.pop(0)

    def generate(self, handle: int, max_tokens: int) -> None:
        prompt = np.arange(4, dtype=np.int32).tobytes()
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.send(Add(handle, prompt, sampling, None, (), 0, None, 0.0))
        finished = False
        while not finished:
            message = self.receive()
            assert isinstance(message, Step)
            finished = any(update.finish_reason for update in message.updates)


def test_time_without_requests_is_no_part_of_the_hosts_turns():
    config, clock = make_config(pipeline_depth=2), Clock()
    pace = Pace(clock)
    core = EngineCore(Scheduler(config, 0), FakeExecutor(config), pace)
    args = SimpleNamespace(scheduling_policy="fcfs", pipeline_depth=2)
    engine = SimpleNamespace(
        core=core, eos_token_ids=(), args=args, get_metrics=core.stats, check_awake=lambda: None, rest=core.rest
    )
    ours, theirs = socket.socketpair()
    theirs.settimeout(60)
    process = EngineProcess(engine, [Connection(ours)], StepRequests(engine), Pulse.create())
    thread = threading.Thread(target=process.run, daemon=True)
    thread.start()
    client = Client(theirs)
    for handle in range(2):
        client.generate(handle, max_tokens=5)
        client.send(Call(handle, GetStats()))  # answered between two turns
        answer = client.receive()
        assert isinstance(answer, Answer)
        assert isinstance(answer.value, Stats)
        clock.now += 30.0
    client.send(Shutdown())
    thread.join(60)
    assert not thread.is_alive()
    assert core.stats().generated_tokens == 10
    assert max(pace._tellings) < 1.0


def test_an_engine_that_falls_asleep_or_wakes_up_does_not_count_as_hung_however_long_it_takes(monkeypatch):
    monkeypatch.setattr(pulses, "IDLE_BEAT_S", 0.001)
    core = EngineCore(Scheduler(make_config(), 0), FakeExecutor(make_config()))
    pulse, beats = Pulse.create(), []

    def take_long(*_) -> bool:
        for _ in range(2):
            beats.append(pulse.beat_at)
            wait_until(lambda: pulse.beat_at > beats[-1])
        return True

    engine = SimpleNamespace(
        core=core,
        args=SimpleNamespace(pipeline_depth=1),
        rest=core.rest,
        sleep=take_long,
        wake_up=take_long,
        request_limits=lambda: core.scheduler.limits,
    )
    ours, theirs = socket.socketpair()
    theirs.settimeout(60)
    process = EngineProcess(engine, [Connection(ours)], StepRequests(engine), pulse)
    thread = threading.Thread(target=process.run, daemon=True)
    thread.start()
    client = Client(theirs)
    for number, question in enumerate((Sleep(2), WakeUp())):
        client.send(Call(number, question))
        assert isinstance(client.receive().value, Changed)
    client.send(Shutdown())
    thread.join(60)
    assert len(set(beats)) == 4  # a thread beats
    assert 0.0 < pulse.silence_s() < 60.0  # the loop beats again


def test_a_process_that_is_stopped_is_silent_whatever_it_was_doing(monkeypatch):
    """In its start, too, and before it has begun."""
    monkeypatch.setattr(pulses, "BEGIN_S", 0.0)
    pulse = Pulse.create()
    resting = subprocess.Popen(
        [sys.executable, "-c", _RESTS, str(pulse.fd)], pass_fds=[pulse.fd], stdout=subprocess.PIPE
    )
    try:
        assert pulse.beat_at == 0.0
        assert pulse.silence_s() > 0.0
        assert resting.stdout.read(1) == b"."
        before = pulse.beat_at
        wait_until(lambda: pulse.beat_at > before)
        os.kill(resting.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, resting.pid, os.WSTOPPED)
        last = pulse.beat_at
        wait_until(lambda: pulse.silence_s() > 0.1)
        assert pulse.beat_at == last
    finally:
        resting.kill()
        resting.communicate()
        pulse.close()


_RESTS = """
import sys, time
from jpaged.processes import pulse
pulse.IDLE_BEAT_S = 0.001
pulse.Pulse(int(sys.argv[1])).rest()
print(end=".", flush=True)
time.sleep(60)
"""


def test_a_process_whose_weights_were_left_half_written_ends_and_says_so(tmp_path):
    """Its keeper starts another, which is given the weights again."""
    core = EngineCore(Scheduler(make_config(), 0), FakeExecutor(make_config()))

    def fail(*_, **__):
        raise EngineDeadError("The engine failed while its weights were replaced: out of memory")

    args = SimpleNamespace(pipeline_depth=1)
    engine = SimpleNamespace(core=core, args=args, rest=core.rest, update_weights=fail)
    ours, theirs = socket.socketpair()
    theirs.settimeout(60)
    process = EngineProcess(engine, [Connection(ours)], StepRequests(engine), Pulse.create())
    (tmp_path / "weights").write_bytes(bytes(8))
    Client(theirs).send(Call(0, UpdateWeights(str(tmp_path / "weights"), [], True, "recompute")))
    with pytest.raises(EngineDeadError, match="while its weights were replaced"):
        process.run()


def test_it_keeps_pytorch_out_before_it_starts_an_engine(monkeypatch):
    """A replica with a tokenizer has transformers, which would import PyTorch."""
    done = []
    for name in ("keep_torch_out", "serve", "end_with_parent"):
        monkeypatch.setattr(engine_process, name, lambda *_, name=name: done.append(name))
    monkeypatch.setattr(engine_process.signal, "signal", lambda *_: None)
    monkeypatch.setattr(engine_process.faulthandler, "register", lambda *_: None)
    ours, theirs = socket.socketpair()
    pulse = Pulse.create()
    try:
        assert engine_process.main([str(pulse.fd), str(os.dup(ours.fileno())), str(os.dup(theirs.fileno()))]) == 1
    finally:
        ours.close()
        theirs.close()
        pulse.close()
    assert done.index("keep_torch_out") < done.index("serve")
