"""batch_invariant=True: a token's log-probabilities have the same bits whatever is computed beside it, and in training."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from jpaged.api.errors import InvalidParameterError
from jpaged.training import token_logprobs
from tests.support.logprob_programs import logprob_programs
from tests.tiny_models import TINY_ENGINE, tiny_model, write_tiny_model

SHAPES: dict[str, Any] = {"decode_buckets": (2, 32), "token_buckets": (8, 64), "max_num_batched_tokens": 64}
LENGTHS = (1, 2, 7, 16, 17, 40, 61)
MODELS = ("llama-biases", "opt-125m-style", "qwen3-moe", "demo")
NEW_TOKENS = 6


class Found(NamedTuple):
    """What a request gave; log-probabilities of its tokens and of its prompt's but for the first."""

    tokens: list[int]
    logprobs: list[float]
    of_prompt: list[float]


def start(name: str, directory: Any, **options: Any) -> LLMEngine:
    own: dict[str, Any] = {}
    if name != "demo":
        own["model"] = str(write_tiny_model(tiny_model(name), directory, use_torch=False))
    else:  # in its own type, of 16 bits on a GPU
        own["dtype"] = "auto"
    with logprob_programs():
        return LLMEngine(EngineArgs(**TINY_ENGINE | SHAPES | own | options))


@pytest.fixture(scope="module", params=MODELS)
def engine(request, tmp_path_factory) -> Iterator[LLMEngine]:
    engine = start(request.param, tmp_path_factory.mktemp("tiny"), batch_invariant=True)
    yield engine
    engine.close()


def with_options(engine: LLMEngine, **options: Any) -> LLMEngine:
    """Another engine on the same programs."""
    return LLMEngine(replace(engine.args, **options), engine.startup)


def prompts(seed: int = 0) -> list[list[int]]:
    """Some of which begin alike."""
    rng = random.Random(seed)
    common = [rng.randrange(3, 150) for _ in range(max(LENGTHS))]
    found = [[rng.randrange(3, 150) for _ in range(length)] for length in LENGTHS]
    return found + [common[:20] + prompt[:25] for prompt in found]


def run(engine: LLMEngine, prompts: Sequence[list[int]], numbers: Sequence[int], rng: random.Random) -> dict[int, Found]:
    """Requests of these numbers, which come at random times."""
    found: dict[int, Found] = {}
    waiting = list(numbers)
    while waiting or engine.has_unfinished_requests():
        for _ in range(min(len(waiting), rng.randrange(4))):
            number = waiting.pop()
            params = SamplingParams(
                temperature=1.0,
                seed=number,
                max_tokens=NEW_TOKENS,
                logprobs=1,
                prompt_logprobs=1 if number % 2 else None,
                ignore_eos=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(number), prompts[number], params)
        for output in engine.step():
            if output.finished:
                number, completion = int(output.request_id), output.outputs[0]
                tokens = list(completion.token_ids)
                logprobs = [of[token].logprob for of, token in zip(completion.logprobs, tokens, strict=True)]
                known = zip(output.prompt_logprobs[1:], prompts[number][1:], strict=True) if number % 2 else ()
                found[number] = Found(tokens, logprobs, [of[token].logprob for of, token in known])
    assert len(found) == len(numbers)
    return found


def alone(engine: LLMEngine, prompts: Sequence[list[int]]) -> dict[int, Found]:
    """Each request by itself, its prompt in one piece."""
    engine = with_options(engine, enable_prefix_caching=False)
    found: dict[int, Found] = {}
    for number in range(len(prompts)):
        found |= run(engine, prompts, [number], random.Random(0))
    return found


def compare(engine: LLMEngine, texts: Sequence[list[int]], expected: dict[int, Found], seed: int) -> int:
    """How many of the requests, all together, differ from what is expected. In batches, chunks, preemptions and prefix
    hits as the seed has it.
    """
    rng = random.Random(seed)
    blocks = rng.choice([24, 40, 200])  # in the fewest, sequences crowd each other out
    options: dict[str, Any] = {
        "max_num_batched_tokens": rng.choice([3, 11, 64]),
        "max_num_seqs": rng.choice([2, 8, 32]),
        "enable_prefix_caching": rng.random() < 0.7,
        "preemption_mode": rng.choice(["swap", "recompute"]),
        "num_gpu_blocks_override": blocks,
        "max_model_len": 72,
        "watermark": 0.0,
    }
    numbers = list(range(len(texts)))
    rng.shuffle(numbers)
    found = run(with_options(engine, **options), texts, numbers, rng)
    return sum(found[number] != expected[number] for number in numbers)


def test_bits_do_not_depend_on_what_is_computed_beside_a_token(engine):
    texts = prompts()
    expected = alone(engine, texts)
    assert all(np.isfinite(found.logprobs).all() for found in expected.values())
    assert [compare(engine, texts, expected, seed) for seed in range(4)] == [0] * 4


def test_a_trainer_computes_the_bits_that_the_engine_sampled_by(engine):
    """In one batch of all sequences, and in one of two of them padded to another length."""
    texts = prompts()
    sampled = alone(engine, texts)
    model, weights = engine.startup.model, engine.startup.runner.weights
    sequences = [text + sampled[number].tokens for number, text in enumerate(texts)]
    for chosen, length in ((range(len(texts)), 70), ((3, 8), 45)):
        tokens = np.full((len(chosen), length), 7, np.int32)
        for row, number in enumerate(chosen):
            tokens[row, : len(sequences[number])] = sequences[number]
        lengths = np.array([len(sequences[number]) for number in chosen], np.int32)
        found = np.asarray(token_logprobs(model, weights, tokens, lengths, batch_invariant=True))
        plain = np.asarray(token_logprobs(model, weights, tokens, lengths))
        assert np.allclose(found, plain, atol=2e-4)
        for row, number in enumerate(chosen):
            start, end = len(texts[number]), lengths[row]
            assert found[row, start:end].tolist() == sampled[number].logprobs
            if sampled[number].of_prompt:
                assert found[row, 1:start].tolist() == sampled[number].of_prompt
            assert found[row, 0] == 0 and not found[row, end:].any()


def test_without_the_option_bits_depend_on_the_batch(tmp_path):
    engine = start("llama-biases", tmp_path)
    try:
        texts = prompts()
        expected = alone(engine, texts)
        assert sum(compare(engine, texts, expected, seed) for seed in range(4)) > 0
    finally:
        engine.close()
