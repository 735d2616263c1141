"""The product of few rows with FP8 weights on Hopper: which calls its kernel (`narrow_product/hopper_kernel.py`) takes,
and in which tiles.

Rows stay in 16 bits: those of a decode step take next to no time to read, and rounding them would take a kernel.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common.numerics import as_bits
from jpaged.pallas_kernels.fp8_product.operands import Operands, Options
from jpaged.pallas_kernels.narrow_product.hopper_kernel import GROUPS, Form, Tiling, narrow_product

TILINGS = (Tiling(8, 2, 1, 3), Tiling(16, 2, 1, 3))
"""From few rows to many: within 2 % of the fastest of a sweep on an H200 for an 8B model's products together."""
_INPUTS = Form(8, None).inputs


def unsupported(x: jax.Array, w: jax.Array, scale: jax.Array, group: int | None, activations: str) -> str | None:
    """Why the kernel cannot take these (checked) arguments; None if it can."""
    del w, activations
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, not {x.dtype}"
    if x.shape[1] < _INPUTS or x.shape[1] % 16:
        return f"it takes multiples of 16 inputs from {_INPUTS} on, and there are {x.shape[1]}"
    if scale.shape[1] > 1 and group not in GROUPS:
        return f"groups of {group} inputs; it takes groups of {', '.join(map(str, GROUPS))}, or a scale an output"
    return None


def worthwhile(x: jax.Array, w: jax.Array, scale: jax.Array, group: int | None, activations: str) -> bool:
    """For few rows, whose bytes are next to nothing beside the weights'."""
    del w, scale, group, activations
    return x.shape[0] <= TILINGS[-1].rows


@functools.partial(jax.jit, static_argnames=("options", "tiling", "interpret"))
def fp8_product(operands: Operands, options: Options, tiling: Tiling | None = None, interpret: Any = None) -> jax.Array:
    """`fp8_product` of the package, for arguments that are checked and that `unsupported` lets pass.

    tiling: of at most 16 rows, to try others than the table's. interpret: a `plgpu.InterpretGPUParams` runs the kernel
    on a CPU.
    """
    x, w, scale, _ = operands
    form = Form(8, options.group if scale.shape[1] > 1 else None)
    tiling = tiling or next((one for one in TILINGS if one.rows >= x.shape[0]), TILINGS[-1])
    return narrow_product((x, as_bits(w), scale, None), form, tiling, options.dtype, interpret)
