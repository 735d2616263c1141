"""What several ops compute alike in plain XLA."""

import jax
import jax.numpy as jnp
from jax import lax


def precision_of(dtype: jnp.dtype) -> lax.Precision | None:
    """float32 products must be float32 throughout; GPUs would round the factors to TF32."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root mean square norm over the last axis, in float32. A scale of x's type is applied after rounding to that type,
    as in transformers' Llama; a float32 scale before, as in its Gemma."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide.astype(scale.dtype) * scale).astype(x.dtype)
