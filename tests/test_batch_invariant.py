"""batch_invariant=True: log-probabilities have the same bits whatever is computed beside a token, and in training."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged import EngineArgs, LLMEngine
from jpaged.api.errors import InvalidParameterError, UnsupportedModelError
from jpaged.bench.models import CONFIGS
from jpaged.executor.start import invariance
from jpaged.executor.start.invariance import check_attention
from jpaged.models import ModelConfig, Weights, build, dense_causal_attend
from jpaged.models.row_tiles import in_row_tiles
from jpaged.training import token_logprobs
from tests.support.invariance import Found, Sizes, alone, compare, trained
from tests.tiny_models import TINY_ENGINE, tiny_model, write_tiny_model

SHAPES: dict[str, Any] = {"decode_buckets": (32,), "token_buckets": (8, 64), "max_num_batched_tokens": 64}
SIZES = Sizes()
MODELS = ("llama-biases", "qwen3-moe", "demo")


def start(name: str, directory: Any, **options: Any) -> LLMEngine:
    own: dict[str, Any] = {}
    if name != "demo":
        own["model"] = str(write_tiny_model(tiny_model(name), directory, use_torch=False))
    else:  # in its own type, of 16 bits on a GPU
        own["dtype"] = "auto"
    return LLMEngine(EngineArgs(**TINY_ENGINE | SHAPES | own | options))


@pytest.fixture(
    scope="module",  # one worker runs all tests of a model, so that it is compiled and run alone once
    params=[pytest.param(name, marks=pytest.mark.xdist_group(f"invariant-{name}")) for name in MODELS],
)
def engine(request, tmp_path_factory) -> Iterator[LLMEngine]:
    engine = start(request.param, tmp_path_factory.mktemp("tiny"), batch_invariant=True)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(engine) -> dict[int, Found]:
    """What each of the prompts gets alone."""
    return alone(engine, SIZES, SIZES.prompts())


def test_bits_do_not_depend_on_what_is_computed_beside_a_token(engine, expected):
    texts = SIZES.prompts()
    assert all(np.isfinite(found.logprobs).all() for found in expected.values())
    assert [compare(engine, SIZES, texts, expected, seed) for seed in range(2)] == [[]] * 2


def test_a_trainer_computes_the_bits_that_the_engine_sampled_by(engine, expected):
    """In one batch of all sequences, and in one of two of them padded to another length."""
    texts, sampled = SIZES.prompts(), expected
    for chosen, length in ((range(len(texts)), 70), ((3, 8), 45)):
        differing, distance = trained(engine, texts, sampled, chosen, length)
        assert not differing
        assert distance < 2e-4


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


def test_gradients_are_those_of_finite_differences():
    """Along a random direction of each parameter, whose step is wide enough for float32."""
    model = build(ModelConfig.from_dict(tiny_model("llama-biases").config), "float32")
    weights, rng = model.init(2), np.random.default_rng(1)
    tokens, lengths = rng.integers(0, 150, (2, 12)).astype(np.int32), np.array([12, 7], np.int32)

    @jax.jit
    def total(weights: Weights) -> jax.Array:
        return jnp.sum(token_logprobs(model, weights, tokens, lengths))

    gradients = jax.jit(jax.grad(total))(weights)
    directions = [rng.normal(size=weight.shape).astype(np.float32) for weight in weights]
    for i, (name, gradient, direction) in enumerate(zip(model.parameter_names, gradients, directions, strict=True)):
        step = 0.02 * float(jnp.linalg.norm(weights[i]) + 0.1) / np.linalg.norm(direction)
        ends = [(*weights[:i], weights[i] + sign * step * direction, *weights[i + 1 :]) for sign in (1, -1)]
        difference = float(total(ends[0]) - total(ends[1])) / (2 * step)
        slope = float(jnp.vdot(gradient, direction))
        assert abs(difference - slope) < 0.02 * abs(slope) + 0.02 * float(jnp.linalg.norm(gradient)), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared_prefix_attention": True}, "batch_invariant=True cannot go with shared_prefix_attention=True"),
        ({"kv_cache_layout": "virtual"}, "batch_invariant=True cannot go with kv_cache_layout='virtual'"),
        ({"one_shot_rows": 8, "tensor_parallel_size": 2}, "batch_invariant=True cannot go with one_shot_rows=8"),
        ({"block_size": 256}, "batch_invariant=True needs a block_size of at most 128"),
        ({"kernel_backend": "cudnn"}, "batch_invariant=True cannot go with kernel_backend='cudnn'"),
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
    with pytest.raises(InvalidParameterError, match="kernel_backend='xla' is for batch_invariant=True"):
        token_logprobs(model, weights, tokens, kernel_backend="xla")
    for name, message in (
        ("cuda", "kernel_backend must be None or one of hopper"),
        ("hopper", "'hopper' cannot do this:"),
    ):
        with pytest.raises(InvalidParameterError, match=message):
            token_logprobs(model, weights, tokens, batch_invariant=True, kernel_backend=name)
    by_default = token_logprobs(model, weights, tokens, batch_invariant=True)
    assert (token_logprobs(model, weights, tokens, batch_invariant=True, kernel_backend="xla") == by_default).all()
    assert token_logprobs(model, {"params": named}, tokens[:, :0]).shape == (2, 0)


def test_a_trainer_attends_to_chunks_of_the_context_as_the_plain_form_does():
    model = build(ModelConfig.from_dict(tiny_model("llama4-scout-style").config), "float32")
    weights, tokens = model.init(0), np.random.default_rng(0).integers(3, 100, (2, 40))
    lengths = np.array([40, 17], np.int32)
    found = token_logprobs(model, weights, tokens, lengths, batch_invariant=True)
    np.testing.assert_allclose(found, token_logprobs(model, weights, tokens, lengths), rtol=0, atol=2e-5)


def test_blocks_whose_attention_is_another_than_a_trainers_are_refused(monkeypatch):
    model = build(ModelConfig.from_dict(CONFIGS["qwen3-0.6b"]), "bfloat16")
    check_attention(model, None, 8)  # on a CPU all blocks go to XLA
    chosen = {8: "xla", 16: "hopper"}
    pick = SimpleNamespace(pick=lambda backend, q, pool: SimpleNamespace(backend=chosen[pool.shape[3]]))
    monkeypatch.setattr(invariance, "OP", pick)
    with pytest.raises(
        InvalidParameterError, match="block_size=8 would take the kernels of 'xla', and a trainer those"
    ):
        check_attention(model, None, 8)
    monkeypatch.undo()
    in_32_bits = build(ModelConfig.from_dict(CONFIGS["qwen3-0.6b"]), "float32")
    with pytest.raises(InvalidParameterError, match="cannot be had with kernel_backend='hopper': "):
        check_attention(in_32_bits, "hopper", 16)


def test_a_model_that_mixes_tokens_by_itself_is_refused():
    live = jnp.ones((20,), bool)
    with pytest.raises(UnsupportedModelError, match="keeps tokens apart outside attention"):
        in_row_tiles(lambda rows: rows.sum(axis=0), live, jnp.ones((20, 3)))


def test_without_the_option_bits_depend_on_the_batch(tmp_path):
    engine = start("llama-biases", tmp_path)
    try:
        texts = SIZES.prompts()
        expected = alone(engine, SIZES, texts)
        assert any(compare(engine, SIZES, texts, expected, seed) for seed in range(4))
    finally:
        engine.close()
