"""Draws have the distribution that a float64 reference gives."""

import math

import numpy as np
import pytest
from scipy import stats

from jpaged.api.sampling_params import SamplingParams
from tests.executor.sampling.helpers import (
    BAD_WORDS,
    DRAWS,
    EXTRAS,
    FULL,
    OUTPUT,
    PROMPT,
    SAMPLING,
    STOPS,
    TRUNCATED,
    VOCAB,
    Slots,
    assert_distributed_as,
    reference_logits,
    reference_probabilities,
    request_logits,
)

TRUNCATIONS = [
    {},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"temperature": 1e38},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": VOCAB - 1},
    {"top_k": VOCAB},
    {"top_k": 10**12},
    {"top_k": -1},
    {"top_p": 5e-324},
    {"top_p": 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.9, "temperature": 0.7},
    {"top_p": 0.9999},
    {"top_p": math.nextafter(1, 0)},
    {"min_p": 1.0},
    {"min_p": 0.2},
    {"min_p": 1e-3, "temperature": 1.5},
    {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    {"top_k": 8, "top_p": 0.7, "min_p": 0.05, "temperature": 2.5},
]


@pytest.mark.parametrize("kwargs", TRUNCATIONS, ids=str)
def test_temperature_and_truncation_give_the_reference_distribution(kwargs):
    params, logits = SamplingParams(**kwargs), request_logits()
    draws = Slots().start(params, seed=11).draws(logits, TRUNCATED)
    assert_distributed_as(draws, reference_probabilities(logits, params))


def test_full_draws_what_sampling_draws_and_truncation_is_left_out_only_where_it_does_nothing():
    slots = Slots()
    for slot, kwargs in enumerate(TRUNCATIONS):
        slots.start(SamplingParams(**kwargs), slot, seed=slot)
    logits = np.random.default_rng(1).normal(size=(DRAWS, VOCAB)) * 3
    rows = np.arange(DRAWS) % len(TRUNCATIONS)
    batch = (logits, rows, np.arange(DRAWS))
    ids = slots.sample(*batch, TRUNCATED).token_ids
    np.testing.assert_array_equal(slots.sample(*batch, FULL).token_ids, ids)
    same = slots.sample(*batch, SAMPLING).token_ids == ids
    for slot, kwargs in enumerate(TRUNCATIONS):
        if not SamplingParams(**kwargs).truncates:
            assert same[rows == slot].all()
    assert not same.all()


@pytest.mark.parametrize("kwargs", EXTRAS, ids=str)
def test_masks_bias_and_penalties_give_the_reference_distribution(kwargs):
    params = SamplingParams(**kwargs)
    request = {"prompt": PROMPT, "output": OUTPUT, "stops": STOPS, "bad_words": BAD_WORDS if params.bad_words else []}
    expected = reference_probabilities(reference_logits(request_logits(1), params, **request), params)
    slots = Slots().start(params, seed=-5, **request)
    assert_distributed_as(slots.draws(request_logits(1), first_position=len(PROMPT) + len(OUTPUT)), expected)


def test_noise_is_independent_across_positions_seeds_and_tokens():
    logits = np.zeros(6)
    first = Slots().start(SamplingParams(), seed=1).draws(logits, TRUNCATED)
    uniform = np.full(36, 1 / 36)
    assert_distributed_as(first[:-1] * 6 + first[1:], uniform)
    assert_distributed_as(first * 6 + Slots().start(SamplingParams(), seed=2).draws(logits, TRUNCATED), uniform)
    assert_distributed_as(first * 6 + Slots().start(SamplingParams(), seed=1 + 2**32).draws(logits, TRUNCATED), uniform)
    # The runner-up is independent of the winner, too: without the winner the same noise draws uniformly again.
    winner = 5
    second = Slots().start(SamplingParams(), seed=1).draws(np.where(np.arange(6) == winner, -np.inf, 0), TRUNCATED)
    np.testing.assert_array_equal(second[first != winner], first[first != winner])
    assert_distributed_as(second[first == winner], np.array([0.2] * 5 + [0.0]))


def test_rare_tokens_of_a_large_vocabulary_get_their_share():
    vocab, rows = 20_000, 250
    logits = np.zeros(vocab)
    logits[0] = math.log(vocab - 1)  # half of the mass; each other token has 2.5e-5
    slots = Slots(vocab=vocab).start(SamplingParams(), seed=3)
    ids = np.concatenate(
        [
            slots.sample(
                np.broadcast_to(logits, (rows, vocab)),
                np.zeros(rows),
                np.arange(start, start + rows),
                SAMPLING,
            ).token_ids
            for start in range(0, 2000, rows)
        ]
    )
    others = np.bincount(np.digitize(ids[ids > 0], np.linspace(1, vocab, 11)[1:-1]), minlength=10)
    assert_distributed_as((ids > 0).astype(int), np.array([0.5, 0.5]))
    assert stats.chisquare(others).pvalue > 1e-3
