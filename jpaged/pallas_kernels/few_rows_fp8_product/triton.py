"""An FP8 product of few rows that rounds them itself, for GPUs with FP8 tensor cores (8.9 and newer).

    a CTA: a strip of outputs, all inputs, all rows
        weights of the first steps                    their copies to shared memory start before anything is computed
        each row's root mean square, largest magnitude                 every CTA reads all rows, which L2 has
        per step:   x --norm--> / scale --> e4m3      as it would be after `round_rows`
                    sums += weights @ x.T             transposed: outputs are the rows that a tensor core wants many of
        at the end: sums * scales + residual, or activation(gate) * up and its largest magnitudes, or sums alone

Every CTA rounds all rows, which is little beside the weights that it multiplies as long as rows are few. Inputs are not
split among CTAs, so a strip's results are complete; to add up parts would take another kernel.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jpaged.pallas_kernels import devices
from jpaged.pallas_kernels.common.numerics import as_bits
from jpaged.pallas_kernels.common.triton_call import Launch, call
from jpaged.pallas_kernels.common.triton_fp8 import as_fp8, narrow, widen
from jpaged.pallas_kernels.common.triton_targets import for_family
from jpaged.pallas_kernels.few_rows_fp8_product.limits import most_rows
from jpaged.pallas_kernels.few_rows_fp8_product.operands import Operands, UnroundedRows
from jpaged.pallas_kernels.fp8_product.rounding import rounds_activations
from jpaged.pallas_kernels.round_rows.operands import Sums, type_of_sums
from jpaged.pallas_kernels.round_rows.triton import ACTIVATIONS, activated


@dataclass(frozen=True)
class Config:
    """How the kernel is cut and compiled. outputs: of a CTA; with an activation as many gates and as many of what they
    multiply. depth: inputs of a step. warps: of a CTA. stages: steps in flight or in use."""

    outputs: int
    depth: int
    warps: int
    stages: int


_ONE = (Config(64, 256, 4, 8), Config(32, 512, 4, 8), Config(64, 128, 4, 6))
_FEW = (Config(64, 256, 4, 8), Config(64, 256, 4, 7), Config(64, 128, 4, 6))
_SMALL = (Config(64, 128, 4, 8), Config(32, 128, 4, 12), Config(64, 128, 4, 5))
_TABLE = {80: (_SMALL, _SMALL), 86: (_SMALL, _SMALL), 90: (_ONE, _FEW), 100: (_ONE, _FEW), 120: (_SMALL, _SMALL)}
"""By family of GPUs: for one row, and for more; for sums, sums with a residual, and an activation. Not measured
against other tiles."""

ROWS = 8
"""The most rows: a tensor core's product has at least 8 columns."""

_PIECE = 4096
"""Numbers of the rows, at most, that a CTA reads at once while it looks for the largest."""


def default_config(rows: int, *, added: bool, gated: bool) -> Config:
    """For so many rows. added: to a residual. gated: with an activation."""
    return for_family(_TABLE)[rows > 1][1 if added else 2 if gated else 0]


def unsupported(rows: UnroundedRows, w: jax.Array) -> str | None:
    """Why the kernel cannot take these (checked) arguments; None if it can."""
    count, depth = rows.shape
    if count > ROWS:
        return f"{count} rows are more than {ROWS}"
    if rows.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {rows.dtype} is not bfloat16 or float16"
    return f"rows of {depth} are not whole sixteens" if depth % 16 else None


def worthwhile(rows: UnroundedRows, w: jax.Array) -> bool:
    """For as many rows as the environment says (`limits`)."""
    del w
    return rows.shape[0] <= most_rows()


