"""The grouped products in plain XLA."""

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.pallas_kernels.common.numerics import precision_of
from jpaged.pallas_kernels.gated_product.reference import ACTIVATIONS


def gated_grouped_product(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array | None,
    groups: jax.Array | None,
    *,
    activation: str,
    known: object = None,
) -> jax.Array:
    """`gated_grouped_product` of the package, checked. known: not needed here."""
    del known
    experts, depth, _, columns = w.shape
    both = _product(x, w.reshape(experts, depth, 2 * columns), group_sizes, groups)
    return ACTIVATIONS[activation](both[:, :columns]) * both[:, columns:]


def weighted_grouped_product(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array | None,
    groups: jax.Array | None,
    weights: jax.Array,
    *,
    known: object = None,
) -> jax.Array:
    """`weighted_grouped_product` of the package, checked. known: not needed here."""
    del known
    product = _product(x, w, group_sizes, groups).astype(jnp.float32)
    return (product * weights[: x.shape[0], None]).astype(x.dtype)


def _product(x: jax.Array, w: jax.Array, group_sizes: jax.Array | None, groups: jax.Array | None) -> jax.Array:
    if group_sizes is not None:
        return lax.ragged_dot(x, w, group_sizes, precision=precision_of(x.dtype))
    matrices = w[jnp.clip(groups, 0, w.shape[0] - 1)]
    return jnp.einsum("ak,akn->an", x, matrices, precision=precision_of(x.dtype))
