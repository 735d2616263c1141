"""Measures tile configurations of the products with quantized weights on this GPU, for the tables in
`jpaged/pallas_kernels/{fp8_product,int4_product}/{hopper,triton}.py`.

    python benchmarks/product_tiles.py fp8-hopper --rows 8 --json tiles.json

    fp8-hopper     FP8 weights, up to 16 rows in bfloat16, by Hopper's kernel
    weights        FP8 weights, rows in bfloat16, by Triton's
    int4-hopper    4-bit weights in groups of 128, rows in bfloat16, by Hopper's kernel
    int4-triton    likewise by Triton's

Microseconds of each product of an 8B model in each configuration, beside the floor of its bytes; one JSON line each.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import product as product_of
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.bench import kernels
from jpaged.bench.device_trace import kernel_times, read_trace
from jpaged.bench.kernel_cases import products
from jpaged.bench.kernel_cases.case import L2_BYTES, normal
from jpaged.pallas_kernels.fp8_product import hopper as fp8_hopper
from jpaged.pallas_kernels.fp8_product import triton as fp8
from jpaged.pallas_kernels.fp8_product.operands import Operands as Fp8Operands
from jpaged.pallas_kernels.fp8_product.operands import Options
from jpaged.pallas_kernels.int4_product import hopper as int4_hopper
from jpaged.pallas_kernels.int4_product import triton as int4
from jpaged.pallas_kernels.int4_product.operands import Operands as Int4Operands
from jpaged.pallas_kernels.narrow_product.hopper_kernel import Tiling

Config = fp8.Config | int4.Config | Tiling
_FORMS = {"fp8-hopper": "FP8 weights", "weights": "FP8 weights", "int4-hopper": "4 bits", "int4-triton": "4 bits"}


def configs(kind: str, rows: int) -> Sequence[Config]:
    """Candidates."""
    tile = max(16, min(64, rows))
    if kind.endswith("-hopper"):
        heights = [8 if rows <= 8 else tile] if rows <= 64 else [64, 128]
        if kind == "fp8-hopper":
            heights = [8 if rows <= 8 else 16]
        cut = product_of((1, 2), (1, 2, 3, 4), (2, 3, 4, 5))  # blocks, consumers, stages
        found = []
        for height, one in product_of(heights, cut):
            with suppress(ValueError):  # it does not fit
                found.append(Tiling(height, *one))
        return found
    if kind == "int4-triton":
        cut = [(64, 4, 4, 2), (64, 2, 4), (32, 2, 4, 2), (32, 2, 3, 1, 2), (64, 4, 3, 2, 2), (32, 4, 3, 2, 2)]
        cut += [(16, 1, 3, 1, 2), (64, 2, 3, 1, 2), (32, 2, 3, 2, 2)]
        return [int4.Config(8 if rows <= 8 else tile, *one) for one in cut]
    shapes = [(64, 128, 4, 5), (64, 128, 4, 8), (64, 256, 4, 3), (64, 256, 4, 5), (128, 128, 4, 4), (128, 128, 8, 5)]
    shapes += [(32, 256, 4, 4), (64, 64, 4, 8)]
    found: list[Config] = [fp8.Config(outputs, tile, depth, *others) for outputs, depth, *others in shapes]
    return found + [fp8.Config(64, tile, 128, 4, 6, splits) for splits in (1, 2, 4)]


def operands(kind: str, layer: str, rows: int) -> tuple[list[Any], list[Any], jax.Array]:
    """Rows, as many weights as exceed an L2 cache, and their scales."""
    outputs, inputs = products.PRODUCTS[layer]
    bits = 4 if kind.startswith("int4") else 8
    copies = max(2, min(32, -(-L2_BYTES // (outputs * inputs * bits // 8))))
    values = [normal(i, (outputs, inputs), jnp.bfloat16) for i in range(copies)]
    if kind.startswith("int4"):
        weights = [lax.bitcast_convert_type(x, jnp.uint8)[..., 0][:, : inputs // 2] for x in values]
    else:
        weights = [(x * 64).astype(jnp.float8_e4m3fn) for x in values]
    scale = jnp.full((outputs, inputs // 128 if kind.startswith("int4") else 1), 0.01, jnp.float32)
    return [normal(100 + i, (rows, inputs), jnp.bfloat16) for i in range(copies)], weights, scale


def product(kind: str, config: Config) -> Callable[..., jax.Array]:
    if kind == "int4-hopper":
        of_hopper = partial(int4_hopper.int4_product, group=128, dtype=jnp.bfloat16, tiling=config)
        return lambda x, w, scale: of_hopper(Int4Operands(x, w, scale, None, None))
    if kind == "int4-triton":
        run = partial(int4.int4_product, group=128, dtype=jnp.bfloat16, config=config)
        return lambda x, w, scale: run(Int4Operands(x, w, scale, None, None))
    options = Options(group=None, activations="none", upper_bound=None, dtype=jnp.dtype(jnp.bfloat16))
    of_fp8 = fp8_hopper.fp8_product if kind == "fp8-hopper" else fp8.fp8_product
    return lambda x, w, scale: of_fp8(Fp8Operands(x, w, scale, None), options, config)


def figure(multiply: Callable[..., jax.Array], given: tuple[list[Any], list[Any], jax.Array]) -> float:
    """Microseconds."""
    program = jax.jit(lambda x, w, scale: [multiply(*pair, scale) for pair in zip(x, w, strict=True)])
    seconds, _ = kernels.measure(lambda: (program, given, len(given[0]), 1.0), repeats=3)
    return 1e6 * statistics.median(seconds)


def figure_on_device(multiply: Callable[..., jax.Array], given: tuple[list[Any], list[Any], jax.Array]) -> float:
    """Microseconds of a product's kernels by the profiler, without what lies between them."""
    program, (rows, weights, scale), turns = jax.jit(multiply), given, 3

    def turn() -> None:
        jax.block_until_ready([program(*pair, scale) for pair in zip(rows, weights, strict=True)])

    turn()
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for _ in range(turns):
                turn()
        times = kernel_times(read_trace(Path(directory)))
    return 1e3 * sum(ms for ms, _ in times.values()) / (turns * len(rows))