@partial(jax.jit, static_argnames=("activation", "config"))
def few_rows_fp8_product(
    operands: Operands, activation: str | None, config: Config | None = None
) -> Sums | jax.Array | UnroundedRows:
    """`few_rows_fp8_product` of the package, checked. config: to try others than the table's."""
    (rows, w, scale, residual), dtype = operands, jnp.dtype(operands.rows.dtype)
    (count, depth), outputs, gated = rows.shape, w.shape[0], activation is not None
    outputs //= 2 if gated else 1
    config = config or default_config(count, added=residual is not None, gated=gated)
    strips, own = triton.cdiv(outputs, config.outputs), 1 if count == 1 else ROWS
    parts = 0 if rows.largest is None else rows.largest.shape[0]
    # In place of an array that is not given the kernel gets another one, which it does not read.
    optional = [rows.x if one is None else one for one in (rows.norm, rows.largest, rows.input_scale)]
    kept, eight_bits = type_of_sums(dtype), rounds_activations(devices.default_device())
    out = jax.ShapeDtypeStruct((count, outputs), jnp.float32 if gated else kept if residual is None else dtype)
    second = jax.ShapeDtypeStruct(
        (strips if gated else count, count if gated else 1), jnp.int32 if gated else jnp.float32
    )
    first, other = call(
        _few_rows_fp8_product,
        Launch((strips,), config.warps, config.stages),
        rows.x,
        *optional,
        as_bits(w),
        scale,
        rows.x if residual is None else residual,
        out=(out, second),
        M=count,
        K=depth,
        N=outputs,
        NORMED=rows.norm is not None,
        EPS=rows.norm_eps,
        PARTS=parts,
        MOST_PARTS=triton.next_power_of_2(max(parts, 1)),
        GIVEN=rows.input_scale is not None,
        BOUND=-1.0 if rows.upper_bound is None else rows.upper_bound,
        ADDED=residual is not None,
        ACTIVATION=ACTIVATIONS[activation],
        KEPT=_TYPES[kept],
        DTYPE=_TYPES[dtype],
        EIGHT_BITS=eight_bits,
        CONVERTS=eight_bits and not triton.knobs.runtime.interpret,
        OUTPUTS=config.outputs,
        ROWS=ROWS,
        OWN=own,
        STEP=config.depth,
        PIECE=min(triton.next_power_of_2(depth), _PIECE // own),
    )
    if gated:
        return UnroundedRows(first, None, other, None, 0.0, None, dtype)
    return Sums(first, other, scale, count, dtype) if residual is None else first


_TYPES = {jnp.dtype(jnp.float32): tl.float32, jnp.dtype(jnp.bfloat16): tl.bfloat16, jnp.dtype(jnp.float16): tl.float16}


@triton.jit
def _few_rows_fp8_product(
    x,
    norm,
    largest,
    given,
    w,
    of_outputs,
    residual,
    out,
    second,
    M: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,  # outputs of a row of the result
    NORMED: tl.constexpr,
    EPS: tl.constexpr,
    PARTS: tl.constexpr,  # of each row in `largest`; 0 if it is not known
    MOST_PARTS: tl.constexpr,  # a power of two
    GIVEN: tl.constexpr,
    BOUND: tl.constexpr,  # negative for none
    ADDED: tl.constexpr,
    ACTIVATION: tl.constexpr,  # a number of ACTIVATIONS
    KEPT: tl.constexpr,  # type that sums are rounded to
    DTYPE: tl.constexpr,  # type that a norm is rounded to
    EIGHT_BITS: tl.constexpr,  # whether tensor cores multiply e4m3; in 16 bits otherwise, for tests
    CONVERTS: tl.constexpr,  # whether instructions round to e4m3 and add a product exactly, as not in the interpreter
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,  # of the tensor cores
    OWN: tl.constexpr,  # of them, that are computed: one, or all
    STEP: tl.constexpr,
    PIECE: tl.constexpr,  # columns of the rows that are looked at together
):
    """x: [M, K]. norm: [K]. largest: int32 [PARTS, M]. given: float32 [1]. w: bits of e4m3 [N or 2 N, K]. of_outputs:
    float32 [N or 2 N]. residual: [M, N].
    out: [M, N]. second: with an activation int32 [strips, M], the largest magnitudes of `out`; without one, and without
    a residual, float32 [M, 1], the scales of x."""
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_column = column < N
    inner = tl.arange(0, STEP)
    row = tl.arange(0, OWN)
    is_row = row < M
    weights = as_fp8(w) if EIGHT_BITS else w
    weights += column.to(tl.int64)[:, None] * K + inner[None, :]
    inputs = x + row[None, :] * K + inner[:, None]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    total_of_others = total
    by = tl.zeros((OWN,), tl.float32)
    scale = tl.zeros((OWN,), tl.float32)
    inverse = tl.zeros((OWN,), tl.float32)
    for start in range(0, K, STEP):
        if start == 0:  # within the loop: while the weights of the first steps come
            if NORMED:
                by = _by(x, row, is_row, K, EPS, PIECE)
            if GIVEN:
                scale = tl.zeros((OWN,), tl.float32) + tl.load(given)
            elif PARTS > 0:
                part = tl.arange(0, MOST_PARTS)[:, None]
                found = tl.load(largest + part * M + row[None, :], mask=(part < PARTS) & is_row[None, :], other=0)
                scale = _scale(tl.max(found, axis=0), BOUND)
            else:
                scale = _scale(_largest(x, norm, by, row, is_row, K, NORMED, DTYPE, PIECE), BOUND)
            inverse = _inverse(scale)
        left = start + inner < K
        wide = tl.load(inputs + start, mask=left[:, None] & is_row[None, :], other=0.0).to(tl.float32)
        if NORMED:
            factor = tl.load(norm + start + inner, mask=left, other=0.0)
            wide = _normed(wide, by[None, :], factor[:, None], DTYPE)
        of_x = _rounded(wide, scale[None, :], inverse[None, :], EIGHT_BITS, CONVERTS)
        if OWN != ROWS:
            of_x = tl.broadcast_to(of_x, (STEP, ROWS))
        here = is_column[:, None]
        if K % STEP != 0:
            here = here & left[None, :]
        total += _product(weights + start, here, of_x, EIGHT_BITS)
        if ACTIVATION != 0:
            total_of_others += _product(weights + N * K + start, here, of_x, EIGHT_BITS)
    scales = tl.broadcast_to(scale, (ROWS,))  # of rows that are computed alike, the first is stored
    rows = tl.arange(0, ROWS)
    is_stored = rows < M
    place = rows[None, :] * N + column[:, None]
    mask = is_column[:, None] & is_stored[None, :]
    if ACTIVATION != 0:
        gate = _scaled(total, scales, of_outputs, column, is_column, KEPT)
        wide = activated(gate, ACTIVATION) * _scaled(total_of_others, scales, of_outputs + N, column, is_column, KEPT)
        tl.store(out + place, wide, mask=mask)
        size = tl.where(is_column[:, None], _bits(wide), 0)
        tl.store(second + tl.program_id(0) * M + rows, tl.max(size, axis=0), mask=is_stored)
    elif ADDED:
        wide = _scaled(total, scales, of_outputs, column, is_column, KEPT)
        wide += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + place, wide.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(out + place, total.to(KEPT), mask=mask)
        tl.store(second + rows, scales, mask=is_stored & (tl.program_id(0) + rows * 0 == 0))


@triton.jit
def _product(weights, here, of_x, EIGHT_BITS: tl.constexpr):
    """Of one step. Sums of tensor cores span 128 inputs, which also keeps Triton from adding to a longer one."""
    of_w = tl.load(weights, mask=here, other=0.0 if EIGHT_BITS else 0)
    if not EIGHT_BITS:
        of_w = widen(of_w, tl.bfloat16)
    return tl.dot(of_w, of_x, max_num_imprecise_acc=128)


@triton.jit
def _rounded(x, scale, inverse, EIGHT_BITS: tl.constexpr, CONVERTS: tl.constexpr):
    """float32 x / scale -> e4m3, or that in 16 bits; what is beyond 448 becomes 448."""
    if CONVERTS:
        found = _divided(x, scale, inverse).to(tl.float8e4nv)
    else:
        bits = narrow(tl.div_rn(x, tl.broadcast_to(scale, x.shape)))
        found = bits.to(tl.float8e4nv, bitcast=True) if EIGHT_BITS else widen(bits, tl.bfloat16, NAN=True)
    return found


_SMALL_SCALE = tl.constexpr(2.0**-100)
_LARGE = tl.constexpr(2.0**60)


@triton.jit
def _inverse(scale):
    """1 / scale, or 2^-60 / scale of one whose inverse float32 may not hold."""
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), tl.where(scale < _SMALL_SCALE, scale * _LARGE, scale))


