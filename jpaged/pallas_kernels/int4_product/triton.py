"""The 4-bit product for GPUs from Ampere on: weights are read in 4 bits and multiplied in x's type.

    a CTA: columns x rows of the result, transposed, as few rows then waste no more of a tensor core than they must
        words [columns, group / 2]:  the lower bits meet the first half of the group's inputs, the upper bits the second
        sums += ((values - zero) @ x^T) * scale, up to 8 rows ((values + 128) @ x^T - (zero + 128) * sum(x)) * scale

A product of few rows is a chain of short steps, each of which waits for the one before longer than it computes. So
several groups are computed side by side there, by warps of their own, whose sums are added up at the end.

Values less their zero points, or with 128, are small integers, exact in 16 bits; scales multiply sums in float32.
Values with 128 make the rounding of these sums some 17 times as large, which is still far less than one in 16 bits, and
an input beyond 2e36 may make them NaN. E2M1 values times their scales in e4m3 (NVFP4) are exact in 16 bits, too. More
of them are taken at a time, and what an output's scales are divided by divides its sum.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jpaged.pallas_kernels.common.numerics import as_bits
from jpaged.pallas_kernels.common.triton_assembly import runs_assembly
from jpaged.pallas_kernels.common.triton_call import Launch, call
from jpaged.pallas_kernels.common.triton_fp4 import inverse, scaled_halves
from jpaged.pallas_kernels.common.triton_fp8 import widen
from jpaged.pallas_kernels.common.triton_int4 import FEW_ROWS, ones_like, products
from jpaged.pallas_kernels.common.triton_targets import by_shared_memory, for_family
from jpaged.pallas_kernels.common.triton_tiles import splits_of
from jpaged.pallas_kernels.int4_product.operands import Operands

_GROUPS = (32, 64, 128)
_NV_STEP = 128
"""Inputs at a time in NVFP4: 64 bytes of each output, and 8 scales."""


@dataclass(frozen=True)
class Config:
    """How the kernel is cut and compiled. rows, columns: of a CTA. warps: of it. stages: iterations in flight or
    in use. side: groups of a step, a power of two. unroll: steps of an iteration if the groups are a multiple of
    so many; otherwise 1, and a stage more for each step less. splits: parts of the inputs, whose sums are added
    up; None chooses. NVFP4 heeds none of these three."""

    rows: int
    columns: int
    warps: int
    stages: int
    side: int = 1
    unroll: int = 1
    splits: int | None = None


_LARGE = (Config(8, 64, 4, 3, 2, 2), Config(16, 64, 4, 4, 2), Config(32, 64, 4, 4, 2), Config(64, 128, 8, 3))
_SMALL = (Config(8, 64, 4, 4, 2), Config(16, 32, 2, 4, 2), Config(32, 64, 2, 4), Config(64, 64, 4, 2))
_CONFIGS = by_shared_memory(_LARGE, _SMALL)
"""By family of GPUs, from few rows to many. The large ones of 8 and 32 rows were the fastest of a sweep on an H200, for
an 8B model's gate, up and down together (`benchmarks/product_tiles.py`); that of 16 is taken from between them."""

_NVFP4_SMALL = (Config(16, 64, 4, 4), Config(32, 64, 4, 3), Config(64, 64, 4, 2))
_NVFP4_LARGE = (Config(16, 64, 4, 6), Config(32, 64, 4, 4), Config(64, 128, 8, 3))
_NVFP4_CONFIGS = by_shared_memory(_NVFP4_LARGE, _NVFP4_SMALL)
"""Likewise. Not measured."""


def default_config(rows: int, *, nvfp4: bool = False) -> Config:
    """For so many rows."""
    table = for_family(_NVFP4_CONFIGS if nvfp4 else _CONFIGS)
    return next((one for one in table if one.rows >= rows), table[-1])


def unsupported(x: jax.Array, w: jax.Array, group: int, form: str) -> str | None:
    """Why the kernel cannot take these (checked) arguments; None if it can."""
    del w
    if x.dtype.itemsize != 2:
        return f"dtype {x.dtype}; it multiplies in 16 bits"
    return (
        None if form == "nvfp4" or group in _GROUPS else f"groups of {group}; it takes {', '.join(map(str, _GROUPS))}"
    )


