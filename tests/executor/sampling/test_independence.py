"""Requests that share a batch do not see each other."""

import jax
import numpy as np
import pytest

from jpaged.api.sampling_params import SamplingParams
from jpaged.engine.interface import SamplingVariant
from jpaged.executor.sampling import records as sampling_records
from tests.executor.sampling.helpers import (
    FULL,
    SAMPLING,
    TRUNCATED,
    VOCAB,
    Slots,
    add_known_tokens,
    add_sampled_tokens,
    request_logits,
    start_full_slot,
    start_slots,
)


def generate(requests, rows, steps=12, variant=FULL):
    """Runs requests side by side; the row and slot of each are given, and the rest of the batch is padding.

    requests: [(params, seed, logits seed)]; rows: [(row, slot)]; the batch has as many rows as needed.
    Each request's logits depend on the request and its last token alone, as a model's would.
    """
    slots = Slots()
    prompt = [1, 2, 3]
    for (params, seed, _), (_, slot) in zip(requests, rows, strict=True):
        slots.start(params, slot, seed=seed, prompt=prompt, stops=[0], bad_words=[[5, 6]] if params.bad_words else [])
    num_rows = max(row for row, _ in rows) + 1
    batch_slots = np.full(num_rows, slots.null, np.int32)
    for row, slot in rows:
        batch_slots[row] = slot
    tables = {s: np.random.default_rng(s).normal(size=(VOCAB, VOCAB)) * 2 for _, _, s in requests}
    tokens = [[prompt[-1]] for _ in requests]
    for step in range(steps):
        logits = np.full((num_rows, VOCAB), np.nan, np.float32)
        for (_, _, table), (row, _), known in zip(requests, rows, tokens, strict=True):
            logits[row] = tables[table][known[-1]]
        ids = slots.sample(logits, batch_slots, np.full(num_rows, len(prompt) + step), variant).token_ids
        slots.full = add_sampled_tokens(slots.full, batch_slots, ids)
        for (row, _), known in zip(rows, tokens, strict=True):
            known.append(int(ids[row]))
    return [known[1:] for known in tokens]


@pytest.mark.parametrize("variant", [SAMPLING, TRUNCATED, FULL])
def test_a_seeded_request_gives_the_same_tokens_alone_and_among_31_others(variant):
    extras = {"presence_penalty": 1.0, "bad_words": ["x"], "logit_bias": {4: 1.0}} if variant == FULL else {}
    mine = (SamplingParams(top_p=0.9, top_k=30, temperature=1.2, **extras), 2**63 - 17, 99)
    others = [(SamplingParams(temperature=0.1 * i, top_k=i, frequency_penalty=0.05 * i), i, i) for i in range(31)]
    (alone,) = generate([mine], [(0, 0)], variant=variant)
    rng = np.random.default_rng(6)
    places = list(zip(rng.permutation(32), rng.permutation(40)[:32], strict=True))
    among = generate([*others[:16], mine, *others[16:]], places, variant=variant)
    assert among[16] == alone
    assert len(set(map(tuple, among))) > 20  # the others are not all alike, or the test would show nothing
    # The noise depends on the seed: another one gives other tokens.
    assert generate([(mine[0], 5, 99)], [(0, 0)], variant=variant) != [alone]


def test_seeds_have_64_bits_and_may_be_negative():
    logits = np.zeros((64, VOCAB))

    def draws(seed):
        slots = Slots().start(SamplingParams(), seed=seed)
        return tuple(slots.sample(logits, np.zeros(64), np.arange(64), TRUNCATED).token_ids)

    assert len({draws(seed) for seed in (0, 1, -1, 2**32, 2**62, -(2**63), 2**63 - 1)}) == 7
    assert draws(-1 + 2**64) == draws(-1)


def test_padded_rows_change_nothing_and_get_valid_tokens():
    params = SamplingParams(presence_penalty=1.0, allowed_token_ids=[1, 2, 3], bad_words=["x"])
    slots = Slots().start(params, 1, prompt=[1, 2], bad_words=[[2, 3]])
    before = jax.tree.map(np.asarray, (slots.state, slots.full))
    padding = np.full(5, slots.null, np.int32)
    logits = np.random.default_rng(7).normal(size=(5, VOCAB))
    logits[1] = np.nan
    for variant in SamplingVariant:
        ids = np.asarray(slots.sample(logits, padding, np.arange(5), variant).token_ids)
        assert ((ids >= 0) & (ids < VOCAB)).all()
    full = add_sampled_tokens(slots.full, padding, ids)
    full = start_full_slot(full, np.int32(slots.null), sampling_records.full_record(params, vocab_size=VOCAB))
    full = add_known_tokens(full, np.int32(slots.null), ids, np.int32(0), np.int32(2))
    state = start_slots(slots.state, padding, np.full((5, sampling_records.CORE_RECORD_WORDS), 123456, np.int32))
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, (state, full)))


def test_stale_extras_of_a_slot_do_not_touch_its_next_request():
    logits = request_logits(2)
    slots = Slots().start(
        SamplingParams(repetition_penalty=2.0, logit_bias={1: 50.0}, allowed_token_ids=[1, 2], bad_words=["x"]),
        prompt=[1, 2, 3],
        bad_words=[[1]],
    )
    params = SamplingParams(logprobs=1)
    slots.start(params, seed=4)
    np.testing.assert_array_equal(slots.draws(logits, FULL), Slots().start(params, seed=4).draws(logits, TRUNCATED))
