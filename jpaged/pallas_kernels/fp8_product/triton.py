"""The FP8 product for GPUs from Ampere on: weights are read in 8 bits, by one kernel with two ways to multiply.

    a CTA: outputs x rows of the result, transposed, as few rows then waste no more of a tensor core than they must

    both in e4m3      x is rounded before; tiles go from shared memory to the tensor cores as they are
    weights alone     w, in e4m3 or of `int8_product`, is widened to x's type in registers

Scales multiply sums in float32: at the end, or, where groups of inputs have their own, behind each step of one group.

Tensor cores of Ada and Hopper add products of e4m3 up in 14 bits (13 behind the point of the largest, the rest cut
off), 32 inputs at a time. So no sum of theirs is longer than a step, of at most 128 inputs; steps are added up in
float32, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3.2).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jpaged.pallas_kernels import devices
from jpaged.pallas_kernels.common.numerics import as_bits
from jpaged.pallas_kernels.common.triton_assembly import runs_assembly
from jpaged.pallas_kernels.common.triton_call import Launch, call
from jpaged.pallas_kernels.common.triton_fp8 import as_fp8, widen
from jpaged.pallas_kernels.common.triton_int8 import widen_int8
from jpaged.pallas_kernels.common.triton_targets import for_family
from jpaged.pallas_kernels.common.triton_tiles import place, splits_of
from jpaged.pallas_kernels.fp8_product.operands import Operands, Options
from jpaged.pallas_kernels.fp8_product.rounding import round_to_fp8, rounds_activations
from jpaged.pallas_kernels.registry import is_hopper


@dataclass(frozen=True)
class Config:
    """How the kernel is cut and compiled. outputs, rows: of a CTA. depth: inputs of a step. warps: of a CTA. stages:
    steps in flight or in use. splits: parts of the inputs, whose sums are added up afterwards; None chooses."""

    outputs: int
    rows: int
    depth: int
    warps: int
    stages: int
    splits: int | None = None


_FEW = (Config(64, 16, 128, 4, 8), Config(64, 32, 128, 4, 6), Config(64, 64, 128, 4, 5))
_FEW_SMALL = (Config(64, 16, 128, 4, 5), Config(64, 32, 128, 4, 4), Config(64, 64, 128, 4, 4))
_BOTH = {
    80: (*_FEW, Config(128, 128, 128, 8, 3)),  # for tests: these GPUs leave x as it is
    86: (*_FEW_SMALL, Config(128, 128, 64, 8, 3)),
    90: (*_FEW, Config(128, 128, 128, 8, 4)),
    100: (*_FEW, Config(128, 128, 128, 8, 4)),
    120: (*_FEW_SMALL, Config(128, 128, 64, 8, 3)),
}
_WIDE_FEW = (Config(64, 16, 128, 4, 5), Config(64, 32, 128, 4, 4), Config(64, 64, 128, 4, 3))
_WIDE_SMALL = (Config(64, 16, 64, 4, 5), Config(64, 32, 64, 4, 4), Config(64, 64, 64, 4, 4))
_WIDE_HOPPER = (Config(64, 16, 128, 2, 5), Config(64, 32, 128, 2, 4), *_WIDE_FEW[2:])
"""Two warps, as `wgmma`, which takes four, reads widened weights from registers and is waited for in each step."""
_WIDE = {
    80: (*_WIDE_FEW, Config(128, 128, 64, 8, 3)),
    86: (*_WIDE_SMALL, Config(128, 64, 64, 8, 3)),
    90: (*_WIDE_HOPPER, Config(128, 128, 64, 8, 4)),
    100: (*_WIDE_FEW, Config(128, 128, 64, 8, 4)),
    120: (*_WIDE_SMALL, Config(128, 64, 64, 8, 3)),
}
"""By family of GPUs, from few rows to many. Not measured."""


def default_config(rows: int, *, rounded: bool) -> Config:
    """For so many rows. rounded: whether x is in e4m3 too."""
    table = for_family(_BOTH if rounded else _WIDE)
    return next((one for one in table if one.rows >= rows), table[-1])


def unsupported(x: jax.Array, w: jax.Array, scale: jax.Array, group: int | None, activations: str) -> str | None:
    """Why the kernel cannot take these (checked) arguments; None if it can."""
    del w, activations
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {x.dtype} is not bfloat16 or float16"
    if scale.shape[1] > 1 and group not in _GROUPS:
        return f"groups of {group}; it takes {', '.join(map(str, _GROUPS))}, or one"
    return None


_GROUPS = (32, 64, 128)


def worthwhile(x: jax.Array, w: jax.Array, scale: jax.Array, group: int | None, activations: str) -> bool:
    """With a scale an output, for few rows of weights alone: XLA's products of two e4m3 operands are cuBLASLt's, which
    read the weights of an 8B model at 3.3 TB/s on an H200. With scales of groups, until weights that are widened once
    for all rows, and multiplied in 16 bits, cost less."""
    del w, group
    if scale.shape[1] == 1:
        return not _rounds(activations) and x.shape[0] <= _MOST_ROWS
    if _rounds(activations):
        return not is_hopper(devices.default_device()) or x.shape[0] <= _MOST_ROUNDED_ROWS
    return x.shape[0] <= MOST_WIDENED_ROWS


_MOST_ROWS, MOST_WIDENED_ROWS, _MOST_ROUNDED_ROWS = 64, 512, 1024
"""Estimated, not measured. Of 8,192 rows and as many inputs and outputs in rounded groups, the kernel reaches 411
TFLOP/s on an H200, and cuBLASLt 699 in bfloat16; widening the weights takes as long as 300 rows of the latter."""


def _rounds(activations: str) -> bool:
    return activations != "none" and rounds_activations(devices.default_device())


@partial(jax.jit, static_argnames=("options", "config"))
def fp8_product(operands: Operands, options: Options, config: Config | None = None) -> jax.Array:
    """`fp8_product` of the package, checked. config: to try others than the table's."""
    (x, w, scale, input_scale), group, dtype = operands, options.group, options.dtype
    rounded = _rounds(options.activations)
    of_rows = scale  # which nobody reads if x is not rounded
    rows, depth = x.shape
    if rounded:
        x, of_rows = round_to_fp8(x, input_scale, options.upper_bound, group)
        x = as_bits(x)
        of_rows = jnp.broadcast_to(of_rows, (rows, of_rows.shape[-1]))
    outputs, groups = scale.shape
    config = config or default_config(rows, rounded=rounded)
    step = config.depth if groups == 1 or group is None else min(config.depth, group)
    ctas = triton.cdiv(outputs, config.outputs) * triton.cdiv(rows, config.rows)
    splits = config.splits or splits_of(ctas, depth // step)
    launch = Launch((ctas, splits), config.warps, config.stages)
    constants: dict[str, Any] = {"M": rows, "K": depth, "N": outputs, "GROUPS": groups}
    constants |= {"GROUP": group if groups > 1 else depth, "ROUNDED": rounded}
    constants["IN_REGISTERS"] = runs_assembly()
    constants |= {"SPLIT": triton.cdiv(triton.cdiv(depth, splits), step) * step}
    constants |= {"OUTPUTS": config.outputs, "ROWS": config.rows, "STEP": step}
    out = jax.ShapeDtypeStruct((splits, rows, outputs), dtype if splits == 1 else jnp.float32)
    (y,) = call(_fp8_product, launch, x, as_bits(w), of_rows, scale, out=[out], **constants)
    return y[0] if splits == 1 else jnp.sum(y, axis=0).astype(dtype)


@triton.jit
def _fp8_product(
    x,
    w,
    of_rows,
    scale,
    out,
    M: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,  # inputs of a group
    ROUNDED: tl.constexpr,  # whether x is in e4m3
    IN_REGISTERS: tl.constexpr,  # as of `widen`
    SPLIT: tl.constexpr,  # inputs of a CTA
    OUTPUTS: tl.constexpr,  # of a CTA
    ROWS: tl.constexpr,  # of a CTA
    STEP: tl.constexpr,  # inputs of a step, which divides a group
):
    """x: [M, K]. w: e4m3 or int8 [N, K]. of_rows: float32 [M, GROUPS], of x if ROUNDED. scale: float32 [N, GROUPS].
    out: [splits, M, N]. Bits of e4m3 come as uint8."""
    tile, strip = place(tl.program_id(0), (M + ROWS - 1) // ROWS, (N + OUTPUTS - 1) // OUTPUTS)
    row, column = tile * ROWS + tl.arange(0, ROWS), strip * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_column = row < M, column < N
    inner = tl.arange(0, STEP)
    weights = as_fp8(w) if ROUNDED else w
    weights += column.to(tl.int64)[:, None] * K + inner[None, :]
    inputs = as_fp8(x) if ROUNDED else x
    inputs += row.to(tl.int64)[None, :] * K + inner[:, None]
    scales = scale + column.to(tl.int64) * GROUPS
    scales_of_rows = of_rows + row.to(tl.int64) * GROUPS
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    begin = tl.program_id(1) * SPLIT
    end = tl.minimum(begin + SPLIT, K)
    AHEAD: tl.constexpr = OUTPUTS * ROWS <= 4096  # larger tiles leave no registers for scales read a step ahead
    if GROUPS > 1 and AHEAD:
        next_factors, next_of_rows = _factors(scales, scales_of_rows, begin // GROUP, is_column, is_row, ROUNDED)
    for start in range(begin, end, STEP):
        here, there = is_column[:, None], is_row[None, :]
        if K % STEP != 0:
            here, there = here & (start + inner < K)[None, :], there & (start + inner < K)[:, None]
        of_x = tl.load(inputs + start, mask=there, other=0.0)
        of_w = tl.load(weights + start, mask=here, other=0.0 if ROUNDED else 0)
        if w.dtype.element_ty == tl.int8:
            of_w = widen_int8(of_w, x.dtype.element_ty, IN_REGISTERS)
        elif not ROUNDED:
            of_w = widen(of_w, x.dtype.element_ty, IN_REGISTERS=IN_REGISTERS)
        if GROUPS == 1 and ROUNDED:  # the limit also keeps Triton from making one product of the sum
            total += tl.dot(of_w, of_x, max_num_imprecise_acc=STEP)
        elif GROUPS == 1:
            total = tl.dot(of_w, of_x, total)
        else:
            if AHEAD:
                factors, factors_of_rows = next_factors, next_of_rows
                following = tl.minimum((start + STEP) // GROUP, GROUPS - 1)
                next_factors, next_of_rows = _factors(scales, scales_of_rows, following, is_column, is_row, ROUNDED)
            else:
                here = start // GROUP
                factors, factors_of_rows = _factors(scales, scales_of_rows, here, is_column, is_row, ROUNDED)
            part = tl.dot(of_w, of_x) * factors[:, None]
            total += part * factors_of_rows[None, :] if ROUNDED else part
    if GROUPS == 1:
        total *= tl.load(scale + column, mask=is_column, other=0.0)[:, None]
        if ROUNDED:
            total *= tl.load(of_rows + row, mask=is_row, other=0.0)[None, :]
    target = out + tl.program_id(1).to(tl.int64) * (M * N) + row.to(tl.int64)[None, :] * N + column[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=is_column[:, None] & is_row[None, :])


@triton.jit
def _factors(scales, scales_of_rows, group, is_column, is_row, ROUNDED: tl.constexpr):
    """A group's scales of outputs and of rows."""
    factors = tl.load(scales + group, mask=is_column, other=0.0)
    return factors, tl.load(scales_of_rows + group, mask=is_row, other=0.0) if ROUNDED else factors
