"""The first half of a gated MLP, in one kernel and in XLA; and the cost of plain products by their rows.

    python benchmarks/gated_product.py --json OUT.json         # on a Hopper GPU, within four minutes
    python benchmarks/gated_product.py --tiny                  # anywhere: whether it runs

Three parts run in processes of their own, which are killed if they hang. A part leaves out what it has no time for.

    kernel, clusters    the kernel without and with clusters, in its likeliest tilings, and XLA's product and
                        activation (with the first of them) as the engine compiles them; TFLOP/s beside the card's
                        8192^3 product
    products            microseconds of a layer's four products (XLA) by rows: which batch sizes are worth a program

Timed are jitted programs of calls on different weights, more than the L2 cache holds, enqueued often enough to hide
dispatch. Figures are the median of several series, with the least and the most. Each kernel's result is compared with
XLA's.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.bench.report import write_report
from jpaged.executor.start.compilation import GPU_OPTIONS
from jpaged.pallas_kernels import gated_product
from jpaged.pallas_kernels.devices import num_multiprocessors
from jpaged.pallas_kernels.gated_product import hopper, hopper_tiling
from jpaged.pallas_kernels.registry import missing, runs_here


@dataclass(frozen=True)
class Model:
    """Sizes of a model's layers."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int = 128

    def products(self) -> dict[str, tuple[int, int]]:
        """(depth, columns) of a layer's products."""
        attention = self.heads * self.head_dim
        return {
            "qkv": (self.hidden, attention + 2 * self.kv_heads * self.head_dim),
            "out": (attention, self.hidden),
            "gate_up": (self.hidden, 2 * self.inner),
            "down": (self.inner, self.hidden),
        }


@dataclass(frozen=True)
class Plan:
    """What is measured, and how long."""

    models: dict[str, Model]
    rows: tuple[int, ...]
    product_rows: tuple[int, ...]
    square: int
    weight_bytes: int  # of all weights of a program together
    series_s: float


FULL = Plan(
    models={"llama-3.1-8b": Model(4096, 14336, 32, 8), "qwen3-0.6b": Model(1024, 3072, 16, 8)},
    rows=(128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 16384),
    product_rows=(*range(32, 513, 32), *range(576, 1025, 64)),
    square=8192,
    weight_bytes=512 << 20,
    series_s=20e-3,
)
TINY = Plan({"tiny": Model(64, 96, 2, 1, 32)}, (8, 70), (8, 16), 64, 1 << 16, 1e-3)
PARTS = ("kernel", "clusters", "products")
SERIES = 5
MOST_WEIGHTS = 32
LIKELIEST = 2  # tilings of each number of rows, by the kernel's own estimate


@dataclass(frozen=True)
class Case:
    """A call to be timed. record: what it is, for the JSON. reference: what its result should be close to."""

    record: dict[str, Any]
    call: Callable[[jax.Array, jax.Array], jax.Array]
    rows: int
    weight: tuple[int, ...]  # shape, of which the first axis is shared with x
    flops: float
    reference: Callable[[jax.Array, jax.Array], jax.Array] | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--seconds", type=float, default=70.0, help="of each part, after JAX has started")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see whether it runs")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    plan = TINY if args.tiny else FULL
    if args.part is not None:
        with args.lines.open("a") as lines:
            for record in measure(plan, args.part, args.seconds):
                print(json.dumps(record), file=lines, flush=True)
        return
    records = [record for part in args.parts for record in in_own_process(args, part)]
    print("\n".join(tables(records)))
    if args.json is not None:
        settings = {"seconds": args.seconds, "parts": args.parts, "plan": asdict(plan), "options": GPU_OPTIONS}
        write_report(args.json, "gated_product", settings, records)


def in_own_process(args: argparse.Namespace, part: str) -> list[dict[str, Any]]:
    """What a part measured until its end, or until it was killed."""
    with tempfile.TemporaryDirectory() as directory:
        lines = Path(directory) / "lines"
        lines.touch()
        command = [sys.executable, __file__, "--part", part, "--lines", str(lines), "--seconds", str(args.seconds)]
        try:
            code = subprocess.run(command + ["--tiny"] * args.tiny, timeout=args.seconds + 40, check=False).returncode
            ended = [] if code == 0 else [{"part": part, "failed": f"exit code {code}"}]
        except subprocess.TimeoutExpired:
            ended = [{"part": part, "failed": "hung, and was killed"}]
        return [json.loads(line) for line in lines.read_text().splitlines()] + ended


