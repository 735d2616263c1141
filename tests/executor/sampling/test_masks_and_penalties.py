"""What is done to logits, against an independent reference, and at its edges."""

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.api.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams
from jpaged.api.structured_outputs import StructuredOutputsParams
from jpaged.engine.interface import NO_TOKEN, NUM_RANKED, FinishCode
from jpaged.executor.sampling import sampler
from tests.executor.sampling.helpers import (
    BAD_WORDS,
    EXTRAS,
    FULL,
    MASKED,
    OUTPUT,
    PROMPT,
    SAMPLING,
    SLOTS,
    STOPS,
    TRUNCATED,
    VOCAB,
    Slots,
    add_sampled_tokens,
    assert_distributed_as,
    process_logits,
    reference_logits,
    reference_probabilities,
    request_logits,
    set_masks,
)


@pytest.mark.parametrize("kwargs", EXTRAS, ids=str)
def test_processed_logits_equal_the_reference(kwargs):
    params = SamplingParams(**kwargs)
    request = {"prompt": PROMPT, "output": OUTPUT, "stops": STOPS, "bad_words": BAD_WORDS if params.bad_words else []}
    slots = Slots().start(params, 2, **request)
    logits = np.stack([request_logits(3), request_logits(4)])
    position = len(PROMPT) + len(OUTPUT)
    result = process_logits(logits, np.array([2, 3]), np.array([position, position]), slots.state, slots.full)
    np.testing.assert_allclose(result[0], reference_logits(logits[0], params, **request), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(result[1], logits[1])


CONSTRAINED = StructuredOutputsParams(regex="a")


def mask_of(*tokens: int) -> np.ndarray:
    bits = np.zeros(64, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


@pytest.mark.parametrize("variant", [MASKED, FULL])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constrained_row_samples_what_its_mask_allows_and_another_what_it_likes(variant, temperature):
    slots = Slots().start(SamplingParams(temperature=temperature, structured_outputs=CONSTRAINED), 2)
    slots.start(SamplingParams(temperature=0.0), 3)
    allowed = [3, 31, 32, VOCAB - 1]
    slots.masks = set_masks(slots.masks, np.array([2, 3, slots.null]), np.stack([mask_of(*allowed), *[mask_of(0)] * 2]))
    logits = np.stack([request_logits(seed) for seed in range(64)])
    own = slots.sample(logits, np.full(64, 2), np.arange(64), variant).token_ids
    free = slots.sample(logits, np.full(64, 3), np.arange(64), variant).token_ids
    assert set(own.tolist()) == set(allowed)
    if not temperature:
        assert own.tolist() == [allowed[i] for i in logits[:, allowed].argmax(axis=1)]
    assert free.tolist() == logits.argmax(axis=1).tolist()


def test_a_masked_draw_is_distributed_as_the_allowed_tokens_are_truncation_included():
    params = SamplingParams(temperature=0.8, top_k=3, top_p=0.9, structured_outputs=CONSTRAINED)
    slots, allowed, logits = Slots().start(params), list(range(0, VOCAB, 3)), request_logits(5)
    slots.masks = set_masks(slots.masks, np.array([0]), mask_of(*allowed)[None])
    masked = np.full(VOCAB, -np.inf)
    masked[allowed] = logits[allowed]
    assert_distributed_as(slots.draws(logits, MASKED), reference_probabilities(masked, params))


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_a_row_ranks_what_it_would_draw_if_the_tokens_before_were_not_allowed(temperature):
    slots = Slots().start(SamplingParams(temperature=temperature, structured_outputs=CONSTRAINED), 2, seed=7)
    logits = np.stack([request_logits(seed) for seed in range(64)])
    logits[:, 30] = logits[:, 31]  # of equal logits the lower id comes first
    slots.masks = set_masks(slots.masks, np.array([2]), mask_of(*range(VOCAB))[None])
    rows, positions = np.full(64, 2), np.arange(64)
    first = slots.sample(logits, rows, positions, MASKED)
    assert first.ranked.shape == (64, NUM_RANKED)
    assert (first.ranked[:, 0] == first.token_ids).all()
    if not temperature:
        assert first.ranked.tolist() == np.argsort(-logits, axis=1, kind="stable")[:, :NUM_RANKED].tolist()
    left = logits.copy()
    for k in range(NUM_RANKED):
        drawn = slots.sample(left, rows, positions, SAMPLING)
        assert drawn.token_ids.tolist() == first.ranked[:, k].tolist()
        left[np.arange(64), drawn.token_ids] = -np.inf


def test_the_token_that_is_drawn_ranks_first_whatever_a_kernel_rounds(monkeypatch):
    """So a row's token does not depend on whether a constrained one is beside it, nor a guess on its step's variant."""
    slots = Slots().start(SamplingParams(temperature=1.0, structured_outputs=CONSTRAINED), 2, seed=7)
    slots.masks = set_masks(slots.masks, np.array([2]), mask_of(*range(VOCAB))[None])
    logits = np.stack([request_logits(seed) for seed in range(64)])
    rows, positions = jnp.full(64, 2), jnp.arange(64)

    def draw():
        return sampler._draw_and_rank(jnp.asarray(logits), rows, positions, slots.state, sampler.ALONE, backend="xla")

    token_ids, _, _, ranked = draw()
    assert token_ids.tolist() == ranked[:, 0].tolist()
    monkeypatch.setattr(sampler, "_draw", lambda *_, **__: (ranked[:, 1], jnp.ones(64, bool)))
    token_ids, _, _, rounded = draw()
    assert token_ids.tolist() == ranked[:, 1].tolist()
    assert rounded[:, :3].tolist() == ranked[:, jnp.array([1, 0, 2])].tolist()


def test_what_is_ranked_is_allowed_and_rows_that_truncate_rank_nothing():
    slots = Slots().start(SamplingParams(temperature=1.0, structured_outputs=CONSTRAINED), 2)
    slots.start(SamplingParams(temperature=1.0, top_k=8, structured_outputs=CONSTRAINED), 3)
    slots.start(SamplingParams(temperature=0.0, top_k=8, structured_outputs=CONSTRAINED), 4)  # greedy all the same
    allowed = [3, 31, 32]
    slots.masks = set_masks(slots.masks, np.array([2, 3, 4]), np.stack([mask_of(*allowed)] * 3))
    logits = np.stack([request_logits(seed) for seed in range(64)])
    ranked = {slot: slots.sample(logits, np.full(64, slot), np.arange(64), MASKED).ranked for slot in (2, 3, 4)}
    assert (ranked[3] == NO_TOKEN).all()
    for slot in (2, 4):
        assert (np.sort(ranked[slot][:, :3], axis=1) == allowed).all()
        assert (ranked[slot][:, 3:] == NO_TOKEN).all()


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"allowed_token_ids": [4, 9, 30]}, [9, 30]),
        ({"allowed_token_ids": [4, 5]}, [9, 12, 30]),  # nothing in common: the constraint stands
        ({"bad_words": ["x"]}, [9, 30]),
        ({"min_tokens": 5}, [12, 30]),
        ({"logit_bias": {4: 100.0}}, [9, 12, 30]),
    ],
    ids=str,
)
def test_other_masks_narrow_a_constraint_and_never_widen_it(kwargs, expected):
    bad_words = [[12]] if "bad_words" in kwargs else []
    params = SamplingParams(structured_outputs=CONSTRAINED, **kwargs)
    slots = Slots().start(params, stops=[9], bad_words=bad_words)
    slots.masks = set_masks(slots.masks, np.array([0]), mask_of(9, 12, 30)[None])
    logits, where = np.zeros((1, VOCAB), np.float32), np.array([0])
    result = process_logits(logits, where, where, slots.state, slots.full, masks=slots.masks)
    assert np.flatnonzero(np.isfinite(result[0])).tolist() == expected


