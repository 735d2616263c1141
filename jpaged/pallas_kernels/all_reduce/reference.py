"""Sums over devices in plain XLA: a `psum` with the kernel's rounding."""

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.pallas_kernels.all_reduce.operands import Operands
from jpaged.pallas_kernels.common.numerics import rms_norm


def all_reduce_peers(inbox: jax.Array, *, axis: str, num_devices: int) -> jax.Array:
    """`all_reduce_peers` of the package: zeros, since nothing is sent to an inbox here."""
    del inbox, axis
    return jnp.zeros((num_devices, 2), jnp.int32)


def all_reduce_add_norm(
    operands: Operands, *, axis: str, num_devices: int, norm_eps: float
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """`all_reduce_add_norm` of the package, checked. The inbox stays as it is."""
    del num_devices
    inbox, generations, _, parts, residual, bias, scale = operands
    total = residual.astype(jnp.float32) + lax.psum(parts.astype(jnp.float32), axis)
    if bias is not None:
        total = total + bias.astype(jnp.float32)
    summed = total.astype(residual.dtype)
    generations = generations + (jnp.arange(generations.size) < parts.shape[0])
    return inbox, generations, summed, None if scale is None else rms_norm(summed, scale, norm_eps)
