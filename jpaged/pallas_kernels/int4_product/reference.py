"""The 4-bit product in plain XLA, which widens the weights first."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.pallas_kernels.common.numerics import precision_of
from jpaged.pallas_kernels.int4_product.api import MIDDLE


def int4_product(
    x: jax.Array, w: jax.Array, scale: jax.Array, zero: jax.Array | None, *, group: int, dtype: Any
) -> jax.Array:
    """`int4_product` of the package, checked."""
    wide = dequantized(w, scale, zero, group).astype(x.dtype)
    dims = (((1,), (1,)), ((), ()))
    y = lax.dot_general(x, wide, dims, precision=precision_of(x.dtype), preferred_element_type=jnp.float32)
    return y.astype(dtype)


def pack(values: Any, group: int) -> Any:
    """Values from 0 to 15, uint8 [N, K] -> [N, K / 2] as the op takes them; of numpy or JAX."""
    halves = values.reshape(values.shape[0], -1, 2, group // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(values.shape[0], -1)


def dequantized(w: jax.Array, scale: jax.Array, zero: jax.Array | None, group: int) -> jax.Array:
    """float32 [N, K]: each weight, exactly where scales have half of float32's digits."""
    rows, groups = scale.shape
    halves = w.reshape(rows, groups, 1, group // 2)
    values = jnp.concatenate([halves & 15, halves >> 4], axis=2).reshape(rows, groups, group).astype(jnp.float32)
    middle = MIDDLE if zero is None else zero.astype(jnp.float32)[:, :, None]
    return ((values - middle) * scale[:, :, None]).reshape(rows, groups * group)
