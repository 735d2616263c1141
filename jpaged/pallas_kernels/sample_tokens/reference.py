"""`sample_tokens` in plain XLA: right on any device, and the definition that the kernel follows.

    logits [R, V] ─┬─ argmax ──────────────────────────────────────────────────────┐
                   └─ temperature, min_p, top_k, top_p ─ one draw with keyed noise ─┴─> token ids [R]

Nothing sorts the vocabulary. top_k and top_p each come down to a threshold on the logits, found exactly by fixing its
bits a few at a time (see `_largest_threshold`); tokens tied with the last one kept are kept.

The draw is Gumbel's: the argmax of logit / temperature + noise, with noise that is a hash of (seed, position, token
id) and of nothing else. So it does not depend on the batch, the row, the slot or the step, and an error of size e in
the logits changes a token with probability about e (a draw by inverting the cumulative sum would add the errors up).

Where the vocabulary is split over devices, each has the logits of its own part. To take the largest, and to draw where
nothing is truncated, they exchange their best (value, token) pair of each row and come to the same tokens.
"""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpaged.pallas_kernels.sample_tokens.noise import gumbel
from jpaged.pallas_kernels.sample_tokens.operands import Operands

_TOP_K_BITS = 4  # bits of the threshold fixed by one pass over the logits: 8 passes of 15 counts
_TOP_P_BITS = 3  # 11 passes of 7 sums; a pass of 15 sums would be bound by arithmetic instead of by memory

_INF = np.float32(np.inf)
_LARGEST = np.finfo(np.float32).max


class Shards(Protocol):
    """The devices that a vocabulary is split over, as one of them sees the others; hashable, static under jit."""

    def first(self, size: int) -> jax.Array | int:
        """Where this shard's part of an axis begins that is split into parts of `size`."""

    def all_gather(self, x: jax.Array) -> jax.Array:
        """[...] -> [shards, ...], on every shard."""


def sample_tokens(operands: Operands, shards: Shards | None = None) -> jax.Array:
    """`sample_tokens` of the package, checked.

    shards: `logits` are of this one's part of the vocabulary, and there is no top_k, top_p or min_p.
    """
    return sample_and_largest(operands, shards)[0]


def sample_and_largest(operands: Operands, shards: Shards | None = None) -> tuple[jax.Array, jax.Array]:
    """The same, and each row's largest logit as `without_nan` has it: int32 [R], float32 [R, 1]."""
    logits, temperature, top_k, top_p, min_p, _, _ = operands
    rows = logits.shape[0]
    greedy = temperature <= 0
    rate = jnp.where(greedy, 1.0, 1.0 / temperature)[:, None]
    most_likely, highest = argmax(without_nan(logits), shards)
    largest = finite(highest)
    scores = _scores(operands, largest, rate, shards)
    if top_k is not None or top_p is not None or min_p is not None:
        top_k = jnp.zeros(rows, jnp.int32) if top_k is None else top_k
        top_p = jnp.ones(rows, jnp.float32) if top_p is None else top_p
        min_p = jnp.zeros(rows, jnp.float32) if min_p is None else min_p
        lowest = lowest_kept(logits, largest, rate, top_k, top_p, min_p)
        scores = jnp.where(logits >= lowest, scores, -_INF)
    return jnp.where(greedy, most_likely, argmax(scores, shards)[0]), highest


def scores_of(operands: Operands, shards: Shards | None = None) -> jax.Array:
    """What a draw without truncation takes the largest of, float32 [R, V]: of rows with a temperature, logit /
    temperature + noise, less a number of the row; of greedy rows the logits.

    So the largest among any of a row's tokens is the one that would be drawn if no others were left.
    """
    logits, temperature = without_nan(operands.logits), operands.temperature
    greedy = (temperature <= 0)[:, None]
    rate = jnp.where(greedy, 1.0, 1.0 / temperature[:, None])
    largest = finite(argmax(logits, shards)[1])
    return jnp.where(greedy, logits, _scores(operands, largest, rate, shards))


def _scores(operands: Operands, largest: jax.Array, rate: jax.Array, shards: Shards | None) -> jax.Array:
    """Logits over temperature plus noise, less the largest, which keeps the best few tokens near zero however low the
    temperature: there float32 still tells their noise apart.
    """
    logits, width = operands.logits, operands.logits.shape[1]
    first = None if shards is None else shards.first(width)
    return (without_nan(logits) - largest) * rate + gumbel(operands.seeds, operands.positions, width, first)


def argmax(values: jax.Array, shards: Shards | None = None) -> tuple[jax.Array, jax.Array]:
    """Token id and value of each row's largest value, the lowest id on ties: int32 [R], float32 [R, 1].

    Shards exchange one pair a row; the earlier shard, whose ids are lower, wins a tie.
    """
    ids = jnp.argmax(values, axis=1).astype(jnp.int32)
    best = jnp.take_along_axis(values, ids[:, None], axis=1)
    if shards is None:
        return ids, best
    ids = ids[:, None] + shards.first(values.shape[1])
    pairs = shards.all_gather(jnp.concatenate([lax.bitcast_convert_type(best, jnp.int32), ids], axis=1))
    values_by_shard = lax.bitcast_convert_type(pairs[:, :, 0], jnp.float32)
    pair = jnp.take_along_axis(pairs, jnp.argmax(values_by_shard, axis=0)[None, :, None], axis=0)[0]
    return pair[:, 1], lax.bitcast_convert_type(pair[:, :1], jnp.float32)


