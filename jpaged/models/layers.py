"""The pieces that the model families share."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from jpaged.models.config import ModelConfig
from jpaged.pallas_kernels import gated_product
from jpaged.pallas_kernels.common.numerics import precision_of, rms_norm
from jpaged.pallas_kernels.gated_product.reference import ACTIVATIONS


class Attend(Protocol):
    """What a layer calls for attention; the caller decides where keys and values live.

    qkv: [T, kv_heads, group + 2, head_dim], as `Attention` projects them, which `rotation`, `norms` and `norm_eps` make
    into queries, keys and values: see `pallas_kernels.split_qkv`, which does just that. Returns [T, heads, head_dim].
    """

    def __call__(
        self,
        qkv: jax.Array,
        *,
        rotation: tuple[jax.Array, jax.Array] | None,
        norms: tuple[jax.Array, jax.Array] | None,
        norm_eps: float,
        scale: float,
        sliding_window: int | None = None,
        logit_softcap: float | None = None,
        alibi_slopes: jax.Array | None = None,
    ) -> jax.Array: ...


class Carried(Protocol):
    """What goes through a stack of layers, a pytree that they change: `residual.Stream`."""

    def become(self, other: Any) -> None:
        """Takes over what a traced function made of it."""


def run_layers(layers: Iterable[nnx.Module], stream: Carried, shared: tuple, attend: Attend | list[Any]) -> None:
    """Passes the stream through a stack of layers: layer(stream, *shared, attend).

    attend: one for all of them; or a list of one a layer, each a pytree, which then holds what the calls made of them.
        Layers of equal structure and shapes are then traced and lowered once between them, which halves the time that
        the programs of a 28-layer model take to lower.
    """
    for index, layer in enumerate(layers):
        if isinstance(attend, list):
            graph, weights = nnx.split(layer)
            after, attend[index] = _run_layer(graph, weights, stream, shared, attend[index])
            stream.become(after)
        else:
            layer(stream, *shared, attend)


@partial(jax.jit, static_argnums=0)
def _run_layer(graph: nnx.GraphDef, weights: nnx.State, stream: Carried, shared: tuple, attend: Any) -> tuple:
    nnx.merge(graph, weights)(stream, *shared, attend)
    return stream, attend


@dataclass(frozen=True)
class Normal:
    """Starts a parameter from a normal distribution."""

    std: float

    def draw(self, key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return (jax.random.normal(key, shape, dtype) * jnp.asarray(self.std, dtype)).astype(dtype)


@dataclass(frozen=True)
class Constant:
    """Starts a parameter from one value."""

    value: float

    def draw(self, key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return jnp.full(shape, self.value, dtype)


def parameter(
    rngs: nnx.Rngs,
    start: Normal | Constant,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    shard_axis: int | None = None,
) -> nnx.Param:
    """A parameter that remembers, as metadata, how it is initialised (`start`) and along which of its axes tensor
    parallelism splits it (`shard_axis`; None: every shard has all of it).
    """
    return nnx.Param(start.draw(rngs.params(), shape, dtype), start=start, shard_axis=shard_axis)


def product(pattern: str, x: jax.Array, kernel: nnx.Param, bias: nnx.Param | None = None) -> jax.Array:
    """An einsum of activations and a kernel, and its bias, in x's type."""
    y = jnp.einsum(pattern, x, kernel[...], precision=precision_of(x.dtype))
    return y if bias is None else y + bias[...]


Part = tuple[jax.Array, jax.Array | None]
"""[T, hidden], this shard's part of a product whose inputs are split over shards, and a bias [hidden] to be added once
to the sum of all parts."""


def _row_parallel(pattern: str, x: jax.Array, kernel: nnx.Param, bias: nnx.Param | None) -> Part:
    return product(pattern, x, kernel), None if bias is None else bias[...]


def _activation(name: str) -> str:
    """What `pallas_kernels` calls an activation of a configuration, whose other names all mean one."""
    return name if name in ACTIVATIONS else "gelu_tanh"


