"""Memory of a process that runs many tests: by the end JAX's programs are gigabytes."""

import ctypes
import gc
import resource
import sys
from pathlib import Path

LARGE_BYTES = 2 << 30
_trim_heap = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's


def give_back_if_large(large_bytes: int = LARGE_BYTES) -> None:
    """A process that has grown so large forgets the programs that JAX has kept, and gives their memory back."""
    if _resident_bytes() <= large_bytes:
        return
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    gc.collect()
    if _trim_heap is not None:
        _trim_heap(0)


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")  # Linux
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0
