"""The grouped product in few bits for GPUs from Ampere on: weights are read as they are and widened in registers.

    list of tiles (`grouped_product/tiles.py`): rows of one group each, x strips of outputs; a CTA a pair

    a CTA:  sums of outputs x rows, transposed: few rows then waste no more of a tensor core than they must
            fp8, int8     steps of inputs; scales multiply sums, at the end, or behind each step of one group
            int4          a group of inputs at a time: lower bits meet its first half, upper bits the second; of up to 8
                          rows, zero points are taken from sums
            mxfp4, nvfp4  several groups at a time: lower bits meet halves of groups, or every other group, upper bits
                          those between
            activation or weights --> out, rows of the tile alone

Widened values are exact in 16 bits, those of MXFP4 (in bfloat16) and NVFP4 with their scales, too; other scales
multiply sums in float32. MXFP4 in float16 goes as int4.
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
from jpaged.pallas_kernels.common.triton_fp4 import float16_halves, inverse, scaled_halves
from jpaged.pallas_kernels.common.triton_fp8 import widen
from jpaged.pallas_kernels.common.triton_int4 import FEW_ROWS, ones_like, products
from jpaged.pallas_kernels.common.triton_int8 import widen_int8
from jpaged.pallas_kernels.common.triton_targets import for_family
from jpaged.pallas_kernels.gated_product.reference import ACTIVATIONS
from jpaged.pallas_kernels.grouped_product.tiles import END, FIRST, GROUP, plan
from jpaged.pallas_kernels.grouped_product.triton import activated
from jpaged.pallas_kernels.int4_product.api import NV_GROUP
from jpaged.pallas_kernels.quantized_grouped_product.api import EIGHT_BITS, HEIGHTS, tile_height
from jpaged.pallas_kernels.quantized_grouped_product.operands import Operands, Options

_GROUP, _FIRST, _END = (tl.constexpr(x) for x in (GROUP, FIRST, END))
_NAMES = tuple(ACTIVATIONS)
_PLAIN, _WEIGHTED = tl.constexpr(-2), tl.constexpr(-1)
_FORMS = ("fp8", "int8", "int4", "mxfp4", "nvfp4")
_FP8, _INT8, _INT4, _MXFP4, _SCALED_MXFP4, _NVFP4 = (tl.constexpr(i) for i in range(6))
"""Places of forms in `_FORMS`, one more where weights are multiplied by their scales."""
_SCALED_STEP = 128
"""Inputs of a step of several groups."""


@dataclass(frozen=True)
class Config:
    """How the kernel is cut and compiled. rows: of a tile, at most. outputs: of a strip, of gate and of up each; twice
    as many without them. depth: inputs of a step in 8 bits. warps: of a CTA. stages: iterations in flight or in use.
    unroll: steps of an iteration if K is a multiple of so many, for larger pieces of an output's weights to be read at
    once; otherwise 1, and a stage more for each step less."""

    rows: int
    outputs: int
    depth: int
    warps: int
    stages: int
    unroll: int = 1


_FEW = (Config(8, 32, 128, 2, 3, 2), Config(16, 32, 128, 2, 4), Config(32, 32, 128, 2, 4))
_HOPPER = (*_FEW, Config(64, 64, 128, 4, 3), Config(128, 64, 64, 4, 3))
_FEW_SMALL = (
    Config(8, 32, 128, 2, 3, 2),
    Config(16, 32, 128, 2, 4),
    Config(32, 32, 128, 2, 3),
    Config(64, 32, 64, 4, 3),
)
_CONFIGS = {
    80: (*_FEW, Config(64, 32, 128, 4, 3), Config(128, 64, 64, 8, 3)),
    86: (*_FEW_SMALL, Config(128, 32, 64, 8, 3)),
    90: _HOPPER,
    100: _HOPPER,
    120: (*_FEW_SMALL, Config(128, 32, 64, 8, 3)),
}
"""By family of GPUs, of tiles of each of `HEIGHTS`. Those of Hopper are the best of sweeps on an H200
(`benchmarks/expert_tiles.py`): of 8 rows with e4m3, of more with e4m3 and MXFP4. Others are not measured."""


_FEW_IN_FOUR_BITS = Config(8, 16, 128, 1, 3, 2)
"""In place of the first one of these; the best of a sweep with 4-bit integers and MXFP4 on an H200."""


def default_config(rows: int, experts: int, form: str, *, has_groups: bool) -> Config:
    """For so many rows of so many experts. has_groups: as of `tile_height`."""
    height = tile_height(rows, experts, has_groups=has_groups)
    if height == _FEW_IN_FOUR_BITS.rows and form not in EIGHT_BITS:
        return _FEW_IN_FOUR_BITS
    table: tuple[Config, ...] = for_family(_CONFIGS)
    return table[HEIGHTS.index(height)]


def _has_scaled_weights(form: str, dtype: Any) -> bool:
    """Whether weights are multiplied by their scales, in which they stay exact; then a step has several groups. Of the
    types of 16 bits bfloat16 alone has all of MXFP4's powers of two."""
    return form == "nvfp4" or (form == "mxfp4" and dtype == jnp.bfloat16)


