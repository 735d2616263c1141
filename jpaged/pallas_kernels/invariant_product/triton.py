"""The invariant product for GPUs from Ampere on, in Triton.

    a CTA: ROWS x COLUMNS of the result      sums += x[rows, k] @ w[k, columns], k = 0, DEPTH, 2 DEPTH, ..

A GPU has one tiling whatever the number of rows, so every element of every call is computed by the same instructions
in the same order: rows past the end are zeros that nobody stores. CTAs that share a strip of w are neighbours and
find it in the L2 cache.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import triton
import triton.language as tl

from jpaged.pallas_kernels.common.triton_call import Launch, call
from jpaged.pallas_kernels.common.triton_targets import for_family


@dataclass(frozen=True)
class Config:
    """How the kernel is cut and compiled. rows, columns: of a CTA. depth: of a step. warps: of a CTA. stages: steps
    whose operands are in flight or in use."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


_CONFIGS = {
    80: Config(64, 64, 64, 4, 5),
    86: Config(64, 64, 64, 4, 4),
    90: Config(64, 64, 64, 4, 6),
    100: Config(64, 64, 64, 4, 6),
    120: Config(64, 64, 64, 4, 4),
}
"""By family of GPUs. One for each: another tiling may take other instructions, and give other bits. Not measured."""


def unsupported(x: jax.Array, w: jax.Array) -> str | None:
    """Why the kernel cannot take these (checked) arguments; None if it can."""
    del w
    return None if x.dtype.itemsize == 2 else f"dtype {x.dtype}; it multiplies in 16 bits"


@partial(jax.jit, static_argnames=("outputs_first", "dtype"))
def invariant_product(x: jax.Array, w: jax.Array, *, outputs_first: bool, dtype: Any) -> jax.Array:
    """`invariant_product` of the package, checked."""
    rows, depth = x.shape
    columns = w.shape[0 if outputs_first else 1]
    config = for_family(_CONFIGS)
    tall = triton.cdiv(rows, config.rows)
    launch = Launch((tall * triton.cdiv(columns, config.columns),), config.warps, config.stages)
    constants: dict[str, Any] = {"M": rows, "N": columns, "K": depth, "TALL": tall, "OUTPUTS_FIRST": outputs_first}
    constants |= {"ROWS": config.rows, "COLUMNS": config.columns, "STEP": config.depth}
    (y,) = call(_invariant_product, launch, x, w, out=[jax.ShapeDtypeStruct((rows, columns), dtype)], **constants)
    return y


@triton.jit
def _invariant_product(
    x,
    w,
    out,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TALL: tl.constexpr,  # tiles of rows
    OUTPUTS_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """x: [M, K]. w: [K, N], or [N, K] if OUTPUTS_FIRST. out: [M, N]."""
    row = (tl.program_id(0) % TALL) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) // TALL) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < M, column < N
    row, wide = row.to(tl.int64), column.to(tl.int64)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, STEP):
        k = start + tl.arange(0, STEP)
        inside = k < K
        operand = tl.load(x + row[:, None] * K + k[None, :], mask=is_row[:, None] & inside[None, :], other=0.0)
        if OUTPUTS_FIRST:
            places = wide[None, :] * K + k[:, None]
        else:
            places = k.to(tl.int64)[:, None] * N + wide[None, :]
        factors = tl.load(w + places, mask=inside[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(operand, factors, total)
    target = out + row[:, None] * N + wide[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
