"""Drawing the next token of every row on the device: pure functions over per-slot sampling state.

    logits [R, V] ── FULL: masks, logit_bias, penalties ──┬─ argmax ───────────────────────────┐
       │                                                  └─ temperature, min_p, top_k, top_p, ├─> token ids [R]
       │                                                     then one keyed draw ──────────────┘
       └─ FULL: log-probabilities, ranks and top alternatives of the logits as the model gave them

The order is vLLM's (its `vllm.v1.sample.sampler`, 0.22): allowed_token_ids, bad_words, min_tokens, logit_bias;
repetition, frequency, presence penalty; temperature, min_p, top_k, top_p; the draw. Each step sees what the one
before it left: top_p is a share of what min_p and top_k keep.

Every array of the state has one row a slot and one more, the **null slot**: row S of S + 1. Padded rows of a step
name it. It holds greedy parameters, and no function here ever writes to it.

From temperature on it is one op, `pallas_kernels.sample_tokens`. Its noise is a hash of (seed, position, token id) and
of nothing else, so a draw does not depend on the batch, the row, the slot or the step.

Under tensor parallelism each shard has the logits of its own part of the vocabulary and nothing gathers them. Shards
exchange, for each row, their best (logit, token) pairs, the sums and counts of a threshold's passes, and the k best
alternatives; every shard comes to the same tokens. `collectives` says how; ALONE adds nothing to the program.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpaged.engine.interface import NO_TOKEN, FinishCode, SamplingVariant
from jpaged.errors import InvalidParameterError
from jpaged.models.collectives import ALONE, Collectives
from jpaged.pallas_kernels import sample_reference, sample_tokens, sample_tokens_backend
from jpaged.pallas_kernels.sample_reference import finite, without_nan
from jpaged.sampling_params import (
    GREEDY_TEMPERATURE,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

_HIGHEST_TEMPERATURE = 1e30  # its reciprocal is still above zero in float32

_TOP_LOGPROBS_BLOCK = 128  # tokens a block, for the block maxima that pick the top alternatives

_INF = np.float32(np.inf)
_LARGEST = np.finfo(np.float32).max


class SamplingState(NamedTuple):
    """What every sampling program reads; one row a slot.

    temperature, top_p, min_p: float32 [S + 1].
    top_k: int32 [S + 1]; 0 or less keeps all.
    seed: uint32 [S + 1, 2]; the low and the high half of a 64-bit seed.
    min_len: int32 [S + 1]; stop tokens are not sampled while the sequence is shorter, the prompt included.
    max_len: int32 [S + 1]; total length in tokens at which the sequence stops.
    uses_extras: bool [S + 1]; whether the slot's row of `FullSamplingState` is its own. Otherwise that row is stale
        and is ignored, so a request that asks for no extras need not write one.
    stop_token_ids: int32 [S + 1, MAX_STOP_TOKEN_IDS]; padded with NO_TOKEN.
    """

    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    top_k: jax.Array
    seed: jax.Array
    min_len: jax.Array
    max_len: jax.Array
    uses_extras: jax.Array
    stop_token_ids: jax.Array


class FullSamplingState(NamedTuple):
    """What only `SamplingVariant.FULL` reads, a row a slot: 4.1 V bytes a slot, 160 MB at V = 152k and 256 slots.

    presence, frequency, repetition: float32 [S + 1]; the penalties.
    token_counts: int32 [S + 1, V]; twice the token's count in the output, plus 1 if it occurs in the prompt. A shard
        has the columns of its own tokens; the rest of the state is whole on each.
    bias_ids, bias_values: int32, float32 [S + 1, MAX_LOGIT_BIAS]; ids padded with NO_TOKEN.
    allowed: uint32 [S + 1, ceil(V / 32)]; bit v % 32 of word v // 32 is set if token v may be sampled.
    bad_words: int32 [S + 1, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS]; each word at the right end of its row, after NO_TOKEN.
    recent: int32 [S + 1, MAX_BAD_WORD_TOKENS - 1]; the last known tokens, newest last, after NO_TOKEN.
    """

    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array
    token_counts: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array
    allowed: jax.Array
    bad_words: jax.Array
    recent: jax.Array


class TokenLogprobs(NamedTuple):
    """Log-probabilities of the model's own distribution; fields as in `engine.interface.Logprobs`.

    token_logprobs: float32 [R]; token_ranks: int32 [R]; top_ids, top_logprobs: int32, float32 [R, k].
    """

    token_logprobs: jax.Array
    token_ranks: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


class TargetScores(NamedTuple):
    """logprobs: float32 [R]; greedy: bool [R]; as in `engine.interface.TargetScores`."""

    logprobs: jax.Array
    greedy: jax.Array


class SampleOutput(NamedTuple):
    """token_ids: int32 [R], each in 0..V-1 whatever the logits; logprobs: None unless the variant is FULL or BEAM."""

    token_ids: jax.Array
    logprobs: TokenLogprobs | None


# ---------------------------------------------------------------------------------------------------------------------
# Sampling
# ---------------------------------------------------------------------------------------------------------------------


def sample(
    logits: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    state: SamplingState,
    full: FullSamplingState | None = None,
    *,
    variant: SamplingVariant,
    num_logprobs: int = MAX_LOGPROBS,
    collectives: Collectives = ALONE,
) -> SampleOutput:
    """Draws a token for every row.

    logits: float32 [R, V], of the shard's tokens. NaN counts as minus infinity.
    slots: int32 [R]; the null slot for padded rows.
    positions: int32 [R]; the position that the new token will have, that is, the sequence's length so far.
    full: needed by SamplingVariant.FULL, ignored by the others.
    variant: static. All but GREEDY draw the same tokens from the same (processed) logits where no row truncates.
        SAMPLING leaves truncation out: 19 passes over the logits where the draw runs in XLA. (A `lax.cond` on the
        device would make XLA wait for the predicate on the host, which stalls the pipelined loop.) Where a kernel
        draws, truncation costs a row nothing that has none; see `program_variant`.
    num_logprobs: static; alternatives returned by FULL and BEAM.
    collectives: static; of the shards the vocabulary is split over.

    Rows with a temperature below GREEDY_TEMPERATURE get the most likely token, the lowest id on ties. A row whose
    tokens all have a logit of minus infinity gets token 0.
    """
    if variant == SamplingVariant.GREEDY:
        return SampleOutput(_most_likely(logits, collectives), None)
    if variant == SamplingVariant.BEAM:
        token_ids = _most_likely(logits, collectives)
        return SampleOutput(token_ids, logprobs_of(logits, token_ids, num_logprobs, collectives))
    logprobs = None
    processed = logits
    if variant == SamplingVariant.FULL:
        if full is None:
            raise ValueError("SamplingVariant.FULL needs a FullSamplingState.")
        processed = process_logits(logits, slots, positions, state, full, collectives)
    truncates = variant >= SamplingVariant.TRUNCATED
    token_ids = _draw(processed, slots, positions, state, collectives, truncates=truncates)
    if variant == SamplingVariant.FULL:
        logprobs = logprobs_of(logits, token_ids, num_logprobs, collectives)
    return SampleOutput(token_ids, logprobs)


def program_variant(variant: SamplingVariant, vocab_size: int, collectives: Collectives = ALONE) -> SamplingVariant:
    """The variant whose program draws for `variant`: TRUNCATED's for SAMPLING where a kernel draws, else its own.

    The kernel truncates a row only if the row asks for it, so that a second program would gain nothing.
    """
    in_kernel = collectives.size == 1 and sample_tokens_backend(vocab_size) == "mosaic"
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
) -> jax.Array:
    """Masks, logit_bias and penalties: float32 [R, V] -> float32 [R, V]. Masked tokens become minus infinity.

    Arguments as for `sample`.
    """
    vocab_size = logits.shape[1]
    extras = state.uses_extras[slots]

    words = _own_words(full.allowed[slots], vocab_size, collectives)
    words = jnp.where(extras[:, None], words, np.uint32(0xFFFFFFFF))
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(words.shape[0], -1)[:, :vocab_size] != 0
    allowed_only = jnp.where(allowed, logits, -_INF)

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
    logits = allowed_only.at[rows, _own_columns(ids, vocab_size, collectives)].add(addends, mode="drop")
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


def logprobs_of(logits: jax.Array, targets: jax.Array, k: int, collectives: Collectives = ALONE) -> TokenLogprobs:
    """Log-probabilities of given tokens and of the k most likely ones, under the model's own distribution.

    logits: float32 [R, V], of the shard's tokens; targets: int32 [R] (NO_TOKEN gives token 0's, to be ignored).
    A rank is 1 plus the number of strictly more likely tokens; of equally likely alternatives the lower id comes
    first. Where V < k, the top is padded with NO_TOKEN and minus infinity.
    """
    logits = without_nan(logits)
    target = _logits_at(logits, jnp.maximum(targets, 0), collectives)
    top_ids, top = _top_k(logits, min(max(k, 1), logits.shape[1]))
    if collectives.size > 1:
        top_ids, top = _merge_top_k(top_ids + collectives.first(logits.shape[1]), top, k, collectives)
    largest = finite(top[:, :1])
    sums = collectives.all_reduce(jnp.sum(jnp.exp(logits - largest), axis=1, keepdims=True))
    log_sum = largest + jnp.log(sums)
    ranks = 1 + collectives.all_reduce(jnp.sum(logits > target, axis=1, dtype=jnp.int32))

    def normalise(values: jax.Array) -> jax.Array:  # a row without any token gives minus infinity, not NaN
        return jnp.where(values == -_INF, -_INF, values - log_sum)

    padding = ((0, 0), (0, max(0, k - top.shape[1])))
    return TokenLogprobs(
        normalise(target)[:, 0],
        ranks,
        jnp.pad(top_ids[:, :k], padding, constant_values=NO_TOKEN),
        jnp.pad(normalise(top)[:, :k], padding, constant_values=-_INF),
    )


def target_scores(logits: jax.Array, targets: jax.Array, collectives: Collectives = ALONE) -> TargetScores:
    """Log-probabilities of given tokens and whether they are the argmax: two passes over the logits, no top-k.

    logits: float32 [R, V], of the shard's tokens; targets: int32 [R].
    """
    logits = without_nan(logits)
    best, largest = sample_reference.argmax(logits, None if collectives.size == 1 else collectives)
    largest = finite(largest.reshape(-1, 1))
    sums = collectives.all_reduce(jnp.sum(jnp.exp(logits - largest), axis=1, keepdims=True))
    log_sum = largest + jnp.log(sums)
    target = _logits_at(logits, targets, collectives)
    logprobs = jnp.where(target == -_INF, -_INF, target - log_sum)
    return TargetScores(logprobs[:, 0], best == targets)


# ---------------------------------------------------------------------------------------------------------------------
# State: one slot starts, one token is added
# ---------------------------------------------------------------------------------------------------------------------

_CORE_FIELDS = ("temperature", "top_p", "min_p", "top_k", "seed_low", "seed_high", "min_len", "max_len", "uses_extras")
CORE_RECORD_WORDS = len(_CORE_FIELDS) + MAX_STOP_TOKEN_IDS
"""int32 words of a `core_record`."""


def init_state(num_slots: int) -> SamplingState:
    """State for slots 0..num_slots-1 and the null slot `num_slots`, all greedy."""
    rows = num_slots + 1
    return SamplingState(
        temperature=jnp.zeros(rows, jnp.float32),
        top_p=jnp.ones(rows, jnp.float32),
        min_p=jnp.zeros(rows, jnp.float32),
        top_k=jnp.zeros(rows, jnp.int32),
        seed=jnp.zeros((rows, 2), jnp.uint32),
        min_len=jnp.zeros(rows, jnp.int32),
        max_len=jnp.full(rows, np.iinfo(np.int32).max, jnp.int32),
        uses_extras=jnp.zeros(rows, jnp.bool_),
        stop_token_ids=jnp.full((rows, MAX_STOP_TOKEN_IDS), NO_TOKEN, jnp.int32),
    )


def init_full_state(num_slots: int, vocab_size: int, shard_vocab_size: int | None = None) -> FullSamplingState:
    """The extras of slots 0..num_slots-1 and the null slot, all neutral.

    shard_vocab_size: columns that a shard has of the vocabulary, where it is split.
    """
    rows = num_slots + 1
    return FullSamplingState(
        presence=jnp.zeros(rows, jnp.float32),
        frequency=jnp.zeros(rows, jnp.float32),
        repetition=jnp.ones(rows, jnp.float32),
        token_counts=jnp.zeros((rows, shard_vocab_size or vocab_size), jnp.int32),
        bias_ids=jnp.full((rows, MAX_LOGIT_BIAS), NO_TOKEN, jnp.int32),
        bias_values=jnp.zeros((rows, MAX_LOGIT_BIAS), jnp.float32),
        allowed=jnp.full((rows, _mask_words(vocab_size)), 0xFFFFFFFF, jnp.uint32),
        bad_words=jnp.full((rows, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), NO_TOKEN, jnp.int32),
        recent=jnp.full((rows, MAX_BAD_WORD_TOKENS - 1), NO_TOKEN, jnp.int32),
    )


def uses_extras(params: SamplingParams) -> bool:
    """Whether a request needs its row of `FullSamplingState` written (logprobs and min_tokens do not)."""
    return bool(params.uses_penalties or params.logit_bias or params.allowed_token_ids is not None or params.bad_words)


def core_record(
    params: SamplingParams, *, seed: int, stop_token_ids: Sequence[int], prompt_len: int, max_len: int
) -> np.ndarray:
    """On the host: a request's row of `SamplingState`, packed into int32 [CORE_RECORD_WORDS] for `start_slots`.

    seed: any integer; its low 64 bits count. stop_token_ids, max_len: as in `SlotStart`.

    Raises:
        InvalidParameterError: more than MAX_STOP_TOKEN_IDS stop tokens.
    """
    stops = sorted(set(stop_token_ids))
    if len(stops) > MAX_STOP_TOKEN_IDS:
        raise InvalidParameterError(
            f"the request has {len(stops)} stop tokens, its model's included; at most {MAX_STOP_TOKEN_IDS} are tested."
        )
    record = np.full(CORE_RECORD_WORDS, NO_TOKEN, np.int32)
    record[:3].view(np.float32)[:] = min(params.temperature, _HIGHEST_TEMPERATURE), params.top_p, params.min_p
    record[3] = min(max(params.top_k, 0), np.iinfo(np.int32).max)
    record[4:6].view(np.uint32)[:] = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    record[6:9] = min(prompt_len + params.min_tokens, np.iinfo(np.int32).max), max_len, uses_extras(params)
    record[9 : 9 + len(stops)] = stops
    return record


def start_slots(state: SamplingState, slots: jax.Array, records: jax.Array) -> SamplingState:
    """Writes the rows of slots that start. slots: int32 [C], the null slot where unused; records: int32 [C, words]."""
    rows = _droppable(slots, state.temperature.shape[0])
    floats = lax.bitcast_convert_type(records[:, :3], jnp.float32)
    new = SamplingState(
        temperature=floats[:, 0],
        top_p=floats[:, 1],
        min_p=floats[:, 2],
        top_k=records[:, 3],
        seed=lax.bitcast_convert_type(records[:, 4:6], jnp.uint32),
        min_len=records[:, 6],
        max_len=records[:, 7],
        uses_extras=records[:, 8] != 0,
        stop_token_ids=records[:, len(_CORE_FIELDS) :],
    )
    return jax.tree.map(lambda old, values: old.at[rows].set(values, mode="drop"), state, new)


def full_record_words(vocab_size: int) -> int:
    """int32 words of a `full_record`."""
    return 3 + 2 * MAX_LOGIT_BIAS + MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS + _mask_words(vocab_size)


def full_record(
    params: SamplingParams, *, vocab_size: int, bad_words_token_ids: Sequence[Sequence[int]] = ()
) -> np.ndarray:
    """On the host: a request's row of `FullSamplingState`, packed into int32 [full_record_words(vocab_size)].

    Raises:
        InvalidParameterError: a token id outside the vocabulary, or too many or too long bad words.
    """
    if len(bad_words_token_ids) > MAX_BAD_WORDS:
        raise InvalidParameterError(
            f"bad_words come to {len(bad_words_token_ids)} token sequences; at most {MAX_BAD_WORDS} are supported."
        )
    bad_words = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), NO_TOKEN, np.int32)
    for row, word in zip(bad_words, bad_words_token_ids, strict=False):
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            raise InvalidParameterError(
                f"bad_words has a word of {len(word)} tokens; it must have from 1 to {MAX_BAD_WORD_TOKENS}."
            )
        row[-len(word) :] = _checked_ids("bad_words", word, vocab_size)

    bias = params.logit_bias or {}
    bias_ids = np.full(MAX_LOGIT_BIAS, NO_TOKEN, np.int32)
    bias_values = np.zeros(MAX_LOGIT_BIAS, np.float32)
    bias_ids[: len(bias)] = _checked_ids("logit_bias", tuple(bias), vocab_size)
    bias_values[: len(bias)] = tuple(bias.values())

    if params.allowed_token_ids is None:
        mask = np.full(_mask_words(vocab_size), 0xFFFFFFFF, np.uint32)
    else:
        bits = np.zeros(_mask_words(vocab_size) * 32, np.uint8)
        bits[_checked_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)] = 1
        mask = np.packbits(bits, bitorder="little").view(np.dtype("<u4")).astype(np.uint32)

    # Divided or multiplied by a float32 zero or infinity a logit would become NaN, so extreme penalties are clipped.
    repetition = np.clip(params.repetition_penalty, np.finfo(np.float32).tiny, _LARGEST)
    penalties = np.array([params.presence_penalty, params.frequency_penalty, repetition], np.float32)
    parts = (penalties, bias_ids, bias_values, bad_words.reshape(-1), mask)
    return np.concatenate([part.view(np.int32) for part in parts])


def start_full_slot(full: FullSamplingState, slot: jax.Array, record: jax.Array) -> FullSamplingState:
    """Writes one slot's extras and forgets its tokens; `add_known_tokens` must then follow for all known tokens.

    slot: int32 []; the null slot is left alone. record: int32 [full_record_words(V)].
    """
    row = _droppable(slot, full.presence.shape[0])
    ends = np.cumsum([3, MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS]).tolist()
    penalties, bias_ids, bias_values, bad_words, mask = jnp.split(record, ends)
    penalties = lax.bitcast_convert_type(penalties, jnp.float32)
    new = FullSamplingState(
        presence=penalties[0],
        frequency=penalties[1],
        repetition=penalties[2],
        token_counts=jnp.zeros(full.token_counts.shape[1:], jnp.int32),
        bias_ids=bias_ids,
        bias_values=lax.bitcast_convert_type(bias_values, jnp.float32),
        allowed=lax.bitcast_convert_type(mask, jnp.uint32),
        bad_words=bad_words.reshape(MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS),
        recent=jnp.full(full.recent.shape[1:], NO_TOKEN, jnp.int32),
    )
    return jax.tree.map(lambda old, values: old.at[row].set(values, mode="drop"), full, new)


def add_known_tokens(
    full: FullSamplingState,
    slot: jax.Array,
    token_ids: jax.Array,
    start: jax.Array,
    prompt_len: jax.Array,
    collectives: Collectives = ALONE,
) -> FullSamplingState:
    """Tells a slot that starts about its known tokens, in order and in chunks of any one fixed size.

    slot: int32 []. token_ids: int32 [C]; they stand at positions start .. start+C-1, NO_TOKEN fills up the last chunk.
    prompt_len: int32 []; tokens before this position are the prompt's, the others the output's.
    """
    num_rows, vocab_size = full.token_counts.shape
    row = _droppable(slot, num_rows)
    valid = token_ids != NO_TOKEN
    in_prompt = start + jnp.arange(token_ids.shape[0], dtype=jnp.int32) < prompt_len
    ids = _own_columns(token_ids, vocab_size, collectives)
    zeros = jnp.zeros(vocab_size, jnp.int32)
    prompt_bits = zeros.at[ids].max(in_prompt.astype(jnp.int32), mode="drop")
    output_counts = zeros.at[ids].add(jnp.where(in_prompt, 0, 2), mode="drop")
    counts = (full.token_counts[slot] + output_counts) | prompt_bits

    history = jnp.concatenate([full.recent[slot], token_ids])
    kept = full.recent.shape[1]
    recent = lax.dynamic_slice(history, (jnp.sum(valid, dtype=jnp.int32),), (kept,))
    return full._replace(
        token_counts=full.token_counts.at[row].set(counts, mode="drop"),
        recent=full.recent.at[row].set(recent, mode="drop"),
    )


def add_sampled_tokens(
    full: FullSamplingState, slots: jax.Array, token_ids: jax.Array, collectives: Collectives = ALONE
) -> FullSamplingState:
    """Adds one new output token to each row's slot. slots: int32 [R], the null slot where nothing was sampled."""
    rows = _droppable(slots, full.presence.shape[0])
    recent = jnp.concatenate([full.recent[slots][:, 1:], token_ids[:, None]], axis=1)
    columns = token_ids if collectives.size == 1 else _own_columns(token_ids, full.token_counts.shape[1], collectives)
    return full._replace(
        token_counts=full.token_counts.at[rows, columns].add(2, mode="drop"),
        recent=full.recent.at[rows].set(recent, mode="drop"),
    )