def measure(plan: Plan, part: str, seconds: float) -> Iterator[dict[str, Any]]:
    """Every case of a part, until its time is up."""
    begun = time.perf_counter()
    cases = [square_case(plan), *(product_cases(plan) if part == "products" else kernel_cases(plan, part))]
    done = 0
    with ThreadPoolExecutor(8) as pool:
        for start in range(0, len(cases), 16):  # compiled together, then timed in peace
            some = cases[start : start + 16]
            for case, compiled in zip(some, list(pool.map(partial(_compiled, plan), some)), strict=True):
                if time.perf_counter() - begun > seconds:
                    yield {"part": part, "left_out": len(cases) - done}
                    return
                yield {"part": part} | case.record | timed(plan, case, compiled)
                done += 1


def square_case(plan: Plan) -> Case:
    n = plan.square
    return Case({"what": "square"}, jnp.matmul, n, (n, n), 2.0 * n**3)


def kernel_cases(plan: Plan, part: str) -> list[Case]:
    """XLA first (without clusters), then tilings, the likeliest of all rows before the next."""
    clusters = part == "clusters"
    in_xla = partial(gated_product, backend="xla")
    cases: list[tuple[int, Case]] = []
    for name, model in plan.models.items():
        for rows in plan.rows:
            flops = 4.0 * rows * model.hidden * model.inner
            shape = (rows, (model.hidden, 2, model.inner), flops)
            record = {"model": name, "rows": rows}
            if not clusters:
                cases.append((0, Case(record | {"what": "xla"}, in_xla, *shape)))
            if missing("hopper") or not runs_here("hopper"):
                continue
            ctas = num_multiprocessors()
            picked = hopper_tiling.pick_tiling(rows, model.hidden, model.inner, ctas)
            for rank, tiling in enumerate(_tilings(rows, model, clusters, ctas)):
                call = partial(hopper.gated_product, bias=None, activation="silu", tiling=tiling)
                described = record | {"what": "kernel", "tiling": asdict(tiling), "picked": tiling == picked}
                cases.append((1 + rank, Case(described, call, *shape, reference=in_xla)))
    return [case for _, case in sorted(cases, key=lambda ranked: ranked[0])]


def _tilings(rows: int, model: Model, clusters: bool, ctas: int) -> list[hopper_tiling.Tiling]:
    """The likeliest first; and the largest in any case."""

    def cycles(tiling: hopper_tiling.Tiling) -> float:
        return hopper_tiling.estimated_cycles(tiling, rows, model.hidden, model.inner, ctas)

    ranked = sorted((t for t in hopper_tiling.tilings(rows) if (t.shared is not None) == clusters), key=cycles)
    return list(dict.fromkeys([*ranked[:LIKELIEST], hopper_tiling.Tiling(shared=ranked[0].shared)]))


def product_cases(plan: Plan) -> list[Case]:
    return [
        Case(
            {"model": name, "rows": rows, "what": product},
            jnp.matmul,
            rows,
            (depth, columns),
            2.0 * rows * depth * columns,
        )
        for name, model in plan.models.items()
        for rows in plan.product_rows
        for product, (depth, columns) in model.products().items()
    ]