def test_stop_tokens_cannot_be_sampled_before_min_tokens_and_can_from_there():
    logits = np.full((8, VOCAB), -50.0, np.float32)
    logits[:, 9] = 50.0  # a stop token that a greedy request would take at once
    logits[:, 4] = 0.0
    slots = Slots().start(SamplingParams(temperature=0.0, min_tokens=3), prompt=[1, 2], stops=[9, 11])
    positions = np.arange(2, 10)
    ids = slots.sample(logits, np.zeros(8), positions).token_ids
    assert ids.tolist() == [4, 4, 4, 9, 9, 9, 9, 9]
    codes = sampler.finish_codes(slots.state, np.zeros(8, np.int32), positions, ids)
    assert codes.tolist() == [FinishCode.RUNNING] * 3 + [FinishCode.STOP] * 5


def test_a_bad_word_is_completed_neither_after_a_prompt_nor_after_generated_tokens():
    logits = np.full((1, VOCAB), -9.0, np.float32)
    logits[0, 7] = 5.0
    logits[0, 8] = 4.0
    slots = Slots().start(
        SamplingParams(temperature=0.0, bad_words=["x"]), prompt=[5, 6], bad_words=[[5, 6, 7], [7, 8, 7]]
    )
    got = []
    for position in range(2, 8):
        ids = slots.sample(logits, [0], [position]).token_ids
        slots.full = add_sampled_tokens(slots.full, np.array([0]), ids)
        got.append(int(ids[0]))
    # 7 is the favourite, but banned right after 5, 6. After 7, 8 it is banned, too.
    assert got == [8, 7, 7, 7, 7, 7]
    slots.full = add_sampled_tokens(slots.full, np.array([0]), np.array([8]))
    assert slots.sample(logits, [0], [9]).token_ids.tolist() == [8]


