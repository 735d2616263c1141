"""Measures tile configurations of the Triton product of experts in few bits on this GPU, for the table in
`jpaged/pallas_kernels/quantized_grouped_product/triton.py`.

    python benchmarks/expert_tiles.py e4m3 int4 --tokens 32 --tokens 1024 --json tiles.json

Both products of Qwen3-30B-A3B's experts, one behind the other, in microseconds; one JSON line each.
"""

import argparse
import json
import re
import statistics
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import product as product_of
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.bench import kernels
from jpaged.bench.kernel_cases.experts import FEW_BITS, Experts, FewBits, quantized_experts_case
from jpaged.pallas_kernels.grouped_product.tiles import RowGroups
from jpaged.pallas_kernels.quantized_grouped_product import triton as kernel
from jpaged.pallas_kernels.quantized_grouped_product.api import EIGHT_BITS
from jpaged.pallas_kernels.quantized_grouped_product.operands import Experts as Weights
from jpaged.pallas_kernels.quantized_grouped_product.operands import Operands, Options

NAMES = {bits.name: bits for bits in FEW_BITS}


CANDIDATES = {
    32: """8 32 128 2 4     8 32 128 2 3 2   8 32 128 2 2 2   8 16 128 1 4     8 16 128 1 3 2
           8 32 256 2 3     8 32 128 2 3 4   8 64 128 2 3""",
    64: """8 32 128 2 3 2   8 16 128 1 3 2   16 32 128 2 4    16 32 128 2 3 2  16 64 128 2 4""",
    256: """16 32 128 2 4   16 32 128 2 6    16 64 128 4 4    16 32 128 4 4    16 64 128 2 4
            16 32 256 2 3   32 32 128 2 4    32 64 128 4 3""",
    1024: """64 32 128 4 3  64 64 128 4 3    64 64 64 4 4     64 64 128 8 3    64 128 128 8 2
             32 64 128 4 3  64 128 64 8 3    128 64 64 8 3""",
    8192: """128 64 64 8 3  128 64 128 8 2   128 128 64 8 3   128 64 64 4 3    64 64 128 4 3
             64 64 64 4 4   64 128 64 8 3    64 128 128 8 2   256 64 64 8 3""",
}
"""The fields of configurations, two spaces between them, by the most tokens that they are tried with."""


def configs(tokens: int, bits: FewBits) -> list[kernel.Config]:
    """Those to try with so many tokens."""
    listed = next((some for most, some in CANDIDATES.items() if tokens <= most), CANDIDATES[8192])
    found = [kernel.Config(*map(int, one.split())) for one in re.split(r"\s{2,}", listed)]
    if bits.form in EIGHT_BITS:
        return found
    return [one for one in found if one.depth == 128]  # a step is as deep as its form asks for


def compile_both(config: kernel.Config, bits: FewBits, arguments: tuple[Any, ...]) -> None:
    """Compiles both products; jax-triton keeps them, by shapes and constants."""
    x, gate_up, down, grouped, twos = arguments
    sizes, tiles, order = grouped[0]
    groups = RowGroups(sizes, None, tiles)
    inner = jax.ShapeDtypeStruct((x.shape[0], down[0].shape[2] * (1 if bits.form in EIGHT_BITS else 2)), jnp.bfloat16)
    for rows, weights, activation, factors, indices in (
        (x, gate_up, "silu", None, order),
        (inner, down, None, twos, None),
    ):
        operands = Operands(rows, Weights(*weights, None, None), groups, factors, indices)
        options = Options(bits.form, bits.group, activation)
        run = partial(kernel.quantized_grouped_product, options=options, config=config)
        jax.jit(run).lower(operands)


def measured(tokens: int, bits: FewBits) -> list[dict[str, Any]]:
    """A line for each configuration."""
    experts = Experts()
    floor = max(experts.floors_us(tokens, bits))
    tried, lines = configs(tokens, bits), []
    # The list of tiles is part of what is compiled.
    cases = {
        rows: quantized_experts_case(tokens, bits, experts, "triton", rows) for rows in {one.rows for one in tried}
    }
    with ThreadPoolExecutor(12) as pool:
        done: dict[kernel.Config, Future[None]] = {
            config: pool.submit(compile_both, config, bits, cases[config.rows][1]) for config in tried
        }
    for config, compiled in done.items():
        line: dict[str, Any] = {"bits": bits.name, "tokens": tokens, "config": str(config), "floor_us": round(floor, 1)}
        kernel.default_config = lambda *_, of=config, **__: of
        jax.clear_caches()
        try:
            compiled.result()
            seconds, _ = kernels.measure(partial(cases.__getitem__, config.rows), repeats=3)
            line["us"] = round(1e6 * statistics.median(seconds), 2)
            line["spread"] = round(float(np.ptp(seconds)) / statistics.median(seconds), 3)
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {error}"[:200]
        print(json.dumps(line), flush=True)
        lines.append(line)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bits", nargs="+", choices=NAMES)
    parser.add_argument("--tokens", type=int, action="append", help="may be repeated (default: 1, 32, 256, 1024, 8192)")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    kernels._BATCH_S = 0.01
    figures: list[dict[str, Any]] = []
    for name, tokens in product_of(options.bits, options.tokens or (1, 32, 256, 1024, 8192)):
        figures += measured(tokens, NAMES[name])
        options.json.write_text(json.dumps({"kind": "experts", "figures": figures}, indent=1))
    return int(all("error" in line for line in figures))


if __name__ == "__main__":
    sys.exit(main())
