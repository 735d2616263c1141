"""`jpaged bench memory`: the figures of the PagedAttention paper, simulated with the engine's own scheduler.

    jpaged bench memory                              every figure that needs no device, as tables
    jpaged bench memory --figure 2 --figure 13       some of them
    jpaged bench memory --plots docs/images --json benchmarks/results/memory.json
    jpaged bench memory --trace requests.jsonl --rate 2     your own requests
    jpaged bench memory --figure 18 --figure 19 --model llama-3.1-8b --load-format dummy     on a GPU

The assumptions are in `setups.py` (how long a step takes), `traces.py` (lengths and arrivals), `reservation.py` (the
systems compared with) and `sharing.py` (beams). docs/paper.md shows the results and explains differences.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from jpaged.api.errors import InvalidParameterError
from jpaged.bench.arguments import HelpFormatter
from jpaged.bench.memory import figures, plots
from jpaged.bench.memory.figures import FIGURES, Options, Row
from jpaged.bench.memory.setups import SETUPS
from jpaged.bench.memory.traces import LENGTHS, read_trace

_ON_DEVICE = ("18", "19")
_LATENCY_FIGURES = ("12", "14", "16", "17")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="jpaged bench memory", description=__doc__, formatter_class=HelpFormatter)
    result.add_argument(
        "--figure",
        action="append",
        choices=("2", "12", "13", "14", "15", "16", "17", "18", "19", "all"),
        help="of the paper; may be repeated (default: all that need no device)",
    )
    result.add_argument("--step-time", default="paper", help="paper, roofline, or a file of measured steps")
    result.add_argument("--lengths", default="paper", choices=LENGTHS, help="where the lengths of requests come from")
    result.add_argument(
        "--duration", type=float, metavar="SECONDS", help="of a trace (default: 600 to 3600, by figure)"
    )
    result.add_argument("--seed", type=int, default=0, help="of lengths and arrivals")
    result.add_argument("--jobs", type=int, default=1, help="processes to simulate in")
    result.add_argument("--quick", action="store_true", help="short traces and fewer points, for a look")
    result.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    result.add_argument("--plots", type=Path, metavar="DIR", help="draw the figures there, as PNG and SVG")
    own = result.add_argument_group("requests of your own, instead of figures")
    own.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines with input_len and output_len, or ShareGPT")
    own.add_argument("--rate", type=float, action="append", help="requests/s, also of figure 18; may be repeated")
    own.add_argument("--tokenizer", help="for ShareGPT's text: a directory or hub id")
    own.add_argument("--setup", default="opt-13b", choices=SETUPS, help="model and cards")
    device = result.add_argument_group("figures 18 and 19 on a device")
    device.add_argument("--model", help="a directory, a hub id, or a name that other benchmarks know")
    device.add_argument(
        "--load-format", default="auto", choices=("auto", "safetensors", "dummy"), help='"dummy" makes random weights'
    )
    device.add_argument(
        "--few-programs",
        action="store_true",
        help="256 sequences at most, and few sizes of programs: engines start sooner, and steps are padded more",
    )
    device.add_argument(
        "--block-size", type=int, action="append", help="of figure 18; may be repeated (default: 16, 32, 64 and 128)"
    )
    device.add_argument("--num-prompts", type=int, default=400, help="requests of each run")
    device.add_argument("--tokens", type=int, default=1024, help="of the sequence that figure 19 swaps")
    device.add_argument("--max-model-len", type=int, default=2048, help="longest request, in tokens")
    device.add_argument(
        "--num-gpu-blocks", type=int, help="blocks of 16 tokens in the pool (default: what memory allows)"
    )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark from the command line; returns the exit status."""
    args = parser().parse_args(argv)
    for name in ("jobs", "num_prompts", "duration", "tokens"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise InvalidParameterError(f"--{name.replace('_', '-')} must be above 0, got {value}.")
    if any(rate <= 0 for rate in args.rate or ()):
        raise InvalidParameterError(f"--rate must be above 0, got {min(args.rate)}.")
    options = Options(
        step_time=args.step_time,
        lengths=args.lengths,
        duration_s=args.duration,
        quick=args.quick,
        progress=sys.stderr.isatty(),
        seed=args.seed,
        jobs=args.jobs,
    )

    def keep(rows: dict[str, list[Row]], says_so: bool = False) -> None:
        """Writes what is there, so that it is kept if the time ends."""
        if args.json:
            from jpaged.bench.report import write_report  # imports jax, which the simulation does not

            flat = [{"figure": figure, **row} for figure, of_figure in rows.items() for row in of_figure]
            write_report(args.json, "memory", vars(args), flat, says_so=says_so)

    rows = _trace_rows(args, options) if args.trace else _figure_rows(args, options, keep)
    if args.plots:
        for file in plots.draw(rows, args.plots):
            print(f"drawn to {file}")
    keep(rows, says_so=True)
    return 0


def _trace_rows(args: argparse.Namespace, options: Options) -> dict[str, list[Row]]:
    setup = SETUPS[args.setup]
    requests = read_trace(args.trace, args.tokenizer, setup.max_model_len)
    rows = figures.trace_report(requests, args.setup, args.rate or (), options)
    _print_table(f"{args.trace}, {len(requests)} requests, {args.setup}", rows["trace"])
    return rows


def _figure_rows(
    args: argparse.Namespace, options: Options, keep: Callable[[dict[str, list[Row]]], None]
) -> dict[str, list[Row]]:
    """keep: is given all rows so far whenever a device has measured one."""
    chosen = list(dict.fromkeys(args.figure or ["all"]))
    if "all" in chosen:
        chosen = list(FIGURES) + (["19"] if args.model else [])
    if chosen == ["18"] and args.few_programs and not args.model:
        raise InvalidParameterError("--few-programs is for figure 18 on a device: name a model with --model.")
    if "19" in chosen and not args.model:
        raise InvalidParameterError("--figure 19 is measured on a device: name a model with --model.")
    rows: dict[str, list[Row]] = {}
    for figure in chosen:
        if figure in FIGURES:
            rows |= FIGURES[figure](options)
        if figure in _ON_DEVICE and args.model:
            from jpaged.bench.memory import device  # imports jax

            for measured in device.measure(figure, args):
                rows |= measured
                keep(rows)
        wanted = [name for name in rows if name == figure or name.startswith(f"{figure}, ")]
        for name in wanted:
            _print_table(f"figure {name}", rows[name])
        if figure in _LATENCY_FIGURES:
            name = f"{figure}, sustained"
            rows[name] = list(figures.sustained(rows[figure], partial(figures.published_curves, figure)))
            _print_table(f"figure {figure}: requests/s sustained at {figures.SUSTAINED_S} s/token", rows[name])
    return rows


def _print_table(title: str, rows: Sequence[Row]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]
    print(f"\n{title}")
    print("  ".join(column.ljust(width) for column, width in zip(columns, widths, strict=True)))
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


__all__ = ["main", "parser"]

if __name__ == "__main__":
    sys.exit(main())
