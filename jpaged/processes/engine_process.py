"""The engine process: `python -m jpaged.processes.engine_process PULSE CONTROL FD [FD ...]`.

    clients                                        engine process
    -------                                        --------------
    check, tokenize      -- Add, Abort, ... -->    read what comes until a step is due, add it
                                                   one engine step
    hand on              <-- Step | Outputs ---    one message a step, never waiting for the reader

`EngineProcesses` starts it. Each FD is one end of a socket pair; a client holds the other: an API process of a server,
or a program with replicas. The first client is the process that started this one; it sends further clients over CONTROL
(`handover.py`) and finds in PULSE whether the loop comes round (`pulse.py`). Prompts come as token ids. The process
ends when it is told to, when the first client is gone (its sockets are closed by the kernel, however it ended), or when
its parent is another than it was. With `--spare FD` it gets PULSE, CONTROL and FDs later (`spare.py`).
"""

import faulthandler
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from jpaged.api.errors import EngineDeadError, JPagedError
from jpaged.frontend.llm_engine import LLMEngine, check_one_host
from jpaged.host.device_memory import MemoryNotSharedError
from jpaged.host.imports import keep_torch_out
from jpaged.host.parent import end_with_parent
from jpaged.processes import handover, wire
from jpaged.processes.client_requests import ClientRequests, make_client_requests
from jpaged.processes.connection import RECEIVE_BYTES, Connection, ConnectionClosedError
from jpaged.processes.flight_recorder import FlightRecorder
from jpaged.processes.opened_weights import opened
from jpaged.processes.pool_view import PoolView, view_pool
from jpaged.processes.pulse import IDLE_BEAT_S, Pulse
from jpaged.processes.shared_weights import map_arrays
from jpaged.processes.spare import await_descriptors
from jpaged.processes.trials import Trials

_SHORTEST_WAIT_S = 0.001
"""`poll` takes whole milliseconds, so a shorter wait is no wait."""

_NewWeights = wire.UpdateWeights | wire.UpdateWeightsOnDevice