class RMSNorm(nnx.Module):
    """Root mean square norm over the last axis, in float32, rounded before the scale as transformers does."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.eps = eps
        self.scale = parameter(rngs, Constant(1.0), (size,), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.scale[...], self.eps)


class LayerNorm(nnx.Module):
    """Layer norm over the last axis, in float32."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.eps = eps
        self.scale = parameter(rngs, Constant(1.0), (size,), dtype)
        self.bias = parameter(rngs, Constant(0.0), (size,), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (wide * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)


class Attention(nnx.Module):
    """Projections around an `Attend`.

    The three input projections are one kernel, laid out by key-value head so that it can be split over devices
    along that axis:

        qkv [hidden, kv_heads, group + 2, head_dim]
                                |-- group: the query heads that share the key-value head
                                |-- 1: its key
                                '-- 1: its value
    """

    def __init__(self, config: ModelConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        hidden, kv_heads, dim = config.hidden_size, config.num_kv_heads, config.head_dim
        slots = config.group_size + 2
        self.config = config
        self.scale, self.sliding_window = config.attention_scales[layer], config.sliding_windows[layer]
        self.qkv = parameter(rngs, Normal(hidden**-0.5), (hidden, kv_heads, slots, dim), dtype, shard_axis=1)
        bias_shape = (kv_heads, slots, dim)
        self.qkv_bias = parameter(rngs, Constant(0.0), bias_shape, dtype, shard_axis=0) if config.qkv_bias else None
        out_std = (config.num_heads * dim * 2 * config.num_layers) ** -0.5
        self.out = parameter(rngs, Normal(out_std), (config.num_heads, dim, hidden), dtype, shard_axis=0)
        self.out_bias = parameter(rngs, Constant(0.0), (hidden,), dtype) if config.output_bias else None

    def __call__(
        self,
        x: jax.Array,
        attend: Attend,
        rotation: tuple[jax.Array, jax.Array] | None = None,
        norms: tuple[RMSNorm, RMSNorm] | None = None,
    ) -> Part:
        """[T, hidden] -> [T, hidden], in parts.

        rotation: cos and sin (`Rope.table`). norms: of each query and of each key.
        """
        y = attend(
            product("th,hksd->tksd", x, self.qkv, self.qkv_bias),
            rotation=rotation,
            norms=None if norms is None else (norms[0].scale[...], norms[1].scale[...]),
            norm_eps=0.0 if norms is None else norms[0].eps,
            scale=self.scale,
            sliding_window=self.sliding_window,
        )
        return _row_parallel("tnd,ndh->th", y, self.out, self.out_bias)


class MLP(nnx.Module):
    """Two products with an activation in between (OPT, GPT-2)."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.activation = _activation(config.activation)
        self.up = parameter(rngs, Normal(hidden**-0.5), (hidden, inner), dtype, shard_axis=1)
        self.up_bias = parameter(rngs, Constant(0.0), (inner,), dtype, shard_axis=0) if config.mlp_bias else None
        down_start = Normal((inner * 2 * config.num_layers) ** -0.5)
        self.down = parameter(rngs, down_start, (inner, hidden), dtype, shard_axis=0)
        self.down_bias = parameter(rngs, Constant(0.0), (hidden,), dtype) if config.mlp_bias else None

    def __call__(self, x: jax.Array) -> Part:
        """[T, hidden] -> [T, hidden], in parts."""
        inner = ACTIVATIONS[self.activation](product("th,hi->ti", x, self.up, self.up_bias))
        return _row_parallel("ti,ih->th", inner, self.down, self.down_bias)


class GatedMLP(nnx.Module):
    """The Llama family's MLP; gate and up are one kernel, gate_up [hidden, 2, intermediate], gate first.

    backend: of `pallas_kernels.gated_product`; gradients need "xla". `Model.forward` sets it.
    """

    backend: str | None = "xla"

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.activation = _activation(config.activation)
        self.gate_up = parameter(rngs, Normal(hidden**-0.5), (hidden, 2, inner), dtype, shard_axis=2)
        bias_shape = (2, inner)
        self.gate_up_bias = parameter(rngs, Constant(0.0), bias_shape, dtype, shard_axis=1) if config.mlp_bias else None
        down_start = Normal((inner * 2 * config.num_layers) ** -0.5)
        self.down = parameter(rngs, down_start, (inner, hidden), dtype, shard_axis=0)
        self.down_bias = parameter(rngs, Constant(0.0), (hidden,), dtype) if config.mlp_bias else None

    def __call__(self, x: jax.Array) -> Part:
        """[T, hidden] -> [T, hidden], in parts."""
        bias = None if self.gate_up_bias is None else self.gate_up_bias[...]
        operands = promote_dtype((x, self.gate_up[...], bias))  # who trains a model may keep some weights in float32
        inner = gated_product(*operands, activation=self.activation, backend=self.backend)
        return _row_parallel("ti,ih->th", inner, self.down, self.down_bias)


def logits_of(hidden: jax.Array, embedding: jax.Array) -> jax.Array:
    """hidden [R, width] against embedding [vocab, width]: float32 [R, vocab]."""
    precision = precision_of(hidden.dtype)
    return jnp.einsum("rh,vh->rv", hidden, embedding, precision=precision, preferred_element_type=jnp.float32)