@triton.jit
def _divided(x, scale, inverse):
    """x / scale, rounded as a division rounds, which takes twenty instructions and a branch: the product with the
    inverse is a few units in the last place away, and each of two steps mends that by the remainder, which is exact."""
    larger = tl.where(scale < _SMALL_SCALE, _LARGE, 1.0)
    x, scale = x * larger, scale * larger
    quotient = x * inverse
    quotient = tl.fma(tl.fma(-quotient, scale, x), inverse, quotient)
    return tl.fma(tl.fma(-quotient, scale, x), inverse, quotient)


@triton.jit
def _scaled(total, scales, of_outputs, column, is_column, KEPT: tl.constexpr):
    """Sums, rounded to the type that they are kept in, times their scales."""
    by_output = tl.load(of_outputs + column, mask=is_column, other=0.0)
    return total.to(KEPT).to(tl.float32) * scales[None, :] * by_output[:, None]


@triton.jit
def _normed(wide, by, factor, DTYPE: tl.constexpr):
    """As `numerics.rms_norm` rounds."""
    normed = (wide * by).to(factor.dtype).to(tl.float32) * factor.to(tl.float32)
    return normed.to(DTYPE).to(tl.float32)


@triton.jit
def _by(x, row, is_row, K: tl.constexpr, EPS: tl.constexpr, PIECE: tl.constexpr):
    """1 / root mean square of each row."""
    squares = tl.zeros((PIECE, row.shape[0]), tl.float32)
    for first in tl.static_range(0, K, PIECE):
        wide = _piece(x, first + tl.arange(0, PIECE), row, is_row, K, False)
        squares += wide * wide
    return 1.0 / tl.sqrt(tl.sum(squares, axis=0) / K + EPS)


