"""Runs a function in a process that has eight CPU devices, which JAX can only be told before it starts.

    result = call_with_eight_devices("tests.parallel.tensor_parallel_runs:tokens_by_degree", "gpt2")

The function's arguments and result are JSON. Programs that the process compiles itself are not kept on disk.
"""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from jpaged.host.imports import keep_torch_out

ROOT = Path(__file__).parents[2]


def xla_flags(devices: int) -> str:
    """XLA_FLAGS of a process that has so many CPU devices and compiles its programs itself."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    return f"{flags} --xla_backend_optimization_level=0"  # these programs take longer to compile than to run


def call_with_eight_devices(function: str, *arguments: Any, timeout_s: float = 850) -> Any:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(8)}
    command = [sys.executable, "-m", "tests.parallel.eight_devices", function, json.dumps(arguments, default=str)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    keep_torch_out()
    from jpaged.executor.start import startup

    startup.KEPT_PLATFORMS = ()  # some functions put parts of their own into models, or look at how a program was made
    module, _, name = sys.argv[1].partition(":")
    print(json.dumps(getattr(import_module(module), name)(*json.loads(sys.argv[2]))))
