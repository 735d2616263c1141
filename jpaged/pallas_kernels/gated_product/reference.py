"""The gated product in plain XLA: a product, whose result [M, 2, I] goes to memory and back, and elementwise work."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common.numerics import precision_of

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def gated_product(x: jax.Array, w: jax.Array, bias: jax.Array | None, *, activation: str) -> jax.Array:
    """`gated_product` of the package, checked."""
    both = jnp.einsum("mk,kci->mci", x, w, precision=precision_of(x.dtype))
    if bias is not None:
        both = both + bias
    return ACTIVATIONS[activation](both[:, 0]) * both[:, 1]
