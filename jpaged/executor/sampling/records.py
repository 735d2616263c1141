"""What sampling needs to know of a request, packed on the host for a slot's rows on the device.

    SamplingParams --core_record, full_record--> int32 words --> `sampling_state.py`

This module needs no JAX.
"""

from collections.abc import Sequence

import numpy as np

from jpaged.api.errors import InvalidParameterError
from jpaged.api.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
    check_token_ids,
)
from jpaged.engine.interface import NO_TOKEN

CORE_FIELDS = (
    *("temperature", "top_p", "min_p", "top_k", "seed_low", "seed_high", "min_len", "max_len"),
    *("uses_extras", "uses_mask"),
)
CORE_RECORD_WORDS = len(CORE_FIELDS) + MAX_STOP_TOKEN_IDS
"""int32 words of a `core_record`."""

_HIGHEST_TEMPERATURE = 1e30  # its reciprocal is still above zero in float32


def uses_extras(params: SamplingParams) -> bool:
    """Whether a request needs its row of `FullSamplingState` written (logprobs and min_tokens do not)."""
    return bool(params.uses_penalties or params.logit_bias or params.allowed_token_ids is not None or params.bad_words)


def core_record(
    params: SamplingParams,
    *,
    seed: int,
    stop_token_ids: Sequence[int],
    prompt_len: int,
    max_len: int,
    has_table: bool = False,
) -> np.ndarray:
    """On the host: a request's row of `SamplingState`, packed into int32 [CORE_RECORD_WORDS] for `start_slots`.

    seed: any integer; its low 64 bits count. stop_token_ids, max_len: as in `SlotStart`. has_table: the
    device follows its constraint by a table, and is sent no masks for it.

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
    record[6:8] = min(prompt_len + params.min_tokens, np.iinfo(np.int32).max), max_len
    record[8:10] = uses_extras(params), params.structured_outputs is not None and not has_table
    record[10 : 10 + len(stops)] = stops
    return record


def full_record_words(vocab_size: int) -> int:
    """int32 words of a `full_record`."""
    return 3 + 2 * MAX_LOGIT_BIAS + MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS + mask_words(vocab_size)


def full_record(
    params: SamplingParams, *, vocab_size: int, bad_words_token_ids: Sequence[Sequence[int]] = ()
) -> np.ndarray:
    """On the host: a request's row of `FullSamplingState`, packed into int32 [full_record_words(vocab_size)].

    Raises:
        InvalidParameterError: a token id outside the vocabulary, or too many or too long bad words.
    """
    check_token_ids(params, vocab_size, bad_words_token_ids)
    bad_words = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), NO_TOKEN, np.int32)
    for row, word in zip(bad_words, bad_words_token_ids, strict=False):
        row[-len(word) :] = word

    bias = params.logit_bias or {}
    bias_ids = np.full(MAX_LOGIT_BIAS, NO_TOKEN, np.int32)
    bias_values = np.zeros(MAX_LOGIT_BIAS, np.float32)
    bias_ids[: len(bias)] = tuple(bias)
    bias_values[: len(bias)] = tuple(bias.values())

    if params.allowed_token_ids is None:
        mask = np.full(mask_words(vocab_size), 0xFFFFFFFF, np.uint32)
    else:
        bits = np.zeros(mask_words(vocab_size) * 32, np.uint8)
        bits[np.asarray(params.allowed_token_ids, np.int64)] = 1
        mask = np.packbits(bits, bitorder="little").view(np.dtype("<u4")).astype(np.uint32)

    penalties = np.array([params.presence_penalty, params.frequency_penalty, params.repetition_penalty], np.float32)
    parts = (penalties, bias_ids, bias_values, bad_words.reshape(-1), mask)
    return np.concatenate([part.view(np.int32) for part in parts])


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)
