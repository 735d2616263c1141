"""Rows rounded to e4m3 in one Mosaic GPU kernel (Hopper).

    a CTA, up to eight warpgroups: a row; each warpgroup has a part of its columns in registers from first to last

        x, or products * scale of the row * scales of the outputs     read once, 4 columns a load
        + residual --> residual'
        * 1 / root mean square * norm                                 one sum over the CTA
        activation(gate) * up
        / largest magnitude * 448 --> values, scale                   one maximum over the CTA

Rows of padding are the last row again; so nothing is branched on, and what they hold is finite where that is.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.common.numerics import FP8, FP8_MAX, LEAST_LARGEST
from jpaged.pallas_kernels.round_rows import hopper_interpreted, hopper_primitives
from jpaged.pallas_kernels.round_rows.operands import Operands, Options, RoundedRows, Sums, padded

_VECTOR = 4  # columns of a thread side by side: 16 bytes of float32, 4 of e4m3
_STEP = 128 * _VECTOR  # columns that a warpgroup's threads take at once
_MOST_WARPGROUPS = 8
_MOST_COLUMNS = 4096  # of a warpgroup: 32 registers of a thread, and as many again for what they multiply


def _warpgroups(depth: int) -> int | None:
    """As many as share a row evenly; None if a row has too many columns for them, or a number that does not divide."""
    fitting = [n for n in range(1, _MOST_WARPGROUPS + 1) if depth % (n * _STEP) == 0]
    return fitting[-1] if fitting and depth // fitting[-1] <= _MOST_COLUMNS else None


def unsupported(x: jax.Array | Sums, depth: int) -> str | None:
    """Why the kernel cannot take these (checked) arguments; None if it can."""
    if jnp.dtype(x.dtype).itemsize > 4:
        return f"dtype {x.dtype} is wider than 32 bits"
    if _warpgroups(depth) is None:
        return f"rows of {depth} do not divide into at most {_MOST_WARPGROUPS} warpgroups, {_STEP} columns at a time"
    return None


@partial(jax.jit, static_argnames=("options", "interpret"))
def round_rows(operands: Operands, options: Options, *, interpret: Any = None) -> tuple[RoundedRows, jax.Array | None]:
    """`round_rows` of the package, checked. interpret: a `plgpu.InterpretGPUParams` runs the kernel on a CPU."""
    gpu = hopper_primitives if interpret is None else hopper_interpreted
    x, residual, norm, input_scale = operands
    dtype, (count, depth) = jnp.dtype(x.dtype), x.shape
    depth //= 1 if options.activation is None else 2
    warpgroups = _warpgroups(depth)
    assert warpgroups is not None
    part = depth // warpgroups
    layout = plgpu.Layout.WG_STRIDED((part,), vec_size=_VECTOR)
    sums = (x.products, x.of_rows, x.of_outputs) if isinstance(x, Sums) else (x, None, None)

    def body(
        x_ref: Any,
        of_rows_ref: Any,
        of_outputs_ref: Any,
        residual_ref: Any,
        norm_ref: Any,
        scale_ref: Any,
        values_ref: Any,
        scales_ref: Any,
        *refs: Any,
    ) -> None:
        gpu.await_kernel_before()
        place, warpgroup = lax.axis_index("row"), lax.axis_index("warpgroup")
        row = jnp.minimum(place, count - 1)
        of_total, of_largest = refs[-2:]

        def read(ref: Any, first: int = 0) -> jax.Array:
            columns = pl.ds(first + warpgroup * part, part)
            return plgpu.load(ref.at[columns], layout=layout, optimized=False).astype(jnp.float32)

        def read_x(first: int = 0) -> jax.Array:
            wide = read(x_ref.at[row], first)
            return wide if of_rows_ref is None else wide * of_rows_ref[row, 0] * read(of_outputs_ref, first)

        wide = read_x()
        if options.activation is not None:
            wide = _activated(options.activation, wide) * read_x(depth)
        own = pl.ds(warpgroup * part, part)
        if residual_ref is not None:
            after = (read(residual_ref.at[row]) + wide).astype(dtype)
            wide = after.astype(jnp.float32)

            @pl.when(place < count)
            def _store() -> None:
                refs[0].at[row, own][...] = after

        if norm_ref is not None:
            total = gpu.over_cta("sum", wide * wide, of_total, warpgroups, layout)
            by = lax.rsqrt(total * (1.0 / depth) + options.norm_eps)
            normed = (wide * by).astype(norm_ref.dtype).astype(jnp.float32)
            wide = (normed * read(norm_ref)).astype(dtype).astype(jnp.float32)
        if scale_ref is not None:
            scale = scale_ref[0]
        else:
            largest = gpu.over_cta("max", jnp.abs(wide), of_largest, warpgroups, layout)
            if options.upper_bound is not None:
                largest = jnp.minimum(largest, options.upper_bound)
            scale = jnp.where(largest < LEAST_LARGEST, 1.0, largest / FP8_MAX)
        values_ref.at[place, own][...] = jnp.minimum(jnp.maximum(wide / scale, -FP8_MAX), FP8_MAX).astype(FP8)

        @pl.when(warpgroup == 0)
        def _() -> None:
            scales_ref[place, 0] = scale

    rows = padded(count)
    shapes = [jax.ShapeDtypeStruct((rows, depth), FP8), jax.ShapeDtypeStruct((rows, 1), jnp.float32)]
    if residual is not None:
        shapes.append(jax.ShapeDtypeStruct((count, depth), dtype))
    values, scales, *after = plgpu.kernel(
        body,
        out_type=tuple(shapes),
        grid=(rows,),
        grid_names=("row",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=(gpu.memory(warpgroups), gpu.memory(warpgroups)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="round_rows",
        interpret=interpret,
    )(*sums, residual, norm, input_scale)
    return RoundedRows(values, scales, count, dtype), after[0] if after else None


def _activated(activation: str, x: jax.Array) -> jax.Array:
    """Of float32. (1 + tanh(y)) / 2 is the sigmoid of 2 y, which loses nothing where tanh is close to -1."""
    match activation:
        case "silu":
            return x / (1.0 + jnp.exp(-x))
        case "relu":
            return jnp.maximum(x, 0.0)
        case "gelu":
            return 0.5 * x * (1.0 + lax.erf(x * math.sqrt(0.5)))
        case _:
            return x / (1.0 + jnp.exp(-math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x)))