def unsupported(x: jax.Array, w: jax.Array, scale: jax.Array, form: str, group: int | None) -> str | None:
    """Why the kernel cannot take these (checked) arguments; None if it can."""
    del w
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {x.dtype} is not bfloat16 or float16"
    wide = form in EIGHT_BITS
    groups = _FP8_GROUPS if form == "fp8" else _GROUPS if form != "nvfp4" else (NV_GROUP,)
    if (not wide or scale.shape[2] > 1) and group not in groups:
        return f"groups of {group}; it takes {', '.join(map(str, groups))}{', or one' if wide else ''}"
    return None


_FP8_GROUPS, _GROUPS = (64, 128), (32, 64, 128)


@partial(jax.jit, static_argnames=("options", "config"))
def quantized_grouped_product(operands: Operands, options: Options, config: Config | None = None) -> jax.Array:
    """`quantized_grouped_product` of the package, checked. config: to try others than the table's."""
    x, (w, scale, zero, outer), groups, weights, row_indices = operands
    form, group, activation = options.form, options.group, options.activation
    rows, depth = x.shape[0] if row_indices is None else row_indices.shape[0], x.shape[1]
    experts, outputs, number = scale.shape
    config = config or default_config(rows, experts, form, has_groups=number > 1)
    columns = outputs if activation is None else outputs // 2
    # A CTA has sums of gate and up, or of twice as many outputs. With scales of groups in 8 bits, high tiles of the
    # latter do not fit in its registers.
    holds_both = activation is None and not (form in EIGHT_BITS and number > 1 and config.rows >= 64)
    width = 2 * config.outputs if holds_both else config.outputs
    strips = triton.cdiv(columns, width)
    listed, ends = plan(groups, experts, rows=rows, height=config.rows)
    if activation is not None:
        ending = _NAMES.index(activation)
    else:
        ending = _PLAIN.value if weights is None else _WEIGHTED.value
    shared = depth if number == 1 or group is None else group
    has_scaled_weights = _has_scaled_weights(form, x.dtype)
    if form in EIGHT_BITS:
        step = config.depth if number == 1 else min(config.depth, shared)
    else:
        step = _SCALED_STEP if has_scaled_weights else shared
    constants: dict[str, Any] = {"LAST": ends.shape[0] - 1, "DEPTH": depth, "COLUMNS": columns, "ENDING": ending}
    constants |= {"STRIPS": strips, "ROWS": config.rows, "WIDTH": width, "STEP": step, "GROUPS": number}
    constants |= {"FORM": _FORMS.index(form) + has_scaled_weights, "GROUP": shared}
    constants |= {"INDEXED": row_indices is not None, "ZEROS": zero is not None, "IN_REGISTERS": runs_assembly()}
    unroll = 1 if depth % (step * config.unroll) else config.unroll
    launch = Launch((listed.shape[0] * strips,), config.warps, config.stages + config.unroll - unroll)
    constants["UNROLL"] = unroll
    out = jax.ShapeDtypeStruct((rows, columns), x.dtype)
    # What is not there is not read either, and x stands for it.
    missing = [x if one is None else one for one in (zero, outer, weights, row_indices)]
    arrays = (x, as_bits(w), as_bits(scale), *missing, listed, ends)
    (product,) = call(_quantized_grouped_product, launch, *arrays, out=[out], **constants)
    return product


