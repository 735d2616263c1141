"""Routing in plain XLA."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.pallas_kernels.grouped_product.sorting import sort_by_expert
from jpaged.pallas_kernels.grouped_product.tiles import RowTiles, plan_tiles
from jpaged.pallas_kernels.route_tokens.choice import ExpertChoice
from jpaged.pallas_kernels.route_tokens.operands import Operands
from jpaged.pallas_kernels.route_tokens.rows import WEIGHTS_BEHIND, RoutedTokens, SortedRows

_FEW_COMPARISONS = 1 << 23
"""Up to here all pairs of scores are compared in one kernel. 2^27 comparisons take 0.74 ms on an H200."""


@partial(jax.jit, static_argnames=("choice", "held", "tile_height"))
def route_tokens(operands: Operands, *, choice: ExpertChoice, held: int, tile_height: int) -> RoutedTokens:
    """`route_tokens` of the package, checked."""
    logits, correction, live, first = operands
    experts, weights = route(logits, choice, correction)
    if live is not None:
        experts = jnp.where(live[:, None], experts, -1)
    assignments, places, sizes = sort_by_expert(experts if first is None else experts - first, held)
    tiles = RowTiles(*plan_tiles(sizes, rows=experts.size, height=tile_height), tile_height)
    of_rows = jnp.pad(weights.reshape(-1)[assignments], (0, WEIGHTS_BEHIND))
    return RoutedTokens(experts, weights, SortedRows(assignments // choice.per_token, of_rows, places, sizes, tiles))


def route(logits: jax.Array, routing: ExpertChoice, correction: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """The experts of each token and their weights.

    Of equal scores the expert of the lower number wins. A token whose logits are NaN gets k experts too.

    logits: float32 [T, E]. correction: [E], added to the scores when experts are picked; or None.
    Returns int32 [T, k], the best first, and float32 [T, k].
    """
    of_best = routing.softmax_of_best_alone(correction is not None)
    if routing.score == "softmax":
        scores = logits if of_best else jax.nn.softmax(logits, axis=-1)
    else:
        scores = jax.nn.sigmoid(logits)
    if correction is not None:
        choice = scores + correction.astype(jnp.float32)
    else:
        choice = logits if routing.picks_by_logits(corrected=False) else scores
    if routing.groups > 1:
        choice = jnp.where(_in_kept_groups(choice, routing), choice, -jnp.inf)
    if _compares_all(choice):
        chosen = _ranks(choice)[:, None, :] == jnp.arange(routing.per_token)[:, None]  # [T, k, E]
        numbers = jnp.arange(logits.shape[1], dtype=jnp.int32)
        experts = jnp.sum(jnp.where(chosen, numbers, 0), axis=-1, dtype=jnp.int32)
        weights = jnp.sum(jnp.where(chosen, scores[:, None, :], 0.0), axis=-1)
    else:
        experts = _best(choice, routing.per_token)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
    if of_best:
        weights = jax.nn.softmax(weights, axis=-1)
    elif routing.renormalized:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + routing.added_to_sum)
    return experts, weights * routing.factor if routing.factor != 1.0 else weights


def _in_kept_groups(choice: jax.Array, routing: ExpertChoice) -> jax.Array:
    """bool [T, E]: whether an expert is in one of its token's best groups."""
    tokens, experts = choice.shape
    grouped = choice.reshape(tokens, routing.groups, experts // routing.groups)
    if _compares_all(grouped):
        of_group = jnp.sum(jnp.where(_ranks(grouped) < routing.group_best, grouped, 0.0), axis=-1)
    else:
        of_group = jnp.sum(jnp.take_along_axis(grouped, _best(grouped, routing.group_best), axis=-1), axis=-1)
    return jnp.repeat(_ranks(of_group) < routing.kept_groups, experts // routing.groups, axis=-1)


def _compares_all(x: jax.Array) -> bool:
    """Whether `_ranks` is the quick way to the greatest along the last axis; else `_best` is."""
    return x.size * x.shape[-1] <= _FEW_COMPARISONS


def _best(x: jax.Array, number: int) -> jax.Array:
    """int32 [..., number]: which are the greatest along the last axis, the greatest first.

    Of equal ones the first comes first; NaN is less than everything. A reduction for each, over what is left.
    """
    x = jnp.where(jnp.isnan(x), -jnp.inf, x.astype(jnp.float32))
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    keys = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)  # integers in the order of the numbers
    found: list[jax.Array] = []
    for _ in range(number):
        found.append(jnp.argmax(keys, axis=-1).astype(jnp.int32))
        keys = jnp.where(jnp.arange(x.shape[-1]) == found[-1][..., None], jnp.iinfo(jnp.int32).min, keys)
    return jnp.stack(found, axis=-1)


def _ranks(x: jax.Array) -> jax.Array:
    """int32: how many along the last axis are greater, or equal and before it; NaN is less than everything.

    All pairs are compared: one fused kernel, where a sort or top-k would be several.
    """
    x = jnp.where(jnp.isnan(x), -jnp.inf, x)
    mine, other = x[..., :, None], x[..., None, :]
    before = jnp.tril(jnp.ones((x.shape[-1],) * 2, bool), -1)
    return jnp.sum((other > mine) | ((other == mine) & before), axis=-1, dtype=jnp.int32)
