"""Greedy rows, ties, thresholds, bad logits, stops, and the programs that sampling is made of."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.api.errors import InvalidParameterError
from jpaged.api.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_STOP_TOKEN_IDS, SamplingParams
from jpaged.engine.interface import NUM_RANKED, FinishCode, SamplingVariant
from jpaged.executor.sampling import records as sampling_records
from jpaged.executor.sampling import sampler
from jpaged.executor.sampling import state as sampling_state
from jpaged.models.collectives import Collectives
from jpaged.pallas_kernels.sample_tokens.reference import lowest_kept
from tests.executor.sampling.helpers import (
    BAD_ROWS,
    BEAM,
    FULL,
    MASKED,
    SAMPLING,
    SLOTS,
    TABLE,
    TRUNCATED,
    VOCAB,
    Slots,
    assert_distributed_as,
    process_logits,
    reference_kept,
    request_logits,
)


@pytest.mark.parametrize("variant", list(SamplingVariant))
def test_greedy_rows_take_the_first_of_the_most_likely_in_every_variant(variant):
    rng = np.random.default_rng(4)
    logits = rng.integers(-3, 4, (64, VOCAB)).astype(np.float32)  # full of ties
    slots = Slots().start(SamplingParams(temperature=0.0, top_k=2, top_p=0.1, min_p=0.9), 0)
    slots.start(SamplingParams(temperature=1e-6), 1)
    ids = slots.sample(logits, np.arange(64) % 2, np.arange(64), variant).token_ids
    np.testing.assert_array_equal(ids, logits.argmax(axis=1))


def test_rows_of_one_batch_are_greedy_or_drawn_each_for_itself():
    logits = np.zeros((4000, VOCAB), np.float32)
    slots = Slots().start(SamplingParams(temperature=0.0), 0).start(SamplingParams(), 1)
    ids = np.asarray(slots.sample(logits, np.arange(4000) % 2, np.arange(4000), TRUNCATED).token_ids)
    assert (ids[::2] == 0).all()
    assert_distributed_as(ids[1::2], np.full(VOCAB, 1 / VOCAB))


TIED = np.array([1.0, 3.0, 2.0, 3.0, 2.0, 2.0, -1.0, 3.0, 0.0, -0.0], np.float32)


@pytest.mark.parametrize(
    ("kwargs", "kept"),
    [
        ({"top_k": 1}, [1, 3, 7]),
        ({"top_k": 3}, [1, 3, 7]),
        ({"top_k": 4}, [1, 2, 3, 4, 5, 7]),
        ({"top_k": 8}, [0, 1, 2, 3, 4, 5, 7, 8, 9]),  # the two zeros are equal, whatever their signs
        ({"top_p": 0.01}, [1, 3, 7]),
        ({"top_p": 0.8}, [1, 2, 3, 4, 5, 7]),
        ({"min_p": 1.0}, [1, 3, 7]),
        ({"min_p": 0.36}, [1, 2, 3, 4, 5, 7]),
        ({"temperature": 1e-5}, [1, 3, 7]),
    ],
    ids=str,
)
def test_tokens_tied_with_the_last_one_kept_are_kept(kwargs, kept):
    params = SamplingParams(**kwargs)
    draws = Slots().start(params, seed=8).draws(TIED, TRUNCATED)
    # exp(-1) = 0.3679 against min_p 0.36; the top three hold 0.668 of the mass, the top six 0.914.
    expected = np.where(np.isin(np.arange(10), kept), np.exp((TIED.astype(float) - 3) / params.temperature), 0)
    assert_distributed_as(draws, expected / expected.sum())


def test_thresholds_are_exact_on_random_rows():
    rng = np.random.default_rng(5)
    rows, vocab = 300, 257
    logits = rng.normal(size=(rows, vocab)) * 10.0 ** rng.uniform(-3, 2, (rows, 1)) + rng.normal(size=(rows, 1)) * 5
    logits[::3] = np.round(logits[::3])  # ties
    logits[1::5, ::2] = -np.inf
    logits = logits.astype(np.float32)
    params = [
        SamplingParams(
            temperature=float(rng.uniform(0.2, 3)),
            top_k=int(rng.integers(0, 300)) if rng.random() < 0.7 else 0,
            top_p=float(rng.uniform(0.05, 0.999)) if rng.random() < 0.7 else 1.0,
            min_p=float(rng.uniform(0, 0.3)) if rng.random() < 0.3 else 0.0,
        )
        for _ in range(rows)
    ]
    of = {name: np.array([getattr(p, name) for p in params]) for name in ("temperature", "top_k", "top_p", "min_p")}
    lowest = jax.jit(lowest_kept)(
        logits,
        logits.max(axis=1, keepdims=True),
        (1 / of["temperature"][:, None]).astype(np.float32),
        of["top_k"].astype(np.int32),
        of["top_p"].astype(np.float32),
        of["min_p"].astype(np.float32),
    )
    kept = logits >= np.asarray(lowest)
    kept &= logits > -np.inf
    expected = np.stack([reference_kept(row, p) for row, p in zip(logits, params, strict=True)]) & (logits > -np.inf)
    # Where a sum comes within float32 rounding of its target, either neighbour is right: none of these rows does.
    np.testing.assert_array_equal(kept, expected)


@pytest.mark.parametrize("variant", list(SamplingVariant))
def test_bad_logits_give_a_valid_token_and_never_a_masked_one_while_another_is_left(variant):
    logits = np.repeat(np.stack(list(BAD_ROWS.values())), 30, axis=0).astype(np.float32)
    slots = Slots().start(SamplingParams(temperature=0.0)).start(SamplingParams(top_k=7, top_p=0.9, min_p=0.01), 1)
    slots.start(
        SamplingParams(temperature=1e30, repetition_penalty=1.2e-38, logit_bias={0: -100}), 2, prompt=[0, 2, 13]
    )
    ids = np.asarray(slots.sample(logits, np.arange(len(logits)) % 3, np.arange(len(logits)), variant).token_ids)
    assert ((ids >= 0) & (ids < VOCAB)).all()
    drawn = logits[np.arange(len(ids)), ids]
    usable = (~np.isnan(logits) & (logits > -np.inf)).any(axis=1)
    assert not (np.isnan(drawn) | (drawn == -np.inf))[usable].any()
    some_inf = np.arange(len(logits)) // 30 == list(BAD_ROWS).index("some +inf")
    if variant != FULL:
        assert (ids[some_inf] == 13).all()


@pytest.mark.parametrize("penalty", [1.2e-38, 3.4e38])
def test_repetition_penalties_at_the_limits_of_float32_make_no_nan(penalty):
    slots = Slots().start(SamplingParams(repetition_penalty=penalty), prompt=range(VOCAB))
    logits = np.resize(np.float32([0.0, 2.0, -2.0]), (1, VOCAB))
    assert not np.isnan(process_logits(logits, np.array([0]), np.array([9]), slots.state, slots.full)).any()


def test_where_other_constraints_leave_no_token_the_allowed_ones_stand():
    slots = Slots().start(SamplingParams(allowed_token_ids=[7], bad_words=["x"]), 0, bad_words=[[7]])
    slots.start(SamplingParams(allowed_token_ids=[3], min_tokens=4, temperature=0.0), 1, stops=[3])
    output = slots.sample(np.stack([request_logits()] * 2), [0, 1], [0, 0])
    assert output.token_ids.tolist() == [7, 3]
    assert np.isfinite(output.logprobs.token_logprobs).all()


def test_finish_codes_name_a_stop_before_a_length_and_heed_min_tokens():
    slots = Slots().start(SamplingParams(), 0, stops=range(MAX_STOP_TOKEN_IDS), max_len=10)
    slots.start(SamplingParams(min_tokens=2), 2, prompt=[1, 2], stops=[5], max_len=10)
    codes = sampler.finish_codes(
        slots.state,
        np.array([0, 0, 0, 0, 0, 1, 2, 2, SLOTS]),
        np.array([8, 9, 8, 9, 10, 0, 3, 4, 0]),
        np.array([99, 99, MAX_STOP_TOKEN_IDS - 1, 0, 99, 0, 5, 5, 0]),
    )
    running, stop, length = FinishCode.RUNNING, FinishCode.STOP, FinishCode.LENGTH
    assert codes.tolist() == [running, length, stop, stop, length, running, running, stop, running]
    assert codes.dtype == np.uint8


@pytest.mark.parametrize(
    ("params", "bad_words", "message"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, [], f"logit_bias names token {VOCAB}"),
        ({"allowed_token_ids": [1, 2**40]}, [], f"allowed_token_ids names token {2**40}"),
        ({}, [[1, VOCAB]], f"bad_words names token {VOCAB}"),
        ({}, [[]], "bad_words has a word of 0 tokens"),
        ({}, [[1] * (MAX_BAD_WORD_TOKENS + 1)], f"bad_words has a word of {MAX_BAD_WORD_TOKENS + 1} tokens"),
        ({}, [[1]] * (MAX_BAD_WORDS + 1), f"bad_words come to {MAX_BAD_WORDS + 1}"),
    ],
)
def test_extras_that_do_not_fit_are_refused_by_name(params, bad_words, message):
    with pytest.raises(InvalidParameterError, match=message):
        sampling_records.full_record(SamplingParams(**params), vocab_size=VOCAB, bad_words_token_ids=bad_words)


def test_too_many_stop_tokens_are_refused():
    with pytest.raises(InvalidParameterError, match=f"{MAX_STOP_TOKEN_IDS + 1} stop tokens"):
        sampling_records.core_record(
            SamplingParams(), seed=0, stop_token_ids=range(MAX_STOP_TOKEN_IDS + 1), prompt_len=1, max_len=2
        )


def test_only_where_a_kernel_draws_for_the_whole_vocabulary_does_one_program_serve_two_variants(monkeypatch):
    own = {variant: variant for variant in SamplingVariant}
    shared = {**own, SAMPLING: TRUNCATED}
    for backend, shards, expected in (("xla", 1, own), ("hopper", 1, shared), ("hopper", 2, own)):
        monkeypatch.setattr(sampler, "sample_tokens_backend", lambda vocab_size, forced, backend=backend: backend)
        collectives = Collectives(shards, "model" if shards > 1 else None)
        assert {v: sampler.program_variant(v, VOCAB, collectives) for v in SamplingVariant} == expected


def test_the_full_variant_needs_its_state():
    state = sampling_state.init_state(1)
    row = jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="FullSamplingState"):
        sampler.sample(jnp.zeros((1, VOCAB)), row, row, state, variant=FULL)


@pytest.mark.parametrize("variant", list(SamplingVariant))
def test_no_variant_sorts_branches_or_loops_over_the_vocabulary(variant):
    vocab, slots = 4096, 8
    state = jax.eval_shape(partial(sampling_state.init_state, slots))
    full = jax.eval_shape(partial(sampling_state.init_full_state, slots, vocab))
    masks = jax.eval_shape(partial(sampling_state.init_masks, slots, vocab))
    rows = jax.ShapeDtypeStruct((4,), np.int32)
    draw = partial(sampler.sample, variant=variant, num_logprobs=5)
    allowed = {"allowed": jax.ShapeDtypeStruct((4, masks.shape[1]), np.uint32)} if variant == TABLE else {}
    jaxpr = jax.make_jaxpr(draw)(
        jax.ShapeDtypeStruct((4, vocab), np.float32), rows, rows, state, full, masks, **allowed
    )
    equations = [eqn for inner in _jaxprs(jaxpr.jaxpr) for eqn in inner.eqns]
    assert not {"cond", "while", "scan"} & {eqn.primitive.name for eqn in equations}
    sorts = [eqn for eqn in equations if eqn.primitive.name in ("sort", "top_k", "approx_top_k")]
    most = NUM_RANKED if variant == MASKED else 5
    assert all(math.prod(eqn.invars[0].aval.shape) <= 4 * most * 128 for eqn in sorts)
    assert bool(sorts) == (variant in (MASKED, FULL, BEAM))


def _jaxprs(jaxpr):
    yield jaxpr
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _jaxprs(inner)


def test_state_is_updated_in_place():
    vocab, slots = 5000, 32
    full = jax.eval_shape(partial(sampling_state.init_full_state, slots, vocab))
    scalar, chunk = jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((16,), np.int32)
    record = jax.ShapeDtypeStruct((sampling_records.full_record_words(vocab),), np.int32)
    for function, arguments in (
        (sampling_state.start_full_slot, (scalar, record)),
        (sampling_state.add_known_tokens, (scalar, chunk, scalar, scalar)),
        (sampling_state.add_sampled_tokens, (chunk, chunk)),
    ):
        memory = jax.jit(function, donate_argnums=0).lower(full, *arguments).compile().memory_analysis()
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in full)
        assert memory.alias_size_in_bytes == size
        assert memory.temp_size_in_bytes < size / 4