@pytest.mark.parametrize("length", [1, 2, MAX_BAD_WORD_TOKENS])
def test_bad_words_of_every_length_are_banned_only_after_their_whole_prefix(length):
    word = list(range(20, 20 + length))
    logits = np.zeros((1, VOCAB), np.float32)
    for prompt, banned in ((word[:-1], True), ([1, 1, 1, *word[:-1]], True), (word[1:-1], length == 1)):
        slots = Slots().start(SamplingParams(bad_words=["x"]), prompt=prompt, bad_words=[word], chunk=4)
        result = process_logits(logits, np.array([0]), np.array([len(prompt)]), slots.state, slots.full)
        if length > 2 or banned:
            assert (result[0, word[-1]] == -np.inf) == banned
        assert np.isfinite(np.delete(result[0], word[-1])).all()


@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
def test_known_tokens_come_to_the_same_counts_in_chunks_of_any_size(chunk):
    rng = np.random.default_rng(9)
    prompt, output = rng.integers(0, VOCAB, 23).tolist(), rng.integers(0, 10, 18).tolist()
    slots = Slots().start(SamplingParams(presence_penalty=1.0), 1, prompt=prompt, output=output, chunk=chunk)
    counts = np.zeros((SLOTS + 1, VOCAB), np.int32)
    counts[1] = 2 * np.bincount(output, minlength=VOCAB) + np.isin(np.arange(VOCAB), prompt)
    np.testing.assert_array_equal(slots.full.token_counts, counts)
    np.testing.assert_array_equal(slots.full.recent[1], (prompt + output)[-(MAX_BAD_WORD_TOKENS - 1) :])
    slots.full = add_sampled_tokens(slots.full, np.array([1, SLOTS, SLOTS]), np.array([5, 5, 5]))
    counts[1, 5] += 2
    np.testing.assert_array_equal(slots.full.token_counts, counts)
    # A sequence that resumes, or the next one in the slot, starts from nothing.
    slots.start(SamplingParams(presence_penalty=1.0), 1, prompt=[3])
    np.testing.assert_array_equal(slots.full.token_counts[1], np.arange(VOCAB) == 3)
    assert slots.full.recent[1].tolist() == [NO_TOKEN] * (MAX_BAD_WORD_TOKENS - 2) + [3]


@pytest.mark.transformers
def test_processors_agree_with_transformers():
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    rng = np.random.default_rng(10)
    for trial in range(5):
        prompt, output = rng.integers(0, VOCAB, 6).tolist(), rng.integers(0, VOCAB, 5).tolist()
        known = prompt + output
        bad_words = [[3], [known[-1], 11], [*known[-2:], 12], [*known[-3:-1], 13], [known[-1], 14, 15]]
        bias = {int(t): float(rng.normal() * 3) for t in rng.choice(VOCAB, 5, replace=False)}
        params = SamplingParams(
            repetition_penalty=1.4,
            bad_words=["x"],
            logit_bias=bias,
            min_tokens=5 + trial % 2,
            temperature=0.8,
            top_k=12,
            top_p=0.85,
            min_p=0.02,
        )
        logits = request_logits(100 + trial)
        slots = Slots().start(params, seed=trial, prompt=prompt, output=output, stops=[20, 21], bad_words=bad_words)
        position = np.array([len(known)])
        ours = process_logits(logits[None], np.array([0]), position, slots.state, slots.full)[0]
        chain = [
            processors.NoBadWordsLogitsProcessor(bad_words),
            processors.MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, [20, 21], device="cpu"),
            processors.SequenceBiasLogitsProcessor([[[t], b] for t, b in bias.items()]),
            processors.RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
        ]
        ids, scores = torch.tensor([known]), torch.tensor(logits[None])
        for processor in chain:
            scores = processor(ids, scores)
        np.testing.assert_allclose(ours, scores[0].numpy(), rtol=1e-5, atol=1e-5)
        for warper in (
            processors.TemperatureLogitsWarper(params.temperature),
            processors.MinPLogitsWarper(params.min_p),
            processors.TopKLogitsWarper(params.top_k),
            processors.TopPLogitsWarper(params.top_p),
        ):
            scores = warper(ids, scores)
        probabilities = torch.softmax(scores.double(), -1)[0].numpy()
        many = Slots().start(
            SamplingParams(**{name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")})
        )
        draws = many.draws(ours, TRUNCATED)
        assert_distributed_as(draws, probabilities / probabilities.sum())
        assert set(draws[probabilities[draws] < 1e-12].tolist()) == set()
