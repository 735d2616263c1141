"""Mixtures of experts: a router, the experts' MLPs as grouped products, and shared experts beside them.

    x [T, hidden]
      |-- router:  logits [T, E]  --> the k best experts of each token, their weights,           (`route_tokens`)
      |                               and rows sorted by expert
      |-- rows                    --> gate, up, activation --> down, weighted                    (`grouped_product`)
      |                           --> the k rows of each token added up
      '-- shared experts (some families): a gated MLP for every token

Two ways to split experts over devices. Both leave each device a term of the sum, which `residual.Stream.add` takes, so
that a sparse layer costs the one all-reduce that a dense one does:

    tensor parallel    every device has some columns of every expert, and computes all rows
    expert parallel    every device has some experts whole, and computes the rows of these
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.api.errors import CheckpointError, InvalidParameterError
from jpaged.models.collectives import Collectives
from jpaged.models.config import ModelConfig, inner_columns
from jpaged.models.config_reader import ConfigReader
from jpaged.models.grouped_linear import GroupedLinear, GroupedProduct, Rows
from jpaged.models.layers import MLP, UNGATED_ACTIVATIONS, GatedMLP
from jpaged.models.linear import Linear, PartialSum, PlainLinear, Reader
from jpaged.models.parameters import Constant, parameter
from jpaged.models.residual import ExpertCounts
from jpaged.pallas_kernels import (
    ExpertChoice,
    RoutedTokens,
    SortedRows,
    route_tokens,
    route_tokens_backend,
    sort_by_expert,
)
from jpaged.pallas_kernels.gated_product.reference import ACTIVATIONS
from jpaged.pallas_kernels.grouped_product.api import tile_height
from jpaged.pallas_kernels.route_tokens.reference import route

_FEW_ROWS = 64
"""Pairs of token and expert that are multiplied unsorted, where they are at most half as many as experts and no kernel
sorts them: few share an expert then, and in XLA sorting is several small kernels more (not measured)."""


@dataclass(frozen=True, kw_only=True)
class Routing(ExpertChoice):
    """How a router picks experts: what `ExpertChoice` says, and

    biased: a stored number for each expert is added to the scores when experts are picked, not to the weights.
    mixer_jitter: a sparse mixer picks two experts and weighs them, see `sparse_mixer`; None for a router as
        `ExpertChoice` says.
    scaled: a stored number for each expert multiplies what it gives, weighted (Gemma 4).
    zipf: for measurements with random weights, whose routers pick all experts alike: an expert is then as popular
        as its rank to the power of minus `zipf` (`skewed`). 0 for a model's own router.
    """

    biased: bool = False
    mixer_jitter: float | None = None
    scaled: bool = False
    zipf: float = 0.0

    def skewed(self, logits: jax.Array) -> jax.Array:
        """Logits [T, E] of a router whose experts are as popular as `zipf` says, of standard normal ones.

        With Gumbel's distribution in place of the normal one, and minus zipf times the logarithm of its rank added, an
        expert is the best one that often exactly, and the next ones likewise without those before (Plackett-Luce).
        Ranks are drawn, the same for all layers.
        """
        ranks = np.random.default_rng(0).permutation(logits.shape[1]) + 1
        gumbel = -jnp.log(-jax.scipy.special.log_ndtr(logits))
        return gumbel - self.zipf * np.log(ranks).astype(np.float32)

    def check(self, num_experts: int) -> None:
        """Raises CheckpointError where a token is to have more experts than there are, or groups are not equal ones."""
        if self.per_token > num_experts:
            raise CheckpointError(
                f"config.json: num_experts_per_tok ({self.per_token}) must be at most the number of experts"
                f" ({num_experts})."
            )
        if num_experts % self.groups or not self.per_token <= self.kept_groups * (num_experts // self.groups):
            raise CheckpointError(
                f"config.json: n_group ({self.groups}) must divide the experts ({num_experts}), and topk_group"
                f" ({self.kept_groups}) of these groups must have num_experts_per_tok ({self.per_token}) of them."
            )


def sigmoid_routing(read: ConfigReader, *, per_token: int | None = None, renormalized: bool = False) -> Routing:
    """DeepSeek-V3's router. per_token, renormalized: where config.json leaves them out."""
    return Routing(
        per_token=read.integer("num_experts_per_tok", per_token),
        score="sigmoid",
        renormalized=read.flag("norm_topk_prob", renormalized),
        factor=read.number("routed_scaling_factor", 1.0),
        biased=True,
        groups=read.integer("n_group", 1),
        kept_groups=read.integer("topk_group", 1),
    )


