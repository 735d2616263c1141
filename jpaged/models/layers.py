"""Attention, MLPs and the stack of layers. With `linear`, `norms` and `residual`, what families are built of."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.models.collectives import ALONE, Collectives
from jpaged.models.config import ModelConfig
from jpaged.models.family import Attend
from jpaged.models.linear import Linear, PartialSum, Reader, Rounding, Rows, count_rows, times
from jpaged.models.norms import HeadNorms, Norm
from jpaged.models.parameters import Constant, parameter
from jpaged.models.residual import Stream
from jpaged.pallas_kernels import Sums, split_qkv, split_queries
from jpaged.pallas_kernels.gated_product.reference import ACTIVATIONS


def run_layers(
    layers: Iterable[nnx.Module],
    stream: Stream,
    shared: tuple,
    attend: Attend | list[Any],
    *,
    own: Sequence[tuple] | None = None,
    sources: Sequence[int | None] = (),
) -> None:
    """Passes the stream through a stack of layers: layer(stream, *shared, *own[layer], attend).

    shared: arrays that all layers read, such as the rotation of each token. own: what each layer reads alone.
    attend: one for all of them; or a list of one a layer, each a pytree, which then holds what the calls made of them.
        Layers of equal structure and shapes are then traced and lowered once between them, which halves the time that
        the programs of a 28-layer model take to lower.
    sources: `ModelConfig.layer_sources`.
    """
    kept: dict[int, tuple[jax.Array, jax.Array]] = {}
    for index, layer in enumerate(layers):
        read = shared if own is None else (*shared, *own[index])
        if isinstance(attend, list):
            graph, weights = nnx.split(layer)
            after, attend[index] = _run_layer(graph, weights, stream, read, attend[index])
            stream.become(after)
        elif index in sources:
            layer(stream, *read, partial(_attend_and_keep, attend, kept, index))
        elif sources and (source := sources[index]) is not None:
            layer(stream, *read, partial(_attend_to_kept, attend, *kept[source]))
        else:
            layer(stream, *read, attend)
        if stream.counts is not None:
            stream.counts.end_layer()


def _attend_and_keep(
    attend: Attend, kept: dict[int, tuple[jax.Array, jax.Array]], layer: int, qkv: Any, **options: Any
) -> jax.Array:
    """The `Attend` of a layer whose keys and values others read, where one serves all layers and remembers nothing."""
    of_heads = {name: options[name] for name in ("rotation", "norms", "norm_eps")}
    _, *kept_of_layer = split_qkv(qkv, **of_heads)
    kept[layer] = kept_of_layer[0], kept_of_layer[1]
    return attend(qkv, **options)


def _attend_to_kept(attend: Attend, k: jax.Array, v: jax.Array, q: jax.Array, **options: Any) -> jax.Array:
    """Likewise of a layer that reads them: k and v [T, kv_heads, head_dim]."""
    queries = split_queries(q, rotation=options["rotation"]).reshape(q.shape)
    whole = jnp.concatenate([queries, k[:, :, None], v[:, :, None]], axis=2)
    return attend(whole, **options | {"rotation": None, "norms": None})


@partial(jax.jit, static_argnums=0)
def _run_layer(graph: nnx.GraphDef, weights: nnx.State, stream: Stream, shared: tuple, attend: Any) -> tuple:
    nnx.merge(graph, weights)(stream, *shared, attend)
    return stream, attend


class Attention(Reader):
    """Projections around an `Attend`.

    The three input projections are one product, laid out by key-value head so that it can be split over devices along
    that axis:

        qkv [hidden, kv_heads, group + 2, head_dim]
                                |-- group: the query heads that share the key-value head
                                |-- 1: its key
                                '-- 1: its value

    A layer that reads the keys and values of another (`config.layer_sources`) has queries [hidden, heads, head_dim]
    instead.

    layer: its number, which picks its window of `config.layer_windows`, and its heads.
    keys_are_values: keys and values are one projection, qkv [hidden, kv_heads, group + 1, head_dim] (Gemma 4).
    value_dim: values have so many columns, fewer than keys, and a product of their own, [hidden, kv_heads, 1,
        value_dim]; `Attend` and the cache get them with zeros behind, as wide as keys (MiMo). Without a norm.
    value_scale: multiplies such values.
    scale: multiplies the product of query and key; head_dim ** -0.5 if None.
    logit_softcap: scores become cap * tanh(score / cap) (Gemma 2).
    alibi_slopes: of all heads of all shards; the score loses slope times distance (Press et al. 2021,
    arXiv:2108.12409).
    clip: queries, keys and values are clipped to [-clip, clip] (MPT).
    sinks: each head has a learned logit that joins its softmax (gpt-oss).
    gated: what attention gives is multiplied by the sigmoid of a product of the layer's input (Qwen3-Next).
    collectives: of the shards, for what depends on the heads of the others: slopes and `HeadNorms`.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        *,
        scale: float | None = None,
        qkv_bias: bool = False,
        output_bias: bool = False,
        logit_softcap: float | None = None,
        alibi_slopes: tuple[float, ...] | None = None,
        clip: float | None = None,
        sinks: bool = False,
        gated: bool = False,
        keys_are_values: bool = False,
        value_dim: int | None = None,
        value_scale: float = 1.0,
        collectives: Collectives = ALONE,
    ) -> None:
        if value_dim is not None and (keys_are_values or clip is not None):
            raise ValueError("value_dim goes neither with keys_are_values nor with clip")
        if value_dim is None and value_scale != 1.0:
            raise ValueError("value_scale goes with value_dim alone")
        config = config.of_layer(layer)
        hidden, heads, dim = config.hidden_size, config.num_heads, config.head_dim
        self.logit_softcap, self.alibi_slopes, self.clip = logit_softcap, alibi_slopes, clip
        self.collectives = collectives
        self.scale = dim**-0.5 if scale is None else scale
        self.sliding_window = config.layer_windows[layer]
        self.chunked = config.chunked_windows and self.sliding_window is not None
        self.kv_heads, self.group, self.keys_are_values = config.num_kv_heads, config.group_size, keys_are_values
        self.value_dim, self.value_scale = value_dim, value_scale
        slots = 1 if keys_are_values or value_dim is not None else 2

        def first(outputs: tuple[int, ...], kv_slots: int) -> Linear:
            options: dict[str, Any] = {"shard_axis": 1, "bias": qkv_bias, "kv_slots": kv_slots}
            return Linear((hidden,), outputs, hidden**-0.5, dtype, rngs, **options)

        keeps = config.layer_sources[layer] is None
        self.qkv = first((self.kv_heads, self.group + slots, dim), slots) if keeps else None
        self.queries = None if keeps else first((heads, dim), 0)
        self.values = None if value_dim is None else first((self.kv_heads, 1, value_dim), 1)
        # As many as query heads, which are split over shards as they stand.
        self.sinks = parameter(rngs, Constant(0.0), (heads,), dtype, 0) if sinks else None
        of_queries, std = (heads, dim), hidden**-0.5
        self.gate = Linear((hidden,), of_queries, std, dtype, rngs, shard_axis=1, bias=qkv_bias) if gated else None
        given = dim if value_dim is None else value_dim
        out_std = (heads * given * 2 * config.num_layers) ** -0.5
        self.out = Linear((heads, given), (hidden,), out_std, dtype, rngs, shard_axis=0, bias=output_bias)

    def rounding(self, num_rows: int, backend: str | None) -> Rounding | None:
        """None where two products read it."""
        return self._first.rounding(num_rows, backend) if self.gate is None and self.values is None else None

    @property
    def _first(self) -> Linear:
        """The input projection."""
        first = self.qkv if self.queries is None else self.queries
        assert first is not None
        return first

    def __call__(
        self,
        x: Rows,
        attend: Attend,
        rotation: tuple[jax.Array, jax.Array] | None = None,
        norms: tuple[Norm, ...] | HeadNorms | None = None,
        backend: str | None = "xla",
        temperature: jax.Array | None = None,
    ) -> PartialSum:
        """[T, hidden] -> [T, hidden].

        x: an array, or rounded as `rounding` says.
        rotation: cos and sin (`Rope.table`). norms: of each query, of each key and of each value, or of the first of
            these alone, before the rotation.
        backend: of products that have kernels (`Linear`).
        temperature: float32 [T], what the queries, normed, are multiplied by (`Temperature.of`); None for nothing.
        """
        if temperature is None:
            qkv, scales, eps = self._projected(x, attend, norms, backend)
        else:
            qkv, scales, eps = _tempered(self._normed(x, norms, backend), self.group, temperature), None, 0.0
        rare: dict[str, Any] = {} if self.sinks is None else {"sinks": self.sinks[...]}
        if self.chunked:
            rare["chunked"] = True
        y = attend(
            qkv,
            rotation=rotation,
            norms=scales,
            norm_eps=eps,
            scale=self.scale,
            sliding_window=self.sliding_window,
            logit_softcap=self.logit_softcap,
            alibi_slopes=self._own_slopes(),
            **rare,
        )
        y = y if self.value_dim is None else y[..., : self.value_dim]
        if self.gate is not None:
            y = y * jax.nn.sigmoid(self.gate(x, backend=backend))
        return self.out.partial_sum(y, backend)

    def _projected(
        self, x: Rows, attend: Attend, norms: tuple[Norm, ...] | HeadNorms | None, backend: str | None
    ) -> tuple[jax.Array | Sums, tuple[jax.Array, jax.Array] | None, float]:
        """qkv, and the scales and the epsilon of norms that are still to be computed."""
        if self.qkv is None or self.keys_are_values or self.values is not None:
            return self._normed(x, norms, backend), None, 0.0
        in_kernel = _kernel_scales(*norms) if isinstance(norms, tuple) and len(norms) == 2 else None
        if in_kernel is not None or norms is None:
            eps = norms[0].eps if isinstance(norms, tuple) else 0.0
            if self.clip is None and getattr(attend, "takes_sums", False):
                return self.qkv.sums(x, backend), in_kernel, eps
            return self._clipped(self.qkv(x, backend=backend)), in_kernel, eps
        return self._normed(x, norms, backend), None, 0.0

    def _normed(self, x: Rows, norms: tuple[Norm, ...] | HeadNorms | None, backend: str | None) -> jax.Array:
        """qkv, with norms that XLA computes."""
        qkv = self._clipped(self._first(x, backend=backend))
        if self.queries is not None:
            qkv = qkv.reshape(*qkv.shape[:-2], self.kv_heads, self.group, qkv.shape[-1])
        elif self.keys_are_values:
            qkv = jnp.concatenate([qkv, qkv[..., self.group :, :]], axis=-2)
        elif self.values is not None:
            values = times(self.values(x, backend=backend), self.value_scale)
            behind = [(0, 0)] * (values.ndim - 1) + [(0, qkv.shape[-1] - values.shape[-1])]
            qkv = jnp.concatenate([qkv, jnp.pad(values, behind)], axis=-2)
        if norms is None:
            return qkv
        return norms(qkv, self.collectives) if isinstance(norms, HeadNorms) else _norm_heads(qkv, self.group, norms)

    def _clipped(self, qkv: jax.Array) -> jax.Array:
        return qkv if self.clip is None else jnp.clip(qkv, -self.clip, self.clip)

    def _own_slopes(self) -> jax.Array | None:
        """Of this shard's heads."""
        if self.alibi_slopes is None:
            return None
        heads = len(self.alibi_slopes) // self.collectives.size
        first = self.collectives.first(heads)
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(self.alibi_slopes, jnp.float32), first, heads)


