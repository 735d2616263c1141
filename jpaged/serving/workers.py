"""`jpaged serve --api-workers N`: the process that starts all others, and ends them together.

    supervise --+--> engine process, one for each replica
                +--> API process 1 --.    each has its own listening socket, a socket to each engine process and a
                +--> API process 2 --'    row of the board
                ...

It takes part in no request. SIGTERM reaches every API process through it, and when they have drained it ends the
engine. An API process that ends by itself takes its clients' streams with it; the others drain, and then all is over:
whoever started the server starts it anew, whole.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from jpaged.api.config import EngineArgs
from jpaged.api.errors import EngineDeadError
from jpaged.host.devices import package_environment
from jpaged.processes.async_llm_engine import AsyncLLMEngine, load_tokenizer
from jpaged.processes.launch import EngineProcesses, Link, python_command
from jpaged.serving.admission import ClientCounts
from jpaged.serving.options import LAST_WORDS_S, SIGNALS, AppOptions, ServerOptions

log = logging.getLogger("jpaged.server")

_LOGGERS = ("jpaged.server", "jpaged.access")
_END_S = 5.0
"""A drained API process gets this long to end, then it is killed."""


class WorkerStart(msgspec.Struct):
    """The start message of an API process: JSON on its standard input.

    parent: the pid of the supervisor. worker, num_workers: its row of the board, and how many there are.
    board_fd, clients_fd: shared memory (`Board`, `ClientCounts`).
    engine_fds: sockets to the replicas. log_levels: by name of the logger.
    """

    args: EngineArgs
    app_options: AppOptions
    server_options: ServerOptions
    parent: int
    worker: int
    num_workers: int
    board_fd: int
    engine_fds: list[int]
    clients_fd: int
    listen_fd: int
    log_levels: dict[str, int]


async def supervise(
    args: EngineArgs, app_options: AppOptions, options: ServerOptions, listeners: Sequence[socket.socket]
) -> None:
    """Serves with one API process for each listener until SIGTERM or SIGINT, and drains.

    Raises:
        EngineDeadError: an API process ended by itself. What else `AsyncLLMEngine.ready` raises.
    """
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    load_tokenizer(args)  # each API process will; what is wrong with it is better said here, and at once
    processes = EngineProcesses(args, num_clients=1 + len(listeners))
    engine = AsyncLLMEngine(replace(args, skip_tokenizer_init=True), processes=processes)
    workers: list[Process] = []
    clients_fd = ClientCounts.shared(1 + len(listeners))
    for number in SIGNALS:
        loop.add_signal_handler(number, stopped.set)
    try:
        for link, listener in zip(processes.links[1:], listeners, strict=True):
            fds = processes.board_fd, clients_fd
            start = _worker_start(args, app_options, options, fds, link, listener)
            if workers:  # the first says for all that they serve, and that they drain
                start.log_levels[log.name] = max(log.level, logging.WARNING)
            workers.append(await _start(start))
            for sock in link.sockets:
                sock.close()
        for listener in listeners:
            listener.close()
        await _until_told(engine, workers, stopped)
    finally:
        os.close(clients_fd)
        await _end(workers, options.shutdown_timeout_s + LAST_WORDS_S + _END_S)
        await engine.shutdown()


async def _until_told(engine: AsyncLLMEngine, workers: Sequence[Process], stopped: asyncio.Event) -> None:
    """Returns when a signal came; raises when something went wrong."""
    ready, stop = asyncio.ensure_future(engine.ready()), asyncio.ensure_future(stopped.wait())
    ends = [asyncio.ensure_future(worker.wait()) for worker in workers]
    try:
        await asyncio.wait((ready, stop, *ends), return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            await asyncio.wait((stop, *ends), return_when=asyncio.FIRST_COMPLETED)
        for worker in workers:
            if worker.returncode is not None and not stop.done():
                how = f"signal {-worker.returncode}" if worker.returncode < 0 else f"exit code {worker.returncode}"
                what = f"API process {worker.pid} ended with {how}"
                log.error("%s; the others drain", what)  # which may take a while
                raise EngineDeadError(f"{what}; start the server anew.")
    finally:
        for task in (ready, stop, *ends):
            task.cancel()
        await asyncio.gather(ready, stop, *ends, return_exceptions=True)


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
        engine_fds=[sock.fileno() for sock in link.sockets],
        listen_fd=listener.fileno(),
        log_levels={name: logging.getLogger(name).level for name in _LOGGERS},
    )


async def _start(start: WorkerStart) -> Process:
    process = await asyncio.create_subprocess_exec(
        *python_command("jpaged.serving.api_process"),
        stdin=PIPE,
        pass_fds=(*start.engine_fds, start.board_fd, start.clients_fd, start.listen_fd),
        env=package_environment(os.environ),
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(start))
    process.stdin.close()
    return process
