"""The processor cores that this process may use."""

import math
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_CPU_INFO = Path("/proc/cpuinfo")
_FEATURES = {
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features"),
}
"""What x86-64 calls them, and what ARM does."""


def usable_cores() -> int:
    """How many cores this process may run on; fewer where its control group has a quota of processor time that is worth
    fewer, such as a container's CPU limit.
    """
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, _quotas())]))


@cache
def cpu_features() -> tuple[str, ...] | None:
    """The models of this machine's cores and the instructions that they have, as Linux tells them (man 5 proc_cpuinfo);
    None if it does not. Machine code for one such list need not run on a machine with another.
    """
    try:
        return features_in(_CPU_INFO.read_text())
    except OSError:
        return None


def features_in(cpu_info: str) -> tuple[str, ...] | None:
    """The lines on model and instructions, each once: a machine's cores may differ. None if there are none.

    cpu_info: what /proc/cpuinfo holds.
    """
    lines = (line.partition(":") for line in cpu_info.splitlines())
    found = sorted({(name.strip(), value.strip()) for name, _, value in lines if name.strip() in _FEATURES})
    return tuple(f"{name}: {value}" for name, value in found) or None


def _quotas() -> Iterator[float]:
    """In cores, of this process's control groups and those above them; `man 7 cgroups` says what the files hold."""
    try:
        groups = [line.split(":", 2) for line in _OWN_GROUPS.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in groups:
        if not controllers:  # version 2
            yield from _quotas_in(_CONTROL_GROUPS, path, ("cpu.max",))
        elif "cpu" in controllers.split(","):
            yield from _quotas_in(_CONTROL_GROUPS / "cpu", path, ("cpu.cfs_quota_us", "cpu.cfs_period_us"))


def _quotas_in(mount: Path, path: str, files: tuple[str, ...]) -> Iterator[float]:
    """A container may see its own group as the mount, and not find it where the host has it."""
    group = mount / path.lstrip("/")
    for directory in (group, *group.parents):
        try:
            quota, period = " ".join((directory / file).read_text() for file in files).split()
        except (OSError, ValueError):
            pass
        else:
            if quota not in ("max", "-1"):
                yield int(quota) / int(period)
        if directory == mount:
            return
