"""The sampler against independent numpy references, its edges, and what keeps requests apart from each other."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jpaged.api.errors import InvalidParameterError
from jpaged.api.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_STOP_TOKEN_IDS, SamplingParams
from jpaged.engine.interface import NO_TOKEN, FinishCode, SamplingVariant
from jpaged.executor.sampling import logprobs, sampler
from jpaged.executor.sampling import records as sampling_records
from jpaged.executor.sampling import state as sampling_state
from jpaged.models.collectives import Collectives
from jpaged.pallas_kernels.sample_tokens.reference import lowest_kept

VOCAB = 40
SLOTS = 40
DRAWS = 20_000
GREEDY, SAMPLING, TRUNCATED, FULL, BEAM = SamplingVariant

sample = jax.jit(sampler.sample, static_argnames=("variant", "num_logprobs"))
start_slots = jax.jit(sampling_state.start_slots)
start_full_slot = jax.jit(sampling_state.start_full_slot)
add_known_tokens = jax.jit(sampling_state.add_known_tokens)
add_sampled_tokens = jax.jit(sampling_state.add_sampled_tokens)
process_logits = jax.jit(sampler.process_logits)
logprobs_of = jax.jit(logprobs.logprobs_of, static_argnames="k")


class Slots:
    """Sampling state filled through the public functions, one slot a request."""

    null = SLOTS

    def __init__(self, vocab=VOCAB):
        self.vocab = vocab
        self.state = sampling_state.init_state(SLOTS)
        self.full = sampling_state.init_full_state(SLOTS, vocab)

    def start(self, params, slot=0, *, seed=0, prompt=(), output=(), stops=(), bad_words=(), max_len=1 << 20, chunk=8):
        record = sampling_records.core_record(
            params, seed=seed, stop_token_ids=stops, prompt_len=len(prompt), max_len=max_len
        )
        unused = np.full_like(record, 7)
        self.state = start_slots(self.state, np.array([slot, self.null], np.int32), np.stack([record, unused]))
        if sampling_records.uses_extras(params) or bad_words:
            record = sampling_records.full_record(params, vocab_size=self.vocab, bad_words_token_ids=bad_words)
            self.full = start_full_slot(self.full, np.int32(slot), record)
            known = [*prompt, *output]
            for start in range(0, len(known), chunk):
                ids = np.full(chunk, NO_TOKEN, np.int32)
                part = known[start : start + chunk]
                ids[: len(part)] = part
                self.full = add_known_tokens(self.full, np.int32(slot), ids, np.int32(start), np.int32(len(prompt)))
        return self

    def sample(self, logits, slots, positions, variant=FULL, **options):
        """`sampler.sample`; few sizes of batch are compiled, so rows are padded as the engine pads them."""
        num_rows, vocab = np.shape(logits)
        padded = 64 if num_rows <= 64 else max(num_rows, DRAWS) if vocab <= VOCAB else num_rows
        pad = (0, padded - num_rows)
        output = sample(
            np.pad(np.asarray(logits, np.float32), (pad, (0, self.vocab - vocab)), constant_values=-np.inf),
            np.pad(np.asarray(slots, np.int32), pad, constant_values=self.null),
            np.pad(np.asarray(positions, np.int32), pad),
            self.state,
            self.full,
            variant=variant,
            **options,
        )
        return jax.tree.map(lambda array: np.asarray(array)[:num_rows], output)

    def draws(self, logits, variant=FULL, first_position=0, **options):
        """DRAWS tokens of slot 0 at as many positions, all from the same logits."""
        positions = first_position + np.arange(DRAWS)
        rows = np.broadcast_to(np.asarray(logits, np.float32), (DRAWS, len(logits)))
        return self.sample(rows, np.zeros(DRAWS), positions, variant, **options).token_ids


def request_logits(seed=0, vocab=VOCAB, scale=2.0):
    return (np.random.default_rng(seed).normal(size=vocab) * scale).astype(np.float32)


# ---------------------------------------------------------------------------------------------------------------------
# References in float64, written from the parameters' definitions
# ---------------------------------------------------------------------------------------------------------------------


def reference_logits(logits, params, prompt=(), output=(), stops=(), bad_words=()):
    x = np.array(logits, np.float64)
    if params.allowed_token_ids is not None:
        x[[t for t in range(len(x)) if t not in params.allowed_token_ids]] = -np.inf
    known = [*prompt, *output]
    for *prefix, last in bad_words:
        if not prefix or known[-len(prefix) :] == prefix:
            x[last] = -np.inf
    if len(output) < params.min_tokens:
        x[list(stops)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in set(known):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    return x


def reference_kept(x, params):
    """Which tokens remain, by sorting."""
    x = np.asarray(x, np.float64)
    scaled = np.exp((x - x.max()) / params.temperature)
    keep = scaled >= params.min_p
    if params.top_k > 0:
        keep &= x >= np.sort(x)[::-1][min(params.top_k, len(x)) - 1]
    probabilities = np.where(keep, scaled, 0) / scaled[keep].sum()
    if params.top_p < 1:
        order = np.argsort(-x, kind="stable")
        last = int(np.argmax(np.cumsum(probabilities[order]) >= params.top_p))
        keep &= x >= x[order[last]]
    return keep


def reference_probabilities(x, params):
    x = np.asarray(x, np.float64)
    weights = np.where(reference_kept(x, params), np.exp((x - x.max()) / params.temperature), 0)
    return weights / weights.sum()


def assert_distributed_as(draws, probabilities):
    """Chi-squared, with the unlikely tokens in one cell; a token of probability 0 must not occur at all."""
    observed = np.bincount(draws, minlength=len(probabilities))
    assert len(observed) == len(probabilities)
    assert observed[probabilities == 0].sum() == 0
    expected = probabilities * len(draws)
    rare = expected < 8
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 1e-9:
        observed, expected = observed[:-1], expected[:-1]
    if len(expected) > 1:
        assert stats.chisquare(observed, expected).pvalue > 1e-3
    else:
        assert observed.sum() == len(draws)


# ---------------------------------------------------------------------------------------------------------------------
# Distributions
# ---------------------------------------------------------------------------------------------------------------------

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


PROMPT, OUTPUT = [1, 2, 3, 2, 9], [3, 4, 4, 4, 30, 31]
EXTRAS = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"frequency_penalty": 2.0},
    {"frequency_penalty": -2.0},
    {"presence_penalty": 2.0},
    {"presence_penalty": -2.0},
    {"presence_penalty": -1.1, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    {"logit_bias": {7: 100.0}},
    {"logit_bias": {7: -100.0, 8: 100.0, 9: 100.0}},
    {"logit_bias": {0: 1.5, VOCAB - 1: -2.5, 4: 3.0}},
    {"allowed_token_ids": [0, 5, 31, 32, VOCAB - 1]},
    {"allowed_token_ids": [17]},
    {"allowed_token_ids": [17, 33], "temperature": 1e38},
    {"bad_words": ["x"]},
    {"min_tokens": 10**6, "max_tokens": None},
    {"min_tokens": len(OUTPUT)},
    {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.3,
        "logit_bias": {3: 2.0, 4: 1.0},
        "allowed_token_ids": list(range(0, 30)),
        "bad_words": ["x"],
        "min_tokens": 10**6,
        "max_tokens": None,
        "temperature": 1.4,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.01,
    },
]
# Of these, in this order: no prefix; the output's end; a prefix that spans prompt and output; one that does not match.
BAD_WORDS = [[6], [31, 12], [9, 3, 4, 4, 4, 30, 31, 13], [30, 14]]
STOPS = [0, 20, 21]


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


# ---------------------------------------------------------------------------------------------------------------------
# Greedy rows, ties, thresholds
# ---------------------------------------------------------------------------------------------------------------------


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


# ---------------------------------------------------------------------------------------------------------------------
# Requests do not see each other
# ---------------------------------------------------------------------------------------------------------------------


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


# ---------------------------------------------------------------------------------------------------------------------
# Bad logits
# ---------------------------------------------------------------------------------------------------------------------

BAD_ROWS = {
    "all nan": np.full(VOCAB, np.nan),
    "some nan": np.where(np.arange(VOCAB) % 2, np.nan, np.arange(VOCAB) / 10),
    "nan and -inf": np.where(np.arange(VOCAB) % 2, np.nan, -np.inf),
    "all -inf": np.full(VOCAB, -np.inf),
    "all +inf": np.full(VOCAB, np.inf),
    "some +inf": np.where(np.arange(VOCAB) == 13, np.inf, 0.0),
    "everything": np.resize([np.nan, np.inf, -np.inf, 1e38, -1e38, 0.0, -0.0, 1e-45], VOCAB),
    "largest floats": np.where(np.arange(VOCAB) % 2, 3.4e38, -3.4e38),
}


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


# ---------------------------------------------------------------------------------------------------------------------
# Masks and penalties, exactly
# ---------------------------------------------------------------------------------------------------------------------


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


# ---------------------------------------------------------------------------------------------------------------------
# Log-probabilities
# ---------------------------------------------------------------------------------------------------------------------


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


def test_logprobs_of_bad_rows_and_absent_targets_are_not_nan():
    logits = np.stack([*BAD_ROWS.values()]).astype(np.float32)
    for target in (NO_TOKEN, 1):
        result = logprobs_of(logits, np.full(len(logits), target, np.int32), k=20)
        assert not any(np.isnan(np.asarray(part)).any() for part in result)
        assert ((result.top_ids >= 0) & (result.top_ids < VOCAB)).all()
        assert (np.sort(np.asarray(result.top_ids), axis=1)[:, 1:] != np.sort(result.top_ids, axis=1)[:, :-1]).all()


# ---------------------------------------------------------------------------------------------------------------------
# Stops, records, programs
# ---------------------------------------------------------------------------------------------------------------------


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
        monkeypatch.setattr(sampler, "sample_tokens_backend", lambda vocab_size, backend=backend: backend)
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
    rows = jax.ShapeDtypeStruct((4,), np.int32)
    jaxpr = jax.make_jaxpr(partial(sampler.sample, variant=variant, num_logprobs=5))(
        jax.ShapeDtypeStruct((4, vocab), np.float32), rows, rows, state, full
    )
    equations = [eqn for inner in _jaxprs(jaxpr.jaxpr) for eqn in inner.eqns]
    assert not {"cond", "while", "scan"} & {eqn.primitive.name for eqn in equations}
    sorts = [eqn for eqn in equations if eqn.primitive.name in ("sort", "top_k", "approx_top_k")]
    assert all(math.prod(eqn.invars[0].aval.shape) <= 4 * 5 * 128 for eqn in sorts)
    assert bool(sorts) == (variant in (FULL, BEAM))


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
