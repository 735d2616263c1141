"""NVIDIA's driver as a compiler: whether it takes PTX as Triton writes it, and keeps what it makes of that on disk.

The driver keeps compiled code in ~/.nv/ComputeCache or where CUDA_CACHE_PATH says, unless CUDA_CACHE_DISABLE=1. It
reads these variables when it is started in a process.
"""

import ctypes
import os
import tempfile
from functools import cache
from pathlib import Path

LEAST_VERSION = 12040
"""The first driver, by its CUDA version, that takes the PTX which is written for GPUs up to Hopper (8.4). Newer cards,
which get newer PTX, have newer drivers."""

PATH, _DISABLE = "CUDA_CACHE_PATH", "CUDA_CACHE_DISABLE"
_COMPILES_NOTHING = ("CUDA_DISABLE_PTX_JIT", "CUDA_DISABLE_JIT")


def why_not_compiler() -> str | None:
    """Why the driver should not compile thousands of kernels; None if it compiles each once and keeps it. The reason
    says what to do about it."""
    version = _version()
    if version is None:
        return "there is no NVIDIA driver here"
    if version < LEAST_VERSION:
        return f"the driver is of CUDA {_shown(version)}; install one of CUDA {_shown(LEAST_VERSION)} or newer"
    for name in (*_COMPILES_NOTHING, _DISABLE):
        if os.environ.get(name) == "1":
            return f"{name}=1 keeps the driver from compiling kernels once for all; unset it"
    if not _can_be_written(code_directory()):
        return (
            f"the driver cannot keep compiled kernels in {code_directory()}; set {PATH} to a directory that can be"
            " written"
        )
    return None


def code_directory() -> Path:
    """Where the driver keeps compiled code."""
    return Path(os.environ.get(PATH) or Path(os.path.expanduser("~")) / ".nv" / "ComputeCache")


def wants_code_directory() -> bool:
    """Whether setting `PATH` in this process's environment would help: the driver cannot write its own directory,
    nobody chose another, and it was not started yet."""
    return bool(_version()) and PATH not in os.environ and not _can_be_written(code_directory()) and not _is_started()


@cache
def _can_be_written(directory: Path) -> bool:
    """Makes the directory, as the driver would, if there is none."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"0")
    except OSError:
        return False
    return True


@cache
def _version() -> int | None:
    """The newest CUDA that the driver serves, 13020 for 13.2; None where there is no driver."""
    found = ctypes.c_int()
    driver = _driver()
    return None if driver is None or driver.cuDriverGetVersion(ctypes.byref(found)) else found.value


def _is_started() -> bool:
    """Whether the driver was started in this process; it counts no devices before."""
    driver = _driver()
    return driver is not None and not driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _shown(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
