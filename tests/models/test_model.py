"""A model as pure functions of its flat weights, and the dense attention for training."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged import models
from jpaged.api.errors import InvalidParameterError
from jpaged.pallas_kernels import split_qkv
from tests.tiny_models import tiny_model


def build(name: str, dtype: str = "float32", **changes: object) -> models.Model:
    return models.build(models.ModelConfig.from_dict(tiny_model(name).config | changes), dtype)


def zeros_but_for_their_index(model: models.Model) -> models.Weights:
    return tuple(jnp.full(a.shape, i, a.dtype) for i, a in enumerate(model.abstract_weights))


def test_names_and_weights_stay_parallel_past_ten_layers() -> None:
    model = build("llama-biases", num_hidden_layers=12)
    weights = zeros_but_for_their_index(model)
    module = model.module(weights)
    assert all(a is b or np.array_equal(a, b) for a, b in zip(model.flatten(module), weights, strict=True))
    by_name = dict(zip(model.parameter_names, weights, strict=True))
    for layer in (0, 2, 11):
        assert module.layers[layer].attention.qkv.kernel[0, 0, 0, 0] == by_name[f"layers.{layer}.attention.qkv"].max()
        assert module.layers[layer].mlp.down.kernel[0, 0] == by_name[f"layers.{layer}.mlp.down"].max()
    assert {piece.parameter for piece in model.pieces} == set(model.parameter_names)


@pytest.mark.parametrize("name", ["llama-mha-d16", "opt-350m-style", "gpt2", "qwen3-tied-d64"])
def test_the_pieces_fill_every_parameter_exactly_once(name: str) -> None:
    model = build(name)
    counts = {
        name: np.zeros(a.shape, np.int32) for name, a in zip(model.parameter_names, model.abstract_weights, strict=True)
    }
    for piece in model.pieces:
        target = jnp.zeros(counts[piece.parameter].shape, jnp.int32)
        counts[piece.parameter] += np.asarray(piece.place(target, jnp.ones(piece.shape, jnp.int32)))
    assert all((count == 1).all() for count in counts.values())


@pytest.mark.parametrize("name", ["llama-mha-d16", "qwen2-tied", "opt-350m-style"])
def test_the_head_alone_gives_the_same_logits(name: str) -> None:
    model = build(name)
    weights = model.init(0)
    hidden = jax.random.normal(jax.random.key(0), (5, model.config.hidden_size))
    head = model.head_weights(weights)
    assert len(head) <= 2
    np.testing.assert_array_equal(model.head_logits(head, hidden), model.logits(weights, hidden))


@pytest.mark.parametrize("name", ["llama-gqa-d64-tied", "opt-350m-style", "gpt2"])
def test_dummy_activations_stay_finite_and_of_order_one_in_a_deep_bfloat16_model(name: str) -> None:
    depth = {"n_layer": 12} if name == "gpt2" else {"num_hidden_layers": 12}
    model = build(name, "bfloat16", **depth)
    weights = model.init(0)
    tokens = jnp.arange(3, 35)

    @jax.jit
    def run(weights: models.Weights) -> jax.Array:
        return model.logits(weights, model.forward(weights, tokens, jnp.arange(32), models.dense_causal_attend))

    logits = run(weights)
    assert logits.dtype == jnp.float32
    assert 0.1 < float(logits.std()) < 10


def products(program: Any) -> list[Any]:
    """Every dot_general equation of a jaxpr and of the jaxprs nested in it."""
    found = [equation for equation in program.eqns if equation.primitive.name == "dot_general"]
    for equation in program.eqns:
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found += products(inner)
    return found


@pytest.mark.parametrize("name", ["llama-biases", "opt-350m-style", "gpt2"])
def test_every_float32_product_asks_for_full_precision(name: str) -> None:
    """The default would round its factors to TF32 on a GPU, which no test on a CPU can see."""
    model = build(name)

    def run(weights: models.Weights, tokens: jax.Array) -> jax.Array:
        return model.logits(weights, model.forward(weights, tokens, tokens, models.dense_causal_attend))

    found = products(jax.make_jaxpr(run)(model.abstract_weights, jnp.arange(4)).jaxpr)
    # Each layer: qkv, two in attention, its output, two in the MLP.
    assert len(found) >= 6 * model.config.num_layers + 1
    for equation in found:
        assert set(equation.params["precision"]) == {jax.lax.Precision.HIGHEST}


@pytest.mark.parametrize("name", ["llama-biases", "gpt2"])
def test_each_layer_makes_one_product_of_q_k_and_v(name: str) -> None:
    model = build(name, "bfloat16")
    tokens = jnp.arange(4)
    program = jax.make_jaxpr(lambda w: model.forward(w, tokens, tokens, lambda qkv, **_: split_qkv(qkv)[0]))
    assert len(products(program(model.abstract_weights).jaxpr)) == 4 * model.config.num_layers


def test_a_module_can_be_trained_and_its_weights_taken_back() -> None:
    model = build("llama-gqa-d64-tied")
    module = model.module(model.init(0))
    tokens = jnp.asarray([[5, 6, 7, 8, 9, 10, 11, 12], [9, 8, 7, 6, 5, 4, 3, 12]])
    positions = jnp.arange(tokens.shape[1])

    def loss_of(module: models.CausalLM, tokens: jax.Array) -> jax.Array:
        def one(row: jax.Array) -> jax.Array:
            logits = module.logits(module(row, positions, models.dense_causal_attend))
            return -jnp.take_along_axis(jax.nn.log_softmax(logits[:-1]), row[1:, None], axis=1).mean()

        return jax.vmap(one)(tokens).mean()

    @nnx.jit
    def step(module: models.CausalLM, tokens: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(loss_of)(module, tokens)
        nnx.update(module, jax.tree.map(lambda w, g: w - 0.3 * g, nnx.state(module, nnx.Param), gradients))
        return loss

    losses = [float(step(module, tokens)) for _ in range(8)]
    assert losses[-1] < 0.7 * losses[0]
    weights = model.flatten(module)
    assert all(a is b for a, b in zip(weights, model.flatten(nnx.state(module)), strict=True))
    pure = jax.jit(lambda weights: loss_of(model.module(weights), tokens))(weights)
    assert float(pure) < losses[-1]


def test_weights_of_another_model_are_refused() -> None:
    model = build("llama-mha-d16")
    with pytest.raises(InvalidParameterError, match="lm_head"):
        model.flatten(build("llama-gqa-d64-tied").module(build("llama-gqa-d64-tied").init(0)))
    wide = build("llama-mha-d16", hidden_size=128)
    with pytest.raises(InvalidParameterError, match="shape"):
        model.flatten(wide.module(zeros_but_for_their_index(wide)))


def reference_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    window: int,
    cap: float,
    slopes: np.ndarray,
    segments: np.ndarray,
) -> np.ndarray:
    """float64, token by token and head by head."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for i in range(q.shape[0]):
        seen = [j for j in range(i + 1) if i - j < window and segments[i] == segments[j]]
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // k.shape[1])
            scores = cap * np.tanh(k[seen, kv_head] @ q[i, head] * scale / cap)
            scores -= slopes[head] * (i - np.array(seen))
            weights = np.exp(scores - scores.max())
            out[i, head] = weights @ v[seen, kv_head] / weights.sum()
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_dense_attention_equals_a_plain_loop(kv_heads: int) -> None:
    rng = np.random.default_rng()
    q = rng.standard_normal((19, 4, 8), np.float32)
    k, v = rng.standard_normal((2, 19, kv_heads, 8), np.float32)
    slopes = np.float32([0.5, 0.25, 0.1, 0.0])
    segments = np.repeat([0, 1, 2], [12, 1, 6])
    qkv = np.concatenate([q.reshape(19, kv_heads, -1, 8), k[:, :, None], v[:, :, None]], axis=2)
    ours = models.dense_causal_attend(
        qkv, scale=0.4, sliding_window=5, logit_softcap=2.0, alibi_slopes=slopes, segment_ids=segments
    )
    theirs = reference_attention(q, k, v, 0.4, 5, 2.0, slopes, segments)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    sinks = jnp.array([-2.0, 0.0, 1.5, 20.0])
    ours = models.dense_causal_attend(qkv, scale=0.4, sinks=sinks)
    heads = k.repeat(4 // kv_heads, 1)
    scores = np.where(np.tri(19), np.einsum("qhd,khd->hqk", q, heads) * 0.4, -np.inf)
    total = np.exp(scores).sum(-1, keepdims=True) + np.exp(np.float64(sinks))[:, None, None]
    theirs = np.einsum("hqk,khd->qhd", np.exp(scores) / total, v.repeat(4 // kv_heads, 1))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    plain = models.dense_causal_attend(qkv, scale=0.4)
    no_limits = reference_attention(q, k, v, 0.4, 99, 1e9, np.zeros(4), np.zeros(19))
    np.testing.assert_allclose(plain, no_limits, rtol=1e-5, atol=1e-5)
