"""What the sampler's tests share: slots filled as the engine fills them, and references in float64, written from the
parameters' definitions.
"""

import jax
import numpy as np
from scipy import stats

from jpaged.engine.interface import NO_TOKEN, SamplingVariant
from jpaged.executor.sampling import logprobs, sampler
from jpaged.executor.sampling import records as sampling_records
from jpaged.executor.sampling import state as sampling_state

VOCAB = 40
SLOTS = 40
DRAWS = 20_000
GREEDY, SAMPLING, TRUNCATED, TABLE, MASKED, FULL, BEAM = SamplingVariant

OPTIMISED = {"xla_backend_optimization_level": 3}
"""For what runs longer than it compiles, as few of the tests' programs do (tests/conftest.py)."""

sample = jax.jit(
    sampler.sample, static_argnames=("variant", "num_logprobs", "logprobs_mode"), compiler_options=OPTIMISED
)
start_slots = jax.jit(sampling_state.start_slots)
start_full_slot = jax.jit(sampling_state.start_full_slot)
set_masks = jax.jit(sampling_state.set_masks)
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
        self.masks = sampling_state.init_masks(SLOTS, vocab)

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
        if variant == TABLE:
            options.setdefault("allowed", np.full((padded, self.masks.shape[1]), 0xFFFFFFFF, np.uint32))
        output = sample(
            np.pad(np.asarray(logits, np.float32), (pad, (0, self.vocab - vocab)), constant_values=-np.inf),
            np.pad(np.asarray(slots, np.int32), pad, constant_values=self.null),
            np.pad(np.asarray(positions, np.int32), pad),
            self.state,
            self.full,
            self.masks,
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
