"""Times the parts of an engine process's loop while it serves, in any checkout that has these classes.

Python imports this file when its folder is on PYTHONPATH. It does nothing unless ENGINE_PARTS names a file to write and
the process is an engine process. At its first step the process writes its number to PATH.pid, and at each SIGUSR2 its
figures to PATH.
`benchmarks/against.sh` does all this with PARTS=1; `table.py` shows such files.

    {"parts": {"Scheduler.schedule": {"number": .., "mean_us": .., "p50_us": .., "p90_us": ..}, ...}, "shares": {...}}

Each part contains what it calls. A timed call costs about a microsecond more. `shares` are of steps: `late` if the
device had run dry when the step was dispatched, `rows` the mean of its decode rows.
"""

import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

MOST = 50_000
"""Calls of a part that are kept, the last ones."""

METHODS = {
    "jpaged.engine.loop": {"EngineCore": ("step", "_read_oldest")},
    "jpaged.engine.pace": {"Pace": ("spare_s", "has_enough")},
    "jpaged.engine.scheduler.scheduler": {"Scheduler": ("schedule", "update", "add")},
    "jpaged.executor.step.runner": {"Runner": ("execute",)},
    "jpaged.executor.step.handle": {"DispatchedStep": ("__init__", "result"), "Step": ("__init__", "result")},
    "jpaged.processes.client_requests": {"StepRequests": ("step", "collect")},
    "jpaged.processes.connection": {"Connection": ("send", "flush", "receive")},
    "jpaged.processes.flight_recorder": {"FlightRecorder": ("planned", "read")},
}
"""By module and class. What a checkout does not have is passed over."""
CALLS_OF_PROGRAMS = {"jpaged.executor.step.runner": ("Runner", "_run"), "jpaged.executor.step.calls": ("Calls", "run")}
"""Methods whose first argument is the program that they call: a part for each kind."""

_durations: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MOST))
_counts: defaultdict[str, float] = defaultdict(float)


def timed(function: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
    """The function, timed. name: of the part, from the call's arguments."""

    def call(*args: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            _durations[name(*args)].append(time.perf_counter() - begun)

    return call


def patch(module: ModuleType) -> None:
    """Times the module's parts."""
    for owner, methods in METHODS.get(module.__name__, {}).items():
        for method in methods:
            replace(module, owner, method, lambda *_, name=f"{owner}.{method}": name)
    if module.__name__ in CALLS_OF_PROGRAMS:
        replace(module, *CALLS_OF_PROGRAMS[module.__name__], lambda _, program: f"call of {program.kind}")
    if module.__name__ == "jpaged.engine.pace":
        count_steps(module)


def replace(module: ModuleType, owner: str, method: str, name: Callable[..., str]) -> None:
    cls = getattr(module, owner, None)
    if cls is not None and method in vars(cls):
        setattr(cls, method, timed(vars(cls)[method], name))


def count_steps(module: ModuleType) -> None:
    dispatched = module.Pace.dispatched

    def count(self: Any, plan: Any, was_late: bool) -> None:
        if not _counts:  # a spare process has no steps, and must not be taken for this one
            write_on_request(Path(os.environ["ENGINE_PARTS"]))
        _counts["steps"] += 1
        _counts["late"] += was_late
        _counts["rows"] += len(plan.decode_slots)
        dispatched(self, plan, was_late)

    module.Pace.dispatched = count


class Patching(MetaPathFinder):
    """Finds the modules of METHODS as Python does, and patches each when it has been run."""

    def __init__(self) -> None:
        self._left = {*METHODS, *CALLS_OF_PROGRAMS}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._left:
            return None
        self._left.discard(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = Patched(spec.loader)
        return spec


class Patched(Loader):
    """Runs a module, then patches it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        patch(module)


def figures() -> dict[str, Any]:
    parts = {}
    for name, durations in list(_durations.items()):
        us = sorted(1e6 * seconds for seconds in list(durations))
        place = len(us) - 1
        parts[name] = {
            "number": len(us),
            "mean_us": sum(us) / len(us),
            "p50_us": us[place // 2],
            "p90_us": us[int(0.9 * place)],
        }
    steps = max(1.0, _counts["steps"])
    return {"parts": parts, "shares": {name: _counts[name] / steps for name in ("late", "rows")}}


def write_on_request(path: Path) -> None:
    """Writes the figures whenever the process gets SIGUSR2, in a thread of their own."""
    asked = threading.Event()
    signal.signal(signal.SIGUSR2, lambda *_: asked.set())
    path.with_name(f"{path.name}.pid").write_text(str(os.getpid()))

    def write() -> None:
        while asked.wait():
            asked.clear()
            part = path.with_name(f"{path.name}.part")
            part.write_text(json.dumps(figures(), indent=1))
            part.replace(path)

    threading.Thread(target=write, name="engine-parts", daemon=True).start()


if os.environ.get("ENGINE_PARTS") and "jpaged.processes.engine_process" in sys.orig_argv:
    sys.meta_path.insert(0, Patching())
