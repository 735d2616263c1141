"""Which implementation of an op runs: picked from the device, or forced by the caller.

    "mosaic"  Pallas Mosaic GPU kernels, for Hopper (compute capability 9.0); JAX >= 0.11
    "xla"     plain XLA, anywhere, for everything

`pick` asks the Mosaic implementation first whether it takes the shapes at hand; it says why not by a message. Without
`backend`, "mosaic" is taken on a device that can run it when it takes the shapes, and "xla" otherwise.
"""

from collections.abc import Callable
from functools import cache

import jax

BACKENDS = ("xla", "mosaic")

_H200_MULTIPROCESSORS = 132


@cache
def mosaic_missing() -> str | None:
    """Why this JAX cannot build Mosaic GPU kernels; None if it can."""
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    if version < (0, 11):
        return f"the Mosaic kernels need JAX >= 0.11, this is {jax.__version__}"
    try:
        from jax.experimental.pallas import mosaic_gpu  # noqa: F401
    except ImportError as error:
        return f"Pallas Mosaic GPU cannot be imported: {error}"
    return None


@cache
def device_runs_mosaic() -> bool:
    """Whether JAX's default device is a Hopper GPU."""
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", ""))
    return getattr(device, "platform", "") == "gpu" and capability.startswith("9.")


def num_multiprocessors() -> int:
    """Of JAX's default device, for the grid of a persistent kernel; of an H200 where there is no GPU to ask."""
    device = jax.devices()[0]
    found = getattr(device, "core_count", None) if device.platform == "gpu" else None
    return found or _H200_MULTIPROCESSORS


def pick(op: str, backend: str | None, unsupported: Callable[[], str | None]) -> str:
    """The backend for one call.

    Args:
        op: name of the op, for messages.
        backend: None, or what the caller forces.
        unsupported: says why the Mosaic implementation refuses these shapes, or None; called only when Mosaic could
            be used at all.
    Raises:
        ValueError: unknown backend, or a forced one that cannot do the call.
    """
    if backend is None:
        usable = mosaic_missing() is None and device_runs_mosaic() and unsupported() is None
        return "mosaic" if usable else "xla"
    if backend not in BACKENDS:
        raise ValueError(f"backend must be None or one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "mosaic" and (reason := mosaic_missing() or unsupported()) is not None:
        raise ValueError(f"backend='mosaic' cannot do this {op}: {reason}")
    return backend
