"""The product of few rows for GPUs from Ampere on.

    a CTA: all rows, some columns of w [K, N]
        x [16, STEP] * scale    rounded to x's type    squares of x add up beside the product
        sums += x w             w [STEP, columns], read once; loads of several steps are in flight
        out = sums / sqrt(mean square + eps) + residual
        and a share of the norm's columns, where it is asked for

A row's bits depend neither on the rows beside it nor on how many there are.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jpaged.pallas_kernels.common.triton_call import Launch, call

ROWS = 16
"""The most rows: those of one matrix instruction."""

_MOST_WEIGHTS = 1 << 25
"""Elements of w up to which the kernel is taken. The larger it is, the less a launch saved is worth."""


@dataclass(frozen=True)
class Config:
    """How the kernel is cut and compiled. columns: of a CTA. step: of K. warps: of a CTA. stages: steps in flight or in
    use."""

    columns: int
    step: int = 128
    warps: int = 4
    stages: int = 4


def default_config(columns: int) -> Config:
    """For so many columns of w: as many CTAs as multiprocessors, if lines of w do not become too short."""
    return Config(32) if columns >= 4096 else Config(16)


def unsupported(x: jax.Array, w: jax.Array, normed: bool) -> str | None:
    """Why the kernel cannot take these (checked) arguments; None if it can. normed: with a norm."""
    if x.dtype.itemsize != 2:
        return f"dtype {x.dtype}; it multiplies in 16 bits"
    if normed and x.dtype == jnp.float16:
        return "float16 has not the range for rows times a norm's scale, before they are divided"
    if x.shape[0] > ROWS:
        return f"{x.shape[0]} rows are more than {ROWS}"
    return None if w.shape[0] * w.shape[1] < 1 << 31 else f"w [{w.shape[0]}, {w.shape[1]}] has 2^31 elements or more"


def worthwhile(x: jax.Array, w: jax.Array, normed: bool) -> bool:
    """Where w is small."""
    del x, normed
    return w.shape[0] * w.shape[1] <= _MOST_WEIGHTS


@partial(jax.jit, static_argnames=("norm_eps", "dtype", "gives_normed", "config"))
def few_rows_product(
    x: jax.Array,
    w: jax.Array,
    norm: jax.Array | None,
    residual: jax.Array | None,
    *,
    norm_eps: float,
    dtype: Any,
    gives_normed: bool,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """`few_rows_product` of the package, checked. config: to try others than `default_config`'s."""
    (rows, depth), columns = x.shape, w.shape[1]
    config = config or default_config(columns)
    # What is not there is not read either, and x stands for it.
    read = (x, w, x if norm is None else norm, x if residual is None else residual)
    ctas = triton.cdiv(columns, config.columns)
    made = (
        jax.ShapeDtypeStruct((rows, columns), dtype),
        jax.ShapeDtypeStruct(x.shape if gives_normed else (1, 1), x.dtype),
    )
    out, normed = call(
        _few_rows_product,
        Launch((ctas,), config.warps, config.stages),
        *read,
        out=made,
        M=rows,
        K=depth,
        N=columns,
        ROWS=ROWS,
        COLUMNS=config.columns,
        STEP=config.step,
        NORMED=norm is not None,
        EPS=norm_eps,
        ADDS=residual is not None,
        GIVES_NORMED=gives_normed,
        SHARE=triton.next_power_of_2(triton.cdiv(depth, ctas)),
    )
    return out, normed if gives_normed else None


@triton.jit
def _few_rows_product(
    x,
    w,
    norm,
    residual,
    out,
    normed,
    M: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a CTA
    STEP: tl.constexpr,  # of K
    NORMED: tl.constexpr,
    EPS: tl.constexpr,
    ADDS: tl.constexpr,
    GIVES_NORMED: tl.constexpr,
    SHARE: tl.constexpr,  # columns of the norm that a CTA gives
):
    """x, normed: [M, K]. w: [K, N]. norm: [K]. residual, out: [M, N]."""
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, STEP)
    is_row, is_column = (row < M)[:, None], (column < N)[None, :]
    inputs = x + row[:, None] * K + inner[None, :]
    weights = w + inner[:, None] * N + column[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for step in range(0, (K + STEP - 1) // STEP):
        here, there = is_row, is_column
        if K % STEP != 0:
            left = step * STEP + inner < K
            here, there = here & left[None, :], there & left[:, None]
        factors = tl.load(weights + step * STEP * N, mask=there, other=0.0)
        given = tl.load(inputs + step * STEP, mask=here, other=0.0)
        if NORMED:
            wide = given.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            scale = tl.load(norm + step * STEP + inner, mask=step * STEP + inner < K, other=0.0).to(tl.float32)
            given = (wide * scale[None, :]).to(given.dtype)
        total = tl.dot(given, factors, total)
    if NORMED:
        factor = tl.rsqrt(squares / K + EPS)[:, None]
        total *= factor
        if GIVES_NORMED:
            own = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
            here = is_row & (own < K)[None, :]
            place = row[:, None] * K + own[None, :]
            wide = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
            scale = tl.load(norm + own, mask=own < K, other=0.0).to(tl.float32)
            tl.store(normed + place, (wide * factor * scale[None, :]).to(normed.dtype.element_ty), mask=here)
    at = row[:, None] * N + column[None, :]
    if ADDS:
        total += tl.load(residual + at, mask=is_row & is_column, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=is_row & is_column)