def _weights(plan: Plan, case: Case) -> int:
    """How many a program has."""
    return min(MOST_WEIGHTS, max(2, -(-plan.weight_bytes // (2 * math.prod(case.weight)))))


def _compiled(plan: Plan, case: Case) -> Callable[..., Any] | str:
    """A program of one call a weight, which gives a number of all of them and the first one's result; or why not."""

    def program(x: jax.Array, weights: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        # Behind a barrier, so that no more than a product of one row is not what is left of them.
        results = lax.optimization_barrier([case.call(x, w) for w in weights])
        return sum(y[0, 0].astype(jnp.float32) for y in results), results[0]

    x = jax.ShapeDtypeStruct((case.rows, case.weight[0]), jnp.bfloat16)
    weights = [jax.ShapeDtypeStruct(case.weight, jnp.bfloat16)] * _weights(plan, case)
    options = GPU_OPTIONS if jax.default_backend() == "gpu" else {}
    try:
        return jax.jit(program).lower(x, weights).compile(compiler_options=options)
    except Exception as error:  # the others are worth having
        return f"{type(error).__name__}: {str(error)[:300]}"


def timed(plan: Plan, case: Case, program: Callable[..., Any] | str) -> dict[str, Any]:
    """Microseconds of a call, and the error where there is something to compare with."""
    if isinstance(program, str):
        return {"failed": program}
    x, weights = _operands(case.rows, case.weight, _weights(plan, case))
    _, first = jax.block_until_ready(program(x, weights))
    found: dict[str, Any] = {}
    if case.reference is not None:
        difference, size = _distance(first, jax.jit(case.reference)(x, weights[0]))
        found["error"] = float(difference) / float(size)
    del first
    begun = time.perf_counter()
    jax.block_until_ready(program(x, weights))
    runs = max(2, round(plan.series_s / (time.perf_counter() - begun)))
    times = []
    for _ in range(SERIES):
        begun = time.perf_counter()
        for _ in range(runs):
            last = program(x, weights)[0]
        last.block_until_ready()
        times.append((time.perf_counter() - begun) / runs / len(weights))
    median = statistics.median(times)
    us = {"us": median, "least_us": min(times), "most_us": max(times)}
    return (
        found | {name: round(s * 1e6, 2) for name, s in us.items()} | {"tflops": round(case.flops / median / 1e12, 1)}
    )


_kept: dict[tuple[int, ...], list[jax.Array]] = {}


def _operands(rows: int, weight: tuple[int, ...], count: int) -> tuple[jax.Array, list[jax.Array]]:
    """x, and weights, which are kept for the next case of this size."""
    depth = weight[0]
    x = jax.random.normal(jax.random.key(rows), (rows, depth), jnp.bfloat16)
    if weight not in _kept:
        keys = jax.random.split(jax.random.key(1), count)
        _kept[weight] = [jax.random.normal(key, weight, jnp.bfloat16) * depth**-0.5 for key in keys]
    return x, _kept[weight]


@jax.jit
def _distance(got: jax.Array, want: jax.Array) -> tuple[jax.Array, jax.Array]:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.linalg.norm((got - want).ravel()), jnp.linalg.norm(want.ravel())


def tables(records: list[dict[str, Any]]) -> Iterator[str]:
    """The figures for people."""
    for record in records:
        if "left_out" in record:
            yield f"{record['part']}: no time for {record['left_out']} cases"
        elif "failed" in record:
            yield f"failed: {record}"
        elif record["what"] == "square":
            yield f"{record['part']}: the card's square product {record['tflops']} TFLOP/s"
    measured = [r for r in records if "us" in r and "model" in r]
    for name in dict.fromkeys(r["model"] for r in measured):
        own = [r for r in measured if r["model"] == name]
        yield from _kernel_table(name, [r for r in own if r["part"] != "products"])
        yield from _product_table(name, [r for r in own if r["part"] == "products"])


def _kernel_table(name: str, records: list[dict[str, Any]]) -> Iterator[str]:
    if not records:
        return
    yield f"\n{name}: us (TFLOP/s); tilings: columns/consumers/what clusters share; * is what the op takes"
    for rows in dict.fromkeys(r["rows"] for r in records):
        cells = []
        for r in sorted((r for r in records if r["rows"] == rows), key=lambda r: r["us"]):
            what = "xla" if r["what"] == "xla" else "/".join(str(v or "-") for v in r["tiling"].values())
            wrong = "" if r.get("error", 0.0) <= 0.02 else " WRONG"  # NaN too
            cells.append(f"{what}{'*' * r.get('picked', False)} {r['us']:.1f} ({r['tflops']:.0f}){wrong}")
        yield f"{rows:>6}  " + "   ".join(cells)


def _product_table(name: str, records: list[dict[str, Any]]) -> Iterator[str]:
    if not records:
        return
    names = list(dict.fromkeys(r["what"] for r in records))
    yield f"\n{name}: us of a product by rows, and of the four"
    yield "  rows" + "".join(product.rjust(10) for product in [*names, "layer"])
    for rows in dict.fromkeys(r["rows"] for r in records):
        times = {r["what"]: r["us"] for r in records if r["rows"] == rows}
        if len(times) == len(names):
            yield f"{rows:>6}" + "".join(f"{us:10.1f}" for us in [*(times[n] for n in names), sum(times.values())])


if __name__ == "__main__":
    main()