def _droppable(slots: jax.Array, num_rows: int) -> jax.Array:
    """The null slot becomes an index past the end, which a scatter in "drop" mode leaves out."""
    return jnp.where(slots == num_rows - 1, num_rows, slots)


def _mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def _checked_ids(name: str, ids: Sequence[int], vocab_size: int) -> np.ndarray:
    array = np.asarray(ids, np.int64)
    wrong = array[(array < 0) | (array >= vocab_size)]
    if wrong.size:
        raise InvalidParameterError(
            f"{name} names token {wrong[0]}, but the vocabulary has {vocab_size} tokens (0 to {vocab_size - 1})."
        )
    return array


# ---------------------------------------------------------------------------------------------------------------------
# Small parts
# ---------------------------------------------------------------------------------------------------------------------


def _draw(
    logits: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    state: SamplingState,
    collectives: Collectives,
    *,
    truncates: bool,
) -> jax.Array:
    """Temperature, min_p, top_k, top_p and the draw: float32 [R, V] -> int32 [R]."""
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
        return sample_tokens(*arguments)
    return sample_reference.sample_tokens(*arguments, shards=collectives)


def _most_likely(logits: jax.Array, collectives: Collectives) -> jax.Array:
    shards = None if collectives.size == 1 else collectives
    return sample_reference.argmax(without_nan(logits), shards)[0]


