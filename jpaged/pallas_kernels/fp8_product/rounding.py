"""Activations and weights rounded to FP8."""

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common.numerics import FP8, FP8_MAX, LEAST_LARGEST
from jpaged.pallas_kernels.devices import Device

_LEAST_CAPABILITY = (8, 9)


def round_to_fp8(
    x: jax.Array, scale: jax.Array | None = None, upper_bound: float | None = None, group: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """[M, K] as e4m3 [M, K] and float32 scales [M, G], or [1] where one is given: x is about their product.

    A row, or group, of zeros has scale 1; so has one of numbers below 5e-33, which become zeros. NaN and infinity make
    one without a given scale NaN.

    group: inputs that share a scale; of the last group it may be fewer. None: all.
    """
    wide = x.astype(jnp.float32)
    rows, depth = x.shape
    grouped = group is not None and group < depth
    if group is not None and grouped:
        wide = jnp.pad(wide, ((0, 0), (0, -depth % group))).reshape(rows, -1, group)
    if scale is None:
        largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
        if upper_bound is not None:
            largest = jnp.minimum(largest, upper_bound)
        scale = jnp.where(largest < LEAST_LARGEST, 1.0, largest / FP8_MAX)
    rounded = jnp.clip(wide / scale, -FP8_MAX, FP8_MAX).astype(FP8)
    if grouped:
        return rounded.reshape(rows, -1)[:, :depth], scale[..., 0]
    return rounded, scale


def rounds_activations(device: Device) -> bool:
    """Whether FP8 activations gain anything, or stand in for a device where they do, as on a CPU."""
    return device.capability is None or device.capability >= _LEAST_CAPABILITY
