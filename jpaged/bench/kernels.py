"""`jpaged bench kernels`: attention, block moves, experts, recurrences and sampling against the card's own limits.

Every case is one jitted program of many calls, each of which needs the one before it. Several programs are enqueued at
once, so dispatch does not count. Calls rotate among block tables that together point at more memory than the L2 cache
holds. Bytes and operations follow from the lengths: each key and value once, four operations for each score that the
causal mask leaves. The card's read and copy bandwidth, its matrix rate and cuDNN's attention come from the same
run.

The cases are in `kernel_cases/`, a file for each kind.
"""

import argparse
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jpaged.api.errors import InvalidParameterError
from jpaged.bench.arguments import HelpFormatter, check_expert_skew
from jpaged.bench.kernel_cases import (
    attention,
    card,
    contiguous,
    experts,
    latents,
    moves,
    products,
    recurrence,
    sampling,
)
from jpaged.bench.kernel_cases.case import Built, Case
from jpaged.bench.report import write_report
from jpaged.pallas_kernels import registry

_BATCH_S = 0.1  # length of programs enqueued together, far above the round trip that ends them


def cases(backend: str | None, zipf: float = 1.0) -> Iterator[Case]:
    """Every case; those of the card itself have no aim. zipf: of the experts of the skewed cases."""
    yield from card.cases()
    yield from attention.cases(backend)
    yield from latents.cases(backend)
    yield from contiguous.cases(backend)
    yield from moves.cases(backend)
    yield from experts.cases(backend, zipf)
    yield from products.cases(backend)
    yield from recurrence.cases(backend)
    yield from sampling.cases(backend)


def measure(build: Callable[[], Built], repeats: int = 7) -> tuple[list[float], float]:
    """Seconds a call, one figure for each of `repeats` batches of programs; and the work of a call."""
    program, arguments, calls, work = build()
    donates = False

    def run(times: int) -> float:
        nonlocal arguments, donates
        start = time.perf_counter()
        out = None
        for _ in range(times):
            out = program(*arguments)
            if donates:
                arguments = (out, *arguments[1:])
        jax.block_until_ready(out)
        return time.perf_counter() - start

    first = program(*arguments)
    jax.block_until_ready(first)
    if any(x.is_deleted() for x in jax.tree.leaves(arguments[0])):
        donates, arguments = True, (first, *arguments[1:])
    once = run(2) / 2
    times = int(np.clip(_BATCH_S / once, 2, 100))
    return [run(times) / times / calls for _ in range(repeats)], work


