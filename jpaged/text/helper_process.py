"""How a process that works for this package's text handling is started: `python -P -m MODULE FD...`."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def start_helper(module: str, *arguments: str, fds: Sequence[int]) -> "subprocess.Popen[bytes]":
    """Starts a module of this package. It reads and prints nothing, and a terminal's Ctrl-C does not reach it.

    fds: that it inherits, by the same numbers.
    """
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    # numpy's threads, one a core, would each reserve 40 MiB of a helper's memory, for nothing.
    environment = os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        pass_fds=fds,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
