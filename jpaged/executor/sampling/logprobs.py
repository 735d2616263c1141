"""Log-probabilities under the distribution that logits give: of given tokens, their ranks, and the likeliest others.

Nothing sorts the vocabulary. Under tensor parallelism each shard has the logits of its own tokens, and shards exchange
a row's sums, its target's logit and their own k best.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpaged.engine.interface import NO_TOKEN
from jpaged.models.collectives import ALONE, Collectives
from jpaged.pallas_kernels.sample_tokens import reference as sample_reference
from jpaged.pallas_kernels.sample_tokens.reference import finite, without_nan

_BLOCK = 128  # tokens a block, for the block maxima that pick the top alternatives

_INF = np.float32(np.inf)


class TokenLogprobs(NamedTuple):
    """Log-probabilities of a distribution over tokens; fields as in `engine.interface.Logprobs`.

    token_logprobs: float32 [R]; token_ranks: int32 [R]; top_ids, top_logprobs: int32, float32 [R, k].
    """

    token_logprobs: jax.Array
    token_ranks: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


class DeviceScores(NamedTuple):
    """logprobs: float32 [R]; greedy: bool [R]; as in `engine.interface.TargetScores`."""

    logprobs: jax.Array
    greedy: jax.Array


def log_sums_of(logits: jax.Array, collectives: Collectives = ALONE) -> jax.Array:
    """Each row's log-sum-exp: what its logits lose to become log-probabilities. float32 [R, V] -> float32 [R, 1].

    The functions below compute it together with the rest, unless they are given it.
    """
    logits = without_nan(logits)
    largest = finite(collectives.all_max(jnp.max(logits, axis=1, keepdims=True)))
    return largest + jnp.log(collectives.all_reduce(jnp.sum(jnp.exp(logits - largest), axis=1, keepdims=True)))


def logprobs_of(
    logits: jax.Array,
    targets: jax.Array,
    k: int,
    collectives: Collectives = ALONE,
    log_sums: jax.Array | None = None,
) -> TokenLogprobs:
    """Log-probabilities of given tokens and of the k most likely ones, under the logits' softmax.

    logits: float32 [R, V], of the shard's tokens; targets: int32 [R] (NO_TOKEN gives token 0's, to be ignored).
    log_sums: of `log_sums_of`, if they are known.
    A rank is 1 plus the number of strictly more likely tokens; of equally likely alternatives the lower id comes
    first. Where V < k, the top is padded with NO_TOKEN and minus infinity.
    """
    logits = without_nan(logits)
    target = logits_at(logits, jnp.maximum(targets, 0), collectives)
    top_ids, top = top_k(logits, k, collectives)
    if log_sums is None:
        largest = finite(top[:, :1])
        sums = collectives.all_reduce(jnp.sum(jnp.exp(logits - largest), axis=1, keepdims=True))
        log_sums = largest + jnp.log(sums)
    ranks = 1 + collectives.all_reduce(jnp.sum(logits > target, axis=1, dtype=jnp.int32))

    def normalise(values: jax.Array) -> jax.Array:  # a row without any token gives minus infinity, not NaN
        return jnp.where(values == -_INF, -_INF, values - log_sums)

    padding = ((0, 0), (0, max(0, k - top.shape[1])))
    return TokenLogprobs(
        normalise(target)[:, 0],
        ranks,
        jnp.pad(top_ids[:, :k], padding, constant_values=NO_TOKEN),
        jnp.pad(normalise(top)[:, :k], padding, constant_values=-_INF),
    )


def target_scores(
    logits: jax.Array, targets: jax.Array, collectives: Collectives = ALONE, log_sums: jax.Array | None = None
) -> DeviceScores:
    """Log-probabilities of given tokens and whether they are the argmax: two passes over the logits, no top-k.

    logits: float32 [R, V], of the shard's tokens; targets: int32 [R]. log_sums: as of `logprobs_of`.
    """
    logits = without_nan(logits)
    best, largest = sample_reference.argmax(logits, None if collectives.size == 1 else collectives)
    if log_sums is None:
        largest = finite(largest.reshape(-1, 1))
        sums = collectives.all_reduce(jnp.sum(jnp.exp(logits - largest), axis=1, keepdims=True))
        log_sums = largest + jnp.log(sums)
    target = logits_at(logits, targets, collectives)
    logprobs = jnp.where(target == -_INF, -_INF, target - log_sums)
    return DeviceScores(logprobs[:, 0], best == targets)


def logits_at(logits: jax.Array, token_ids: jax.Array, collectives: Collectives) -> jax.Array:
    """Each row's logit of one token, which one of the shards has: float32 [R, 1]."""
    if collectives.size == 1:
        return jnp.take_along_axis(logits, token_ids[:, None], axis=1)
    width = logits.shape[1]
    columns = collectives.columns(token_ids, width)[:, None]
    own = jnp.take_along_axis(logits, jnp.minimum(columns, width - 1), axis=1)
    return collectives.all_max(jnp.where(columns < width, own, -_INF))


def top_k(values: jax.Array, k: int, collectives: Collectives) -> tuple[jax.Array, jax.Array]:
    """The k largest of each row over all shards, best first, lower ids first on ties: int32 [R, k], float32 [R, k]. All
    of a row, if it has fewer.
    """
    ids, best = _top_k(values, min(max(k, 1), values.shape[1]))
    if collectives.size > 1:
        return _merge_top_k(ids + collectives.first(values.shape[1]), best, k, collectives)
    return ids, best


def _merge_top_k(ids: jax.Array, values: jax.Array, k: int, collectives: Collectives) -> tuple[jax.Array, jax.Array]:
    """The k best of all shards' best; of equals the lower id first, as they stand in the order of shards."""
    all_ids, all_values = collectives.all_gather(ids), collectives.all_gather(values)
    rows = ids.shape[0]
    all_ids = jnp.moveaxis(all_ids, 0, 1).reshape(rows, -1)
    all_values = jnp.moveaxis(all_values, 0, 1).reshape(rows, -1)
    values, places = lax.top_k(jnp.where(all_values == 0, 0.0, all_values), min(max(k, 1), all_values.shape[1]))
    return jnp.take_along_axis(all_ids, places, axis=1), values


def _top_k(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of each row, best first, lower ids first on ties: int32 [R, k], float32 [R, k]; k <= V.

    `lax.top_k` sorts the whole vocabulary on GPUs for k above 16. But all of the k best lie in the k blocks with the
    largest maxima (each other block has k tokens before its best one), so only those are looked at.
    """
    num_rows, vocab_size = logits.shape
    num_blocks = -(-vocab_size // _BLOCK)
    logits = jnp.where(logits == 0, 0.0, logits)  # lax.top_k puts -0.0 below 0.0
    if num_blocks <= k:
        values, ids = lax.top_k(logits, k)
        return ids, values
    padding = num_blocks * _BLOCK - vocab_size
    blocks = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-_INF)
    blocks = blocks.reshape(num_rows, num_blocks, _BLOCK)
    chosen = jnp.sort(lax.top_k(jnp.max(blocks, axis=2), k)[1], axis=1)  # by id again, for the order of ties
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1)
    values, places = lax.top_k(candidates.reshape(num_rows, -1), k)
    block = jnp.take_along_axis(chosen, places // _BLOCK, axis=1)
    return block * _BLOCK + places % _BLOCK, values
