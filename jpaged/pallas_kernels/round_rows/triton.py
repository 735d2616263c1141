"""Rows rounded to e4m3 in one Triton kernel, a CTA a row: for GPUs other than Hopper, and there for rows of lengths
that the Mosaic kernel does not take. What it computes, and in which order, is as in `hopper.py`."""

from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jpaged.pallas_kernels.common.numerics import FP8, from_bits
from jpaged.pallas_kernels.common.triton_call import Launch, call
from jpaged.pallas_kernels.common.triton_fp8 import narrow
from jpaged.pallas_kernels.round_rows.operands import Operands, Options, RoundedRows, Sums, padded

_MOST_COLUMNS = 32_768
_ACTIVATIONS = {None: 0, "silu": 1, "relu": 2, "gelu": 3, "gelu_tanh": 4}


def unsupported(x: jax.Array | Sums, depth: int) -> str | None:
    """Why the kernel cannot take these (checked) arguments; None if it can."""
    if jnp.dtype(x.dtype).itemsize > 4:
        return f"dtype {x.dtype} is wider than 32 bits"
    return None if depth <= _MOST_COLUMNS else f"rows of {depth} are longer than {_MOST_COLUMNS}"


@partial(jax.jit, static_argnames="options")
def round_rows(operands: Operands, options: Options) -> tuple[RoundedRows, jax.Array | None]:
    """`round_rows` of the package, checked."""
    x, residual, norm, input_scale = operands
    dtype, (count, depth) = jnp.dtype(x.dtype), x.shape
    depth //= 1 if options.activation is None else 2
    rows, columns = padded(count), triton.next_power_of_2(depth)
    source, *scales = (x.products, x.of_rows, x.of_outputs) if isinstance(x, Sums) else (x,)
    # What there is not stands for itself as another array, which the kernel does not read.
    of_rows, of_outputs = scales or (source, source)
    optional = (source if one is None else one for one in (residual, norm, input_scale))
    out = [jax.ShapeDtypeStruct((rows, depth), jnp.uint8), jax.ShapeDtypeStruct((rows, 1), jnp.float32)]
    out.append(jax.ShapeDtypeStruct((1, 1) if residual is None else (count, depth), dtype))
    values, found, after = call(
        _round_rows,
        Launch((rows,), warps=min(16, max(4, columns // 1024)), stages=1),
        source,
        of_rows,
        of_outputs,
        *optional,
        out=out,
        COUNT=count,
        K=depth,
        COLUMNS=columns,
        SUMS=isinstance(x, Sums),
        ADDED=residual is not None,
        NORMED=norm is not None,
        EPS=options.norm_eps,
        ACTIVATION=_ACTIVATIONS[options.activation],
        GIVEN=input_scale is not None,
        BOUND=-1.0 if options.upper_bound is None else options.upper_bound,
    )
    return RoundedRows(from_bits(values, FP8), found, count, dtype), None if residual is None else after


@triton.jit
def _round_rows(
    x,
    of_rows,
    of_outputs,
    residual,
    norm,
    given,
    values,
    scales,
    after,
    COUNT: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,  # K, rounded up to a power of two
    SUMS: tl.constexpr,
    ADDED: tl.constexpr,
    NORMED: tl.constexpr,
    EPS: tl.constexpr,
    ACTIVATION: tl.constexpr,  # a number of _ACTIVATIONS
    GIVEN: tl.constexpr,
    BOUND: tl.constexpr,  # negative for none
):
    """x: [R, K or 2 K]. of_rows: float32 [R, 1]. of_outputs: float32 [K or 2 K]. residual, after: [COUNT, K]. norm:
    [K]. given: float32 [1]. values: bits of e4m3 [R, K]. scales: float32 [R, 1]."""
    place = tl.program_id(0)
    row = tl.minimum(place, COUNT - 1).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < K
    dtype = after.dtype.element_ty
    width: tl.constexpr = K if ACTIVATION == 0 else 2 * K
    wide = _read(x, of_rows, of_outputs, row, width, column, inside, SUMS)
    if ACTIVATION != 0:
        wide = _activated(wide, ACTIVATION) * _read(x, of_rows, of_outputs, row, width, column + K, inside, SUMS)
    if ADDED:
        wide += tl.load(residual + row * K + column, mask=inside, other=0.0).to(tl.float32)
        kept = wide.to(dtype)
        tl.store(after + row * K + column, kept, mask=(column < K) & (place + column * 0 < COUNT))
        wide = kept.to(tl.float32)
    if NORMED:
        scale_of = tl.load(norm + column, mask=inside, other=0.0)
        by = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / K + EPS)
        wide = (wide * by).to(norm.dtype.element_ty).to(tl.float32) * scale_of.to(tl.float32)
        wide = wide.to(dtype).to(tl.float32)
    if GIVEN:
        scale = tl.load(given)
    else:
        # Magnitudes and their bits sort alike, and NaN behind them all, which a maximum of floats would lose.
        bits = wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.max(bits, axis=0).to(tl.float32, bitcast=True)
        if BOUND >= 0:
            largest = tl.where(largest > BOUND, BOUND, largest)
        scale = tl.where(largest < 4.48e-33, 1.0, largest / 448.0)
    tl.store(values + place.to(tl.int64) * K + column, narrow(wide / scale), mask=inside)
    tl.store(scales + place, scale)


@triton.jit
def _read(x, of_rows, of_outputs, row, width: tl.constexpr, column, inside, SUMS: tl.constexpr):
    """Columns of a row, float32; zeros beyond its end."""
    wide = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if SUMS:
        wide = wide * tl.load(of_rows + row) * tl.load(of_outputs + column, mask=inside, other=0.0)
    return wide


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:
        return x / (1.0 + tl.exp(-x))
    if ACTIVATION == 2:
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if ACTIVATION == 3:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
