"""An API process among several: `python -m jpaged.serving.api_process`, started by `supervise` only.

It reads a `WorkerStart` from its standard input, and serves on the socket that it inherits with the engine processes
that others share with it. SIGTERM makes it drain; Ctrl-C is the supervisor's to deal with, whose end is also its own.
Its pulse shows the supervisor that its event loop comes round.
"""

import asyncio
import faulthandler
import logging
import signal
import socket
import sys

import msgspec
import uvloop

from jpaged.api.errors import JPagedError
from jpaged.host.imports import keep_torch_out
from jpaged.host.parent import end_with_parent
from jpaged.processes.async_llm_engine import AsyncLLMEngine
from jpaged.processes.board import Board
from jpaged.processes.launch import Link
from jpaged.processes.pulse import IDLE_BEAT_S, Pulse
from jpaged.processes.request_metrics import NUM_COLUMNS
from jpaged.serving.admission import ClientCounts
from jpaged.serving.server import LOG_FORMAT, run
from jpaged.serving.workers import WorkerStart


def main() -> int:
    """Returns when it has drained."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)  # sent before a process that hangs is killed
    keep_torch_out()
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerStart)
    end_with_parent(start.parent)
    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT)
    for name, level in start.log_levels.items():
        logging.getLogger(name).setLevel(level)
    replicas = [None if fd is None else socket.socket(fileno=fd) for fd in start.engine_fds]
    board = Board(start.num_workers, len(replicas), NUM_COLUMNS, start.worker, start.board_fd)
    listener = socket.socket(fileno=start.listen_fd)
    try:
        engine = AsyncLLMEngine(start.args, link=Link(replicas, board, socket.socket(fileno=start.handover_fd)))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            _beat(runner.get_loop(), Pulse(start.pulse_fd))
            clients = ClientCounts(start.num_workers, start.worker, start.clients_fd)
            runner.run(run(engine, start.app_options, start.server_options, listener, (signal.SIGTERM,), clients))
    except JPagedError:
        return 1  # the supervisor meets the same error, and says so
    return 0


def _beat(loop: asyncio.AbstractEventLoop, pulse: Pulse) -> None:
    """Beats at each `IDLE_BEAT_S`, as long as the loop comes round."""
    pulse.beat()
    loop.call_later(IDLE_BEAT_S, _beat, loop, pulse)


if __name__ == "__main__":
    sys.exit(main())
