"""Queries and a written pool from a projection's output, in plain XLA."""

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common.numerics import rms_norm
from jpaged.pallas_kernels.rope_and_write.projection import Projection
from jpaged.pallas_kernels.write_kv.destination import Destination
from jpaged.pallas_kernels.write_kv.reference import write_kv


def rope_and_write(
    kv_pool: jax.Array, projection: Projection, destination: Destination, *, norm_eps: float
) -> tuple[jax.Array, jax.Array]:
    """`rope_and_write` of the package, checked."""
    q, k, v = split_qkv(projection, norm_eps)
    return q, write_kv(kv_pool, k, v, destination)


def split_qkv(projection: Projection, norm_eps: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`split_qkv` of the package, checked."""
    qkv, rotation, norms, _ = projection
    tokens, kv_heads, slots, head_dim = qkv.shape
    q = qkv[:, :, : slots - 2].reshape(tokens, kv_heads * (slots - 2), head_dim)
    k, v = qkv[:, :, slots - 2], qkv[:, :, slots - 1]
    if norms is not None:
        q, k = (rms_norm(x, scale, norm_eps) for x, scale in zip((q, k), norms, strict=True))
    if rotation is not None:
        q, k = (rotate(x, *rotation) for x in (q, k))
    return q, k, v


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x [T, heads, head_dim], whose i-th and (i + head_dim / 2)-th entries are a pair, by angles whose cos and
    sin are float32 [T, head_dim / 2]. In float32, rounded once."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1).astype(x.dtype)