def _kernel_scales(query_norm: Norm, key_norm: Norm) -> tuple[jax.Array, jax.Array] | None:
    """What the kernel that rotates takes of both norms; None if it cannot compute them. It has one epsilon for both."""
    query_scale, key_scale = query_norm.kernel_scale(), key_norm.kernel_scale()
    if (
        query_scale is None
        or key_scale is None
        or query_norm.eps != key_norm.eps
        or query_scale.dtype != key_scale.dtype
    ):
        return None
    return query_scale, key_scale


def _norm_heads(qkv: jax.Array, group: int, norms: tuple[Norm, ...]) -> jax.Array:
    """qkv [T, kv_heads, group + 2 or group, head_dim] with its queries, keys and values normalised, or the first of
    these."""
    parts = jnp.split(qkv, (*range(group, qkv.shape[-2]),), axis=-2)
    normed = [norm(part) for norm, part in zip(norms, parts, strict=False)]
    return jnp.concatenate([*normed, *parts[len(normed) :]], axis=-2)


def _tempered(qkv: jax.Array, group: int, temperature: jax.Array) -> jax.Array:
    """qkv [T, kv_heads, group + 2 or group, head_dim] with the queries of each token multiplied by its temperature,
    [T]."""
    queries, others = jnp.split(qkv, (group,), axis=-2)
    return jnp.concatenate([(queries * temperature[:, None, None, None]).astype(qkv.dtype), others], axis=-2)


