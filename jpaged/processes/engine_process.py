"""The engine process: `python -m jpaged.processes.engine_process FD [FD ...]`, started by `EngineProcesses`.

    API process(es)                                engine process
    ---------------                                --------------
    tokenize, check      -- Add, Abort, ... -->    read what comes until a step is due, add it
                                                   EngineCore.step()
    detokenize, JSON     <-- Step -------------    one message a step, never waiting for the reader

Each FD is one end of a socket pair; an API process holds the other. The step loop does nothing that grows with text:
prompts come as token ids, and tokens leave as arrays. The process ends when it is told to, when the last API process
is gone (its sockets are closed by the kernel, however it ended), or when its parent is another than it was.
"""

import os
import select
import signal
import socket
import sys
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from jpaged.api.errors import JPagedError
from jpaged.engine.scheduler.scheduler import RequestUpdate
from jpaged.engine.sequences.request import Request, RequestStatus
from jpaged.frontend.llm_engine import LLMEngine
from jpaged.host.parent import end_with_parent
from jpaged.processes.pool_view import PoolView, view_pool
from jpaged.processes.replicas import check_one_host
from jpaged.processes.wire import (
    Abort,
    Add,
    Answer,
    Call,
    Dead,
    Failed,
    Finish,
    FrameReader,
    FromEngine,
    Ready,
    Refused,
    Shutdown,
    Start,
    Step,
    ToEngine,
    Update,
    frame,
)

_RECEIVE_BYTES = 1 << 16
"""At once; Python allocates as many for each call, and gives back what did not come."""

_SHORTEST_WAIT_S = 0.001
"""Time-outs of a poll are whole milliseconds."""


class _Closed(Exception):
    """The other end of a connection is gone."""


class Connection:
    """One API process. Sending never blocks: what the socket does not take waits in memory."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._reader = FrameReader(ToEngine)
        self._unsent = bytearray()

    def receive(self) -> Iterator[ToEngine]:
        """What has come. Raises _Closed when the other end is gone."""
        try:
            data = self.sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise _Closed from error
        if not data:
            raise _Closed
        yield from self._reader.feed(data)

    def send(self, message: FromEngine) -> None:
        self._unsent += frame(message)
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes. A lost connection shows when it is read."""
        while self._unsent:
            try:
                sent = self.sock.send(self._unsent)
            except (BlockingIOError, OSError):
                return
            del self._unsent[:sent]

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)


@dataclass(slots=True)
class _Tenant:
    """A request of an API process. num_logprobs: positions sent, by the index of a sequence that has had an update."""

    request: Request
    connection: Connection
    handle: int
    num_logprobs: dict[int, int] = field(default_factory=dict)