@dataclass(frozen=True)
class ClampedSwiGLU:
    """The activation of gpt-oss's experts: (up + 1) * gate * sigmoid(alpha * gate), of a gate of at most `limit` and an
    up within [-limit, limit] (arXiv:2508.10925)."""

    alpha: float = 1.702
    limit: float = 7.0

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


@dataclass(frozen=True, kw_only=True)
class SparseConfig(ModelConfig):
    """What configurations of families with experts have. `num_experts` is the `ModelConfig`'s.

    routing: of every sparse layer.
    expert_size: the inner width of an expert.
    shared_size: that of the shared experts, all of them together; 0 for none.
    shared_gate: the shared experts' output is multiplied by a learned gate of each token (Qwen2-MoE).
    dense_layers: whether a layer has an ordinary MLP, of `intermediate_size`, instead of experts.
    expert_parallel: shards have whole experts instead of columns of all.
    expert_shards: shards that the experts are split over whole; 1 until `shard` says so.
    activation: of experts and MLPs.
    clamped: of experts, in place of that.
    weighted_inputs: a router's weight multiplies what an expert reads, not what it gives (Llama 4).
    gated_experts: experts, shared ones too, are gated MLPs. Without gates (Nemotron 3) they have neither biases nor a
        clamped activation.
    latent_size: columns that routed experts read and give, between two products that they share; 0 for `hidden_size`.
    router_bias: the router's product has a bias. expert_bias: both products of each expert have.
    """

    routing: Routing
    expert_size: int
    shared_size: int = 0
    shared_gate: bool = False
    dense_layers: tuple[bool, ...]
    expert_parallel: bool = False
    expert_shards: int = 1
    activation: str
    clamped: ClampedSwiGLU | None = None
    weighted_inputs: bool = False
    gated_experts: bool = True
    latent_size: int = 0
    router_bias: bool = False
    expert_bias: bool = False

    @property
    def held_experts(self) -> int:
        """Experts that a shard has, or columns of."""
        return self.num_experts // self.expert_shards

    def with_router_skew(self, zipf: float) -> Self:
        """As `ModelConfig.with_router_skew`."""
        if not self.num_experts:
            return super().with_router_skew(zipf)
        return replace(self, routing=replace(self.routing, zipf=zipf))

    @property
    def router_skew(self) -> float:
        return self.routing.zipf

    def shard(self, shards: int) -> Self:
        """As `ModelConfig.shard`. Columns of quantized experts are filled up to whole groups that share a scale.

        Raises:
            InvalidParameterError: also where shards that are to have whole experts do not divide their number.
        """
        if shards == 1:
            return self
        split = super().shard(shards)
        shared_size = inner_columns(self.shared_size, shards)
        if not self.expert_parallel:
            group = None if self.quantization is None else self.quantization.kind.least_group
            expert_size = inner_columns(self.expert_size, shards, group or 1)
            return replace(split, shared_size=shared_size, expert_size=expert_size)
        if self.num_experts % shards:
            raise InvalidParameterError(
                f"enable_expert_parallel=True splits {self.num_experts} experts over tensor_parallel_size={shards}"
                " devices, which do not divide them; use a divisor, or leave it out to split each expert."
            )
        return replace(split, shared_size=shared_size, expert_shards=shards)


