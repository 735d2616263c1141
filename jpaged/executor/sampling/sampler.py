"""Drawing the next token of every row on the device: pure functions over per-slot sampling state.

    logits [R, V] ── TABLE, MASKED: what a constraint allows
                  ── FULL: as well masks, logit_bias, penalties ──┬─ argmax ───────────────────────────┐
       │                                                          └─ temperature, min_p, top_k, top_p, ├─> token ids [R]
       │                                                             then one keyed draw ──────────────┘
       └─ FULL: log-probabilities, ranks and top alternatives of the logits as the model gave them, or of those that the
                token was drawn from (`EngineArgs.logprobs_mode`)

The order is vLLM's (its `vllm.v1.sample.sampler`, 0.22): allowed_token_ids, bad_words, min_tokens, logit_bias;
repetition, frequency, presence penalty; temperature, min_p, top_k, top_p; the draw. Each step sees what the one
before it left: top_p is a share of what min_p and top_k keep. A constraint's mask comes first; where it and
allowed_token_ids have no token in common, the mask stands alone.

From temperature on it is one op, `pallas_kernels.sample_tokens`. Its noise is a hash of (seed, position, token id) and
of nothing else, so a draw does not depend on the batch, the row, the slot or the step.

Under tensor parallelism each shard has the logits of its own part of the vocabulary. Shards exchange, for each row,
their best (logit, token) pairs and the k best alternatives. Where rows truncate, the shards deal their logits out by
rows, so that each draws for some of them and no logit is on two shards. All come to the same tokens. `collectives` says
how; ALONE adds nothing to the program.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpaged.api.config import LogprobsMode
from jpaged.api.sampling_params import GREEDY_TEMPERATURE, MAX_BAD_WORDS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS
from jpaged.engine.interface import NO_TOKEN, NUM_RANKED, FinishCode, SamplingVariant
from jpaged.executor.sampling.logprobs import TokenLogprobs, log_sums_of, logits_at, logprobs_of, top_k
from jpaged.executor.sampling.state import FullSamplingState, SamplingState
from jpaged.models.collectives import ALONE, Collectives
from jpaged.models.row_tiles import in_row_tiles
from jpaged.pallas_kernels import sample_tokens, sample_tokens_backend
from jpaged.pallas_kernels.sample_tokens import reference as sample_reference
from jpaged.pallas_kernels.sample_tokens.operands import Operands
from jpaged.pallas_kernels.sample_tokens.reference import without_nan

_INF = np.float32(np.inf)


class SampleOutput(NamedTuple):
    """token_ids: int32 [R], each in 0..V-1 whatever the logits. logprobs: None unless the variant is FULL or BEAM.
    is_finite: bool [R]; where False, no logit of the row is finite, or one is plus infinity: its token means nothing.
    ranked: int32 [R, NUM_RANKED], of MASKED; `token_ids`, and what would have been drawn in its place if it, and those
        before, had not been allowed. NO_TOKEN throughout for rows that truncate: leaving tokens out changes what others
        they keep.
    """

    token_ids: jax.Array
    is_finite: jax.Array
    logprobs: TokenLogprobs | None
    ranked: jax.Array | None = None


def sample(
    logits: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    state: SamplingState,
    full: FullSamplingState | None = None,
    masks: jax.Array | None = None,
    *,
    variant: SamplingVariant,
    num_logprobs: int = MAX_LOGPROBS,
    collectives: Collectives = ALONE,
    backend: str | None = None,
    logprobs_mode: LogprobsMode = "raw_logprobs",
    live: jax.Array | None = None,
    allowed: jax.Array | None = None,
) -> SampleOutput:
    """Draws a token for every row.

    logits: float32 [R, V], of the shard's tokens. NaN counts as minus infinity.
    slots: int32 [R]; the null slot for padded rows.
    positions: int32 [R]; the position that the new token will have, that is, the sequence's length so far.
    full: needed by SamplingVariant.FULL, ignored by the others.
    masks: uint32 [S + 1, words], as `init_masks`; needed by MASKED. FULL heeds them if there are any, others do not.
    variant: static. All but GREEDY draw the same tokens from the same (processed) logits where no row truncates.
        SAMPLING leaves truncation out: 19 passes over the logits where the draw runs in XLA. (A `lax.cond` on the
        device would make XLA wait for the predicate on the host, which stalls the pipelined loop.) Where a kernel
        draws, truncation costs a row nothing that has none; see `program_variant`.
    num_logprobs: static; alternatives returned by FULL and BEAM.
    collectives: static; of the shards the vocabulary is split over.
    backend: static; of `pallas_kernels.sample_tokens`.
    logprobs_mode: static; as of `EngineArgs`, for FULL. BEAM's log-probabilities are the model's own.
    live: bool [R], of an engine that is batch_invariant: what sums or rounds is then computed in tiles of rows
        (`models.row_tiles`), and what comes out for other rows means nothing.
    allowed: uint32 [R, words]; what the tables of constraints allow each row (`tables.py`); needed by TABLE. MASKED and
        FULL heed it beside `masks`, if it is given; others do not.

    Rows with a temperature below GREEDY_TEMPERATURE get the most likely token, the lowest id on ties. A row whose
    tokens all have a logit of minus infinity gets token 0.
    """
    if variant == SamplingVariant.GREEDY:
        return SampleOutput(*_most_likely(logits, collectives), None)
    by_row: ByRow = _at_once if live is None else partial(_in_tiles, live)
    if variant == SamplingVariant.BEAM:
        token_ids, is_finite = _most_likely(logits, collectives)
        return SampleOutput(token_ids, is_finite, _logprobs(logits, token_ids, num_logprobs, collectives, live))
    logprobs = None
    processed = logits
    if variant == SamplingVariant.FULL:
        if full is None:
            raise ValueError("SamplingVariant.FULL needs a FullSamplingState.")

        def process(
            logits: jax.Array, slots: jax.Array, positions: jax.Array, allowed: jax.Array | None = None
        ) -> jax.Array:
            return process_logits(logits, slots, positions, state, full, collectives, masks, allowed)

        rows = (logits, slots, positions) if allowed is None else (logits, slots, positions, allowed)
        processed = by_row(process, *rows)
    elif variant == SamplingVariant.TABLE:
        if allowed is None:
            raise ValueError("SamplingVariant.TABLE needs what tables allow.")
        processed = _allowed_only(logits, allowed, collectives)
    elif variant == SamplingVariant.MASKED:
        mask = _masks_of(slots, state, masks, allowed)
        if masks is None or mask is None:
            raise ValueError("SamplingVariant.MASKED needs masks.")
        processed = _allowed_only(logits, mask, collectives)
    truncates = variant >= SamplingVariant.TRUNCATED
    if variant == SamplingVariant.MASKED:
        drawn = partial(_draw_and_rank, state=state, collectives=collectives, backend=backend)
        return SampleOutput(*by_row(drawn, processed, slots, positions))
    draw = partial(_draw, state=state, collectives=collectives, truncates=truncates, backend=backend)
    token_ids, is_finite = by_row(draw, processed, slots, positions)
    if variant == SamplingVariant.FULL:
        if logprobs_mode == "processed_logprobs":
            left = partial(
                drawn_from if live is None else _drawn_from_as_they_are, state=state, collectives=collectives
            )
            logits = by_row(left, processed, token_ids, slots)
        logprobs = _logprobs(logits, token_ids, num_logprobs, collectives, live)
    return SampleOutput(token_ids, is_finite, logprobs)


ByRow = Callable[..., Any]
"""Calls its first argument with the others, arrays with a row for each token that is sampled."""


def _at_once(function: Callable[..., Any], *rows: jax.Array) -> Any:
    return function(*rows)


def _in_tiles(live: jax.Array, function: Callable[..., Any], *rows: jax.Array) -> Any:
    return in_row_tiles(function, live, *rows)


def _logprobs(
    logits: jax.Array, token_ids: jax.Array, k: int, collectives: Collectives, live: jax.Array | None
) -> TokenLogprobs:
    sums = None if live is None else in_row_tiles(partial(log_sums_of, collectives=collectives), live, logits)
    return logprobs_of(logits, token_ids, k, collectives, sums)


def program_variant(
    variant: SamplingVariant, vocab_size: int, collectives: Collectives = ALONE, backend: str | None = None
) -> SamplingVariant:
    """The variant whose program draws for `variant`: TRUNCATED's for SAMPLING where a kernel draws, else its own.

    backend: as of `sample`.

    The kernel truncates a row only if the row asks for it, so that a second program would gain nothing.
    """
    in_kernel = collectives.size == 1 and sample_tokens_backend(vocab_size, backend) != "xla"
    return SamplingVariant.TRUNCATED if variant == SamplingVariant.SAMPLING and in_kernel else variant


def finish_codes(state: SamplingState, slots: jax.Array, positions: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Whether the tokens just sampled end their sequences: uint8 [R], a `FinishCode` each.

    positions: int32 [R]; where the new tokens stand, as for `sample`. A stop token that is also the last one the
    length allows counts as a stop.
    """
    stops = jnp.any(state.stop_token_ids[slots] == token_ids[:, None], axis=1) & (positions >= state.min_len[slots])
    full_length = positions + 1 >= state.max_len[slots]
    code = jnp.where(stops, FinishCode.STOP, jnp.where(full_length, FinishCode.LENGTH, FinishCode.RUNNING))
    return code.astype(jnp.uint8)


