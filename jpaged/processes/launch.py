"""Starts engine processes, one for each replica, and gives every client a socket to each.

    client 0   links[0].sockets[0] ----------- replica 0: engine process
               links[0].sockets[1] ---. .----'
    client 1   links[1].sockets[0] ---|-'
               links[1].sockets[1] ---'------- replica 1: engine process

All are ends of socket pairs: nothing listens anywhere, and whoever ends, the kernel tells the others.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jpaged.api.config import EngineArgs
from jpaged.host.devices import package_environment, replica_environments
from jpaged.processes.board import Board, shared_memory
from jpaged.processes.request_metrics import NUM_COLUMNS
from jpaged.processes.wire import Reports, Start, frame

_SOCKET_BYTES = 1 << 20


@dataclass(frozen=True)
class Link:
    """What a client has of the engine: a socket to each replica, and its row of the board."""

    sockets: list[socket.socket]
    board: Board


class EngineProcesses:
    """Starts the engine processes of a model's replicas.

    args: `data_parallel_size` of them. num_clients: that will talk to them; if there are several, all but this
        process's links are to be inherited, by `pass_fds`. reports: what the clients are told of each step.

    Attributes:
        links: for each client.
        board_fd: of the memory of their boards; -1 with one client.

    Raises:
        InvalidParameterError: as `replica_environments`.
    """

    def __init__(self, args: EngineArgs, num_clients: int = 1, reports: Reports = "steps") -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        num_replicas = args.data_parallel_size
        environments = replica_environments(args, os.environ) if num_replicas > 1 else [package_environment(os.environ)]
        self.board_fd = -1 if num_clients == 1 else shared_memory(num_clients, num_replicas, NUM_COLUMNS)
        self.links = [
            Link([], Board(num_clients, num_replicas, NUM_COLUMNS, client, self.board_fd))
            for client in range(num_clients)
        ]
        for replica, environment in enumerate(environments):
            pairs = [_socket_pair() for _ in range(num_clients)]
            theirs = [pair[1] for pair in pairs]
            self._processes.append(_start(theirs, environment))
            for end in theirs:
                end.close()
            for link, (ours, _) in zip(self.links, pairs, strict=True):
                link.sockets.append(ours)
            own = replace(args, verbose=args.verbose and replica == 0)
            self.links[0].sockets[replica].sendall(frame(Start(own, reports)))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def exit_code(self, replica: int, timeout_s: float) -> int | None:
        """The exit code of a replica that is about to end; None if it still runs after `timeout_s`."""
        try:
            return self._processes[replica].wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def wait(self, timeout_s: float) -> None:
        """Waits until all have ended; kills those that still run after `timeout_s`."""
        end = time.monotonic() + timeout_s
        for process in self._processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package, whatever the current directory."""
    return [sys.executable, "-P", "-m", module, *arguments]


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in pair:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
    return pair


def _start(sockets: list[socket.socket], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    fds = [sock.fileno() for sock in sockets]
    return subprocess.Popen(
        python_command("jpaged.processes.engine_process", *map(str, fds)),
        stdin=subprocess.DEVNULL,
        pass_fds=fds,
        env=environment,
        process_group=0,  # Ctrl-C is for this process, which deals with it
    )
