"""Products whose bits depend on a row alone: whether they do on this device, and their time beside XLA's product.

    python benchmarks/invariant_product.py --json OUT.json         # on a GPU, within a minute and a half
    python benchmarks/invariant_product.py --tiny                  # anywhere: whether it runs

Bits: rows of a product of many are compared with the products of these rows alone. Times: jitted programs of calls on
different weights, more than the L2 cache holds, enqueued often enough to hide dispatch; medians of several series.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpaged.bench.report import write_report
from jpaged.executor.start.compilation import GPU_OPTIONS
from jpaged.pallas_kernels import invariant_product
from jpaged.pallas_kernels.registry import missing, refuses_here

SHAPES = {
    "0.6B qkv": (1024, 4096),
    "0.6B out": (2048, 1024),
    "0.6B gate, up": (1024, 6144),
    "0.6B down": (3072, 1024),
    "0.6B head": (1024, 151_936),
    "8B qkv": (4096, 6144),
    "8B out": (4096, 4096),
    "8B gate, up": (4096, 28_672),
    "8B down": (14_336, 4096),
}
"""Inputs and outputs."""
ROWS = (1, 64, 256, 512, 2048)
ROWS_OF_BITS = (1, 7, 64, 129, 512, 2048)
WEIGHT_BYTES = 256 << 20  # of all weights of a program together
SERIES, SERIES_S = 5, 10e-3


def backends() -> list[str]:
    """Those that can run here; XLA's loop is the reference."""
    return [one for one in ("hopper", "triton") if missing(one) is None and refuses_here(one) is None]


def normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def bits(tiny: bool) -> Iterator[dict[str, Any]]:
    """Of every backend and number of rows: how many elements differ from those of the rows alone."""
    shapes = {"tiny": (96, 72)} if tiny else {name: SHAPES[name] for name in ("0.6B qkv", "0.6B down", "8B down")}
    counts = (1, 7, 129) if tiny else ROWS_OF_BITS
    for name, (depth, columns) in shapes.items():
        for outputs_first in (False, True):
            w = normal(1, (columns, depth) if outputs_first else (depth, columns)) * depth**-0.5
            x = normal(2, (max(counts), depth))
            exact = np.asarray(x[:8], np.float64) @ (lambda a: a.T if outputs_first else a)(np.asarray(w, np.float64))
            for backend in backends() or ["xla"]:
                product = partial(invariant_product, outputs_first=outputs_first, dtype=jnp.float32, backend=backend)
                whole = np.asarray(product(x, w))
                error = float(np.linalg.norm(whole[:8] - exact) / np.linalg.norm(exact))
                for rows in counts:
                    first = x.shape[0] - rows  # the last ones, which then stand elsewhere in a tile
                    differing = sum(
                        int((np.asarray(product(x[begin : begin + rows], w)) != whole[begin : begin + rows]).sum())
                        for begin in {0, first // 2, first}
                    )
                    record = {"what": "bits", "shape": name, "outputs_first": outputs_first, "backend": backend}
                    yield record | {"rows": rows, "differing": differing, "relative_error": error}


def program(call: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., Any]:
    def run(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        results = lax.optimization_barrier([call(x, w) for w in weights])
        return sum(y[0, 0].astype(jnp.float32) for y in results)

    return run


def times(tiny: bool) -> Iterator[dict[str, Any]]:
    """Microseconds of a call, by shape, rows and what computes it."""
    shapes = {"tiny": (96, 72)} if tiny else SHAPES
    cases = []
    for name, (depth, columns) in shapes.items():
        first = name == "0.6B head"
        weight = (columns, depth) if first else (depth, columns)
        copies = min(16, max(2, -(-WEIGHT_BYTES // (2 * depth * columns)))) if not tiny else 2
        axes = (((1,), (1 if first else 0,)), ((), ()))
        calls: dict[str, Any] = {"cuBLAS": partial(lax.dot_general, dimension_numbers=axes)}
        for backend in backends() or ["xla"]:
            calls[backend] = partial(invariant_product, outputs_first=first, backend=backend)
        cases += [
            (name, weight, copies, rows, what, calls[what]) for rows in ROWS[: 2 if tiny else None] for what in calls
        ]

    def compiled(case: Any) -> Any:
        _, weight, copies, rows, _, call = case
        x = jax.ShapeDtypeStruct((rows, weight[1] if case[0] == "0.6B head" else weight[0]), jnp.bfloat16)
        weights = [jax.ShapeDtypeStruct(weight, jnp.bfloat16)] * copies
        options: dict[str, Any] = GPU_OPTIONS if jax.default_backend() == "gpu" else {}
        return jax.jit(program(call)).lower(x, weights).compile(compiler_options=options)

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(compiled, cases))
    held: dict[str, list[jax.Array]] = {}
    for (name, weight, copies, rows, what, _), run in zip(cases, made, strict=True):
        if name not in held:
            held = {name: [normal(i, weight) for i in range(copies)]}
        depth = weight[1] if name == "0.6B head" else weight[0]
        x = normal(99, (rows, depth))
        jax.block_until_ready(run(x, held[name]))
        begun = time.perf_counter()
        jax.block_until_ready(run(x, held[name]))
        runs = max(2, round(SERIES_S / (time.perf_counter() - begun)))
        series = []
        for _ in range(SERIES):
            begun = time.perf_counter()
            for _ in range(runs):
                last = run(x, held[name])
            last.block_until_ready()
            series.append((time.perf_counter() - begun) / runs / copies * 1e6)
        yield {"what": what, "shape": name, "rows": rows, "us": round(statistics.median(series), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--only", choices=("bits", "times"), help="one part alone")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see whether it runs")
    args = parser.parse_args()
    records: list[dict[str, Any]] = []
    for part in (bits, times):
        if args.only in (None, part.__name__):
            for record in part(args.tiny):
                records.append(record)
                print(json.dumps(record), flush=True)
    if args.json is not None:
        write_report(args.json, "invariant_product", {"only": args.only, "tiny": args.tiny}, records)
    sys.exit(any(record.get("differing") for record in records))


if __name__ == "__main__":
    main()