def process_logits(
    logits: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    state: SamplingState,
    full: FullSamplingState,
    collectives: Collectives = ALONE,
    masks: jax.Array | None = None,
    allowed: jax.Array | None = None,
) -> jax.Array:
    """Masks, logit_bias and penalties: float32 [R, V] -> float32 [R, V]. Masked tokens become minus infinity.

    Arguments as for `sample`.
    """
    vocab_size = logits.shape[1]
    extras = state.uses_extras[slots]

    words = jnp.where(extras[:, None], full.allowed[slots], np.uint32(0xFFFFFFFF))
    if (mask := _masks_of(slots, state, masks, allowed)) is not None:
        has_any = jnp.any(words & mask, axis=1, keepdims=True)
        words = jnp.where(has_any, words & mask, mask)
    allowed_only = _allowed_only(logits, words, collectives)

    # Bad words, stop tokens before min_len and logit_bias all add to single logits, and minus infinity absorbs what is
    # added to it, so one scatter does for the three of them whatever the order in which it adds.
    bad_words = full.bad_words[slots]
    prefix, last = bad_words[:, :, :-1], bad_words[:, :, -1]
    completes = jnp.all((prefix == NO_TOKEN) | (prefix == full.recent[slots][:, None, :]), axis=2)
    too_short = positions < state.min_len[slots]
    ids = jnp.concatenate(
        [
            jnp.where(completes & extras[:, None], last, NO_TOKEN),
            jnp.where(too_short[:, None], state.stop_token_ids[slots], NO_TOKEN),
            jnp.where(extras[:, None], full.bias_ids[slots], NO_TOKEN),
        ],
        axis=1,
    )
    masks = jnp.full((logits.shape[0], MAX_BAD_WORDS + MAX_STOP_TOKEN_IDS), -_INF)
    addends = jnp.concatenate([masks, full.bias_values[slots]], axis=1)
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    logits = allowed_only.at[rows, collectives.columns(ids, vocab_size)].add(addends, mode="drop")
    # Where nothing is left, allowed_token_ids stand and what contradicts them gives way.
    logits = jnp.where(_any_left(logits, collectives), logits, allowed_only)

    def of_row(values: jax.Array, neutral: float) -> jax.Array:
        return jnp.where(extras, values[slots], neutral)[:, None]

    known = full.token_counts[slots]
    output_counts = (known >> 1).astype(jnp.float32)
    repetition = jnp.where(known != 0, of_row(full.repetition, 1.0), 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - of_row(full.frequency, 0.0) * output_counts
    return logits - jnp.where(known >> 1 != 0, of_row(full.presence, 0.0), 0.0)


def _draw(
    logits: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    state: SamplingState,
    collectives: Collectives,
    *,
    truncates: bool,
    backend: str | None,
) -> tuple[jax.Array, jax.Array]:
    """Temperature, min_p, top_k, top_p and the draw: float32 [R, V] -> int32 [R], and `SampleOutput.is_finite`.

    NaN counts as minus infinity, so the logit of the token drawn is not finite only where none is, or one is plus
    infinity. That shards know of it costs no message of its own: they compare their largest logits, or send tokens.
    """
    temperature = state.temperature[slots]
    arguments = (
        logits,
        jnp.where(temperature < GREEDY_TEMPERATURE, 0.0, temperature),
        state.top_k[slots] if truncates else None,
        state.top_p[slots] if truncates else None,
        state.min_p[slots] if truncates else None,
        state.seed[slots],
        positions,
    )
    if collectives.size == 1:
        token_ids = sample_tokens(*arguments, backend=backend)
        return token_ids, _is_finite_at(logits, token_ids)
    if not truncates:
        token_ids, largest = sample_reference.sample_and_largest(Operands(*arguments), shards=collectives)
        return token_ids, sample_reference.is_finite(largest[:, 0])
    # A threshold's passes would be some 20 all-reduces in turn, and no kernel could make them. So each shard gets whole
    # rows, an equal part of them, and draws for those.
    rows, size = logits.shape[0], collectives.size
    fill = -rows % size
    logits, *parameters = (jnp.pad(x, [(0, fill), *[(0, 0)] * (x.ndim - 1)]) for x in arguments if x is not None)
    logits = collectives.deal_rows(logits)
    own = sample_tokens(logits, *map(collectives.own_rows, parameters), backend=backend)
    own = jnp.where(_is_finite_at(logits, own), own, ~own)  # a token that means nothing goes as a negative number
    token_ids = collectives.all_gather(own).reshape(-1)[:rows]
    return jnp.where(token_ids < 0, ~token_ids, token_ids), token_ids >= 0


def _draw_and_rank(
    logits: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    state: SamplingState,
    collectives: Collectives,
    *,
    backend: str | None,
) -> tuple[jax.Array, jax.Array, None, jax.Array]:
    """As `_draw`, for rows of which some truncate; and `SampleOutput.ranked`. Its first token is the one drawn, though
    kernels may have rounded otherwise: so a row's token does not depend on the variant of its step.
    """
    token_ids, is_finite = _draw(logits, slots, positions, state, collectives, truncates=True, backend=backend)
    temperature = state.temperature[slots]
    temperature = jnp.where(temperature < GREEDY_TEMPERATURE, 0.0, temperature)
    operands = Operands(logits, temperature, None, None, None, state.seed[slots], positions)
    scores = sample_reference.scores_of(operands, None if collectives.size == 1 else collectives)
    if collectives.size == 1:
        scores = jnp.where(jnp.arange(scores.shape[1]) == token_ids[:, None], _INF, scores)
    ranked, best = top_k(scores, NUM_RANKED, collectives)
    ranked = jnp.where(best == -_INF, NO_TOKEN, ranked)
    ranked = jnp.pad(ranked, ((0, 0), (0, NUM_RANKED - ranked.shape[1])), constant_values=NO_TOKEN)
    keeps_all = (state.top_k[slots] <= 0) & (state.top_p[slots] >= 1) & (state.min_p[slots] <= 0)
    keeps_all |= temperature <= 0
    # Of several shards; one alone ranks what it drew first.
    token_ids = jnp.where(keeps_all & (ranked[:, 0] != NO_TOKEN), ranked[:, 0], token_ids)
    return token_ids, is_finite, None, jnp.where(keeps_all[:, None], ranked, NO_TOKEN)


def drawn_from(
    logits: jax.Array, token_ids: jax.Array, slots: jax.Array, state: SamplingState, collectives: Collectives
) -> jax.Array:
    """Logits whose softmax is the distribution that `_draw` drew from: float32 [R, V] -> float32 [R, V]. Of greedy rows
    it is that of the logits as they are.

    token_ids: int32 [R]; what was drawn, which counts as kept even where a kernel rounds a threshold otherwise.
    """
    temperature = state.temperature[slots]
    is_greedy = temperature < GREEDY_TEMPERATURE
    rate = jnp.where(is_greedy, 1.0, 1.0 / jnp.where(is_greedy, 1.0, temperature))[:, None]
    parameters = (rate, state.top_k[slots], state.top_p[slots], state.min_p[slots])
    rows, size = logits.shape[0], collectives.size
    if size == 1:
        lowest, largest = _threshold(logits, *parameters)
    else:  # as `_draw` does it: each shard has whole rows, an equal part of them
        padded = [jnp.pad(x, [(0, -rows % size), *[(0, 0)] * (x.ndim - 1)]) for x in (logits, *parameters)]
        own = _threshold(collectives.deal_rows(padded[0]), *map(collectives.own_rows, padded[1:]))
        lowest, largest = (collectives.all_gather(x).reshape(-1, 1)[:rows] for x in own)
    drawn = logits_at(logits, token_ids, collectives)
    kept = (logits >= jnp.minimum(lowest, drawn)) | is_greedy[:, None]
    return jnp.where(kept, (without_nan(logits) - largest) * rate, -_INF)


def _drawn_from_as_they_are(
    logits: jax.Array, token_ids: jax.Array, slots: jax.Array, state: SamplingState, collectives: Collectives
) -> jax.Array:
    """`drawn_from`, but at a temperature of 1 what is kept stays as it is: with nothing left out, the log-probabilities
    have the bits of the model's own, which a trainer computes."""
    left = drawn_from(logits, token_ids, slots, state, collectives)
    temperature = state.temperature[slots][:, None]
    as_it_is = (temperature == 1.0) | (temperature < GREEDY_TEMPERATURE)
    return jnp.where(as_it_is & (left > -_INF), logits, left)


def _threshold(
    logits: jax.Array, rate: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The lowest logit that is kept of each whole row, and the largest: float32 [R, 1] each."""
    largest = sample_reference.finite(jnp.max(without_nan(logits), axis=1, keepdims=True))
    return sample_reference.lowest_kept(logits, largest, rate, top_k, top_p, min_p), largest


def _is_finite_at(logits: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Whether each row's logit of its token is finite: bool [R]."""
    return jnp.isfinite(jnp.take_along_axis(logits, token_ids[:, None], axis=1)[:, 0])


def _most_likely(logits: jax.Array, collectives: Collectives) -> tuple[jax.Array, jax.Array]:
    """Each row's most likely token, and `SampleOutput.is_finite`."""
    shards = None if collectives.size == 1 else collectives
    token_ids, largest = sample_reference.argmax(without_nan(logits), shards)
    return token_ids, sample_reference.is_finite(largest[:, 0])


def _masks_of(
    slots: jax.Array, state: SamplingState, masks: jax.Array | None, allowed: jax.Array | None
) -> jax.Array | None:
    """What constraints allow these slots, uint32 [R, words]; all bits are set for those without. None without any.
    allowed: what tables allow, uint32 [R, words]; a slot that follows one has no mask of its own.
    """
    if masks is None:
        return allowed
    own = jnp.where(state.uses_mask[slots][:, None], masks[slots], np.uint32(0xFFFFFFFF))
    return own if allowed is None else own & allowed


def _allowed_only(logits: jax.Array, words: jax.Array, collectives: Collectives) -> jax.Array:
    """Makes minus infinity of the logits of tokens that are not allowed. words: uint32 [R, ceil(V / 32)]."""
    vocab_size = logits.shape[1]
    words = _own_words(words, vocab_size, collectives)
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return jnp.where(bits.reshape(words.shape[0], -1)[:, :vocab_size] != 0, logits, -_INF)


def _own_words(words: jax.Array, width: int, collectives: Collectives) -> jax.Array:
    """The words of a mask over the vocabulary that cover this shard's `width` tokens, a multiple of 32."""
    if collectives.size == 1:
        return words
    count = width // 32
    words = jnp.pad(words, ((0, 0), (0, count * collectives.size - words.shape[1])))
    return lax.dynamic_slice_in_dim(words, collectives.first(count), count, axis=1)


def _any_left(logits: jax.Array, collectives: Collectives) -> jax.Array:
    """Whether any token of each row is not masked: bool [R, 1]."""
    left = jnp.any(logits > -_INF, axis=1, keepdims=True)
    return left if collectives.size == 1 else collectives.all_max(left.astype(jnp.int32)) != 0
