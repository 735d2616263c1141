"""A model over several hosts: one process each, the scheduler on process 0.

    process 0      LLM / LLMEngine --> plan --+--> its runner ------.
                                              |                     |  collectives between all devices
    process 1 ..   `jpaged worker`  <-- TCP --'--> its runner ------'

Every process runs the same programs on its own devices in the same order (JAX's multi-controller model). What process
0 decides reaches the others as encoded plans; nothing comes back but through collectives. `jax.distributed` brings the
processes together; then process 0 listens on a port that the system picks, tells the others which by a collective,
together with a secret that they must begin with, and sends its `EngineArgs` and plans.
"""

import hmac
import json
import os
import secrets
import socket
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jpaged.api.config import EngineArgs
from jpaged.api.errors import InvalidParameterError, JPagedError
from jpaged.engine.interface import Executor, StepPlan
from jpaged.executor import plan_codec
from jpaged.executor.start.startup import start
from jpaged.executor.step.handle import DispatchedStep
from jpaged.executor.step.runner import Runner
from jpaged.host.hub import model_directory

_SECRET_BYTES = 32
_ACCEPT_S = 120.0


@dataclass(frozen=True)
class Cluster:
    """How the processes find each other.

    address: "host:port" of process 0, where `jax.distributed` meets; the host must be reachable from all others.
    num_processes: at least 2. process_id: this one, from 0.
    """

    address: str
    num_processes: int
    process_id: int

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].strip("[]")

    @staticmethod
    def find(args: EngineArgs, environment: Mapping[str, str] = os.environ) -> "Cluster | None":
        """From the options, or else from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; None where
        neither says anything or there is one process.

        Raises:
            InvalidParameterError: only some of the three are given, or they do not fit together.
        """
        given = {
            name: environment.get(f"JAX_{name.upper()}") if value is None else value
            for name, value in (
                ("coordinator_address", args.coordinator_address),
                ("num_processes", args.num_processes),
                ("process_id", args.process_id),
            )
        }
        if all(value is None for value in given.values()):
            return None
        missing = [name for name, value in given.items() if value is None]
        if missing:
            raise InvalidParameterError(
                f"{missing[0]} is missing: several processes need coordinator_address, num_processes and process_id,"
                f" as options or as JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
            )
        address, count, process = str(given["coordinator_address"]), given["num_processes"], given["process_id"]
        try:
            count, process = int(str(count)), int(str(process))
        except ValueError:
            raise InvalidParameterError(
                f"num_processes and process_id must be integers, got {count!r} and {process!r}."
            ) from None
        if not 0 <= process < count:
            raise InvalidParameterError(f"process_id={process} must be from 0 to num_processes - 1 = {count - 1}.")
        if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdigit():
            raise InvalidParameterError(f'coordinator_address must be "host:port", got {address!r}.')
        return Cluster(address, count, process) if count > 1 else None


class LeadingRunner:
    """Process 0's executor: sends each plan to the other processes, then runs it here."""

    def __init__(self, runner: Runner, workers: "Workers") -> None:
        self.runner = runner
        self._workers = workers

    def execute(self, plan: StepPlan) -> DispatchedStep:
        """As `Runner.execute`. Raises JPagedError when a worker is gone."""
        self._workers.send(plan_codec.encode(plan))
        return self.runner.execute(plan)

    def close(self) -> None:
        """As `Runner.close`; the other processes end."""
        self.runner.close()
        self._workers.close()


class Workers:
    """Process 0's connections to all other processes."""

    def __init__(self, connections: list[socket.socket]) -> None:
        self._connections = connections
        self._finalizer = weakref.finalize(self, _close, connections)  # also at exit, before jax.distributed waits

    def send(self, message: bytes) -> None:
        """To each of them. Raises JPagedError when one is gone."""
        framed = len(message).to_bytes(8, "little") + message
        for connection in self._connections:
            try:
                connection.sendall(framed)
            except OSError as error:
                raise JPagedError(f"A worker process is gone ({error}); start all processes anew.") from error

    def close(self) -> None:
        """The workers end."""
        self._finalizer()


def lead(args: EngineArgs, cluster: Cluster) -> Workers:
    """On process 0: brings the processes together and tells the others what to run.

    Raises:
        InvalidParameterError: this is not process 0, or the options cannot be served by several processes.
        JPagedError: some process did not come.
    """
    if cluster.process_id != 0:
        raise InvalidParameterError(
            f"process_id={cluster.process_id}: requests enter at process 0; start `jpaged worker` here, with the same"
            f" coordinator_address and num_processes."
        )
    _initialize(cluster)
    secret = secrets.token_bytes(_SECRET_BYTES)
    with socket.create_server(("", 0), backlog=cluster.num_processes) as server:
        server.settimeout(_ACCEPT_S)
        _agree(np.frombuffer(secret + server.getsockname()[1].to_bytes(4, "little"), np.uint8))
        connections: list[socket.socket] = []
        try:
            while len(connections) < cluster.num_processes - 1:
                connection, _ = server.accept()
                connection.settimeout(_ACCEPT_S)
                if hmac.compare_digest(_read(connection, _SECRET_BYTES), secret):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    connections.append(connection)
                else:
                    connection.close()
        except TimeoutError:
            _close(connections)
            raise JPagedError(
                f"Only {len(connections) + 1} of num_processes={cluster.num_processes} processes came."
            ) from None
    workers = Workers(connections)
    workers.send(json.dumps(asdict(args)).encode())
    return workers


def run_worker(cluster: Cluster) -> None:
    """On every other process: serves process 0 until it ends.

    Raises:
        InvalidParameterError: this is process 0.
        Whatever starting an engine raises; process 0 then ends, too.
    """
    if cluster.process_id == 0:
        raise InvalidParameterError("process_id=0 is where requests enter: LLM, not `jpaged worker`.")
    _initialize(cluster)
    told = bytes(_agree(np.zeros(_SECRET_BYTES + 4, np.uint8)))
    with socket.create_connection((cluster.host, int.from_bytes(told[_SECRET_BYTES:], "little"))) as connection:
        connection.sendall(told[:_SECRET_BYTES])
        sent = json.loads(_receive(connection) or b"{}")
        own: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in sent.items()}
        args = replace(EngineArgs(**own), verbose=False)
        directory = model_directory(args)
        runner: Executor = start(args, directory).runner
        while (message := _receive(connection)) is not None:
            runner.execute(plan_codec.decode(message))


def _initialize(cluster: Cluster) -> None:
    if not jax.distributed.is_initialized():
        jax.distributed.initialize(cluster.address, cluster.num_processes, cluster.process_id)


def _agree(own: np.ndarray) -> np.ndarray:
    """Process 0's bytes, on every process."""
    return np.asarray(multihost_utils.broadcast_one_to_all(own)).astype(np.uint8)


def _receive(connection: socket.socket) -> bytes | None:
    """The next message; None when there will be none."""
    size = _read(connection, 8)
    return _read(connection, int.from_bytes(size, "little")) if size else None


def _read(connection: socket.socket, size: int) -> bytes:
    """Exactly that many bytes, or none where the other end closed."""
    parts, left = [], size
    while left:
        try:
            part = connection.recv(min(left, 1 << 20))
        except ConnectionError:
            return b""
        if not part:
            return b""
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _close(connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.close()
