"""What a benchmark ran on, to stand beside its figures."""

import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import jax

import jpaged


def environment() -> dict[str, str | int]:
    """Date, versions and device."""
    device = jax.devices()[0]
    versions = {name: _version(name) for name in ("jax", "jaxlib", "flax", "numpy")}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "jpaged": jpaged.__version__,
        **versions,
        "python": platform.python_version(),
        "device": device.device_kind,
        "num_devices": len(jax.devices()),
        "platform_version": device.client.platform_version.splitlines()[0],
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