class EngineProcess:
    """The step loop and its connections.

    pulse: shared with whoever watches that the loop comes round. control: where further clients come from; None: there
    will be none. ready: what each is told first.
    """

    def __init__(
        self,
        engine: LLMEngine,
        connections: list[Connection],
        requests: ClientRequests,
        pulse: Pulse,
        control: socket.socket | None = None,
        ready: wire.Ready | None = None,
    ) -> None:
        self._engine = engine
        self._connections = connections
        self._requests = requests
        self._pulse = pulse
        self._control = control
        self._ready = ready
        self._trials = Trials(requests, self._start, engine.args.pipeline_depth + 2)
        self._shutdown = False
        self._poll = select.poll()
        for connection in connections:
            self._poll.register(connection.sock, select.POLLIN)
        if control is not None:
            control.setblocking(False)
            self._poll.register(control, select.POLLIN)

    def run(self) -> None:
        """Serves until told to end or until no client is left."""
        requests = self._requests
        has_idle_memory = False
        while self._connections and not self._shutdown:
            self._pulse.beat()
            spare_s = requests.spare_s()  # in any case: the host's part of a turn ends with it
            if requests.awaits_news:
                spare_s = min(spare_s, _SHORTEST_WAIT_S)
            self._receive(spare_s if requests.can_step() else 0.0 if has_idle_memory else IDLE_BEAT_S)
            self._send(requests.collect())
            self._trials.advance()
            can_step = requests.can_step()
            has_idle_memory = not (can_step or requests.has_unfinished()) and self._engine.rest()
            if can_step and requests.spare_s() < _SHORTEST_WAIT_S:
                self._send(requests.step())

    def _send(self, messages: Mapping[Connection, wire.FromEngine]) -> None:
        for connection, message in messages.items():
            connection.send(message)

    def _receive(self, wait_s: float) -> None:
        """Takes the messages that have come. Without any, waits for some, at most `wait_s`."""
        wait_ms = max(0, int(wait_s * 1000))
        unsent = False
        for connection in self._connections:
            connection.flush()
            unsent |= connection.has_unsent
        if wait_ms != 0:
            mask = select.POLLIN | (select.POLLOUT if unsent else 0)
            for connection in self._connections:
                self._poll.modify(connection.sock, mask)
        events = self._poll.poll(wait_ms)
        if not events:
            return
        if self._control is not None and any(fd == self._control.fileno() for fd, _ in events):
            self._welcome()
        for connection in list(self._connections):
            try:
                for message in connection.receive():
                    self._take(connection, message)
            except ConnectionClosedError:
                self._drop(connection)

    def _welcome(self) -> None:
        """Takes the clients that have come since the start."""
        while self._control is not None:
            try:
                _, sock = handover.receive(self._control)
            except BlockingIOError:
                return
            except EOFError:  # who sent them is gone
                self._poll.unregister(self._control)
                self._control = None
                return
            assert sock is not None
            connection = Connection(sock)
            self._connections.append(connection)
            self._poll.register(sock, select.POLLIN)
            if self._ready is not None:
                connection.send(self._ready)

    def _drop(self, connection: Connection) -> None:
        """A client is gone: aborts its requests."""
        self._poll.unregister(connection.sock)
        connection.sock.close()
        self._connections.remove(connection)
        self._trials.drop(connection)
        self._requests.abort(self._requests.of(connection))

    def _take(self, connection: Connection, message: wire.ToEngine) -> None:
        if isinstance(message, wire.Add):
            self._trials.add(connection, message)
        elif isinstance(message, wire.Abort):
            self._trials.abort(connection, message.handles)
            ids = [connection.request_id(handle) for handle in message.handles]
            if not message.reports:
                self._requests.abort(ids)
            elif (last := self._requests.abort_reporting(ids)) is not None:
                connection.send(last)
        elif isinstance(message, wire.Finish):
            self._trials.finish(connection, message)
            self._requests.finish(connection.request_id(message.handle), message)
        elif isinstance(message, wire.Call):
            connection.send(self._answer(message))
        elif isinstance(message, wire.Shutdown):
            self._shutdown = True

    def _start(self, connection: Connection, message: wire.Add) -> None:
        try:
            self._engine.check_awake()
            request = message.request(connection.request_id(message.handle), self._engine.eos_token_ids)
            self._requests.add(request, connection, message.handle, message.resumed)
        except JPagedError as error:
            connection.send(wire.Refused(message.handle, type(error).__name__, str(error)))

    def _answer(self, call: wire.Call) -> wire.Answer:
        try:
            return wire.Answer(call.call_id, self._reply(call.question))
        except JPagedError as error:
            if isinstance(error, EngineDeadError) and isinstance(call.question, _NewWeights):
                raise  # this process has no weights of use; the one that takes its place is given them again
            return wire.Answer(call.call_id, wire.Error(type(error).__name__, str(error)))

    def _reply(self, question: wire.Question) -> wire.Reply:
        engine = self._engine
        if isinstance(question, wire.GetRequests):
            return wire.Requests(self._requests.views(question.most))
        if isinstance(question, wire.GetStats):
            return wire.Stats(engine.get_metrics())
        if isinstance(question, wire.GetPool):
            return wire.Pool(engine.get_metrics(expert_load=False), self._pool_view())
        if isinstance(question, wire.CheckIntegrity):
            engine.core.check_integrity()
            return wire.Intact()
        if isinstance(question, wire.ResetPrefixCache):
            return wire.Changed(int(engine.reset_prefix_cache()), engine.request_limits())
        if isinstance(question, wire.Sleep | wire.WakeUp | _NewWeights | wire.GiveBackWeights):
            self._pulse.rest()  # gigabytes are moved, read or mapped
        if isinstance(question, wire.Sleep):
            return wire.Changed(int(engine.sleep(question.level)), engine.request_limits())
        if isinstance(question, wire.WakeUp):
            engine.wake_up()
            return wire.Changed(1, engine.request_limits())
        if isinstance(question, _NewWeights):
            return self._update_weights(question)
        if isinstance(question, wire.GiveBackWeights):
            return wire.Changed(int(engine.startup.give_back_weights()), engine.request_limits())
        if isinstance(question, wire.SetPaused):
            if question.paused:
                engine.pause()
            else:
                engine.resume()
            return wire.Changed(int(question.paused), engine.request_limits())
        tokens = np.frombuffer(question.token_ids, np.int32).tolist()
        change = engine.pin_prefix if isinstance(question, wire.PinPrefix) else engine.unpin_prefix
        return wire.Changed(int(change(tokens, question.cache_salt)), engine.request_limits())

    def _update_weights(self, question: _NewWeights) -> wire.Reply:
        begun = time.perf_counter()
        with ExitStack() as stack:
            if isinstance(question, wire.UpdateWeights):
                weights: Mapping[str, Any] = map_arrays(question.path, question.arrays)
            else:
                try:
                    weights = stack.enter_context(opened(question))
                except MemoryNotSharedError as error:
                    return wire.Unreachable(str(error))
            has_them = time.perf_counter()
            self._engine.update_weights(weights, partial=question.partial, in_flight=question.in_flight)
            has_written = time.perf_counter()
        seconds = {
            "open": has_them - begun,
            "write": has_written - has_them,
            "close": time.perf_counter() - has_written,
        }
        return wire.Changed(1, self._engine.request_limits(), seconds)

    def _pool_view(self) -> PoolView:
        scheduler = self._engine.core.scheduler
        return view_pool(*scheduler.pool.occupancy(), self._requests.tables(), scheduler.config.block_size)


