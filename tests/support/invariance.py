"""Requests whose log-probabilities must have the same bits, whatever is computed beside them and in whatever pieces."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jpaged import LLMEngine, RequestOutputKind, SamplingParams
from jpaged.training import compiler_options, token_logprobs


class Found(NamedTuple):
    """What a request gave; log-probabilities of its tokens and of its prompt's but for the first."""

    tokens: list[int]
    logprobs: list[float]
    of_prompt: list[float]


@dataclass(frozen=True)
class Sizes:
    """What `compare` draws from.

    lengths: of prompts. vocab_size: tokens are below it. new_tokens: of each request. chunks: most tokens of a step.
    rows: most of a step. blocks: of the pool; in the fewest, sequences crowd each other out. max_model_len: holds the
    longest prompt with its new tokens.
    """

    lengths: tuple[int, ...] = (1, 2, 7, 16, 17, 40, 61)
    vocab_size: int = 150
    new_tokens: int = 6
    chunks: tuple[int, ...] = (3, 11, 64)
    rows: tuple[int, ...] = (2, 8, 32)
    blocks: tuple[int, ...] = (24, 40, 200)
    max_model_len: int = 72

    def prompts(self, seed: int = 0) -> list[list[int]]:
        """Two of each length, nearly; some begin alike."""
        rng = random.Random(seed)

        def draw(length: int) -> list[int]:
            return [rng.randrange(3, self.vocab_size) for _ in range(length)]

        longest = max(self.lengths)
        common = draw(longest)
        found = [draw(length) for length in self.lengths]
        return found + [common[: longest // 3] + prompt[: longest * 2 // 5] for prompt in found]


def with_options(engine: LLMEngine, **options: Any) -> LLMEngine:
    """Another engine on the same programs."""
    return LLMEngine(replace(engine.args, **options), engine.startup)


def run(
    engine: LLMEngine, sizes: Sizes, prompts: Sequence[list[int]], numbers: Sequence[int], rng: random.Random
) -> dict[int, Found]:
    """Requests of these numbers, which come at random times."""
    found: dict[int, Found] = {}
    waiting = list(numbers)
    while waiting or engine.has_unfinished_requests():
        for _ in range(min(len(waiting), rng.randrange(4))):
            number = waiting.pop()
            params = SamplingParams(
                temperature=1.0,
                seed=number,
                max_tokens=sizes.new_tokens,
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


def alone(engine: LLMEngine, sizes: Sizes, prompts: Sequence[list[int]]) -> dict[int, Found]:
    """Each request by itself, its prompt in one piece."""
    engine = with_options(engine, enable_prefix_caching=False)
    found: dict[int, Found] = {}
    for number in range(len(prompts)):
        found |= run(engine, sizes, prompts, [number], random.Random(0))
    return found


def compare(
    engine: LLMEngine, sizes: Sizes, prompts: Sequence[list[int]], expected: dict[int, Found], seed: int
) -> list[int]:
    """The requests, all together, that differ from what is expected. In batches, chunks, preemptions and prefix hits as
    the seed has it.
    """
    rng = random.Random(seed)
    blocks = rng.choice(sizes.blocks)
    options: dict[str, Any] = {
        "max_num_batched_tokens": rng.choice(sizes.chunks),
        "max_num_seqs": rng.choice(sizes.rows),
        "enable_prefix_caching": rng.random() < 0.7,
        "preemption_mode": rng.choice(["swap", "recompute"]),
        "num_gpu_blocks_override": blocks,
        "max_model_len": sizes.max_model_len,
        "watermark": 0.0,
    }
    numbers = list(range(len(prompts)))
    rng.shuffle(numbers)
    found = run(with_options(engine, **options), sizes, prompts, numbers, rng)
    return [number for number in numbers if found[number] != expected[number]]


def trained(
    engine: LLMEngine, prompts: Sequence[list[int]], sampled: dict[int, Found], chosen: Sequence[int], length: int
) -> tuple[list[int], float]:
    """Which of some requests, padded to a length in one batch, have other log-probabilities in training than the engine
    found, in their prompts or their tokens; and how far any is from the trainer's plain form."""
    tokens = np.full((len(chosen), length), 7, np.int32)
    sequences = [prompts[number] + sampled[number].tokens for number in chosen]
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
    lengths = np.array(list(map(len, sequences)), np.int32)
    model = engine.startup.model

    @partial(jax.jit, compiler_options=compiler_options())
    def compute(weights: Any, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        backend = engine.args.kernel_backend
        return token_logprobs(model, weights, tokens, lengths, batch_invariant=True, kernel_backend=backend)

    weights = engine.startup.runner.weights
    found = np.asarray(compute(weights, tokens, lengths))
    plain = np.asarray(token_logprobs(model, weights, tokens, lengths))
    differing = []
    for row, number in enumerate(chosen):
        start, of = len(prompts[number]), sampled[number]
        same = found[row, start : lengths[row]].tolist() == of.logprobs
        same &= not of.of_prompt or found[row, 1:start].tolist() == of.of_prompt
        if not same or found[row, 0] or found[row, lengths[row] :].any():
            differing.append(number)
    return differing, float(np.abs(found - plain).max())