class EngineProcess:
    """The step loop and its connections.

    engine: only its core is used.
    """

    def __init__(self, engine: LLMEngine, connections: list[Connection]) -> None:
        self._engine = engine
        self._core = engine.core
        self._connections = connections
        self._tenants: dict[str, _Tenant] = {}
        self._not_started: deque[_Tenant] = deque()
        self._shutdown = False
        self._poll = select.poll()
        for connection in connections:
            self._poll.register(connection.sock, select.POLLIN)

    def run(self) -> None:
        """Serves until told to end or until no API process is left."""
        while self._connections and not self._shutdown:
            spare_s = self._core.spare_s()  # in any case: the host's part of a turn ends with it
            self._receive(spare_s if self._core.has_unfinished() else None)
            if self._core.has_unfinished() and self._core.spare_s() < _SHORTEST_WAIT_S:
                self._send_step(self._core.step(just_in_time=True))

    def _receive(self, wait_s: float | None) -> None:
        """Takes what has come; if nothing has, waits for it, `wait_s` at most (None: for ever)."""
        wait_ms = None if wait_s is None else max(0, int(wait_s * 1000))
        unsent = False
        for connection in self._connections:
            connection.flush()
            unsent |= connection.has_unsent
        if wait_ms != 0:
            mask = select.POLLIN | (select.POLLOUT if unsent else 0)
            for connection in self._connections:
                self._poll.modify(connection.sock, mask)
        if not self._poll.poll(wait_ms):
            return
        for connection in list(self._connections):
            try:
                for message in connection.receive():
                    self._take(connection, message)
            except _Closed:
                self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        """An API process is gone: nobody waits for its requests."""
        self._poll.unregister(connection.sock)
        connection.sock.close()
        self._connections.remove(connection)
        self._abort([t.request.request_id for t in self._tenants.values() if t.connection is connection])

    def _take(self, connection: Connection, message: ToEngine) -> None:
        if isinstance(message, Add):
            self._add(connection, message)
        elif isinstance(message, Abort):
            self._abort([_request_id(connection, handle) for handle in message.handles])
        elif isinstance(message, Finish):
            request_id = _request_id(connection, message.handle)
            self._core.finish(request_id, message.stop_reason, message.index)
            tenant = self._tenants.get(request_id)
            if tenant is not None and tenant.request.group.finished:
                del self._tenants[request_id]
        elif isinstance(message, Call):
            connection.send(self._answer(message))
        elif isinstance(message, Shutdown):
            self._shutdown = True

    def _add(self, connection: Connection, message: Add) -> None:
        request_id = _request_id(connection, message.handle)
        try:
            request = Request(
                request_id,
                np.frombuffer(message.prompt, np.int32),
                message.sampling,
                eos_token_ids=self._engine.eos_token_ids,
                bad_words_token_ids=message.bad_words_token_ids,
                priority=message.priority,
                cache_salt=message.cache_salt,
                arrival_time=message.arrival_time,
                beam=message.beam,
            )
            self._core.add_request(request)
        except JPagedError as error:
            connection.send(Refused(message.handle, type(error).__name__, str(error)))
            return
        tenant = self._tenants[request_id] = _Tenant(request, connection, message.handle)
        self._not_started.append(tenant)

    def _abort(self, request_ids: list[str]) -> None:
        self._core.abort(request_ids)
        for request_id in request_ids:
            self._tenants.pop(request_id, None)

    def _answer(self, call: Call) -> Answer:
        try:
            if call.name == "stats":
                return Answer(call.call_id, stats=self._core.stats())
            if call.name == "pool":
                return Answer(call.call_id, stats=self._core.stats(), pool=self._pool_view())
            if call.name == "reset_prefix_cache":
                return Answer(call.call_id, done=self._core.reset_prefix_cache())
            if call.name == "check_integrity":
                self._core.check_integrity()
                return Answer(call.call_id, done=True)
        except JPagedError as error:
            return Answer(call.call_id, error=str(error))
        return Answer(call.call_id, error=f"There is no call {call.name!r}.")

    def _pool_view(self) -> PoolView:
        scheduler = self._core.scheduler
        tables = []
        for slot in scheduler.slots.used().tolist():
            request = scheduler.slots.requests[slot]
            tenant = None if request is None else self._tenants.get(request.request_id)
            if tenant is not None:  # else: it has ended, and steps that are under way still use its blocks
                tables.append((tenant.handle, scheduler.slots.blocks(slot)))
        return view_pool(*scheduler.pool.occupancy(), tables, scheduler.config.block_size)

    def _send_step(self, updates: list[RequestUpdate]) -> None:
        """One message to each connection that a step has news for."""
        news: dict[Connection, tuple[array, array, list[Update], array]] = {}
        current: Connection | None = None
        ended: list[str] = []
        for request, token_ids in updates:
            tenant = self._tenants[request.request_id]
            if tenant.connection is not current:  # nearly always there is only one
                current = tenant.connection
                handles, tokens, rare, _ = news.setdefault(current, _no_news())
            is_plain = len(token_ids) == 1 and not request.finished and request.logprobs is None
            if is_plain and tenant.num_logprobs and len(request.group.members) == 1:
                handles.append(tenant.handle)
                tokens.append(token_ids[0])
            else:
                rare.append(_update(tenant, request, token_ids))
                if request.finished and request.group.finished:
                    ended.append(request.request_id)
        for request_id in ended:
            self._tenants.pop(request_id, None)
        for tenant in self._take_started():
            news.setdefault(tenant.connection, _no_news())[3].append(tenant.handle)
        for connection, (handles, tokens, rare, started) in news.items():
            connection.send(Step(handles.tobytes(), tokens.tobytes(), rare, started.tobytes()))

    def _take_started(self) -> list[_Tenant]:
        """Those that have started since the last call: the first in the queue, or any where some have priority."""
        waiting, started = self._not_started, []
        if self._engine.args.scheduling_policy == "priority":
            started = [tenant for tenant in waiting if tenant.request.status != RequestStatus.WAITING]
            if started:
                self._not_started = deque(t for t in waiting if t.request.status == RequestStatus.WAITING)
            return started
        while waiting and waiting[0].request.status != RequestStatus.WAITING:
            started.append(waiting.popleft())
        return started


