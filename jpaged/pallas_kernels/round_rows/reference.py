"""Rows rounded to e4m3 in plain XLA."""

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common.numerics import rms_norm
from jpaged.pallas_kernels.fp8_product.rounding import round_to_fp8
from jpaged.pallas_kernels.gated_product.reference import ACTIVATIONS
from jpaged.pallas_kernels.round_rows.operands import Operands, Options, RoundedRows, Sums, padded


def round_rows(operands: Operands, options: Options) -> tuple[RoundedRows, jax.Array | None]:
    """`round_rows` of the package, checked."""
    x, residual, norm, input_scale = operands
    dtype, count = x.dtype, x.shape[0]
    wide = x.wide() if isinstance(x, Sums) else x.astype(jnp.float32)
    if options.activation is not None:
        gate, up = jnp.split(wide, 2, axis=1)
        wide = ACTIVATIONS[options.activation](gate) * up
    if residual is not None:
        residual = (residual.astype(jnp.float32) + wide).astype(dtype)
        wide = residual.astype(jnp.float32)
    if norm is not None:
        wide = rms_norm(wide.astype(dtype), norm, options.norm_eps).astype(jnp.float32)
    wide = jnp.pad(wide, ((0, padded(count) - count), (0, 0)))
    values, scales = round_to_fp8(wide, input_scale, options.upper_bound)
    scales = jnp.broadcast_to(scales.reshape(-1, 1), (wide.shape[0], 1))
    return RoundedRows(values, scales, count, dtype), residual