def without_nan(logits: jax.Array) -> jax.Array:
    """NaN becomes minus infinity and plus infinity the largest float, so that differences are never NaN."""
    return jnp.where(jnp.isnan(logits), -_INF, jnp.minimum(logits, _LARGEST))


def is_finite(largest: jax.Array) -> jax.Array:
    """Whether values that `without_nan` returned are finite as they came: bool, of their shape."""
    return (largest > -_INF) & (largest < _LARGEST)


def finite(largest: jax.Array) -> jax.Array:
    """A row's largest logit, 0 where everything is masked, so that taking it off a logit is never NaN."""
    return jnp.where(largest == -_INF, 0.0, largest)


def lowest_kept(
    logits: jax.Array,
    largest: jax.Array,
    rate: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
) -> jax.Array:
    """The lowest logit that min_p, top_k and top_p leave, in this order: float32 [R, 1].

    min_p keeps p >= min_p * p_max. top_k keeps the k most likely, and those tied with the k-th. top_p keeps the fewest
    most likely of what is left whose probabilities reach the share top_p, and those tied with the last of them.
    Ties are ties of logits before temperature, which may round different ones to the same float.
    logits: float32 [R, V]; largest, rate: float32 [R, 1], the row's largest logit and 1 / temperature.

    Passes read the logits as they are: a copy with NaN cleaned out, or with exp taken, would have to be written and
    would double what each pass reads. NaN is at or above no threshold, so it counts for nothing.
    """
    vocab_size = logits.shape[1]
    wanted = jnp.where(top_k <= 0, vocab_size, jnp.minimum(top_k, vocab_size))[:, None]
    one = jnp.ones_like(logits, jnp.int32)
    lowest = _largest_threshold(logits, one, wanted, _TOP_K_BITS)
    lowest = jnp.maximum(lowest, largest + jnp.log(min_p)[:, None] / rate)

    mass = jnp.exp((logits - largest) * rate)
    share = top_p[:, None] * _sums_above(logits, mass, [lowest])[0]
    at_p = _largest_threshold(logits, mass, share, _TOP_P_BITS)
    at_p = jnp.minimum(at_p, largest)  # a top_p so small that its share underflows to zero still keeps the best token
    return jnp.where(top_p[:, None] < 1.0, jnp.maximum(lowest, at_p), lowest)


def _largest_threshold(logits: jax.Array, weights: jax.Array, wanted: jax.Array, bits: int) -> jax.Array:
    """The largest float32 for which the tokens at or above it still weigh what is wanted: float32 [R, 1].

    logits: float32 [R, V]; weights: [R, V], not negative; wanted: [R, 1]. Where all tokens together weigh less than
    wanted, minus infinity comes out.

    Floats are searched in the order of their bit patterns (negative ones with the bits below the sign flipped), from
    the top: of the 2 ** bits possible values of the next few bits, those that hold are counted, which is their value.
    So 32 / bits passes over the logits find it exactly, with no branch and nothing for the host to wait for.
    """
    image = jnp.zeros_like(wanted, jnp.uint32)
    shift = 32
    while shift:
        width = min(bits, shift)
        shift -= width
        image = _fix_bits(logits, weights, wanted, image, np.uint32(shift), width)
    return _float_of_image(image)


# Jitted so that the passes of a search are traced and lowered once.
@partial(jax.jit, static_argnames="width")
def _fix_bits(
    logits: jax.Array,
    weights: jax.Array,
    wanted: jax.Array,
    image: jax.Array,
    shift: jax.Array,
    width: int,
) -> jax.Array:
    """One pass of `_largest_threshold`: the `width` bits of the image from `shift` up."""
    candidates = [_float_of_image(image + (np.uint32(digit) << shift)) for digit in range(1, 1 << width)]
    for weight in _sums_above(logits, weights, candidates):
        image = image + jnp.where(weight >= wanted, np.uint32(1) << shift, np.uint32(0))
    return image


def _float_of_image(image: jax.Array) -> jax.Array:
    """uint32 -> float32, order preserving; images of NaN become the infinity they lie beyond."""
    key = lax.bitcast_convert_type(image ^ np.uint32(0x80000000), jnp.int32)
    key = jnp.clip(key, np.int32(-0x7F800001), np.int32(0x7F800000))
    return lax.bitcast_convert_type(key ^ ((key >> 31) & np.int32(0x7FFFFFFF)), jnp.float32)


def _sums_above(logits: jax.Array, weights: jax.Array, thresholds: Sequence[jax.Array]) -> list[jax.Array]:
    """For each threshold ([R, 1]), the summed weights of the tokens at or above it ([R, 1]).

    One reduction of n operands, so that the compiler reads the logits once; as n reductions it makes 2 n kernels.
    """
    operands = [jnp.where(logits >= threshold, weights, 0) for threshold in thresholds]
    zero = np.zeros((), weights.dtype)
    sums = lax.reduce(operands, [zero] * len(operands), lambda a, b: [x + y for x, y in zip(a, b, strict=True)], [1])
    return [total[:, None] for total in sums]
