"""The product of few rows in plain XLA."""

from functools import partial

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common.numerics import precision_of, rms_norm


@partial(jax.jit, static_argnames=("norm_eps", "dtype", "gives_normed"))
def few_rows_product(
    x: jax.Array,
    w: jax.Array,
    norm: jax.Array | None,
    residual: jax.Array | None,
    *,
    norm_eps: float,
    dtype: jnp.dtype,
    gives_normed: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """`few_rows_product` of the package, checked."""
    read = x if norm is None else rms_norm(x, norm, norm_eps)
    kept = dtype if dtype == jnp.float32 else None  # sums of routers and heads are not rounded
    y = jnp.einsum("mk,kn->mn", read, w, precision=precision_of(x.dtype), preferred_element_type=kept).astype(dtype)
    return (y if residual is None else (residual + y).astype(dtype)), read if gives_normed else None
