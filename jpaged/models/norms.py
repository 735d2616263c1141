"""Norms over the last axis.

Who uses a norm calls it. A kernel that computes a norm together with something else (`residual.Stream.normed`,
`layers.Attention`) asks it for `kernel_scale`, and calls it where there is none.
"""

from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.models.collectives import Collectives
from jpaged.models.parameters import Constant, parameter
from jpaged.pallas_kernels.common.numerics import rms_norm


class HeadsShape(Protocol):
    """What of a `ModelConfig` lays out its heads."""

    @property
    def num_kv_heads(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


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

        The kernels' norm is `numerics.rms_norm`. A scale is of x's type, or float32; not all kernels take the latter.
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


class UnscaledRMSNorm(RMSNorm):
    """`RMSNorm` without weights (Llama 4's of queries and keys)."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype) -> None:
        self.eps, self.size, self.dtype = eps, size, dtype

    def multiplier(self) -> jax.Array:
        return jnp.ones((self.size,), self.dtype)


class WideRMSNorm(RMSNorm):
    """`RMSNorm`, rounded once, after the scale (OLMo 2 and 3)."""

    def multiplier(self) -> jax.Array:
        return self.scale[...].astype(jnp.float32)


class OnePlusRMSNorm(RMSNorm):
    """Gemma's: times 1 + w, in float32, rounded once."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.eps = eps
        self.scale = parameter(rngs, Constant(0.0), (size,), dtype)

    def multiplier(self) -> jax.Array:
        return 1.0 + self.scale[...].astype(jnp.float32)


class LayerNorm(Norm):
    """Layer norm, in float32.

    bias: whether something is added at the end.
    """

    def __init__(self, size: int, eps: float, dtype: jnp.dtype, rngs: nnx.Rngs, *, bias: bool = True) -> None:
        self.eps = eps
        self.scale = parameter(rngs, Constant(1.0), (size,), dtype)
        self.bias = parameter(rngs, Constant(0.0), (size,), dtype) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        normed = _centred(x, self.eps) * self.multiplier()
        if self.bias is not None:
            normed = normed + self.bias[...].astype(jnp.float32)
        return normed.astype(x.dtype)

    def multiplier(self) -> jax.Array:
        """What the normalised values are multiplied by, float32 [size]."""
        return self.scale[...].astype(jnp.float32)


class OnePlusLayerNorm(LayerNorm):
    """Nemotron-4's: times 1 + w."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        super().__init__(size, eps, dtype, rngs)
        self.scale = parameter(rngs, Constant(0.0), (size,), dtype)

    def multiplier(self) -> jax.Array:
        return 1.0 + super().multiplier()


class UnscaledLayerNorm(Norm):
    """Layer norm without weights (OLMo), in float32."""

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return _centred(x, self.eps).astype(x.dtype)


def _centred(x: jax.Array, eps: float) -> jax.Array:
    """x of mean 0 and variance 1 along its last axis, float32."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    return wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)


class HeadNorms(nnx.Module):
    """Norms of queries and keys whose scales differ from head to head, computed by XLA before the rotation.

    scale: [kv_heads, group + 2, head_dim], laid out as `Attention`'s qkv; nothing reads those of the values.
    """

    def __init__(self, config: HeadsShape, eps: float, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.eps = eps
        shape = (config.num_kv_heads, config.group_size + 2, config.head_dim)
        self.scale = parameter(rngs, Constant(1.0), shape, dtype, shard_axis=0, kv_slots=2)

    def normalised(self, qkv: jax.Array, collectives: Collectives) -> jax.Array:
        """qkv [T, kv_heads, group + 2, head_dim] -> the same, float32, before the scale; values may become anything."""
        raise NotImplementedError

    def __call__(self, qkv: jax.Array, collectives: Collectives) -> jax.Array:
        """qkv [T, kv_heads, group + 2, head_dim] with its queries and keys normed."""
        group = qkv.shape[-2] - 2
        normed = (self.normalised(qkv, collectives) * self.scale[...].astype(jnp.float32)).astype(qkv.dtype)
        return jnp.concatenate([normed[..., : group + 1, :], qkv[..., group + 1 :, :]], axis=-2)


class LayerNormOfHeads(HeadNorms):
    """A layer norm without bias of each head (StableLM 2 12B, Command R+)."""

    def normalised(self, qkv: jax.Array, collectives: Collectives) -> jax.Array:
        return _centred(qkv, self.eps)


class RMSNormOfAllHeads(HeadNorms):
    """One RMS norm over the queries of all heads, and one over all keys (OLMo 2 and 3).

    Shards add up their squares: one more exchange a layer, of two numbers a token.
    """

    def normalised(self, qkv: jax.Array, collectives: Collectives) -> jax.Array:
        wide = qkv.astype(jnp.float32)
        group = qkv.shape[-2] - 2
        squares = jnp.square(wide)
        # Where key-value heads are stored several times, each is stored equally often: their mean stays the same.
        sums = jnp.stack([squares[..., :group, :].sum((-3, -2, -1)), squares[..., group, :].sum((-2, -1))], axis=-1)
        kv_heads, dim = qkv.shape[-3] * collectives.size, qkv.shape[-1]
        counts = jnp.array([kv_heads * group * dim, kv_heads * dim], jnp.float32)
        of_queries, of_keys = jnp.moveaxis(jax.lax.rsqrt(collectives.all_reduce(sums) / counts + self.eps), -1, 0)
        factors = jnp.where(
            (jnp.arange(group + 2) < group)[:, None], of_queries[:, None, None, None], of_keys[:, None, None, None]
        )
        return wide * factors
