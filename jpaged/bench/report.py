"""A benchmark's JSON file: its figures, and everything that is needed to read them or to measure them again.

    {"benchmark": "throughput",
     "environment": {"date", "commit", "command", "host", "driver", "jpaged", "jax", ..., "device", "num_devices", ...},
     "settings": {option: value, ...},
     "results": [{...}, ...]}

All benchmarks write this form, those of `benchmarks/` included.
"""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

import jpaged

_SOURCES = Path(jpaged.__file__).parents[1]


def write_report(
    path: Path,
    benchmark: str,
    settings: dict[str, Any],
    results: Any,
    *,
    devices: dict[str, Any] | None = None,
    says_so: bool = True,
) -> None:
    """Writes a benchmark's figures with its settings and the `environment`.

    devices: the environment's entries about devices, for a benchmark whose devices belong to another process; None
        asks JAX, which opens them.
    says_so: whether to print where; not for a report that more is to come to.
    """
    environment_ = environment(devices)
    report = {"benchmark": benchmark, "environment": environment_, "settings": settings, "results": results}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(path.suffix + ".part")  # whoever ends the process leaves a whole file
    part.write_text(json.dumps(report, indent=1, default=str) + "\n")
    part.replace(path)
    if says_so:
        print(f"written to {path}")


def environment(devices: dict[str, Any] | None = None) -> dict[str, Any]:
    """Date, commit, command line, host, driver, versions and devices (JAX's, unless `devices` gives these entries).

    What cannot be found out is None. The environment variable JPAGED_COMMIT names the commit where the sources are no
    git checkout.
    """
    versions = {name: _version(name) for name in ("jax", "jaxlib", "flax", "numpy")}
    found: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": os.environ.get("JPAGED_COMMIT") or _commit(),
        "command": _command(),
        "host": _host(),
        "driver": _read("/sys/module/nvidia/version"),
        "jpaged": jpaged.__version__,
        **versions,
        "python": platform.python_version(),
    }
    return found | (_devices() if devices is None else devices)


def _devices() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "num_devices": len(jax.devices()),
        "platform_version": device.client.platform_version.splitlines()[0],
    }


def _commit() -> str | None:
    """The commit of jpaged's sources, with "-dirty" if files differ from it; None if they are no git checkout."""
    command = ["git", "-C", str(_SOURCES), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _command() -> str:
    """What was typed, without the program's directory and without keys."""
    program, *arguments = sys.argv
    for i, argument in enumerate(arguments):
        if argument.startswith("--api-key="):
            arguments[i] = "--api-key=..."
        elif i and arguments[i - 1] == "--api-key":
            arguments[i] = "..."
    name = Path(program).name
    if name in ("jpaged", "__main__.py"):
        words = ["jpaged"]
    elif Path(program).resolve().is_relative_to(_SOURCES):
        words = ["python", str(Path(program).resolve().relative_to(_SOURCES))]
    else:
        words = [name]
    return shlex.join([*words, *arguments])


def _host() -> str:
    """Processor, cores that this process may use, memory, and the NVIDIA cards that the driver lists."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = [_processor(), f"{len(os.sched_getaffinity(0))} cores", f"{memory:.0f} GiB"]
    models = [
        line.partition(":")[2].strip()
        for file in Path("/proc/driver/nvidia/gpus").glob("*/information")
        for line in file.read_text().splitlines()
        if line.startswith("Model:")
    ]
    return ", ".join([*parts, *(f"{count} x {model}" for model, count in Counter(models).items())])


def _processor() -> str:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
