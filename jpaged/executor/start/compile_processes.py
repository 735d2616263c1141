"""Divides a cold start's lowering among processes: it is Python under one interpreter lock, about a second a body.

    this process                                       python -m jpaged.executor.start.compile_process FD, several
    ------------                                       ----------------------------------------------------
    plans memory, lowers the heads                     import JAX, open the device, build the model from its
      |                                                configuration (no weights)
    share_out(config, programs) -- config, share -->   lower and compile them, leave them in the executable cache
    compiles its own share      <-- each program --
    loads theirs from the cache, as on a warm start

A helper is never needed: what it does not deliver is compiled here. It ends when its share is done, when its socket
closes, which it does with this process however that ends, or when it is no longer wanted. Being a process group of its
own, it does not see a terminal's Ctrl-C, which this process deals with.

Of several processes that start with the same programs, one compiles and the others take what it leaves (`turns`).

`JPAGED_COMPILE_PROCESSES` says how many there are; by default as many as the machine has room for.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from jpaged.api.errors import InvalidParameterError, shown
from jpaged.executor.config import ExecutorConfig
from jpaged.executor.start.turns import Turns
from jpaged.executor.step.program import StepProgram
from jpaged.host.devices import package_environment

MOST_PROCESSES = 7
"""Beyond these the threads that compile, several times the lowering's time in all, want the cores."""

DEVICE_BYTES = 2**30
"""Device memory that a helper may take: a CUDA context, and what loading programs needs."""

LEAST_SHARED = 12
"""Programs to compile that make helpers worth starting, which takes them as long as some eight programs do."""

COUNT_VARIABLE = "JPAGED_COMPILE_PROCESSES"

_MOST_CHOSEN = 256
"""A larger number is a mistake."""

log = logging.getLogger("jpaged.startup")


def chosen_processes(environment: Mapping[str, str]) -> int | None:
    """How many helpers the user wants; None where that is not said.

    Raises:
        InvalidParameterError: the environment variable is no such number.
    """
    value = environment.get(COUNT_VARIABLE, "").strip()
    if not value:
        return None
    if not (value.isdecimal() and len(value) <= 3 and int(value) <= _MOST_CHOSEN):
        raise InvalidParameterError(
            f"{COUNT_VARIABLE} must be a number of processes from 0, for none, to {_MOST_CHOSEN}, got {shown(value)}; "
            "unset it to have as many as cores and memory allow."
        )
    return int(value)


def helpful_processes(cores: int, spare_bytes: int) -> int:
    """How many helpers a machine has room for: one for two cores, one of them kept for this process.

    spare_bytes: of the device's memory, beside what this process holds.
    """
    return max(0, min(MOST_PROCESSES, cores // 2 - 1, spare_bytes // DEVICE_BYTES))


@dataclass(frozen=True)
class Setting:
    """What a helper has to know before it knows the programs' shapes.

    model_config, dtype: what to build. tensor_parallel_size: devices. kept_on: as of `Compiler`. jax_settings: this
    process's.
    """

    model_config: Any
    dtype: str
    tensor_parallel_size: int
    kept_on: tuple[str, ...]
    jax_settings: Mapping[str, Any] = field(default_factory=dict)


class CompileProcesses:
    """Helpers for one model, not yet started. Used as a context, at whose end none is left.

    count: how many there will be; with 0, nothing is ever shared out.

    Attributes:
        turns: at compiling many programs; they end with the context.
    """

    def __init__(self, count: int, setting: Setting) -> None:
        self.count = count
        self._setting = setting
        self._helpers: list[_Helper] = []
        self._started = False
        self.turns = Turns()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for helper in self._helpers:
            helper.kill()
        for helper in self._helpers:
            helper.end()
        self._helpers = []
        self.turns.end_all()

    def start(self) -> None:
        """Starts them, once; returns at once. Called as soon as it is clear that there will be programs to compile."""
        if self._started:
            return
        self._started = True
        with suppress(OSError):  # the machine has no room for another one
            for _ in range(self.count):
                self._helpers.append(_Helper(self._setting))
        log.info("%d processes started to help compile", len(self._helpers))

    def share_out(self, config: ExecutorConfig, programs: Sequence[StepProgram]) -> dict[StepProgram, Future[None]]:
        """Gives each helper, and the caller, an equal share of these programs. To be called once.

        Returns the helpers' programs, each with a future that is done when it is in the cache or will not be.
        """
        if not are_many(programs):
            return {}
        self.start()
        shared: dict[StepProgram, Future[None]] = {}
        for index, helper in enumerate(self._helpers):
            shared |= helper.compile(config, programs[index :: len(self._helpers) + 1])
        return shared


def are_many(programs: Sequence[object]) -> bool:
    """Whether so many are to be compiled that it is worth dividing."""
    return len(programs) >= LEAST_SHARED


class _Helper:
    """One of the processes, and the socket to it."""

    def __init__(self, setting: Setting) -> None:
        self._started = time.perf_counter()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "jpaged.executor.start.compile_process", str(theirs.fileno())],
                env=package_environment(os.environ) | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
                pass_fds=(theirs.fileno(),),
                process_group=0,
                stdin=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())
        with suppress(OSError):  # it died already; `_follow` will see
            self._connection.send(setting)
        self._thread: threading.Thread | None = None

    def compile(self, config: ExecutorConfig, programs: Collection[StepProgram]) -> dict[StepProgram, Future[None]]:
        futures: dict[StepProgram, Future[None]] = {program: Future() for program in programs}
        self._thread = threading.Thread(target=self._follow, args=(config, futures), daemon=True)
        self._thread.start()
        return futures

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """Once it has been killed."""
        self._process.wait()
        if self._thread is not None:
            self._thread.join()
        self._connection.close()

    def _follow(self, config: ExecutorConfig, futures: dict[StepProgram, Future[None]]) -> None:
        waiting, shared = dict(futures), self._age_s()
        ages = []
        try:
            self._connection.send((config, tuple(futures)))
            while waiting:
                waiting.pop(self._connection.recv()).set_result(None)
                ages.append(self._age_s())
        except (EOFError, OSError):  # it died, and said why on stderr; the caller compiles what is left
            for future in waiting.values():
                future.set_result(None)
        first, last = (ages[0], ages[-1]) if ages else (self._age_s(),) * 2
        log.info(
            "process %d compiled %d of its %d programs; from its start: %.1f s to their names, %.1f s to the first "
            "program, %.1f s to the last",
            self._process.pid,
            len(ages),
            len(futures),
            shared,
            first,
            last,
        )

    def _age_s(self) -> float:
        return time.perf_counter() - self._started
