"""The FP8 product in plain XLA, which gives products of two e4m3 operands to cuBLASLt on GPUs that have them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.pallas_kernels import devices
from jpaged.pallas_kernels.common.numerics import precision_of

LARGEST = float(jnp.finfo(jnp.float8_e4m3fn).max)
"""448. What is larger would become NaN."""

_LEAST_CAPABILITY = (8, 9)


def fp8_product(
    x: jax.Array,
    w: jax.Array,
    scale: jax.Array,
    input_scale: jax.Array | None,
    *,
    group: int | None,
    activations: str,
    upper_bound: float | None,
    dtype: Any,
) -> jax.Array:
    """`fp8_product` of the package, checked."""
    if activations != "none" and _rounds_activations(devices.default_device()):
        rounded, of_rows = round_to_fp8(x, input_scale, upper_bound)
        return (_dot(rounded, w) * of_rows * scale[:, 0]).astype(dtype)
    if scale.shape[1] == 1:
        return (_dot(x, w.astype(x.dtype)) * scale[:, 0]).astype(dtype)
    return _dot(x, dequantized(w, scale, group).astype(x.dtype)).astype(dtype)


def round_to_fp8(
    x: jax.Array, scale: jax.Array | None = None, upper_bound: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """[M, K] as e4m3 [M, K] and float32 scales [M, 1], or [1] where one is given: x is about their product.

    A row of zeros has scale 1. NaN and infinity make a row without a given scale NaN.
    """
    wide = x.astype(jnp.float32)
    if scale is None:
        largest = jnp.max(jnp.abs(wide), axis=1, keepdims=True)
        if upper_bound is not None:
            largest = jnp.minimum(largest, upper_bound)
        scale = jnp.where(largest == 0, 1.0, largest / LARGEST)
    return jnp.clip(wide / scale, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn), scale


def dequantized(w: jax.Array, scale: jax.Array, group: int | None) -> jax.Array:
    """float32 [N, K]: w times its scales, rounded once."""
    if group is not None:
        scale = jnp.repeat(scale, group, axis=1)[:, : w.shape[1]]
    return w.astype(jnp.float32) * scale


def _rounds_activations(device: devices.Device) -> bool:
    """Whether FP8 activations gain anything, or stand in for a device where they do, as on a CPU."""
    return device.capability is None or device.capability >= _LEAST_CAPABILITY


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """float32 [M, N]."""
    if x.dtype == jnp.float8_e4m3fn and devices.default_device().platform == "cpu":  # which multiplies no such
        x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    return lax.dot_general(
        x, w, (((1,), (1,)), ((), ())), precision=precision_of(x.dtype), preferred_element_type=jnp.float32
    )
