"""What several ops compute alike in plain XLA."""

import jax
import jax.numpy as jnp
from jax import lax

FP8 = jnp.float8_e4m3fn.dtype
"""e4m3, of weights, activations, keys and values in 8 bits."""
FP8_MAX = float(jnp.finfo(FP8).max)
"""448. What is larger would become NaN."""

LEAST_SCALE, MOST_SCALE = 1e-35, 1e35
"""Of values in few bits. Beyond these, what they multiply or divide may be no normal number of float32: devices make
zeros of small ones, and zero divided by such a scale is NaN."""

LEAST_LARGEST = FP8_MAX * LEAST_SCALE
"""Rows whose largest magnitude is below this are rounded to zeros, with a scale of 1. Triton's kernels spell it out.
int8 takes the same limit, though its own would be lower."""


def precision_of(dtype: jnp.dtype) -> lax.Precision | None:
    """float32 products must be float32 throughout; GPUs would round the factors to TF32."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root mean square norm over the last axis, in float32. A scale of x's type is applied after rounding to that type,
    as in transformers' Llama; a float32 scale before, as in its Gemma."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide.astype(scale.dtype) * scale).astype(x.dtype)


def to_fp8(x: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """x, divided by a scale, in e4m3: rounded to the nearest, ties to even; what is beyond 448 becomes 448."""
    wide = x.astype(jnp.float32)
    wide = wide if scale is None else wide / scale
    return jnp.clip(wide, -FP8_MAX, FP8_MAX).astype(FP8)


def as_bits(x: jax.Array) -> jax.Array:
    """e4m3 as uint8, and other types as they are: costs nothing, and all GPUs' kernels take it so. XLA's CPU compiler
    widens all of an array in e4m3 to move a part of it."""
    return lax.bitcast_convert_type(x, jnp.uint8) if x.dtype == FP8 else x


def from_bits(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What `as_bits` made of an array of this type."""
    return lax.bitcast_convert_type(x, dtype) if x.dtype != dtype else x
