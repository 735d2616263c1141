"""The 4-bit product on Hopper: which calls its kernel (`narrow_product/hopper_kernel.py`) takes, and in which tiles."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.int4_product.operands import Operands
from jpaged.pallas_kernels.narrow_product.hopper_kernel import GROUPS, Form, Tiling, narrow_product

_INPUTS = Form(4, None).inputs  # of a stage
_MOST_ROWS = {32: 32, 64: 512, 128: 2048}  # by group

TILINGS = (Tiling(8, 2, 1, 3), Tiling(16, 2, 1, 3), Tiling(32, 1, 4, 3), Tiling(64), Tiling(128, 1, 2, 2))
"""From few rows to many: the fastest of a sweep on an H200 for an 8B model's products together, or within 1 % of it
(`benchmarks/product_tiles.py`). Of 64 and 128 rows no others came without spills."""


def pick_tiling(rows: int, group: int, *, zeros: bool) -> Tiling:
    """The tiling for so many rows, and groups of so many inputs, which have zero points or none.

    Scales of more groups, and zero points, leave registers for fewer sums.
    """
    fitting = TILINGS if group == 128 else TILINGS[:-1]
    found = next((one for one in fitting if one.rows >= rows), fitting[-1])
    if group < (64 if found.by_mma else 128):
        return dataclasses.replace(found, blocks=1, consumers=2)
    return Tiling(32, 2, 2, 3) if zeros and found.rows == 32 else found


def unsupported(x: jax.Array, w: jax.Array, group: int, form: str) -> str | None:
    """Why the kernel cannot take these (checked) arguments; None if it can."""
    del w
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, not {x.dtype}"
    if x.shape[1] < _INPUTS:
        return f"it takes at least {_INPUTS} inputs, and there are {x.shape[1]}"
    if form != "int4" or group not in GROUPS:
        return f"groups of {group} of form={form!r}; it takes {', '.join(map(str, GROUPS))} of 'int4'"
    return None


def worthwhile(x: jax.Array, w: jax.Array, group: int, form: str) -> bool:
    """Up to where XLA, which widens the weights once for all rows, may be faster: less in groups of 64, which have
    smaller tiles, and of 32, whose scales leave no registers for more."""
    del w, form
    return x.shape[0] <= _MOST_ROWS[group]


@functools.partial(jax.jit, static_argnames=("group", "dtype", "tiling", "interpret"))
def int4_product(
    operands: Operands, *, group: int, dtype: Any, tiling: Tiling | None = None, interpret: Any = None
) -> jax.Array:
    """`int4_product` of the package, for arguments that are checked and that `unsupported` lets pass.

    tiling: to try others than the table's. interpret: a `plgpu.InterpretGPUParams` runs the kernel on a CPU.
    """
    x, w, scale, zero, _ = operands
    form = Form(4, group, zero is not None)
    tiling = tiling or pick_tiling(x.shape[0], group, zeros=form.zeros)
    return narrow_product((x, w, scale, zero), form, tiling, dtype, interpret)