def main(argv: list[str]) -> int:
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C and a service manager's SIGTERM reach every
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # process; the client decides when this one ends
    keep_torch_out()
    faulthandler.register(signal.SIGUSR1)  # whoever finds this process hanging asks where, before it kills it
    if argv[0] == "--spare":
        end_with_parent(parent)
        pulse, control, *fds = await_descriptors(int(argv[1]))
    else:
        pulse, control, *fds = map(int, argv)
    end_with_parent(parent, fds[:1])
    sockets = [socket.socket(fileno=fd) for fd in fds]
    if not serve(sockets, Pulse(pulse), socket.socket(fileno=control)):
        return 1
    os._exit(0)  # nothing is left to save, and taking JAX down in order lasts seconds


def serve(sockets: Sequence[socket.socket], pulse: Pulse, control: socket.socket | None = None) -> bool:
    """Starts the engine that the first client asks for and serves all until they are gone, or one ends it.

    pulse, control: as of `EngineProcess`.

    Returns: False where the engine could not start; the clients have been told why.
    """
    start = _receive_start(sockets[0])
    if start is None:
        return True
    connections = [Connection(sock) for sock in sockets]
    pulse.rest()
    begun = time.monotonic()
    try:
        check_one_host(start.args)
        args = replace(start.args, data_parallel_size=1)  # other replicas have processes of their own
        engine = LLMEngine(args, with_tokenizer=start.reports != "steps")  # else text is the clients' business
        if engine.startup.on_first_use is not None:
            engine.startup.on_first_use.before = pulse.rest  # to compile takes long
    except Exception as error:  # JAX and the operating system have many; whoever started this is told
        _send_last(connections, wire.Failed(type(error).__name__, str(error)))
        return False
    phases = engine.startup.seconds
    ready = wire.Ready(
        pid=os.getpid(),
        device=engine.startup.device,
        vocab_size=engine.vocab_size,
        limits=engine.request_limits(),
        eos_token_ids=engine.eos_token_ids,
        default_sampling_params=engine.default_sampling_params,
        startup_s=phases | {"other": time.monotonic() - begun - sum(phases.values())},
        on_gpu=engine.startup.on_gpu,
        has_prefix_cache=engine.has_prefix_cache,
    )
    for connection in connections:
        connection.send(ready)
    if start.reports == "steps":  # else nobody starts the process again
        engine.core.observer = FlightRecorder(pulse, engine.core.scheduler.slots)
        engine.prepare_structured_outputs()
    process = EngineProcess(engine, connections, make_client_requests(engine, start.reports), pulse, control, ready)
    try:
        process.run()
    except Exception as error:  # a defect: it is raised again, for the traceback
        _send_last(connections, _failure(error))
        raise
    return True


def _receive_start(sock: socket.socket) -> wire.Start | None:
    """The first message; None if the client is gone before it."""
    reader = wire.FrameReader(wire.ToEngine)
    while data := sock.recv(RECEIVE_BYTES):
        for message in reader.feed(data):
            if not isinstance(message, wire.Start):
                raise TypeError(f"The first message was {type(message).__name__}, not Start.")
            return message
    return None


def _failure(error: Exception) -> wire.Failed:
    """What clients are told of an error that the engine does not survive."""
    if isinstance(error, EngineDeadError):  # it says so itself
        return wire.Failed("EngineDeadError", str(error))
    return wire.Failed("EngineDeadError", f"The engine failed: {type(error).__name__}: {error}")


def _send_last(connections: list[Connection], message: wire.FromEngine) -> None:
    for connection in connections:
        connection.send_last(message)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
