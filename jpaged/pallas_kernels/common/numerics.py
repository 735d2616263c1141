"""What several ops compute alike in plain XLA."""

import jax
import jax.numpy as jnp
from jax import lax


def precision_of(dtype: jnp.dtype) -> lax.Precision | None:
    """float32 products must be float32 throughout; GPUs would round the factors to TF32."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root mean square norm over the last axis, in float32, rounded before the scale as transformers does."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * scale
