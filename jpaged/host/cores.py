"""The processor cores that this process may use."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """How many cores this process may run on; fewer where its control group has a quota of processor time that is worth
    fewer, such as a container's CPU limit.
    """
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, _quotas())]))


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