@triton.jit
def _quantized_grouped_product(
    x,
    w,
    scale,
    zero,
    outer,
    weights,
    row_indices,
    tiles,
    ends,
    out,
    LAST: tl.constexpr,  # of ends
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ENDING: tl.constexpr,  # a number of an activation, `_PLAIN` or `_WEIGHTED`
    STRIPS: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile
    WIDTH: tl.constexpr,  # columns of a strip
    STEP: tl.constexpr,  # inputs of a step, which divides a group; in 4 bits one or several
    FORM: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,  # inputs of a group
    INDEXED: tl.constexpr,  # whether `row_indices` is one
    ZEROS: tl.constexpr,  # whether `zero` is one
    IN_REGISTERS: tl.constexpr,  # as of `widen`
    UNROLL: tl.constexpr,  # steps of an iteration
):
    """x: [A or T, DEPTH]. w: uint8 or int8 [E, 2 if gated, COLUMNS, DEPTH or half of it]. scale: [.., GROUPS].
    zero: uint8 likewise. outer: float32 [.., 1]. weights: float32 [A]. row_indices: int32 [A].
    tiles: int32 [tiles, 3]. ends: int32 [LAST + 1]. out: [A, COLUMNS]."""
    tile = tl.program_id(0) // STRIPS
    # The number of tiles and the tile are loaded together: to wait for the number first costs half a microsecond.
    # Entries behind the last tile exist, and hold anything. For high tiles that takes too many registers.
    last = tl.load(ends + LAST)
    if ROWS > 32 and tile >= last:
        return
    group = tl.load(tiles + tile * 3 + _GROUP).to(tl.int64)
    begin, end = tl.load(tiles + tile * 3 + _FIRST), tl.load(tiles + tile * 3 + _END)
    if (tile >= last) | (begin >= end):
        return
    row = begin + tl.arange(0, ROWS)
    is_row = row < end
    row = row.to(tl.int64)
    column = (tl.program_id(0) % STRIPS) * WIDTH + tl.arange(0, WIDTH)
    is_column = column < COLUMNS
    GATED: tl.constexpr = ENDING >= 0
    SCALED: tl.constexpr = FORM >= _SCALED_MXFP4
    HALVES: tl.constexpr = 2 if GATED else 1
    EIGHT: tl.constexpr = FORM <= _INT8
    BYTES: tl.constexpr = DEPTH if EIGHT else DEPTH // 2
    output = group * (HALVES * COLUMNS) + column
    PART: tl.constexpr = STEP if EIGHT else STEP // 2
    inner = tl.arange(0, PART)
    # Of sixteen bytes the lower bits are for as many inputs, the upper bits for those behind them: half a group in
    # MXFP4, the next group in NVFP4.
    place = (inner // 16) * 32 + inner % 16 if SCALED else inner
    HALF: tl.constexpr = 16 if SCALED else PART
    source = row
    if INDEXED:
        source = tl.load(row_indices + row, mask=is_row, other=0).to(tl.int64)
    inputs = x + source[None, :] * DEPTH + place[:, None]
    factors = w + output[:, None] * BYTES + inner[None, :]
    at = output * GROUPS
    has_output, which = is_column, column * 0
    if SCALED:  # several of a step
        has_output, which, at = is_column[:, None], tl.arange(0, STEP // GROUP)[None, :], at[:, None]
        at += which
    OTHERS: tl.constexpr = WIDTH if GATED else 16
    first, second = tl.zeros((WIDTH, ROWS), tl.float32), tl.zeros((OTHERS, ROWS), tl.float32)
    # Scales are read a step ahead where registers suffice, else behind a step's products. One for all inputs multiplies
    # sums at the end.
    READS: tl.constexpr = not EIGHT or GROUPS > 1
    AHEAD: tl.constexpr = SCALED or ROWS <= 32
    next_first = 0
    next_second = 0
    if READS and AHEAD:
        is_there = has_output & (which < GROUPS)
        next_first = tl.load(scale + at, mask=is_there, other=0)
        next_second = next_first
        if GATED:
            next_second = tl.load(scale + at + COLUMNS * GROUPS, mask=is_there, other=0)
    for iteration in range(0, DEPTH, STEP * UNROLL):
        for number in tl.static_range(UNROLL):
            start = iteration + number * STEP
            there, of_words = is_row[None, :], is_column[:, None]
            if DEPTH % STEP != 0:
                left = DEPTH - start
                there, of_words = there & (place < left)[:, None], of_words & (inner < left * PART // STEP)[None, :]
            lower = tl.load(inputs + start, mask=there, other=0.0)
            if EIGHT:
                upper = lower
            else:
                upper = tl.load(inputs + start + HALF, mask=there, other=0.0)
            of_step = factors + start * PART // STEP  # powers of two: the compiler sees that addresses are aligned
            words = tl.load(of_step, mask=of_words, other=0)
            of_first, of_second = next_first, next_second
            if READS and AHEAD:
                of_next = scale + at + (start + STEP) // GROUP
                is_there = has_output & (which + (start + STEP) // GROUP < GROUPS)
                next_first = tl.load(of_next, mask=is_there, other=0)
            elif READS:
                of_first = scale + at + start // GROUP
            input_sums = first  # read for 4-bit integers and few rows alone
            if FORM == _INT4 and ROWS <= FEW_ROWS:
                ones = ones_like(words, lower.dtype, IN_REGISTERS)
                input_sums = tl.dot(ones, upper, tl.dot(ones, lower))
            step = (lower, upper, input_sums)
            zeros = zero + at + start // GROUP
            first = _sum(first, words, step, of_first, zeros, is_column, FORM, GROUPS, ZEROS, IN_REGISTERS)
            if GATED:
                words = tl.load(of_step + COLUMNS * BYTES, mask=of_words, other=0)
                if READS and AHEAD:
                    next_second = tl.load(of_next + COLUMNS * GROUPS, mask=is_there, other=0)
                elif READS:
                    of_second = of_first + COLUMNS * GROUPS
                zeros += COLUMNS * GROUPS
                second = _sum(second, words, step, of_second, zeros, is_column, FORM, GROUPS, ZEROS, IN_REGISTERS)
    if EIGHT and GROUPS == 1:
        first *= tl.load(scale + output, mask=is_column, other=0.0)[:, None]
        if GATED:
            second *= tl.load(scale + output + COLUMNS, mask=is_column, other=0.0)[:, None]
    if FORM == _NVFP4:
        first *= inverse(tl.load(outer + output, mask=is_column, other=0.0))[:, None]
        if GATED:
            second *= inverse(tl.load(outer + output + COLUMNS, mask=is_column, other=0.0))[:, None]
    if ENDING == _WEIGHTED:
        first *= tl.load(weights + row, mask=is_row, other=0.0)[None, :]
    elif GATED:
        first = activated(first, ENDING) * second
    target = out + row[None, :] * COLUMNS + column[:, None]
    tl.store(target, first.to(out.dtype.element_ty), mask=is_column[:, None] & is_row[None, :])


@triton.jit
def _sum(
    total,
    words,
    step,  # what all outputs share: the inputs of a byte's lower bits, those of its upper bits, their sums
    scales,  # of its groups, or their addresses
    zeros,  # addresses of zero points
    is_column,
    FORM: tl.constexpr,
    GROUPS: tl.constexpr,
    ZEROS: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
):
    """The sums [WIDTH, ROWS] with a step's products added."""
    lower, upper, input_sums = step
    kind: tl.constexpr = lower.dtype
    if FORM >= _SCALED_MXFP4:
        total = _scaled_sum(total, words, lower, upper, scales, FORM, IN_REGISTERS)
    elif FORM == _INT4:
        part = products(words, lower, upper, input_sums, zeros, is_column, ZEROS, IN_REGISTERS)
        total += part * _read(scales, is_column)[:, None]
    elif FORM == _MXFP4:
        of_lower, of_upper = float16_halves(words, IN_REGISTERS)
        part = tl.dot(of_upper, upper, tl.dot(of_lower, lower))
        total += part * _power_of_two(_read(scales, is_column))[:, None]
    else:
        if FORM == _FP8:
            wide = widen(words, kind, IN_REGISTERS=IN_REGISTERS)
        else:
            wide = widen_int8(words, kind, IN_REGISTERS)
        if GROUPS == 1:
            total = tl.dot(wide, lower, total)
        else:
            total += tl.dot(wide, lower) * _read(scales, is_column)[:, None]
    return total


@triton.jit
def _scaled_sum(total, words, lower, upper, scales, FORM: tl.constexpr, IN_REGISTERS: tl.constexpr):
    """Of several groups. scales: uint8 [WIDTH, SCALES]; of MXFP4, 0 makes zeros and 255, which stands for NaN and which
    loading refuses, infinities."""
    if FORM == _NVFP4:
        wide = widen(scales, lower.dtype)
        of_lower, of_upper = tl.split(tl.reshape(wide, (scales.shape[0], scales.shape[1] // 2, 2)))
    else:
        of_lower = (scales.to(tl.uint16) << 7).to(tl.bfloat16, bitcast=True)
        of_upper = of_lower
    lower_words, upper_words = scaled_halves(words, of_lower, of_upper, IN_REGISTERS)
    total = tl.dot(lower_words, lower, total)
    return tl.dot(upper_words, upper, total)


@triton.jit
def _read(scales, is_column):
    """Scales [WIDTH], of which these may be the addresses."""
    if scales.dtype.is_ptr():
        found = tl.load(scales, mask=is_column, other=0)
    else:
        found = scales
    return found


@triton.jit
def _power_of_two(scale):
    """uint8 -> float32: 2^(scale - 127); NaN of 255."""
    wide = scale.to(tl.uint32)
    bits = tl.where(wide == 255, 0x7FC00000, tl.where(wide == 0, 1 << 22, wide << 23)).to(tl.uint32)
    return bits.to(tl.float32, bitcast=True)
