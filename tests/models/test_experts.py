"""Routers against transformers' and against plain numpy; experts' MLPs against a loop over tokens."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.models.experts import ClampedSwiGLU, Held, Routing, mix, route, route_rows
from jpaged.models.grouped_linear import PlainProduct
from jpaged.pallas_kernels import route_tokens
from jpaged.pallas_kernels.route_tokens import reference


def plain_route(logits: np.ndarray, routing: Routing, correction: np.ndarray | None) -> list[dict[int, float]]:
    """For each token: expert -> weight, in float64."""
    found = []
    for row in logits.astype(np.float64):
        scores = 1 / (1 + np.exp(-row)) if routing.score == "sigmoid" else np.exp(row) / np.exp(row).sum()
        choice = scores + (0 if correction is None else correction)
        if routing.groups > 1:
            groups = np.sort(choice.reshape(routing.groups, -1), axis=1)[:, -2:].sum(axis=1)
            kept = np.argsort(-groups)[: routing.kept_groups]
            choice = np.where(np.isin(np.arange(len(row)) // (len(row) // routing.groups), kept), choice, -np.inf)
        best = np.argsort(-choice)[: routing.per_token]
        total = scores[best].sum() if routing.renormalized else 1.0
        found.append({int(expert): routing.factor * scores[expert] / total for expert in best})
    return found


@settings(max_examples=15, deadline=None)
@given(
    routing=st.sampled_from(
        [
            Routing(per_token=3),
            Routing(per_token=2, renormalized=False),
            Routing(per_token=4, score="sigmoid", biased=True, groups=4, kept_groups=2, factor=2.5),
            Routing(per_token=1, score="sigmoid", renormalized=False),
            Routing(per_token=3, biased=True),
            Routing(per_token=3, biased=True, renormalized=False),
        ]
    ),
    seed=st.integers(0, 2**31),
)
def test_routers_pick_and_weigh_as_plain_numpy_does(routing: Routing, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((5, 16)).astype(np.float32)
    correction = rng.standard_normal(16).astype(np.float32) if routing.biased else None
    experts, weights = map(np.asarray, jax.jit(route, static_argnums=1)(logits, routing, correction))
    for chosen, shares, wanted in zip(experts, weights, plain_route(logits, routing, correction), strict=True):
        assert set(chosen.tolist()) == set(wanted)
        assert shares == pytest.approx([wanted[expert] for expert in chosen.tolist()], rel=1e-5)


@pytest.mark.parametrize(
    "routing",
    [
        Routing(per_token=8),
        Routing(per_token=4, renormalized=False),
        Routing(per_token=6, score="sigmoid", biased=True, groups=4, kept_groups=2, factor=2.5),
    ],
)
def test_many_tokens_get_the_experts_of_few_ties_zeros_and_nan_included(
    routing: Routing, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((40, 32)).astype(np.float32).round(1)
    logits[0], logits[1, ::2], logits[2], logits[3], logits[4] = np.nan, np.nan, -np.inf, 0.0, np.inf
    logits[3, 1] = -0.0
    correction = jnp.asarray(rng.standard_normal(32).round(1), jnp.float32) if routing.biased else None
    few = route(jnp.asarray(logits), routing, correction)
    monkeypatch.setattr(reference, "_FEW_COMPARISONS", 0)
    many = route(jnp.asarray(logits), routing, correction)
    np.testing.assert_array_equal(few[0], many[0])
    np.testing.assert_allclose(few[1], many[1], rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_token_without_finite_logits_gets_different_experts_and_touches_no_other(bad: float) -> None:
    logits = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    spoilt = logits.copy()
    spoilt[1] = bad
    routing = Routing(per_token=4)
    experts, weights = map(np.asarray, route(jnp.asarray(spoilt), routing))
    clean, clean_weights = map(np.asarray, route(jnp.asarray(logits), routing))
    assert len(set(experts[1].tolist())) == 4
    assert set(experts[1].tolist()) <= set(range(8))
    np.testing.assert_array_equal(experts[[0, 2]], clean[[0, 2]])
    np.testing.assert_array_equal(weights[[0, 2]], clean_weights[[0, 2]])


def draw(seed: int, tokens: int, experts: int, hidden: int, inner: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    x, gate_up, down = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((tokens, hidden), (experts, hidden, 2, inner), (experts, inner, hidden))
    )
    return x, gate_up, down


def mixed(x: Any, gate_up: Any, down: Any, experts: Any, weights: Any, **options: Any) -> jax.Array:
    """`mix` of plain weights."""
    return mix(x, (PlainProduct(gate_up), PlainProduct(down)), len(gate_up), experts, weights, **options)


def test_experts_give_each_token_the_weighted_sum_of_its_own_and_others_nothing() -> None:
    x, gate_up, down = draw(1, 7, 4, 24, 16)
    rng = np.random.default_rng(2)
    experts = rng.integers(-1, 5, (7, 3)).astype(np.int32)  # -1 and 4 are on other devices
    weights = rng.random((7, 3)).astype(np.float32)
    found = mixed(x, gate_up, down, experts, weights, activation="silu", backend="xla")
    wanted = np.zeros((7, 24))
    for token, (own, shares) in enumerate(zip(experts, weights, strict=True)):
        for expert, share in zip(own, shares, strict=True):
            if 0 <= expert < 4:
                gate, up = (x[token].astype(np.float64) @ gate_up[expert, :, half] for half in range(2))
                wanted[token] += share * (gate / (1 + np.exp(-gate)) * up) @ down[expert]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("tokens", [2, 7])  # rows unsorted, and sorted by expert
@pytest.mark.parametrize("activation", [ClampedSwiGLU(limit=1.5), "silu"])
def test_biases_are_weighted_with_the_experts_they_are_of(tokens: int, activation: ClampedSwiGLU | str) -> None:
    x, gate_up, down = draw(1, tokens, 12, 24, 16)
    rng = np.random.default_rng(2)
    experts = np.stack([rng.permutation(14)[:3] - 1 for _ in range(tokens)]).astype(np.int32)  # -1, 12: other devices
    weights = rng.random((tokens, 3)).astype(np.float32)
    biases = rng.standard_normal((12, 2, 16)).astype(np.float32), rng.standard_normal((12, 24)).astype(np.float32)
    found = mixed(x, gate_up, down, experts, weights, activation=activation, backend="xla", biases=biases)
    wanted = np.zeros((tokens, 24))
    for token, (own, shares) in enumerate(zip(experts, weights, strict=True)):
        for expert, share in zip(own, shares, strict=True):
            if 0 <= expert < 12:
                gate, up = (x[token].astype(np.float64) @ gate_up[expert, :, half] for half in range(2))
                gate, up = gate + biases[0][expert, 0], up + biases[0][expert, 1]
                if activation == "silu":
                    inner = gate / (1 + np.exp(-gate)) * up
                else:
                    gate, up = np.minimum(gate, 1.5), np.clip(up, -1.5, 1.5)
                    inner = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
                wanted[token] += share * (inner @ down[expert] + biases[1][expert])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)


def test_a_token_alone_gets_what_it_gets_among_others() -> None:
    x, gate_up, down = draw(6, 2, 6, 24, 16)  # 3 pairs are at most half as many as 6 experts, 6 are not
    experts, weights = np.array([[5, 0, -1], [1, 2, 3]], np.int32), np.float32([[0.5, 0.2, 0.3], [0.1, 0.8, 0.1]])
    both = mixed(x, gate_up, down, experts, weights, activation="silu", backend="xla")
    alone = mixed(x[:1], gate_up, down, experts[:1], weights[:1], activation="silu", backend="xla")
    np.testing.assert_allclose(alone, both[:1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", [ClampedSwiGLU(limit=1.5), "silu"])
def test_rows_that_come_sorted_give_what_rows_sorted_here_give(activation: ClampedSwiGLU | str) -> None:
    x, gate_up, down = draw(1, 7, 6, 24, 16)
    rng = np.random.default_rng(2)
    logits, live = rng.standard_normal((7, 12)).astype(np.float32), np.arange(7) < 5
    held, routing = Held(4, 6), Routing(per_token=3)
    options: dict[str, Any] = {"first": jnp.int32(held.first), "held": held.number, "live": live}
    experts, weights, rows = route_tokens(logits, routing, backend="xla", **options)
    again = route_rows(logits, routing, held=held, live=live, backend="xla")
    np.testing.assert_array_equal(again.experts, experts)
    assert again.rows is None
    biases = rng.standard_normal((6, 2, 16)).astype(np.float32), rng.standard_normal((6, 24)).astype(np.float32)
    mixing: dict[str, Any] = {"activation": activation, "backend": "xla", "biases": biases}
    wanted = mixed(x, gate_up, down, experts - held.first, weights, **mixing)
    found = mixed(x, gate_up, down, experts - held.first, weights, rows=rows, **mixing)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [2, 7])  # rows unsorted, and sorted by expert
@pytest.mark.parametrize("biased", [False, True])
def test_weights_of_inputs_multiply_what_an_expert_reads_and_no_bias(tokens: int, biased: bool) -> None:
    x, gate_up, down = draw(1, tokens, 12, 24, 16)
    rng = np.random.default_rng(2)
    logits, routing = rng.standard_normal((tokens, 14)).astype(np.float32), Routing(per_token=3, score="sigmoid")
    experts, weights, rows = route_tokens(logits, routing, first=jnp.int32(1), held=12, backend="xla")
    own = np.asarray(experts) - 1  # -1 and 12 are on other devices
    biases = rng.standard_normal((12, 2, 16)).astype(np.float32), rng.standard_normal((12, 24)).astype(np.float32)
    of_both, of_down = biases if biased else (np.zeros_like(biases[0]), np.zeros_like(biases[1]))
    wanted = np.zeros((tokens, 24))
    for token, choice in np.ndindex(own.shape):
        if 0 <= (expert := own[token, choice]) < 12:
            read = x[token].astype(np.float64) * np.float64(weights[token, choice])
            gate, up = (read @ gate_up[expert, :, half] + of_both[expert, half] for half in range(2))
            wanted[token] += (gate / (1 + np.exp(-gate)) * up) @ down[expert] + of_down[expert]
    options: dict[str, Any] = {"activation": "silu", "backend": "xla", "weighted_inputs": True}
    options["biases"] = biases if biased else None
    for sorted_rows in (None, rows):
        found = mixed(x, gate_up, down, experts - 1, weights, rows=sorted_rows, **options)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)


def test_gradients_reach_experts_router_weights_and_tokens() -> None:
    x, gate_up, down = draw(3, 5, 4, 16, 8)
    logits = np.random.default_rng(4).standard_normal((5, 4)).astype(np.float32)

    def loss(x: jax.Array, gate_up: jax.Array, down: jax.Array, logits: jax.Array) -> jax.Array:
        chosen = route(logits, Routing(per_token=2))
        return jnp.sum(mixed(x, gate_up, down, *chosen, activation="silu", backend="xla") ** 2)

    gradients = jax.grad(loss, argnums=(0, 1, 2, 3))(x, gate_up, down, logits)
    for gradient, argument in zip(gradients, (x, gate_up, down, logits), strict=True):
        assert gradient.shape == argument.shape
        assert jnp.isfinite(gradient).all()
        assert jnp.abs(gradient).max() > 0
    step = 1e-2 * np.random.default_rng(5).standard_normal(x.shape).astype(np.float32)
    around = [loss(x + sign * step, gate_up, down, logits) for sign in (1, -1)]
    assert float(around[0] - around[1]) == pytest.approx(2 * float(jnp.sum(gradients[0] * step)), rel=2e-2)


@pytest.mark.parametrize("options", [{"activation": ClampedSwiGLU()}, {"activation": "relu2", "biases": "both"}])
def test_experts_without_gates_refuse_what_they_would_have_to_ignore(options: dict[str, Any]) -> None:
    x, gate_up, down = draw(3, 2, 4, 24, 16)
    experts, weights = np.zeros((2, 1), np.int32), np.ones((2, 1), np.float32)
    if "biases" in options:
        options = options | {"biases": (np.zeros((4, 16), np.float32), np.zeros((4, 24), np.float32))}
    with pytest.raises(ValueError, match="without gates"):
        mixed(x, gate_up[:, :, 0], down, experts, weights, backend="xla", gated=False, **options)