@triton.jit
def _largest(x, norm, by, row, is_row, K: tl.constexpr, NORMED: tl.constexpr, DTYPE: tl.constexpr, PIECE: tl.constexpr):
    """The bits of each row's largest magnitude, normed where there is a norm."""
    found = tl.zeros((PIECE, row.shape[0]), tl.int32)
    for first in tl.static_range(0, K, PIECE):
        column = first + tl.arange(0, PIECE)
        wide = _piece(x, column, row, is_row, K, NORMED and row.shape[0] > 1)
        if NORMED:
            wide = _normed(wide, by[None, :], tl.load(norm + column, mask=column < K, other=0.0)[:, None], DTYPE)
        found = tl.maximum(found, _bits(wide))
    return tl.max(found, axis=0)


@triton.jit
def _piece(x, column, row, is_row, K: tl.constexpr, AGAIN: tl.constexpr):
    """Some columns of all rows, float32 [columns, rows]; zeros beyond. AGAIN: they are read once more, by a load that
    differs, or registers would have to keep them all since the first."""
    mask = (column < K)[:, None] & is_row[None, :]
    cache: tl.constexpr = ".ca" if AGAIN else ""
    return tl.load(x + row[None, :] * K + column[:, None], mask=mask, other=0.0, cache_modifier=cache).to(tl.float32)


@triton.jit
def _bits(x):
    """Magnitudes as int32, which sort alike, and NaN behind them all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(bits, BOUND: tl.constexpr):
    """What makes this largest magnitude 448."""
    largest = bits.to(tl.float32, bitcast=True)
    if BOUND >= 0:
        largest = tl.where(largest > BOUND, BOUND, largest)
    return tl.where(largest < 4.48e-33, 1.0, tl.div_rn(largest, tl.full(largest.shape, 448.0, tl.float32)))