def _own_columns(token_ids: jax.Array, width: int, collectives: Collectives) -> jax.Array:
    """Token ids as columns of this shard's `width`; past the end, where scatters drop them, for tokens it has not."""
    # A negative index would count from the end instead of being dropped.
    if collectives.size == 1:
        return jnp.where(token_ids < 0, width, token_ids)
    columns = token_ids - collectives.first(width)
    return jnp.where((columns < 0) | (columns >= width) | (token_ids < 0), width, columns)


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


def _logits_at(logits: jax.Array, token_ids: jax.Array, collectives: Collectives) -> jax.Array:
    """Each row's logit of one token, which one of the shards has: float32 [R, 1]."""
    if collectives.size == 1:
        return jnp.take_along_axis(logits, token_ids[:, None], axis=1)
    width = logits.shape[1]
    columns = _own_columns(token_ids, width, collectives)[:, None]
    own = jnp.take_along_axis(logits, jnp.minimum(columns, width - 1), axis=1)
    return collectives.all_max(jnp.where(columns < width, own, -_INF))


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
    num_blocks = -(-vocab_size // _TOP_LOGPROBS_BLOCK)
    logits = jnp.where(logits == 0, 0.0, logits)  # lax.top_k puts -0.0 below 0.0
    if num_blocks <= k:
        values, ids = lax.top_k(logits, k)
        return ids, values
    padding = num_blocks * _TOP_LOGPROBS_BLOCK - vocab_size
    blocks = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-_INF)
    blocks = blocks.reshape(num_rows, num_blocks, _TOP_LOGPROBS_BLOCK)
    chosen = jnp.sort(lax.top_k(jnp.max(blocks, axis=2), k)[1], axis=1)  # by id again, for the order of ties
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1)
    values, places = lax.top_k(candidates.reshape(num_rows, -1), k)
    block = jnp.take_along_axis(chosen, places // _TOP_LOGPROBS_BLOCK, axis=1)
    return block * _TOP_LOGPROBS_BLOCK + places % _TOP_LOGPROBS_BLOCK, values