UNGATED_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    **ACTIVATIONS,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
"""Those of MLPs without gates: what kernels of gated products take, and squares (So et al. 2021, arXiv:2109.08668)."""


class MLP(Reader):
    """Two products with an activation in between (OPT, GPT-2).

    activation: a key of `UNGATED_ACTIVATIONS`.
    """

    def __init__(
        self, config: ModelConfig, activation: str, dtype: jnp.dtype, rngs: nnx.Rngs, *, bias: bool = False
    ) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.activation = activation
        self.up = Linear((hidden,), (inner,), hidden**-0.5, dtype, rngs, shard_axis=1, bias=bias)
        self.down = _down(config, dtype, rngs, bias)

    def rounding(self, num_rows: int, backend: str | None) -> Rounding | None:
        return self.up.rounding(num_rows, backend)

    def __call__(self, x: Rows, backend: str | None = "xla") -> PartialSum:
        """[T, hidden] -> [T, hidden].

        x: an array, or rounded as `rounding` says. backend: as of `GatedMLP`.
        """
        return self.down.partial_sum(UNGATED_ACTIVATIONS[self.activation](self.up(x, backend=backend)), backend)


class GatedMLP(Reader):
    """The Llama family's MLP; gate and up are one product, gate_up [hidden, 2, intermediate], gate first.

    activation: a key of `pallas_kernels.gated_product.ACTIVATIONS` (`ConfigReader.activation`).
    """

    def __init__(
        self, config: ModelConfig, activation: str, dtype: jnp.dtype, rngs: nnx.Rngs, *, bias: bool = False
    ) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.activation = activation
        self.gate_up = Linear((hidden,), (2, inner), hidden**-0.5, dtype, rngs, shard_axis=2, bias=bias)
        self.down = _down(config, dtype, rngs, bias)

    def rounding(self, num_rows: int, backend: str | None) -> Rounding | None:
        return self.gate_up.rounding(num_rows, backend)

    def __call__(self, x: Rows, backend: str | None = "xla") -> PartialSum:
        """[T, hidden] -> [T, hidden].

        x: an array, or rounded as `rounding` says.
        backend: of `pallas_kernels.gated_product`; gradients need "xla".
        """
        inner = self.gate_up.gated(x, self.activation, backend, self.down.rounding(count_rows(x), backend))
        return self.down.partial_sum(inner, backend)


