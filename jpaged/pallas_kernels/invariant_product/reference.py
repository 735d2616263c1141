"""The invariant product in plain XLA: a loop over tiles of one size, as products of another shape round otherwise."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.pallas_kernels.common.numerics import precision_of

TILE_ROWS = 128
"""As many rows as keep the tensor cores busy for about as long as their weights take to arrive: an H200's 990 TFLOP/s
in 16 bits and 4.8 TB/s meet at 206 rows (computed, not measured). Fewer would read weights in vain more often, more
would pad small batches."""


def invariant_product(x: jax.Array, w: jax.Array, *, outputs_first: bool, dtype: Any) -> jax.Array:
    """`invariant_product` of the package, checked."""
    rows = x.shape[0]
    count = -(-rows // TILE_ROWS)
    tiles = jnp.pad(x, ((0, count * TILE_ROWS - rows), (0, 0))).reshape(count, TILE_ROWS, -1)
    axes = (((1,), (1 if outputs_first else 0,)), ((), ()))

    def multiply(tile: jax.Array) -> jax.Array:
        tile = lax.optimization_barrier(tile)
        y = lax.dot_general(tile, w, axes, precision=precision_of(x.dtype), preferred_element_type=dtype)
        return lax.optimization_barrier(y)

    return lax.map(multiply, tiles).reshape(count * TILE_ROWS, -1)[:rows]
