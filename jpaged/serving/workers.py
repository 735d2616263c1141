"""`jpaged serve --api-workers N`: the process that starts all others, and ends them together.

    supervise --+--> engine process, one for each replica
                +--> API process 1 --.    each has its own listening socket, a socket to each engine process and a
                +--> API process 2 --'    row of the board
                ...

It takes part in no request. SIGTERM reaches every API process through it, and when they have drained it ends the
engine. An engine process that ends is started again, and so is an API process: its clients' streams break off, those of
the others go on. An API process whose event loop stands still is killed first; a pulse in shared memory shows that.
What ends too often is not started again. Then all drain, and whoever started the server starts it anew, whole.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from jpaged.api.config import EngineArgs
from jpaged.api.errors import EngineDeadError
from jpaged.host.devices import package_environment
from jpaged.processes import handover
from jpaged.processes.async_llm_engine import AsyncLLMEngine, load_tokenizer
from jpaged.processes.keeper import RestartLimit
from jpaged.processes.launch import EngineProcesses, Link, python_command
from jpaged.processes.pulse import Pulse
from jpaged.serving.admission import ClientCounts
from jpaged.serving.options import LAST_WORDS_S, SIGNALS, AppOptions, ServerOptions

log = logging.getLogger("jpaged.server")

_LOGGERS = ("jpaged.server", "jpaged.access")
_END_S = 5.0
"""A drained API process gets this long to end, then it is killed."""
_OF_USE_S = 10.0
"""An API process that ended before that had not served for long; the next one has to wait."""
_LOOK_S = 1.0
"""Between two looks at a pulse."""
_TRACEBACK_S = 0.2
"""A process that hangs gets this long to write its traceback."""


class WorkerStart(msgspec.Struct):
    """The start message of an API process: JSON on its standard input.

    parent: the pid of the supervisor. worker, num_workers: its row of the board, and how many there are.
    board_fd, clients_fd, pulse_fd: shared memory (`Board`, `ClientCounts`, `Pulse`).
    engine_fds: sockets to the replicas, None where no process runs; handover_fd: where those to later ones come from.
    log_levels: by name of the logger.
    """

    args: EngineArgs
    app_options: AppOptions
    server_options: ServerOptions
    parent: int
    worker: int
    num_workers: int
    board_fd: int
    clients_fd: int
    pulse_fd: int
    engine_fds: list[int | None]
    handover_fd: int
    listen_fd: int
    log_levels: dict[str, int]


class _Worker:
    """An API process, and the one that takes its place when it ends.

    number: of the client. start: what it is told, but for the sockets to the replicas. most_restarts: within ten
    minutes. hang_s: one whose event loop does not come round for so long is killed. Its listening socket stays open
    here, so that clients who connect while no process runs wait for the next.
    """

    def __init__(self, number: int, start: WorkerStart, most_restarts: int, hang_s: float) -> None:
        self.number = number
        self.process: Process | None = None
        self._pulse: Pulse | None = None
        self._start = start
        self._hang_s = hang_s
        self._was_hanging = False
        self._limit = RestartLimit(most_restarts)

    async def begin(self, engine: AsyncLLMEngine, sockets: Sequence[socket.socket | None]) -> None:
        """Starts the process. sockets: to the replicas; closed here. Raises OSError if it cannot be started."""
        assert engine.keeper is not None
        start, theirs, pulse = self._start, None, None
        try:
            ours, theirs = handover.socket_pair()
            engine.keeper.add_client(self.number, ours)
            start.engine_fds = [None if sock is None else sock.fileno() for sock in sockets]
            start.handover_fd = theirs.fileno()
            self._pulse = pulse = Pulse.create()
            start.pulse_fd = pulse.fd
            fds = (*start.engine_fds, start.handover_fd, start.board_fd, start.clients_fd, start.pulse_fd)
            self.process = await asyncio.create_subprocess_exec(
                *python_command("jpaged.serving.api_process"),
                stdin=PIPE,
                pass_fds=[fd for fd in (*fds, start.listen_fd) if fd is not None],
                env=package_environment(os.environ),
            )
        finally:
            for one in (theirs, pulse, *sockets):
                if one is not None:
                    one.close()
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(start))
        self.process.stdin.close()

    async def keep(self, engine: AsyncLLMEngine, processes: EngineProcesses) -> None:
        """Starts the process again whenever it ends. Raises EngineDeadError when that is too often."""
        while True:
            assert self.process is not None
            begun, self._was_hanging = time.monotonic(), False
            watching = asyncio.ensure_future(self._kill_when_silent(self.process))
            try:
                code = await self.process.wait()
            finally:
                watching.cancel()
            how = f"ended with signal {-code}" if code < 0 else f"ended with exit code {code}"
            if self._was_hanging:
                how = f"did not come round for {self._hang_s:g} s (--step-timeout) and was killed"
            what = f"API process {self.process.pid} {how}"
            processes.links[0].board.clear_gauges(self.number)
            was_of_use = time.monotonic() - begun > _OF_USE_S
            while True:
                wait_s = self._limit.wait_s(was_of_use)
                if wait_s is None:
                    log.error("%s; the others drain", what)  # which may take a while
                    raise EngineDeadError(f"{what}; start the server anew.")
                log.error("%s; starting it again%s (%s)", what, f" in {wait_s:g} s" if wait_s else "", self._limit)
                await asyncio.sleep(wait_s)
                try:
                    await self.begin(engine, processes.new_client())
                    break
                except OSError as error:  # the machine has no memory, processes or files to spare at the moment
                    what, was_of_use = f"An API process cannot be started ({error})", False

    async def _kill_when_silent(self, process: Process) -> None:
        """Kills the process when its pulse is silent."""
        pulse, late = self._pulse, 0
        assert pulse is not None
        while late < 2:  # once may be because this process was stopped as well, and both go on
            await asyncio.sleep(min(_LOOK_S, self._hang_s / 4))
            late = late + 1 if pulse.silence_s() > self._hang_s else 0
        self._was_hanging = True
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGUSR1)  # it writes its traceback, if it can
            await asyncio.sleep(_TRACEBACK_S)
            process.kill()


async def supervise(
    args: EngineArgs, app_options: AppOptions, options: ServerOptions, listeners: Sequence[socket.socket]
) -> None:
    """Serves with one API process for each listener until SIGTERM or SIGINT, and drains.

    Raises:
        EngineDeadError: an API process or the engine ended too often. What else `AsyncLLMEngine.ready` raises.
    """
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    load_tokenizer(args)  # each API process will; what is wrong with it is better said here, and at once
    processes = EngineProcesses(args, num_clients=1 + len(listeners))
    engine = AsyncLLMEngine(replace(args, skip_tokenizer_init=True), processes=processes, restarts=options.restarts)
    workers: list[_Worker] = []
    clients_fd = ClientCounts.shared(1 + len(listeners))
    for number in SIGNALS:
        loop.add_signal_handler(number, stopped.set)
    try:
        for link, listener in zip(processes.links[1:], listeners, strict=True):
            fds = processes.board_fd, clients_fd
            start = _worker_start(args, app_options, options, fds, link, listener)
            if workers:  # the first says for all that they serve, and that they drain
                start.log_levels[log.name] = max(log.level, logging.WARNING)
            restarts = options.restarts
            worker = _Worker(link.board.worker, start, restarts.max_restarts, restarts.step_timeout_s)
            workers.append(worker)
            await worker.begin(engine, link.sockets)
        await _until_told(engine, processes, workers, stopped)
    finally:
        for listener in listeners:
            listener.close()
        os.close(clients_fd)
        running = [worker.process for worker in workers if worker.process is not None]
        await _end(running, options.shutdown_timeout_s + LAST_WORDS_S + _END_S)
        await engine.shutdown()


async def _until_told(
    engine: AsyncLLMEngine, processes: EngineProcesses, workers: Sequence[_Worker], stopped: asyncio.Event
) -> None:
    """Returns when a signal came; raises when something went wrong for good."""
    ready, stop = asyncio.ensure_future(engine.ready()), asyncio.ensure_future(stopped.wait())
    failed = asyncio.ensure_future(engine.failed())
    kept = [asyncio.ensure_future(worker.keep(engine, processes)) for worker in workers]
    try:
        await asyncio.wait((ready, stop, failed, *kept), return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            await asyncio.wait((stop, failed, *kept), return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            return
        if failed.done():
            raise failed.result()
        for task in kept:
            if task.done():
                task.result()
    finally:
        all_tasks = (ready, stop, failed, *kept)
        for one in all_tasks:
            one.cancel()
        await asyncio.gather(*all_tasks, return_exceptions=True)


async def _end(workers: Sequence[Process], timeout_s: float) -> None:
    """Lets API processes drain. A second Ctrl-C kills them at once."""
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            worker.send_signal(signal.SIGTERM)
    impatient = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, impatient.set)
    ends = [asyncio.ensure_future(worker.wait()) for worker in workers]
    hurry = asyncio.ensure_future(impatient.wait())
    all_ended = asyncio.gather(*ends)
    await asyncio.wait((all_ended, hurry), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    for worker in workers:
        if worker.returncode is None:
            log.warning("API process %d did not end in time and is killed", worker.pid)
            worker.kill()
    await all_ended


def _worker_start(
    args: EngineArgs,
    app_options: AppOptions,
    options: ServerOptions,
    fds: tuple[int, int],
    link: Link,
    listener: socket.socket,
) -> WorkerStart:
    return WorkerStart(
        args=args,
        app_options=app_options,
        server_options=options,
        parent=os.getpid(),
        worker=link.board.worker,
        num_workers=link.board.num_workers,
        board_fd=fds[0],
        clients_fd=fds[1],
        pulse_fd=-1,
        engine_fds=[],
        handover_fd=-1,
        listen_fd=listener.fileno(),
        log_levels={name: logging.getLogger(name).level for name in _LOGGERS},
    )
