"""Log-probabilities, ranks and alternatives, against an independent reference."""

import jax
import numpy as np
import pytest

from jpaged.api.sampling_params import SamplingParams
from jpaged.engine.interface import NO_TOKEN
from tests.executor.sampling.helpers import (
    BAD_ROWS,
    VOCAB,
    Slots,
    logprobs_of,
    reference_logits,
    reference_probabilities,
    request_logits,
)


@pytest.mark.parametrize(("vocab", "k"), [(VOCAB, 20), (VOCAB, 0), (12, 20), (1000, 5), (2561, 20), (5000, 20)])
@pytest.mark.parametrize("ties", [False, True])
def test_logprobs_ranks_and_alternatives_equal_the_reference(vocab, k, ties):
    rng = np.random.default_rng(vocab + k)
    logits = (rng.normal(size=(9, vocab)) * 3).astype(np.float32)
    if ties:
        logits = np.round(logits)
    logits[0, ::2] = -np.inf
    targets = rng.integers(0, vocab, 9).astype(np.int32)
    result = logprobs_of(logits, targets, k=k)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact - exact.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True)) + exact.max(
        axis=1, keepdims=True
    )
    chosen = np.take_along_axis(logits, targets[:, None], axis=1)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    padding = ((0, 0), (0, k - order.shape[1]))
    top = np.pad(np.take_along_axis(exact, order, axis=1), padding, constant_values=-np.inf)
    np.testing.assert_array_equal(result.top_ids, np.pad(order, padding, constant_values=NO_TOKEN))
    np.testing.assert_allclose(result.top_logprobs, top, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        result.token_logprobs, np.take_along_axis(exact, targets[:, None], axis=1)[:, 0], rtol=1e-5, atol=1e-5
    )
    np.testing.assert_array_equal(result.token_ranks, 1 + (logits > chosen).sum(axis=1))


def test_logprobs_are_those_of_the_logits_before_anything_is_done_to_them():
    params = SamplingParams(logit_bias={5: 100.0}, temperature=0.1, top_k=3, logprobs=20)
    logits = request_logits(12)
    output = Slots().start(params).sample(logits[None], [0], [4])
    assert output.token_ids.tolist() == [5]
    expected = logprobs_of(logits[None], np.array([5]), k=20)
    jax.tree.map(np.testing.assert_array_equal, output.logprobs, expected)
    assert output.logprobs.top_ids.shape == (1, 20)


PROCESSED = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.0, "top_k": 9},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 0.8, "top_p": 0.6},
    "min_p": {"temperature": 1.3, "min_p": 0.1},
    "all": {"temperature": 0.9, "min_p": 0.02, "top_k": 12, "top_p": 0.9, "logit_bias": {7: 2.0, 8: -100.0}},
    "one": {"temperature": 1.0, "top_k": 1},
    "greedy": {"temperature": 0.0, "presence_penalty": 1.5, "top_k": 2},
}


def test_processed_logprobs_are_those_of_the_distribution_that_tokens_are_drawn_from():
    slots, prompt, output = Slots(), [1, 2, 3], [9, 11, 9]
    params = {name: SamplingParams(**options, logprobs=20) for name, options in PROCESSED.items()}
    for slot, one in enumerate(params.values()):
        slots.start(one, slot, seed=slot, prompt=prompt, output=output)
    logits = np.stack([request_logits(seed) for seed in range(len(params))])
    rows = np.arange(len(params))
    found = slots.sample(logits, rows, rows + 6, logprobs_mode="processed_logprobs")
    np.testing.assert_array_equal(found.token_ids, slots.sample(logits, rows, rows + 6).token_ids)
    for row, (name, one) in enumerate(params.items()):
        processed = reference_logits(logits[row], one, prompt, output)
        if one.temperature == 0:
            exact = np.exp(processed - processed.max())
        else:
            exact = reference_probabilities(processed, one)
        exact /= exact.sum()
        with np.errstate(divide="ignore"):
            expected = np.log(exact)
        token = found.token_ids[row]
        assert np.isfinite(expected[token]), name
        np.testing.assert_allclose(found.logprobs.token_logprobs[row], expected[token], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.logprobs.top_logprobs[row], np.sort(expected)[::-1][:20], rtol=1e-4, atol=1e-5)
        assert found.logprobs.token_ranks[row] == 1 + (expected > expected[token]).sum()


def test_processed_logprobs_of_bad_rows_are_not_nan():
    logits = np.stack([*BAD_ROWS.values()]).astype(np.float32)
    slots = Slots()
    for slot, options in enumerate(({"temperature": 1.0, "top_p": 0.5}, {"temperature": 0.0}, {"min_p": 0.3})):
        slots.start(SamplingParams(**options, logprobs=5), slot)
        found = slots.sample(logits, [slot] * len(logits), range(len(logits)), logprobs_mode="processed_logprobs")
        assert not any(np.isnan(part).any() for part in found.logprobs)


def test_logprobs_of_bad_rows_and_absent_targets_are_not_nan():
    logits = np.stack([*BAD_ROWS.values()]).astype(np.float32)
    for target in (NO_TOKEN, 1):
        result = logprobs_of(logits, np.full(len(logits), target, np.int32), k=20)
        assert not any(np.isnan(np.asarray(part)).any() for part in result)
        assert ((result.top_ids >= 0) & (result.top_ids < VOCAB)).all()
        assert (np.sort(np.asarray(result.top_ids), axis=1)[:, 1:] != np.sort(result.top_ids, axis=1)[:, :-1]).all()
