"""The device that kernels are chosen and sized for: JAX's default one."""

import re
from dataclasses import dataclass
from functools import cache

import jax

_H200_MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Device:
    """What a backend is chosen by.

    Attributes:
        platform: as JAX names it: "gpu", "cpu", ...
        capability: an NVIDIA GPU's compute capability, (9, 0) on Hopper; None on all other devices.
    """

    platform: str
    capability: tuple[int, int] | None = None

    def __str__(self) -> str:
        if self.capability is None:
            return self.platform.upper()
        return f"{self.platform.upper()} of compute capability {self.capability[0]}.{self.capability[1]}"


@cache
def default_device() -> Device:
    """JAX's default device."""
    device = jax.devices()[0]
    found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return Device(device.platform, (int(found[1]), int(found[2])) if found else None)


def num_multiprocessors() -> int:
    """Multiprocessors of JAX's default device, the grid of a persistent kernel; an H200's where there is no GPU."""
    device = jax.devices()[0]
    found = getattr(device, "core_count", None) if device.platform == "gpu" else None
    return found or _H200_MULTIPROCESSORS
