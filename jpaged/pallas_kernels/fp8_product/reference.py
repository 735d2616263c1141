"""The FP8 product in plain XLA, which gives products of two e4m3 operands to cuBLASLt on GPUs that have them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.pallas_kernels import devices
from jpaged.pallas_kernels.common.numerics import precision_of
from jpaged.pallas_kernels.fp8_product.operands import Operands, Options
from jpaged.pallas_kernels.fp8_product.rounding import round_to_fp8, rounds_activations


def fp8_product(operands: Operands, options: Options) -> jax.Array:
    """`fp8_product` of the package, checked."""
    (x, w, scale, input_scale), group, dtype = operands, options.group, options.dtype
    if group is None and options.activations != "none" and rounds_activations(devices.default_device()):
        rounded, of_rows = round_to_fp8(x, input_scale, options.upper_bound)
        return (product(rounded, w) * of_rows * scale[:, 0]).astype(dtype)
    if scale.shape[1] == 1:
        return (product(x, w.astype(x.dtype)) * scale[:, 0]).astype(dtype)
    return product(x, dequantized(w, scale, group).astype(x.dtype)).astype(dtype)


def dequantized(w: jax.Array, scale: jax.Array, group: int | None) -> jax.Array:
    """float32 [N, K]: w times its scales, rounded once."""
    if group is not None:
        scale = jnp.repeat(scale, group, axis=1)[:, : w.shape[1]]
    return w.astype(jnp.float32) * scale


def product(x: jax.Array, w: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """x @ w.T, accumulated in float32; [M, N] of a dtype."""
    if x.dtype == jnp.float8_e4m3fn and devices.default_device().platform == "cpu":  # which multiplies no such
        return product(x.astype(jnp.float32), w.astype(jnp.float32)).astype(dtype)
    return lax.dot_general(
        x, w, (((1,), (1,)), ((), ())), precision=precision_of(x.dtype), preferred_element_type=dtype
    )
