"""Activations and weights rounded to 8-bit integers."""

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common.numerics import LEAST_LARGEST

_LEAST, _MOST = -128.0, 127.0


def round_to_int8(x: jax.Array, scale: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """[M, K] as int8 [M, K] and float32 scales [M, 1], or [1] where one is given: x is about their product.

    Each row's largest magnitude becomes 127, and all is rounded to the nearest, ties to even. What is beyond -128 or
    127 times a given scale becomes just that. A row of zeros has scale 1; so has one of numbers below 5e-33, which
    become zeros. NaN and infinity make a row's own scale NaN or infinite, and with it all that is computed of the row;
    by a given scale NaN becomes 0, as int8 has none.
    """
    wide = x.astype(jnp.float32)
    if scale is None:
        largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
        scale = jnp.where(largest < LEAST_LARGEST, 1.0, largest / _MOST)
    return jnp.clip(jnp.round(wide / scale), _LEAST, _MOST).astype(jnp.int8), scale
