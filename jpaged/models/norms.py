"""Norms over the last axis.

Who uses a norm calls it. A kernel that computes a norm together with something else (`residual.Stream.normed`,
`layers.Attention`) asks it for `kernel_scale`, and calls it where there is none.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.models.parameters import Constant, parameter
from jpaged.pallas_kernels.common.numerics import rms_norm


class Norm(nnx.Module):
    """The contract of a norm.

    eps: what is added to the mean square, or to the variance.
    """

    eps: float

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] -> [..., size], of x's type."""
        raise NotImplementedError

    def kernel_scale(self) -> jax.Array | None:
        """The scale [size] with which a kernel's RMS norm gives what a call does; None if none does.

        The kernels' norm is x / sqrt(mean(x ** 2) + eps), in float32, rounded to x's type, times the scale.
        """
        return None


class RMSNorm(Norm):
    """Root mean square norm, in float32, rounded before the scale as transformers' Llama does.

    A subclass that multiplies by something else, such as Gemma's 1 + w, overrides `multiplier`; kernels then take it
    too. One that overrides `__call__` is never computed by a kernel, unless it overrides `kernel_scale` as well.
    """

    def __init__(self, size: int, eps: float, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.eps = eps
        self.scale = parameter(rngs, Constant(1.0), (size,), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.multiplier(), self.eps)

    def multiplier(self) -> jax.Array:
        """What the normalised values are multiplied by, [size]."""
        return self.scale[...]

    def kernel_scale(self) -> jax.Array | None:
        return self.multiplier() if type(self).__call__ is RMSNorm.__call__ else None


class LayerNorm(Norm):
    """Layer norm, in float32."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.eps = eps
        self.scale = parameter(rngs, Constant(1.0), (size,), dtype)
        self.bias = parameter(rngs, Constant(0.0), (size,), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (wide * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)
