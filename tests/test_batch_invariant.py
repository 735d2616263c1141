"""batch_invariant=True: log-probabilities have the same bits whatever is computed beside a token, and in training."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from jpaged.api.errors import InvalidParameterError, UnsupportedModelError
from jpaged.models import ModelConfig, Weights, build, dense_causal_attend
from jpaged.models.row_tiles import in_row_tiles
from jpaged.training import token_logprobs
from tests.tiny_models import TINY_ENGINE, tiny_model, write_tiny_model

SHAPES: dict[str, Any] = {"decode_buckets": (32,), "token_buckets": (8, 64), "max_num_batched_tokens": 64}
LENGTHS = (1, 2, 7, 16, 17, 40, 61)
MODELS = ("llama-biases", "qwen3-moe", "demo")
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
    return LLMEngine(EngineArgs(**TINY_ENGINE | SHAPES | own | options))


@pytest.fixture(scope="module", params=MODELS)
def engine(request, tmp_path_factory) -> Iterator[LLMEngine]:
    engine = start(request.param, tmp_path_factory.mktemp("tiny"), batch_invariant=True)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(engine) -> dict[int, Found]:
    """What each of the prompts gets alone."""
    return alone(engine, prompts())


def with_options(engine: LLMEngine, **options: Any) -> LLMEngine:
    """Another engine on the same programs."""
    return LLMEngine(replace(engine.args, **options), engine.startup)


def prompts(seed: int = 0) -> list[list[int]]:
    """Some of which begin alike."""
    rng = random.Random(seed)
    common = [rng.randrange(3, 150) for _ in range(max(LENGTHS))]
    found = [[rng.randrange(3, 150) for _ in range(length)] for length in LENGTHS]
    return found + [common[:20] + prompt[:25] for prompt in found]


def run(
    engine: LLMEngine, prompts: Sequence[list[int]], numbers: Sequence[int], rng: random.Random
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


def test_bits_do_not_depend_on_what_is_computed_beside_a_token(engine, expected):
    texts = prompts()
    assert all(np.isfinite(found.logprobs).all() for found in expected.values())
    assert [compare(engine, texts, expected, seed) for seed in range(4)] == [0] * 4


def test_a_trainer_computes_the_bits_that_the_engine_sampled_by(engine, expected):
    """In one batch of all sequences, and in one of two of them padded to another length."""
    texts, sampled = prompts(), expected
    model, weights = engine.startup.model, engine.startup.runner.weights
    sequences = [text + sampled[number].tokens for number, text in enumerate(texts)]
    for chosen, length in ((range(len(texts)), 70), ((3, 8), 45)):
        tokens = np.full((len(chosen), length), 7, np.int32)
        for row, number in enumerate(chosen):
            tokens[row, : len(sequences[number])] = sequences[number]
        lengths = np.array([len(sequences[number]) for number in chosen], np.int32)
        found = np.asarray(token_logprobs(model, weights, tokens, lengths, batch_invariant=True))
        if length == 45:  # the sequences of the shorter batch are in the longer one, too
            plain = np.asarray(token_logprobs(model, weights, tokens, lengths))
            assert np.allclose(found, plain, atol=2e-4)
        for row, number in enumerate(chosen):
            start, end = len(texts[number]), lengths[row]
            assert found[row, start:end].tolist() == sampled[number].logprobs
            if sampled[number].of_prompt:
                assert found[row, 1:start].tolist() == sampled[number].of_prompt
            assert found[row, 0] == 0
            assert not found[row, end:].any()


def test_gradients_are_those_of_plain_autodiff_and_ratios_begin_at_one():
    model = build(ModelConfig.from_dict(tiny_model("llama-biases").config), "float32")
    weights, rng = model.init(1), np.random.default_rng(0)
    tokens, lengths = rng.integers(0, 160, (3, 20)).astype(np.int32), np.array([20, 9, 1], np.int32)
    advantages = rng.normal(size=tokens.shape).astype(np.float32)

    def plain(weights: Weights) -> jax.Array:
        total = 0.0
        for row, length in enumerate(lengths):
            hidden = model.forward(weights, tokens[row, :length], jnp.arange(length), dense_causal_attend)
            scores = jax.nn.log_softmax(model.logits(weights, hidden), axis=-1)
            found = scores[jnp.arange(length - 1), tokens[row, 1:length]]
            total += jnp.sum(found * advantages[row, 1:length])
        return total

    old = token_logprobs(model, weights, tokens, lengths, batch_invariant=True)

    def ratios(module: nnx.Module) -> jax.Array:
        return jnp.exp(token_logprobs(model, module, tokens, lengths, batch_invariant=True) - old)

    module = model.module(weights)
    assert (np.asarray(ratios(module)) == 1).all()
    # At ratios of 1 the gradient is that of the log-probabilities.
    found = nnx.grad(lambda module: jnp.sum(ratios(module) * advantages))(module)
    expected = jax.jit(jax.grad(plain))(weights)
    for name, one, other in zip(model.parameter_names, model.flatten(found), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4 * float(jnp.abs(other).max() + 1e-3), err_msg=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared_prefix_attention": True}, "batch_invariant=True cannot go with shared_prefix_attention=True"),
        ({"kv_cache_layout": "virtual"}, "batch_invariant=True cannot go with kv_cache_layout='virtual'"),
        ({"one_shot_rows": 8, "tensor_parallel_size": 2}, "batch_invariant=True cannot go with one_shot_rows=8"),
        ({"block_size": 256}, "batch_invariant=True needs a block_size of at most 128"),
        ({"kernel_backend": "mosaic"}, "batch_invariant=True cannot go with kernel_backend='mosaic'"),
    ],
)
def test_what_cannot_keep_the_promise_is_refused_by_name(options, message):
    with pytest.raises(InvalidParameterError, match=message):
        LLMEngine(EngineArgs(batch_invariant=True, **options))


def test_the_trainer_says_what_is_wrong_with_its_arguments():
    model = build(ModelConfig.from_dict(tiny_model("llama-biases").config), "float32")
    weights = model.init(0)
    tokens = np.zeros((2, 4), np.int32)
    named = dict(zip(model.parameter_names, weights, strict=True))
    with pytest.raises(InvalidParameterError, match=r"tokens must be integers \[batch, length\], got float32"):
        token_logprobs(model, weights, tokens.astype(np.float32))
    with pytest.raises(InvalidParameterError, match=r"lengths must be integers \[2\]"):
        token_logprobs(model, weights, tokens, np.zeros(3, np.int32))
    with pytest.raises(InvalidParameterError, match="lm_head is missing"):
        token_logprobs(model, {name: array for name, array in named.items() if name != "lm_head"}, tokens)
    with pytest.raises(InvalidParameterError, match=r"embedding must have shape"):
        token_logprobs(model, named | {"embedding": weights[0][:, :3]}, tokens)
    assert token_logprobs(model, {"params": named}, tokens[:, :0]).shape == (2, 0)


def test_a_model_that_mixes_tokens_by_itself_is_refused():
    live = jnp.ones((20,), bool)
    with pytest.raises(UnsupportedModelError, match="keeps tokens apart outside attention"):
        in_row_tiles(lambda rows: rows.sum(axis=0), live, jnp.ones((20, 3)))


def test_without_the_option_bits_depend_on_the_batch(tmp_path):
    engine = start("llama-biases", tmp_path)
    try:
        texts = prompts()
        expected = alone(engine, texts)
        assert sum(compare(engine, texts, expected, seed) for seed in range(4)) > 0
    finally:
        engine.close()