def _no_news() -> tuple[array, array, list[Update], array]:
    return array("q"), array("i"), [], array("q")


def _update(tenant: _Tenant, request: Request, token_ids: list[int]) -> Update:
    first = request.index not in tenant.num_logprobs
    logprobs, num_logprobs = None, 0
    if request.logprobs is not None:
        logprobs = request.logprobs[tenant.num_logprobs.get(request.index, 0) :]
        num_logprobs = len(request.logprobs)
    tenant.num_logprobs[request.index] = num_logprobs
    return Update(
        handle=tenant.handle,
        index=request.index,
        token_ids=token_ids,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        num_cached_tokens=request.num_cached_tokens,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs if first else None,
        stats=request.stats if first or request.finished else None,
        cumulative_logprob=request.cumulative_logprob,
        score=request.score,
    )


def _request_id(connection: Connection, handle: int) -> str:
    return f"{connection.sock.fileno()}:{handle}"


def main(argv: list[str]) -> int:
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C and a service manager's SIGTERM reach every
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # process; the API process decides when this one ends
    fds = [int(fd) for fd in argv]
    sockets = [socket.socket(fileno=fd) for fd in fds]
    end_with_parent(parent, fds)
    start = _receive_start(sockets[0])
    connections = [Connection(sock) for sock in sockets]
    try:
        check_one_host(start.args)
        # One replica; others have processes of their own. And text is the API processes' business.
        engine = LLMEngine(replace(start.args, data_parallel_size=1, skip_tokenizer_init=True))
    except Exception as error:  # JAX and the operating system have many; whoever started this is told
        _send_last(connections, Failed(type(error).__name__, str(error)))
        return 1
    ready = Ready(
        pid=os.getpid(),
        vocab_size=engine.vocab_size,
        limits=engine.request_limits(),
        eos_token_ids=engine.eos_token_ids,
        default_sampling_params=engine.default_sampling_params,
        startup_s=engine.startup.seconds,
    )
    for connection in connections:
        connection.send(ready)
    process = EngineProcess(engine, connections)
    try:
        process.run()
    except Exception as error:  # a defect: it is raised again, for the traceback
        _send_last(connections, Dead(f"{type(error).__name__}: {error}"))
        raise
    os._exit(0)  # nothing is left to save, and taking JAX down in order lasts seconds


def _receive_start(sock: socket.socket) -> Start:
    reader = FrameReader(ToEngine)
    while True:
        data = sock.recv(_RECEIVE_BYTES)
        if not data:
            sys.exit(0)
        for message in reader.feed(data):
            if not isinstance(message, Start):
                raise TypeError(f"The first message was {type(message).__name__}, not Start.")
            return message


def _send_last(connections: list[Connection], message: FromEngine) -> None:
    for connection in connections:
        connection.sock.setblocking(True)
        connection.send(message)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