def worthwhile(x: jax.Array, w: jax.Array, group: int, form: str) -> bool:
    """For few rows, where reading weights costs most. Of many, XLA widens the weights once for all of them."""
    del w, group, form
    return x.shape[0] <= _MOST_ROWS


_MOST_ROWS = 512
"""Estimated, not measured: from there on the products cost more than writing and reading the weights in 16 bits."""


@partial(jax.jit, static_argnames=("group", "dtype", "config"))
def int4_product(operands: Operands, *, group: int, dtype: Any, config: Config | None = None) -> jax.Array:
    """`int4_product` of the package, checked. config: to try others than the table's."""
    x, w, scale, zero, outer = operands
    rows, depth = x.shape
    columns = w.shape[0]
    config = config or default_config(rows, nvfp4=outer is not None)
    strips = triton.cdiv(columns, config.columns)
    ctas = strips * triton.cdiv(rows, config.rows)
    out = jax.ShapeDtypeStruct((rows, columns), dtype)
    constants: dict[str, Any] = {"M": rows, "K": depth, "N": columns, "GROUP": group, "STRIPS": strips}
    constants |= {"ROWS": config.rows, "COLUMNS": config.columns, "IN_REGISTERS": runs_assembly()}
    if outer is not None:
        del constants["GROUP"]
        constants["STEP"] = _NV_STEP
        launch = Launch((ctas,), config.warps, config.stages)
        (y,) = call(_nvfp4_product, launch, x, w, as_bits(scale), outer, out=[out], **constants)
        return y
    groups = depth // group
    unroll = 1 if groups % (config.side * config.unroll) else config.unroll
    of_iteration = config.side * unroll
    splits = config.splits or splits_of(ctas, groups // of_iteration)
    split = triton.cdiv(triton.cdiv(groups, splits), of_iteration) * of_iteration
    splits = triton.cdiv(groups, split)
    constants |= {"ZEROS": zero is not None, "SPLIT": split, "SIDE": config.side, "UNROLL": unroll}
    launch = Launch((ctas, splits), config.warps, config.stages + config.unroll - unroll)
    parts = jax.ShapeDtypeStruct((splits, rows, columns), dtype if splits == 1 else jnp.float32)
    (y,) = call(_int4_product, launch, x, w, scale, w if zero is None else zero, out=[parts], **constants)
    return y[0] if splits == 1 else jnp.sum(y, axis=0).astype(dtype)


@triton.jit
def _int4_product(
    x,
    w,
    scale,
    zero,
    out,
    M: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    STRIPS: tl.constexpr,
    ROWS: tl.constexpr,  # of a CTA
    COLUMNS: tl.constexpr,  # of a CTA
    ZEROS: tl.constexpr,  # whether `zero` is one
    SPLIT: tl.constexpr,  # groups of a CTA
    SIDE: tl.constexpr,  # groups of a step
    UNROLL: tl.constexpr,  # steps of an iteration, whose groups divide SPLIT
    IN_REGISTERS: tl.constexpr,  # as of `halves`
):
    """x: [M, K]. w: uint8 [N, K / 2]. scale: float32 [N, K / GROUP]. zero: uint8 likewise. out: [splits, M, N]."""
    HALF: tl.constexpr = GROUP // 2
    row = (tl.program_id(0) // STRIPS) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % STRIPS) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < M, column < N
    inner = tl.arange(0, HALF)
    inputs = x + row.to(tl.int64)[None, :] * K + inner[:, None]
    words = w + column.to(tl.int64)[:, None] * (K // 2) + inner[None, :]
    groups = column.to(tl.int64) * (K // GROUP)
    of_inputs, of_words, of_groups = is_row[None, :], is_column[:, None], is_column
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    begin = tl.program_id(1) * SPLIT
    last = K // GROUP - 1
    end = tl.minimum(begin + SPLIT, K // GROUP)
    side = tl.arange(0, SIDE)
    if SIDE > 1:
        side = side[:, None]
        inputs, words = inputs[None] + side[:, :, None] * GROUP, words[None] + side[:, :, None] * HALF
        groups, of_groups = groups[None], is_column[None]
        of_inputs, of_words = of_inputs[None], of_words[None]
        total = tl.zeros((SIDE, COLUMNS, ROWS), tl.float32)
    kind: tl.constexpr = x.dtype.element_ty
    # Scales are read a step ahead. Behind the last group they are its own, and inputs zeros.
    next_factor = tl.load(scale + groups + tl.minimum(begin + side, last), mask=of_groups, other=0.0)
    for iteration in range(begin, end, SIDE * UNROLL):
        for number in tl.static_range(UNROLL):
            g = iteration + number * SIDE
            factor = next_factor
            next_factor = tl.load(scale + groups + tl.minimum(g + SIDE + side, last), mask=of_groups, other=0.0)
            of_weights, of_x = of_words, of_inputs
            if SIDE > 1 and (K // GROUP) % SIDE != 0:
                is_there = (g + side <= last)[:, :, None]
                of_weights, of_x = of_words & is_there, of_inputs & is_there
            packed = tl.load(words + g * HALF, mask=of_weights, other=0)
            first = tl.load(inputs + g * GROUP, mask=of_x, other=0.0)
            second = tl.load(inputs + g * GROUP + HALF, mask=of_x, other=0.0)
            zeros = zero + groups + tl.minimum(g + side, last)
            input_sums = total  # read for few rows alone
            if ROWS <= FEW_ROWS:
                ones = ones_like(packed, kind, IN_REGISTERS)
                input_sums = tl.dot(ones, second, tl.dot(ones, first))
            part = products(packed, first, second, input_sums, zeros, of_groups, ZEROS, IN_REGISTERS)
            total += part * tl.expand_dims(factor, -1)
    if SIDE > 1:
        whole = tl.sum(total, axis=0)
    else:
        whole = total
    target = out + tl.program_id(1).to(tl.int64) * (M * N) + row.to(tl.int64)[None, :] * N + column[:, None]
    tl.store(target, whole.to(out.dtype.element_ty), mask=is_column[:, None] & is_row[None, :])


@triton.jit
def _nvfp4_product(
    x,
    w,
    scale,
    outer,
    out,
    M: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    STRIPS: tl.constexpr,
    ROWS: tl.constexpr,  # of a CTA
    COLUMNS: tl.constexpr,  # of a CTA
    STEP: tl.constexpr,  # inputs at a time
    IN_REGISTERS: tl.constexpr,  # as of `scaled_halves`
):
    """x: [M, K]. w: uint8 [N, K / 2]. scale: e4m3 as uint8 [N, K / 16]. outer: float32 [N]. out: [M, N]."""
    row = (tl.program_id(0) // STRIPS) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % STRIPS) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < M, column < N
    inner, sixteens = tl.arange(0, STEP // 2), tl.arange(0, STEP // 32)
    place = (inner // 16) * 32 + inner % 16  # the input that a byte's lower bits are for
    inputs = x + row.to(tl.int64)[None, :] * K + place[:, None]
    words = w + column.to(tl.int64)[:, None] * (K // 2) + inner[None, :]
    scales = scale + column.to(tl.int64)[:, None] * (K // 16) + 2 * sixteens[None, :]
    kind: tl.constexpr = x.dtype.element_ty
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for step in range(0, (K + STEP - 1) // STEP):
        of_words, of_scales, of_inputs = is_column[:, None], is_column[:, None], is_row[None, :]
        if K % STEP != 0:
            left = K - step * STEP
            of_words, of_inputs = of_words & (inner * 2 < left)[None, :], of_inputs & (place < left)[:, None]
            of_scales = of_scales & (sixteens * 32 < left)[None, :]
        packed = tl.load(words + step * (STEP // 2), mask=of_words, other=0)
        of_lower = widen(tl.load(scales + step * (STEP // 16), mask=of_scales, other=0), kind)
        of_upper = widen(tl.load(scales + step * (STEP // 16) + 1, mask=of_scales, other=0), kind)
        lower, upper = scaled_halves(packed, of_lower, of_upper, IN_REGISTERS)
        total = tl.dot(lower, tl.load(inputs + step * STEP, mask=of_inputs, other=0.0), total)
        total = tl.dot(upper, tl.load(inputs + step * STEP + 16, mask=of_inputs, other=0.0), total)
    total *= inverse(tl.load(outer + column, mask=is_column, other=0.0))[:, None]
    target = out + row.to(tl.int64)[None, :] * N + column[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=is_column[:, None] & is_row[None, :])