class TopGatesMLP(GatedMLP):
    """A `GatedMLP` in which only the largest gates of a token count, found without sorting: those that are `cutoff`
    standard deviations above their mean, less that threshold ("statistical top-k", You et al. 2025, arXiv:2506.06644).

    columns: gates of a token, of all shards, without padding. collectives: of the shards, which add up two numbers a
        token: one more exchange a layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        activation: str,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        *,
        cutoff: float,
        columns: int,
        collectives: Collectives,
    ) -> None:
        super().__init__(config, activation, dtype, rngs)
        self.cutoff, self.columns, self.collectives = cutoff, columns, collectives

    def __call__(self, x: Rows, backend: str | None = "xla") -> PartialSum:
        """As of `GatedMLP`."""
        gate, up = jnp.moveaxis(self.gate_up(x, backend=backend), 1, 0)
        wide = gate.astype(jnp.float32)
        sums = jnp.stack([jnp.sum(wide, axis=-1), jnp.sum(jnp.square(wide), axis=-1)], axis=-1)
        mean, square = jnp.moveaxis(self.collectives.all_reduce(sums) / self.columns, -1, 0)
        # A root of zero would have no gradient.
        deviation = jnp.sqrt(jnp.maximum(square - jnp.square(mean), _LEAST_VARIANCE))
        above = jax.nn.relu(wide - (mean + self.cutoff * deviation)[:, None])
        inner = ACTIVATIONS[self.activation](above).astype(up.dtype) * up
        return self.down.partial_sum(inner, backend)


_LEAST_VARIANCE = 1e-12


def _down(config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs, bias: bool) -> Linear:
    """The second product of an MLP."""
    inner = config.intermediate_size
    std = (inner * 2 * config.num_layers) ** -0.5
    return Linear((inner,), (config.hidden_size,), std, dtype, rngs, shard_axis=0, bias=bias)