def split_by_experts(config: ModelConfig) -> SparseConfig:
    """The same model, whose shards are to have whole experts.

    Raises:
        InvalidParameterError: it has no experts.
    """
    if not isinstance(config, SparseConfig) or not config.num_experts:
        raise InvalidParameterError(
            f"enable_expert_parallel=True is for mixtures of experts, and {config.architecture} is none; leave it out."
        )
    return replace(config, expert_parallel=True)


class Held(NamedTuple):
    """The experts that a shard has: from the first on, so many."""

    first: jax.Array | int
    number: int


class Router(nnx.Module):
    """Picks each token's experts. Every shard has all of it."""

    def __init__(self, config: SparseConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        hidden, experts = config.hidden_size, config.num_experts
        self.routing = config.routing
        self.gate = PlainLinear((hidden,), (experts,), hidden**-0.5, dtype, rngs, bias=config.router_bias)
        # In float32, as it is stored: it decides between scores that are close.
        start, wide = Constant(0.0), jnp.dtype(jnp.float32)
        self.correction = parameter(rngs, start, (experts,), wide) if config.routing.biased else None
        self.scales = parameter(rngs, Constant(1.0), (experts,), dtype) if config.routing.scaled else None

    def __call__(
        self,
        x: jax.Array,
        *,
        held: Held | None = None,
        live: jax.Array | None = None,
        height: int | None = None,
        backend: str | None = "xla",
    ) -> RoutedTokens:
        """x: [T, hidden]. held: the experts that are here; None for all. live: bool [T], tokens that are no padding;
        None for all. height: of tiles of the rows, as of `route_rows`. backend: of the grouped products; gradients need
        "xla"."""
        logits = self.gate(x, jnp.dtype(jnp.float32))
        if self.routing.zipf:
            logits = self.routing.skewed(logits)
        correction = None if self.correction is None else self.correction[...]
        return route_rows(logits, self.routing, correction, held=held, live=live, height=height, backend=backend)

    def scales_of(self, experts: jax.Array) -> jax.Array | None:
        """float32 [T, k]: what multiplies what these give, [T, k]; None for nothing."""
        return None if self.scales is None else self.scales[...].astype(jnp.float32)[jnp.maximum(experts, 0)]


def route_rows(
    logits: jax.Array,
    routing: Routing,
    correction: jax.Array | None = None,
    *,
    held: Held | None = None,
    live: jax.Array | None = None,
    height: int | None = None,
    backend: str | None,
) -> RoutedTokens:
    """Routes the tokens of logits float32 [T, E]; correction: [E], if `routing.biased`. Others: as of `Router`.

    Rows are sorted where a kernel does it. height: of their tiles, as of `GroupedLinear.tile_height`; None for products
    in 16 bits.
    """
    tokens, num_experts = logits.shape
    if routing.mixer_jitter is not None:
        experts, weights = sparse_mixer(logits, routing.mixer_jitter)
        return RoutedTokens(experts if live is None else jnp.where(live[:, None], experts, -1), weights, None)
    if (found := route_tokens_backend(logits, routing, backend)) == "xla":
        experts, weights = route(logits, routing, correction)
        return RoutedTokens(experts if live is None else jnp.where(live[:, None], experts, -1), weights, None)
    here, first, number = num_experts, None, None
    if held is not None:
        here, first, number = held.number, jnp.asarray(held.first, jnp.int32), held.number
    if height is None:
        height = tile_height(tokens * routing.per_token, here, backend)
    return route_tokens(
        logits,
        routing,
        correction=None if correction is None else correction.astype(jnp.float32),
        live=live,
        first=first,
        held=number,
        tile_height=height,
        backend=found,
    )


def sparse_mixer(logits: jax.Array, jitter: float) -> tuple[jax.Array, jax.Array]:
    """The two experts of each token and their weights, as SparseMixer-v2 has them once trained (Liu et al. 2024,
    arXiv:2409.12136): each is the best one of those left, and its weight is its part of a softmax over those left whose
    logits are close to its own, within 2 jitter of the larger of both magnitudes.

    logits: float32 [T, E]. Returns int32 [T, 2] and float32 [T, 2].
    """
    left, found = logits, []
    for _ in range(2):
        best = jnp.argmax(left, axis=-1)[:, None]
        top = jnp.take_along_axis(left, best, axis=-1)
        is_far = (top - logits) / jnp.maximum(jnp.abs(logits), top) > 2 * jitter
        part = jnp.sum(jnp.where(is_far, 0.0, jnp.exp(left - top)), axis=-1, keepdims=True)
        found.append((best.astype(jnp.int32), 1 / part))
        left = jnp.where(jnp.arange(logits.shape[1]) == best, -jnp.inf, left)
    experts, weights = (jnp.concatenate(parts, axis=-1) for parts in zip(*found, strict=True))
    return experts, weights


class GroupedExperts(nnx.Module):
    """The experts' MLPs: gate_up [E, hidden, 2, inner], gate first, and down [E, inner, hidden]; and their biases
    [E, 2, inner] and [E, hidden], if they have any. Without gates up [E, hidden, inner] in gate_up's place."""

    def __init__(self, config: SparseConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> None:
        experts, inner = config.held_experts, config.expert_size
        hidden = config.latent_size or config.hidden_size
        whole = config.expert_parallel
        std = (inner * 2 * config.num_layers) ** -0.5
        columns = (2, inner) if config.gated_experts else (inner,)
        axes = (0, 0) if whole else (1 + len(columns), 1)
        first = GroupedLinear(experts, (hidden,), columns, hidden**-0.5, dtype, rngs, shard_axis=axes[0])
        self.gate_up: GroupedLinear | None = first if config.gated_experts else None
        self.up: GroupedLinear | None = None if config.gated_experts else first
        self.down = GroupedLinear(experts, (inner,), (hidden,), std, dtype, rngs, shard_axis=axes[1])
        self.activation: str | ClampedSwiGLU = config.clamped or config.activation
        self.weighted_inputs = config.weighted_inputs
        zero, biased = Constant(0.0), config.expert_bias
        both = (experts, 2, inner)
        self.gate_up_bias = parameter(rngs, zero, both, dtype, 0 if whole else 2) if biased else None
        self.down_bias = parameter(rngs, zero, (experts, hidden), dtype, 0 if whole else None) if biased else None
        # Of an expert whose columns are split over shards each has a term of the sum, and the first its bias.
        self.bias_of_first = None if whole else collectives

    def __call__(
        self,
        x: jax.Array,
        experts: jax.Array,
        weights: jax.Array,
        backend: str | None,
        rows: SortedRows | None = None,
        scales: jax.Array | None = None,
    ) -> jax.Array:
        """The sum of what each token's experts here give, weighted unless the weights multiply their inputs.

        x: [T, hidden]. experts: int32 [T, k], counted from the first one here; others count for nothing.
        weights: float32 [T, k].
        rows: of these experts, if they are sorted already. scales: `Router.scales_of` the experts.
        backend: of the grouped products; gradients need "xla".
        Returns [T, hidden].
        """
        biases = None
        if self.gate_up_bias is not None and self.down_bias is not None:
            down_bias = self.down_bias[...]
            if self.bias_of_first is not None and self.bias_of_first.size > 1:
                down_bias = jnp.where(self.bias_of_first.index() == 0, down_bias, 0)
            biases = self.gate_up_bias[...], down_bias
        first = self._first()
        return mix(
            x,
            (first.product(), self.down.product()),
            first.layout.experts,
            experts,
            weights,
            activation=self.activation,
            backend=backend,
            biases=biases,
            rows=rows,
            weighted_inputs=self.weighted_inputs,
            gated=self.gate_up is not None,
            scales=scales,
        )

    def tile_height(self, rows: int, backend: str | None) -> int:
        """As of `GroupedLinear`."""
        return self._first().tile_height(rows, backend)

    def _first(self) -> GroupedLinear:
        first = self.gate_up or self.up
        assert first is not None
        return first


def mix(
    x: jax.Array,
    products: tuple[GroupedProduct, GroupedProduct],
    num_experts: int,
    experts: jax.Array,
    weights: jax.Array,
    *,
    activation: str | ClampedSwiGLU,
    backend: str | None,
    biases: tuple[jax.Array, jax.Array] | None = None,
    rows: SortedRows | None = None,
    weighted_inputs: bool = False,
    gated: bool = True,
    scales: jax.Array | None = None,
) -> jax.Array:
    """The experts' MLPs as grouped products; the other arguments are those of `GroupedExperts`.

    products: with gate_up, or with up, and with down, of num_experts each. biases: of gate_up and down.
    weighted_inputs: as in `SparseConfig`; biases stay as they are.
    gated: the first product is with gate_up. Without gates there are neither biases nor a `ClampedSwiGLU`.
    """
    (tokens, each), (gate_up, down) = experts.shape, products
    x = x.astype(down.promoted(gate_up.promoted(x.dtype)))
    if not gated:
        if isinstance(activation, ClampedSwiGLU) or biases is not None:
            raise ValueError("experts without gates have neither biases nor a clamped activation")
        activated = partial(_activated, gate_up, activation=activation, backend=backend)
    elif isinstance(activation, ClampedSwiGLU) or biases is not None:
        bias = None if biases is None else biases[0]
        activated = partial(_gated_apart, gate_up, bias=bias, activation=activation, backend=backend)
    else:
        activated = partial(gate_up.gated, activation=activation, backend=backend)

    def weigh(read: jax.Array, of_rows: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """What experts read, and the weights of what they give; None: they are in the former, [A, hidden]."""
        if not weighted_inputs:
            return read, of_rows
        return (read * of_rows[: read.shape[0], None]).astype(read.dtype), None

    if rows is not None:
        of_rows = Rows(rows.group_sizes, None, rows.tiles)
        of_read = of_rows._replace(row_indices=rows.tokens)  # gathered by the product, unless they are weighted before
        gathered, of_read = of_read.of(x) if weighted_inputs else (x, of_read)
        read, of_down = weigh(gathered, rows.weights)
        products_of_rows = down.multiply(activated(read, of_read), of_rows, of_down, backend=backend)[rows.places]
    elif experts.size <= min(_FEW_ROWS, num_experts // 2):
        unsorted = Rows(None, experts.reshape(-1))
        read, of_down = weigh(jnp.repeat(x, each, axis=0), weights.reshape(-1))
        weighted = down.multiply(activated(read, unsorted), unsorted, of_down, backend=backend)
        products_of_rows = weighted.reshape(tokens, each, -1)
    else:
        assignments, places, sizes = sort_by_expert(experts, num_experts)
        read, of_down = weigh(x[assignments // each], weights.reshape(-1)[assignments])
        weighted = down.multiply(activated(read, Rows(sizes, None)), Rows(sizes, None), of_down, backend=backend)
        products_of_rows = weighted[places]
    here = (experts >= 0) & (experts < num_experts)
    found = products_of_rows.astype(jnp.float32)
    if biases is not None:
        of_row = biases[1][jnp.clip(experts, 0, num_experts - 1)].astype(jnp.float32)
        found = found + (of_row if weighted_inputs else weights[..., None] * of_row)
    if scales is not None:
        found = found * scales[..., None]
    return jnp.sum(jnp.where(here[..., None], found, 0.0), axis=1).astype(x.dtype)


def _activated(up: GroupedProduct, x: jax.Array, rows: Rows, *, activation: str, backend: str | None) -> jax.Array:
    """As of `GroupedProduct.gated`, activation(up), [A, inner], the activation in XLA and in float32."""
    wide = up.multiply(x, rows, backend=backend).astype(jnp.promote_types(x.dtype, jnp.float32))
    return UNGATED_ACTIVATIONS[activation](wide).astype(x.dtype)


def _gated_apart(
    gate_up: GroupedProduct,
    x: jax.Array,
    rows: Rows,
    *,
    bias: jax.Array | None,
    activation: str | ClampedSwiGLU,
    backend: str | None,
) -> jax.Array:
    """`GroupedProduct.gated` with what kernels lack: a bias [E, 2, I], or a clamped activation.

    The product is a kernel of its own, and the rest an elementwise one of XLA's, in float32: gate and up [A, 2, I] go
    to memory, in x's type, and back.
    """
    both = gate_up.multiply(x, rows, backend=backend)
    both = both.reshape(both.shape[0], 2, -1).astype(jnp.promote_types(x.dtype, jnp.float32))
    if bias is not None:
        groups = rows.groups
        if groups is None:
            assert rows.group_sizes is not None
            ends = jnp.cumsum(rows.group_sizes)
            groups = jnp.sum(jnp.arange(both.shape[0])[:, None] >= ends, axis=1, dtype=jnp.int32)
        both = both + bias[jnp.clip(groups, 0, bias.shape[0] - 1)].astype(both.dtype)
    gate, up = both[:, 0], both[:, 1]
    inner = activation(gate, up) if isinstance(activation, ClampedSwiGLU) else ACTIVATIONS[activation](gate) * up
    return inner.astype(x.dtype)


class SparseMLP(Reader):
    """A router, its experts, and shared experts if the configuration has any."""

    def __init__(self, config: SparseConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> None:
        self.collectives, self.held_experts = collectives, config.held_experts if config.expert_parallel else 0
        self.router = Router(config, dtype, rngs)
        self.experts = GroupedExperts(config, dtype, rngs, collectives)
        hidden, shared = config.hidden_size, replace(config, intermediate_size=config.shared_size)
        mlp = GatedMLP if config.gated_experts else MLP
        self.shared = mlp(shared, config.activation, dtype, rngs) if config.shared_size else None
        width = config.latent_size
        self.into_latents = Linear((hidden,), (width,), hidden**-0.5, dtype, rngs) if width else None
        self.out_of_latents = Linear((width,), (hidden,), width**-0.5, dtype, rngs) if width else None
        self.shared_gate = PlainLinear((hidden,), (1,), hidden**-0.5, dtype, rngs) if config.shared_gate else None

    def __call__(
        self,
        x: jax.Array,
        backend: str | None = "xla",
        live: jax.Array | None = None,
        counts: ExpertCounts | None = None,
        *,
        routed_by: jax.Array | None = None,
    ) -> PartialSum:
        """[T, hidden] -> [T, hidden].

        backend: of `pallas_kernels.gated_grouped_product` and its companions; gradients need "xla".
        live: bool [T], see `residual.Kernels`; for other tokens no expert is read, and the routed experts give zeros.
        counts: counts the tokens of each expert.
        routed_by: what the router reads, [T, hidden]; x if None.
        """
        first = self.collectives.first(self.held_experts)
        held = Held(first, self.held_experts) if self.held_experts else None
        routed = x if routed_by is None else routed_by
        height = self.experts.tile_height(routed.shape[0] * self.router.routing.per_token, backend)
        experts, weights, rows = self.router(routed, held=held, live=live, height=height, backend=backend)
        if counts is not None:
            counts.count(experts)
        read = x if self.into_latents is None else self.into_latents(x, backend=backend)
        given = self.experts(read, experts - first, weights, backend, rows, self.router.scales_of(experts))
        # A product of a shard's term is its term of the product.
        total = PartialSum(given if self.out_of_latents is None else self.out_of_latents(given, backend=backend))
        if self.shared is None:
            return total
        shared = self.shared(x, backend)
        if self.shared_gate is not None:
            shared = PartialSum(shared.array * jax.nn.sigmoid(self.shared_gate(x)))
        return total + shared


def feed_forward(
    config: SparseConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives
) -> SparseMLP | GatedMLP:
    """What a layer has behind attention: experts, or an ordinary MLP."""
    if config.dense_layers[layer]:
        return GatedMLP(config, config.activation, dtype, rngs)
    return SparseMLP(config, dtype, rngs, collectives)
