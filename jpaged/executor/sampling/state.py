"""What sampling knows of each slot, on the device: a row of arrays.

    a request's record (`sampling_records.py`), int32 words --start_slots, start_full_slot--> a slot's rows
               known and sampled tokens --add_known_tokens, add_sampled_tokens--> their counts

Every array has one row a slot and one more, the **null slot**: row S of S + 1. Padded rows of a step name it. It holds
greedy parameters, and no function here ever writes to it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpaged.api.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
)
from jpaged.engine.interface import NO_TOKEN
from jpaged.executor.sampling.records import CORE_FIELDS, mask_words
from jpaged.models.collectives import ALONE, Collectives


class SamplingState(NamedTuple):
    """What every sampling program reads; one row a slot.

    temperature, top_p, min_p: float32 [S + 1].
    top_k: int32 [S + 1]; 0 or less keeps all.
    seed: uint32 [S + 1, 2]; the low and the high half of a 64-bit seed.
    min_len: int32 [S + 1]; stop tokens are not sampled while the sequence is shorter, the prompt included.
    max_len: int32 [S + 1]; total length in tokens at which the sequence stops.
    uses_extras: bool [S + 1]; whether the slot's row of `FullSamplingState` is its own. Otherwise that row is stale
        and is ignored, so a request that asks for no extras need not write one.
    uses_mask: bool [S + 1]; whether the slot's row of the masks (`init_masks`) is its own. Not where a table says what
        the slot may sample (`tables.py`).
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
    uses_mask: jax.Array
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
        uses_mask=jnp.zeros(rows, jnp.bool_),
        stop_token_ids=jnp.full((rows, MAX_STOP_TOKEN_IDS), NO_TOKEN, jnp.int32),
    )


def init_masks(num_slots: int, vocab_size: int) -> jax.Array:
    """What each slot may sample under its constraint, uint32 [num_slots + 1, ceil(V / 32)]: bit v % 32 of word v // 32
    is set if token v may be sampled. 19 KB a slot at V = 152k.
    """
    return jnp.full((num_slots + 1, mask_words(vocab_size)), 0xFFFFFFFF, jnp.uint32)


def set_masks(masks: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    """Writes the masks of some slots. slots: int32 [C], the null slot where unused; rows: uint32 [C, words]."""
    return masks.at[_droppable(slots, masks.shape[0])].set(rows, mode="drop")


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
        allowed=jnp.full((rows, mask_words(vocab_size)), 0xFFFFFFFF, jnp.uint32),
        bad_words=jnp.full((rows, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), NO_TOKEN, jnp.int32),
        recent=jnp.full((rows, MAX_BAD_WORD_TOKENS - 1), NO_TOKEN, jnp.int32),
    )


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
        uses_mask=records[:, 9] != 0,
        stop_token_ids=records[:, len(CORE_FIELDS) :],
    )
    return jax.tree.map(lambda old, values: old.at[rows].set(values, mode="drop"), state, new)


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
    ids = collectives.columns(token_ids, vocab_size)
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
    columns = collectives.columns(token_ids, full.token_counts.shape[1])
    return full._replace(
        token_counts=full.token_counts.at[rows, columns].add(2, mode="drop"),
        recent=full.recent.at[rows].set(recent, mode="drop"),
    )


def _droppable(slots: jax.Array, num_rows: int) -> jax.Array:
    """The null slot becomes an index past the end, which a scatter in "drop" mode leaves out."""
    return jnp.where(slots == num_rows - 1, num_rows, slots)