def measured(kind: str, layer: str, rows: int, *, on_device: bool) -> Iterator[dict[str, Any]]:
    """A line for each configuration. on_device: as of the option."""
    outputs, inputs = products.PRODUCTS[layer]
    floor = products.product_floor_us(_FORMS[kind], rows, outputs, inputs)
    given = operands(kind, layer, rows)
    first = given[0][0], given[1][0], given[2]

    def lower(config: Config) -> None:  # jax-triton keeps what it compiles
        jax.jit(product(kind, config)).lower(*first)

    with ThreadPoolExecutor(12) as pool:
        lowered = {config: pool.submit(partial(lower, config)) for config in configs(kind, rows)}
    for config, done in lowered.items():
        line: dict[str, Any] = {"layer": layer, "rows": rows, "config": str(config), "floor_us": round(floor, 1)}
        try:
            done.result()
            line["us"] = round((figure_on_device if on_device else figure)(product(kind, config), given), 2)
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {error}"[:200]
        yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=_FORMS)
    parser.add_argument("--rows", type=int, action="append", help="may be repeated (default: 8)")
    parser.add_argument("--layer", action="append", choices=products.PRODUCTS, help="default: all")
    parser.add_argument("--on-device", action="store_true", help="time kernels alone, by the profiler, without gaps")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    kernels._BATCH_S = 0.01
    layers, figures = options.layer or list(products.PRODUCTS), []
    for layer, rows in product_of(layers, options.rows or [8]):
        for line in measured(options.kind, layer, rows, on_device=options.on_device):
            figures.append(line)
            print(json.dumps(line), flush=True)
    options.json.write_text(json.dumps({"kind": options.kind, "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
