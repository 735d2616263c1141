"""The grouped products in plain XLA."""

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.pallas_kernels.common.numerics import precision_of
from jpaged.pallas_kernels.gated_product.reference import ACTIVATIONS
from jpaged.pallas_kernels.grouped_product.tiles import RowGroups


def gated_grouped_product(x: jax.Array, w: jax.Array, groups: RowGroups, *, activation: str) -> jax.Array:
    """`gated_grouped_product` of the package, checked."""
    experts, depth, _, columns = w.shape
    both = _product(x, w.reshape(experts, depth, 2 * columns), groups)
    return ACTIVATIONS[activation](both[:, :columns]) * both[:, columns:]


def weighted_grouped_product(x: jax.Array, w: jax.Array, groups: RowGroups, weights: jax.Array) -> jax.Array:
    """`weighted_grouped_product` of the package, checked."""
    product = _product(x, w, groups).astype(jnp.float32)
    return (product * weights[: x.shape[0], None]).astype(x.dtype)


def _product(x: jax.Array, w: jax.Array, groups: RowGroups) -> jax.Array:
    if groups.sizes is not None:
        return lax.ragged_dot(x, w, groups.sizes, precision=precision_of(x.dtype))
    matrices = w[jnp.clip(groups.of_rows, 0, w.shape[0] - 1)]
    return jnp.einsum("ak,akn->an", x, matrices, precision=precision_of(x.dtype))
