"""Runs functions in a process that has eight CPU devices, which JAX can only be told before it starts.

    result = call_with_eight_devices("tests.parallel.tensor_parallel_runs:tokens_by_degree", "gpt2")

The function's arguments and result are JSON. Programs that the process compiles itself are not kept on disk. It starts
with the first call and stays for the following ones: imports take seconds, and functions that JAX has traced are there.
"""

import atexit
import gc
import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jpaged.host.imports import keep_torch_out
from tests.support.memory import give_back_if_large

ROOT = Path(__file__).parents[2]


def xla_flags(devices: int) -> str:
    """XLA_FLAGS of a process that has so many CPU devices and compiles its programs itself."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    return f"{flags} --xla_backend_optimization_level=0"  # these programs take longer to compile than to run


class _Process:
    """environment: its variables."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self._connection, theirs = Pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the process writes to it
        descriptor = theirs.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.parallel.eight_devices", str(descriptor)],
            cwd=ROOT,
            env=environment,
            pass_fds=(descriptor,),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        theirs.close()

    def call(self, function: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        try:
            self._connection.send((function, json.dumps(arguments, default=str)))
            if not self._connection.poll(timeout_s):
                raise TimeoutError(f"{function} took more than {timeout_s} s")
            return json.loads(self._connection.recv())
        except (EOFError, ConnectionError):
            self._process.wait()
            self._output.seek(0)
            raise AssertionError(self._output.read().decode(errors="replace")[-4000:]) from None

    def end(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()
        self._output.close()


_process: _Process | None = None


def call_with_eight_devices(function: str, *arguments: Any, timeout_s: float = 850) -> Any:
    """What "module:function" returns. After one that fails, or in another environment, another process is started."""
    global _process
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(8)}
    environment.pop("PYTEST_CURRENT_TEST", None)
    if _process is not None and _process.environment != environment:
        _end_process()
    if _process is None:
        _process = _Process(environment)
    try:
        return _process.call(function, arguments, timeout_s)
    except BaseException:
        _end_process()
        raise


@atexit.register
def _end_process() -> None:
    global _process
    if _process is not None:
        _process.end()
        _process = None


def _serve(connection: Connection) -> None:
    gc.freeze()  # what is imported stays
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:  # the tests have ended
            return
        module, _, name = function.partition(":")
        connection.send(json.dumps(getattr(import_module(module), name)(*json.loads(arguments))))
        give_back_if_large(1 << 30)


if __name__ == "__main__":
    keep_torch_out()
    from jpaged.executor.start import startup

    startup.KEPT_PLATFORMS = ()  # some functions put parts of their own into models, or look at how a program was made
    _serve(Connection(int(sys.argv[1])))