def main(argv: list[str] | None = None) -> int:
    """Runs every case, prints a table and writes the figures as JSON; if it is stopped, the figures so far."""
    parser = argparse.ArgumentParser(
        prog="jpaged bench kernels", description=main.__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument(
        "--only",
        metavar="TEXT",
        action="append",
        help="run only the cases whose name contains this, or is what follows a =; may be repeated (default: all)",
    )
    parser.add_argument(
        "--backend",
        metavar="NAME",
        action="append",
        help=f"force one backend of {', '.join(registry.backends())}; may be repeated: a column each (default: by "
        "device)",
    )
    parser.add_argument(
        "--expert-skew",
        type=float,
        default=1.0,
        metavar="Z",
        help="of the experts' skewed cases: an expert is as popular as its rank to the power of -Z (default: 1)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="where to write JSON (default: benchmarks/results/kernels.json)",
    )
    parser.add_argument("--repeats", type=int, default=7, help="batches of programs that the median is taken of")
    options = parser.parse_args(argv)
    try:
        backends = [registry.canonical(name) for name in options.backend] if options.backend else [None]
    except ValueError as error:
        parser.error(f"--{error}")
    if len(set(backends)) < len(backends):
        parser.error(f"--backend {' --backend '.join(options.backend)}: one of them is named twice")
    try:
        check_expert_skew(options.expert_skew)
    except InvalidParameterError as error:
        parser.error(str(error))
    device = jax.devices()[0]
    if device.platform != "gpu":
        print(f"jpaged bench kernels needs a GPU; JAX sees only {device.platform}", file=sys.stderr)
        return 1
    only = options.only
    chosen = [
        [case for case in cases(backend, options.expert_skew) if not only or _is_asked_for(case, only)]
        for backend in backends
    ]
    if not chosen[0]:
        parser.error(f"--only {' --only '.join(only)}: no case has that in its name")
    print(f"{device.device_kind}, JAX {jax.__version__}, {', '.join(map(str, options.backend or ['default']))} backend")
    rows: list[dict[str, Any]] = []
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # still writes the report
    try:
        if len(backends) == 1:
            _measure_all(chosen[0], options.repeats, rows)
        else:
            _compare_all(dict(zip(backends, chosen, strict=True)), options.repeats, rows)
    finally:
        signal.signal(signal.SIGTERM, before)
        if rows:
            path = options.json or Path("benchmarks/results/kernels.json")
            backend: Any = backends[0] if len(backends) == 1 else backends
            settings = {
                "backend": backend,
                "only": only,
                "expert_skew": options.expert_skew,
                "complete": len(rows) == len(chosen[0]),
            }
            write_report(path, "kernels", settings, rows)
    return 0


def _is_asked_for(case: Case, only: list[str]) -> bool:
    return any(case.name == text[1:] if text.startswith("=") else text in case.name for text in only)


def _compare_all(chosen: dict[Any, list[Case]], repeats: int, rows: list[dict[str, Any]]) -> None:
    """Adds each case's figures to `rows` as it prints them, a column a backend, measured one after the other."""
    print(f"{'case':44s} {'unit':8s}" + "".join(f" {name:>10s}" for name in chosen))
    for of_backends in zip(*chosen.values(), strict=True):
        row: dict[str, Any] = {"case": of_backends[0].name, "unit": of_backends[0].unit}
        if of_backends[0].of_the_card:  # the same whichever kernels run
            of_backends = of_backends[:1]
        print(f"{row['case']:44s} {row['unit']:8s}", end="", flush=True)
        for name, case in zip(chosen, of_backends, strict=False):
            figures = _figures(case, repeats)
            row["card" if case.of_the_card else name] = figures
            print(f" {figures['value']:10,.1f}" if "value" in figures else f" {'-':>10s}", end="", flush=True)
        print()
        rows.append(row)


def _measure_all(chosen: list[Case], repeats: int, rows: list[dict[str, Any]]) -> None:
    """Adds each case's figures to `rows` as it prints them."""
    print(f"{'case':44s} {'median':>10s} {'spread':>7s} {'unit':8s} {'us':>9s}  aim")
    for case in chosen:
        figures = _figures(case, repeats)
        rows.append({"case": case.name} | figures)
        if "error" in figures:
            print(f"{case.name:44s} failed: {figures['error'][:200]}")
            continue
        aim = "" if case.aim is None else f"{case.aim:g}"
        value, spread, median_us = (figures[name] for name in ("value", "spread", "median_us"))
        print(f"{case.name:44s} {value:10,.1f} {spread:6.1%} {case.unit:8s} {median_us:9.2f}  {aim}", flush=True)


def _figures(case: Case, repeats: int) -> dict[str, Any]:
    """What one case gives, or its error: one case that fails must not cost the others."""
    try:
        seconds, work = measure(case.build, repeats)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    median = statistics.median(seconds)
    return {
        "value": {"us": median * 1e6, "GB/s": work / median / 1e9, "TFLOP/s": work / median / 1e12}[case.unit],
        "unit": case.unit,
        "aim": case.aim,
        "median_us": median * 1e6,
        "spread": (max(seconds) - min(seconds)) / median,
        "all_us": [s * 1e6 for s in seconds],
    }


if __name__ == "__main__":
    raise SystemExit(main())
