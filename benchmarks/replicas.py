"""Whether the loops of several replicas slow each other down on the host.

    python benchmarks/replicas.py --replicas 2

Each loop is an engine's whole control plane with a fake executor (as in `jpaged bench scheduler`); some sequences end
and start in each step. The loop runs once alone, then several at a time: in threads of one process, and in processes.
The table gives the steps per second of all loops together. With GPUs behind them, the host must sustain the steps of
all replicas.
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from jpaged.bench.arguments import HelpFormatter
from jpaged.bench.scheduler import Case, measure


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--replicas", type=int, default=2, help="loops at a time")
    parser.add_argument("--running", type=int, default=256, help="running sequences of each")
    parser.add_argument("--finishing", type=int, default=4, help="sequences that end in each step")
    parser.add_argument("--steps", type=int, default=2000, help="steps of each loop")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    args = parser.parse_args(argv)
    if min(args.replicas, args.running, args.finishing, args.steps) < 1:
        parser.error("--replicas, --running, --finishing and --steps must be at least 1")
    context = multiprocessing.get_context("spawn")
    rates = {"one loop": _rate(args, 1, ThreadPoolExecutor(1))}
    rates[f"{args.replicas} threads"] = _rate(args, args.replicas, ThreadPoolExecutor(args.replicas))
    processes = ProcessPoolExecutor(args.replicas, mp_context=context)
    rates[f"{args.replicas} processes"] = _rate(args, args.replicas, processes)
    for name, rate in rates.items():
        print(f"{name:<16}{rate:>10,.0f} steps/s", flush=True)
    if args.json:
        from jpaged.bench.report import write_report  # imports jax, which nothing measured here does

        write_report(
            args.json, "replicas", vars(args), [{"loops": name, "steps_s": rate} for name, rate in rates.items()]
        )
    return 0


def _rate(args: argparse.Namespace, loops: int, executor: Executor) -> float:
    """Steps/s of all loops together, from the moment that they have all warmed up."""
    case = Case("finishes", finishing=args.finishing)
    with executor:
        list(executor.map(_run, [case] * loops, [args.running] * loops, [50] * loops))
        begun = time.perf_counter()
        list(executor.map(_run, [case] * loops, [args.running] * loops, [args.steps] * loops))
        return loops * args.steps / (time.perf_counter() - begun)


def _run(case: Case, running: int, steps: int) -> None:
    measure(case, running, steps)


if __name__ == "__main__":
    sys.exit(main())
