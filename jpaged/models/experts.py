"""Mixtures of experts: a router, the experts' MLPs as grouped products, and shared experts beside them.

    x [T, hidden]
      |-- router:  scores [T, E]  --> the k best experts of each token, and their weights        (`route`)
      |-- rows sorted by expert   --> gate, up, activation --> down, weighted                    (`grouped_product`)
      |                           --> the k rows of each token added up
      '-- shared experts (some families): a gated MLP for every token

Two ways to split experts over devices. Both leave each device a term of the sum, which `residual.Stream.add` takes, so
that a sparse layer costs the one all-reduce that a dense one does:

    tensor parallel    every device has some columns of every expert, and computes all rows
    expert parallel    every device has some experts whole, and computes the rows of these
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Self

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from jpaged.api.errors import InvalidParameterError
from jpaged.models.collectives import Collectives
from jpaged.models.config import ModelConfig, inner_columns
from jpaged.models.layers import GatedMLP
from jpaged.models.linear import Linear, PartialSum
from jpaged.models.parameters import Constant, Normal, parameter
from jpaged.pallas_kernels import gated_grouped_product, sort_by_expert, weighted_grouped_product


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How a router picks experts.

    per_token: experts of a token.
    score: what its logits become: "softmax" over all experts, or "sigmoid" of each (DeepSeek-V3).
    renormalized: a token's weights are divided by their sum.
    factor: multiplies the weights.
    biased: a stored number for each expert is added to the scores when experts are picked, not to the weights.
    groups, kept_groups: experts are in this many equal groups, and a token's come from the best of these alone; a group
        is as good as its two best experts together. One group: no such limit.
    """

    per_token: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalized: bool = True
    factor: float = 1.0
    biased: bool = False
    groups: int = 1
    kept_groups: int = 1


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
    """

    routing: Routing
    expert_size: int
    shared_size: int = 0
    shared_gate: bool = False
    dense_layers: tuple[bool, ...]
    expert_parallel: bool = False
    expert_shards: int = 1
    activation: str

    @property
    def held_experts(self) -> int:
        """Experts that a shard has, or columns of."""
        return self.num_experts // self.expert_shards

    def shard(self, shards: int) -> Self:
        """As `ModelConfig.shard`.

        Raises:
            InvalidParameterError: also where shards that are to have whole experts do not divide their number.
        """
        if shards == 1:
            return self
        split = super().shard(shards)
        shared_size = inner_columns(self.shared_size, shards)
        if not self.expert_parallel:
            return replace(split, shared_size=shared_size, expert_size=inner_columns(self.expert_size, shards))
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
    if not isinstance(config, SparseConfig):
        raise InvalidParameterError(
            f"enable_expert_parallel=True is for mixtures of experts, and {config.architecture} is none; leave it out."
        )
    return replace(config, expert_parallel=True)


class Router(nnx.Module):
    """Picks each token's experts. Every shard has all of it."""

    def __init__(self, config: SparseConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        hidden, experts = config.hidden_size, config.num_experts
        self.routing = config.routing
        self.gate = Linear((hidden,), (experts,), hidden**-0.5, dtype, rngs)
        # In float32, as it is stored: it decides between scores that are close.
        start, wide = Constant(0.0), jnp.dtype(jnp.float32)
        self.correction = parameter(rngs, start, (experts,), wide) if config.routing.biased else None

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[T, hidden] -> experts int32 [T, k] and weights float32 [T, k], the best first."""
        logits = self.gate(x, jnp.dtype(jnp.float32))
        return route(logits, self.routing, None if self.correction is None else self.correction[...])


def route(logits: jax.Array, routing: Routing, correction: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """The experts of each token and their weights.

    Of equal scores the expert of the lower number wins. A token whose logits are NaN gets k experts too.

    logits: float32 [T, E]. correction: [E], if `routing.biased`.
    Returns int32 [T, k], the best first, and float32 [T, k].
    """
    if routing.score == "softmax":
        # A softmax keeps the order, and of the best alone it is what renormalising one of all would give.
        scores = logits if routing.renormalized else jax.nn.softmax(logits, axis=-1)
    else:
        scores = jax.nn.sigmoid(logits)
    choice = scores if correction is None else scores + correction.astype(jnp.float32)
    if routing.groups > 1:
        choice = jnp.where(_in_kept_groups(choice, routing), choice, -jnp.inf)
    chosen = _ranks(choice)[:, None, :] == jnp.arange(routing.per_token)[:, None]  # [T, k, E]
    numbers = jnp.arange(logits.shape[1], dtype=jnp.int32)
    experts = jnp.sum(jnp.where(chosen, numbers, 0), axis=-1, dtype=jnp.int32)
    weights = jnp.sum(jnp.where(chosen, scores[:, None, :], 0.0), axis=-1)
    if routing.renormalized and routing.score == "softmax":
        weights = jax.nn.softmax(weights, axis=-1)
    elif routing.renormalized:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)  # as DeepSeek-V3
    return experts, weights * routing.factor if routing.factor != 1.0 else weights


def _in_kept_groups(choice: jax.Array, routing: Routing) -> jax.Array:
    """bool [T, E]: whether an expert is in one of its token's best groups."""
    tokens, experts = choice.shape
    grouped = choice.reshape(tokens, routing.groups, experts // routing.groups)
    of_group = jnp.sum(jnp.where(_ranks(grouped) < 2, grouped, 0.0), axis=-1)
    return jnp.repeat(_ranks(of_group) < routing.kept_groups, experts // routing.groups, axis=-1)


def _ranks(x: jax.Array) -> jax.Array:
    """int32: how many along the last axis are greater, or equal and before it; NaN is less than everything.

    All pairs are compared: one fused kernel, where a sort or top-k would be several.
    """
    x = jnp.where(jnp.isnan(x), -jnp.inf, x)
    mine, other = x[..., :, None], x[..., None, :]
    before = jnp.tril(jnp.ones((x.shape[-1],) * 2, bool), -1)
    return jnp.sum((other > mine) | ((other == mine) & before), axis=-1, dtype=jnp.int32)


class GroupedExperts(nnx.Module):
    """The experts' MLPs: gate_up [E, hidden, 2, inner], gate first, and down [E, inner, hidden]."""

    def __init__(self, config: SparseConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        experts, hidden, inner = config.held_experts, config.hidden_size, config.expert_size
        whole = config.expert_parallel
        std = (inner * 2 * config.num_layers) ** -0.5
        shape = (experts, hidden, 2, inner)
        self.gate_up = parameter(rngs, Normal(hidden**-0.5), shape, dtype, 0 if whole else 3)
        self.down = parameter(rngs, Normal(std), (experts, inner, hidden), dtype, 0 if whole else 1)
        self.activation = config.activation

    def __call__(self, x: jax.Array, experts: jax.Array, weights: jax.Array, backend: str | None) -> jax.Array:
        """The weighted sum of each token's experts, of those that are here.

        x: [T, hidden]. experts: int32 [T, k], counted from the first one here; others count for nothing.
        weights: float32 [T, k].
        backend: of the grouped products; gradients need "xla".
        Returns [T, hidden].
        """
        operands = promote_dtype((x, self.gate_up[...], self.down[...]))  # as in `Linear.gated`
        return mix(*operands, experts, weights, activation=self.activation, backend=backend)


def mix(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    *,
    activation: str,
    backend: str | None,
) -> jax.Array:
    """The experts' MLPs as grouped products; the arguments are those of `GroupedExperts`."""
    (tokens, each), num_experts = experts.shape, gate_up.shape[0]
    gated = partial(gated_grouped_product, activation=activation, backend=backend)
    weighted = partial(weighted_grouped_product, backend=backend)
    if tokens == 1:  # whose experts differ: nothing to sort, which would take as long as the products
        rows = gated(jnp.broadcast_to(x, (each, x.shape[1])), gate_up, None, groups=experts[0])
        rows = weighted(rows, down, None, weights[0], groups=experts[0])[None]
    else:
        assignments, places, sizes = sort_by_expert(experts, num_experts)
        rows = gated(x[assignments // each], gate_up, sizes)
        rows = weighted(rows, down, sizes, weights.reshape(-1)[assignments])[places]
    here = (experts >= 0) & (experts < num_experts)
    found = jnp.where(here[..., None], rows.astype(jnp.float32), 0.0)
    return jnp.sum(found, axis=1).astype(x.dtype)


class SparseMLP(nnx.Module):
    """A router, its experts, and shared experts if the configuration has any."""

    def __init__(self, config: SparseConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> None:
        self.collectives, self.held_experts = collectives, config.held_experts if config.expert_parallel else 0
        self.router = Router(config, dtype, rngs)
        self.experts = GroupedExperts(config, dtype, rngs)
        hidden, shared = config.hidden_size, replace(config, intermediate_size=config.shared_size)
        self.shared = GatedMLP(shared, config.activation, dtype, rngs) if config.shared_size else None
        self.shared_gate = Linear((hidden,), (1,), hidden**-0.5, dtype, rngs) if config.shared_gate else None

    def __call__(self, x: jax.Array, backend: str | None = "xla") -> PartialSum:
        """[T, hidden] -> [T, hidden].

        backend: of `pallas_kernels.gated_grouped_product` and its companions; gradients need "xla".
        """
        experts, weights = self.router(x)
        experts = experts - self.collectives.first(self.held_experts)
        total = PartialSum(self.experts(x, experts, weights, backend))
        if self.shared is None:
            return total
        shared = self.shared(x, backend)
        if self.shared_gate is not None:
            shared = PartialSum(shared.term * jax.nn.sigmoid(self.shared_gate(x)))
        return total + shared


def feed_forward(
    config: SparseConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives
) -> SparseMLP | GatedMLP:
    """What a layer has behind attention: experts, or an ordinary MLP."""
    if config.dense_layers[layer]:
        return GatedMLP(config, config.activation, dtype, rngs)
    return SparseMLP(config, dtype, rngs, collectives)
