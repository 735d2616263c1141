"""The time of each kernel, and how long none ran, from a profile of JAX.

    /device:GPU:0   Stream #14   |==k1==| |=k2=|    |===k3===|
                    Stream #20        |==copy==|
                    idle         |..............####.........|     of the time from the first event to the last

The directory that `jax.profiler.trace` writes also holds a *.trace.json.gz, which opens in https://ui.perfetto.dev.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import numpy as np
from jax.profiler import ProfileData


def read_trace(directory: Path) -> list[ProfileData]:
    """The recorded profiles, one a process."""
    return [jax.profiler.ProfileData.from_file(str(file)) for file in sorted(directory.rglob("*.xplane.pb"))]


def kernel_times(profiles: Iterable[ProfileData]) -> dict[str, tuple[float, int]]:
    """Kernel -> (total milliseconds on the device, launches). Empty without a GPU."""
    times: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for events in _device_events(profiles):
        for event in events:
            ms, count = times[event.name]
            times[event.name] = ms + event.duration_ns / 1e6, count + 1
    return dict(times)


def idle_share(profiles: Iterable[ProfileData]) -> float | None:
    """The share of the time from a GPU's first event to its last in which none of its streams ran anything.

    The mean over the GPUs; None without one.
    """
    shares = []
    for events in _device_events(profiles):
        times = np.array([(event.start_ns, event.start_ns + event.duration_ns) for event in events])
        if not len(times):
            continue
        starts, ends = times[times[:, 0].argsort()].T
        latest = np.maximum.accumulate(ends)  # end so far of this event and all that began earlier
        idle = np.maximum(starts[1:] - latest[:-1], 0).sum()
        shares.append(float(idle / (latest[-1] - starts[0])))
    return sum(shares) / len(shares) if shares else None


def _device_events(profiles: Iterable[ProfileData]) -> Iterator[list]:
    """The events of each GPU's streams."""
    for profile in profiles:
        for plane in profile.planes:
            if plane.name.startswith("/device:GPU"):
                yield [event for line in plane.lines if line.name.startswith("Stream") for event in line.events]
