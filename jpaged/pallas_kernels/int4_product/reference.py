"""The 4-bit product in plain XLA, which widens the weights first."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.pallas_kernels.common.numerics import precision_of
from jpaged.pallas_kernels.int4_product.api import MIDDLE, NV_GROUP, NV_PACK
from jpaged.pallas_kernels.int4_product.operands import Operands

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of four bits in MXFP4 and NVFP4, by their number."""


def int4_product(operands: Operands, *, group: int, dtype: Any) -> jax.Array:
    """`int4_product` of the package, checked."""
    x, w, scale, zero, outer = operands
    wide = dequantized(w, scale, zero, group) if outer is None else nvfp4_dequantized(w, scale, outer)
    wide = wide.astype(x.dtype)
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
    values = _both_halves(w.reshape(rows, groups, group // 2)).astype(jnp.float32)
    middle = MIDDLE if zero is None else zero.astype(jnp.float32)[:, :, None]
    return ((values - middle) * scale[:, :, None]).reshape(rows, groups * group)


def e2m1(w: jax.Array, pack: int) -> jax.Array:
    """float32 [N, K] of uint8 [N, K / 2], of which so many inputs share bytes."""
    bits = _both_halves(w.reshape(w.shape[0], -1, pack // 2))
    return jnp.asarray(E2M1, jnp.float32)[bits].reshape(w.shape[0], -1)


def _both_halves(w: jax.Array) -> jax.Array:
    """The lower four bits of bytes [N, G, n], and behind them the upper ones: [N, G, 2 n].

    Shifted by one number or another, since what XLA concatenates it computes in a kernel that is several times slower.
    """
    shifts = jnp.array([[0], [4]], jnp.uint8)
    return ((w[:, :, None] >> shifts) & 15).reshape(*w.shape[:2], -1)


def nvfp4_dequantized(w: jax.Array, scale: jax.Array, outer: jax.Array) -> jax.Array:
    """float32 [N, K]: each weight, rounded twice, as compressed-tensors does."""
    # Of a divisor that is the same for a whole row, XLA would multiply by the reciprocal.
    divisor = lax.optimization_barrier(jnp.broadcast_to(outer[:, None], scale.shape))
    wide = jnp.where(divisor == 0, 0, scale.astype(jnp.float32) / divisor)
    return e2m1(w, NV_PACK) * jnp.repeat(wide, NV_GROUP, axis=1)
