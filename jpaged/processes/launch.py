"""Starts engine processes, one for each replica, and gives every client a socket to each.

    client 0   links[0].sockets[0] ----------- replica 0: engine process
               links[0].sockets[1] ---. .----'
    client 1   links[1].sockets[0] ---|-'
               links[1].sockets[1] ---'------- replica 1: engine process

All are ends of socket pairs: nothing listens anywhere, and whoever ends, the kernel tells the others. Each engine
process also has a control channel to the process that started it (`handover.py`), and shares a sign of life with it
(`pulse.py`).
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jpaged.api.config import EngineArgs
from jpaged.host.devices import package_environment, replica_environments
from jpaged.processes import handover
from jpaged.processes.board import Board, shared_memory
from jpaged.processes.pulse import Pulse
from jpaged.processes.request_metrics import NUM_COLUMNS
from jpaged.processes.spare import Spare
from jpaged.processes.wire import Reports, Start, frame

_SOCKET_BYTES = 1 << 20


@dataclass(frozen=True)
class Link:
    """What a client has of the engine.

    sockets: to each replica's process; None where none runs. board: with the client's row.
    handover: where sockets to processes that replace these will come from; None for a client that is told by a call.
    """

    sockets: list[socket.socket | None]
    board: Board
    handover: socket.socket | None = None


class EngineProcesses:
    """Starts the engine processes of a model's replicas, and starts them again.

    args: `data_parallel_size` of them. num_clients: that will talk to them; if there are several, all but this
        process's links are to be inherited, by `pass_fds`. reports: what the clients are told of each step.

    Attributes:
        args: as given.
        links: for each client.
        controls: for each replica the channel by which it gets further clients; it is readable when its process ends.
        pulses: for each replica the sign of life of its process.
        board_fd: of the memory of the clients' boards; -1 with one client.

    Raises:
        InvalidParameterError: as `replica_environments`.
    """

    def __init__(self, args: EngineArgs, num_clients: int = 1, reports: Reports = "steps") -> None:
        self.args, self._reports = args, reports
        self._processes: list[subprocess.Popen[bytes]] = []
        self._spares: dict[int, Spare] = {}
        num_replicas = args.data_parallel_size
        self._environments: list[dict[str, str]] = [package_environment(os.environ)]
        if num_replicas > 1:
            self._environments = replica_environments(args, os.environ)
        self.controls: list[socket.socket] = []
        self.pulses: list[Pulse] = []
        self.board_fd = -1 if num_clients == 1 else shared_memory(num_clients, num_replicas, NUM_COLUMNS)
        self.links = [
            Link([], Board(num_clients, num_replicas, NUM_COLUMNS, client, self.board_fd))
            for client in range(num_clients)
        ]
        for replica in range(num_replicas):
            process, control, pulse, sockets = self._start(replica)
            self._processes.append(process)
            self.controls.append(control)
            self.pulses.append(pulse)
            for link, sock in zip(self.links, sockets, strict=True):
                link.sockets.append(sock)

    @property
    def num_replicas(self) -> int:
        return len(self._processes)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def restart(self, replica: int) -> list[socket.socket]:
        """Starts a replica's process again, whose process has ended. Returns the sockets to it, one for each client.

        Raises:
            OSError: it cannot be started, for want of memory, processes or files; nothing has changed.
        """
        process, control, pulse, sockets = self._start(replica)
        self.controls[replica].close()
        self.pulses[replica].close()
        self._processes[replica], self.controls[replica], self.pulses[replica] = process, control, pulse
        return sockets

    def make_spare(self, replica: int) -> None:
        """Starts a process ahead, which `restart` takes; if that is not possible now, `restart` starts one."""
        if replica not in self._spares:
            with contextlib.suppress(OSError):
                self._spares[replica] = Spare(_engine_command(), self._environments[replica])

    def end_spare(self, replica: int) -> None:
        """Ends the process that waits to take a replica's place, if there is one."""
        spare = self._spares.pop(replica, None)
        if spare is not None:
            spare.end()

    def _end_spares(self) -> None:
        for replica in list(self._spares):
            self.end_spare(replica)

    def new_client(self) -> list[socket.socket | None]:
        """Makes a socket to each replica's process for a client that comes later; None where none runs."""
        sockets: list[socket.socket | None] = []
        for control in self.controls:
            ours, theirs = _socket_pair()
            try:
                handover.send(control, handover.NewClient(), theirs)
                sockets.append(ours)
            except OSError:  # it has ended; all clients hear of the next one
                ours.close()
                sockets.append(None)
            theirs.close()
        return sockets

    def exit_code(self, replica: int, timeout_s: float) -> int | None:
        """The exit code of a replica that is about to end; None if it still runs after `timeout_s`."""
        try:
            return self._processes[replica].wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self, replica: int, timeout_s: float) -> int:
        """The exit code of a replica that is of no more use; it is killed if it still runs after `timeout_s`."""
        code = self.exit_code(replica, timeout_s)
        if code is None:
            self._processes[replica].kill()
            code = self._processes[replica].wait()
        return code

    def send_signal(self, replica: int, number: int) -> None:
        """Sends a signal to a replica's process, if it runs."""
        self._processes[replica].send_signal(number)

    def kill(self) -> None:
        self._end_spares()
        for process in self._processes:
            process.kill()

    def wait(self, timeout_s: float) -> None:
        """Waits until all have ended; kills those that still run after `timeout_s`."""
        self._end_spares()
        end = time.monotonic() + timeout_s
        for process in self._processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, replica: int) -> tuple[subprocess.Popen[bytes], socket.socket, Pulse, list[socket.socket]]:
        """Returns a replica's new process, its control channel and pulse, and the clients' sockets to it."""
        pairs = [_socket_pair() for _ in self.links]
        control, its_control = handover.socket_pair()
        pulse = Pulse.create()
        theirs = [pair[1] for pair in pairs]
        try:
            fds = [pulse.fd, its_control.fileno(), *(end.fileno() for end in theirs)]
            spare = self._spares.pop(replica, None)
            process = (spare and spare.take(fds)) or _start(fds, self._environments[replica])
        except OSError:
            pulse.close()
            raise
        finally:
            for end in (its_control, *theirs):
                end.close()
        sockets = [pair[0] for pair in pairs]
        own = replace(self.args, verbose=self.args.verbose and replica == 0)
        with contextlib.suppress(OSError):  # it has ended already, as its control channel tells
            sockets[0].sendall(frame(Start(own, self._reports)))
        return process, control, pulse, sockets


def ended_how(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}  # real-time signals have none
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package, whatever the current directory."""
    return [sys.executable, "-P", "-m", module, *arguments]


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in pair:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
    return pair


def _engine_command() -> list[str]:
    return python_command("jpaged.processes.engine_process")


def _start(fds: Sequence[int], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """fds: of the pulse, the control channel and each client's socket."""
    return subprocess.Popen(
        [*_engine_command(), *map(str, fds)],
        stdin=subprocess.DEVNULL,
        pass_fds=fds,
        env=environment,
        process_group=0,  # Ctrl-C is for this process, which deals with it
    )
