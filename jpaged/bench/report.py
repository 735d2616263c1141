"""A benchmark's JSON file: its figures, and what they were measured on."""

import json
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

import jpaged


def write_report(
    path: Path, benchmark: str, settings: dict[str, Any], results: Any, *, with_device: bool = True
) -> None:
    """Writes a benchmark's settings and figures, with date, versions and device beside them.

    with_device: False leaves the device alone, for a benchmark whose device belongs to another process.
    """
    environment_ = environment(with_device=with_device)
    report = {"benchmark": benchmark, "environment": environment_, "settings": settings, "results": results}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, default=str) + "\n")
    print(f"written to {path}")


def environment(*, with_device: bool = True) -> dict[str, str | int]:
    """Date, versions and device."""
    versions = {name: _version(name) for name in ("jax", "jaxlib", "flax", "numpy")}
    found: dict[str, str | int] = {
        "date": datetime.now(UTC).date().isoformat(),
        "jpaged": jpaged.__version__,
        **versions,
        "python": platform.python_version(),
    }
    if with_device:
        device = jax.devices()[0]
        found |= {
            "device": device.device_kind,
            "num_devices": len(jax.devices()),
            "platform_version": device.client.platform_version.splitlines()[0],
        }
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
