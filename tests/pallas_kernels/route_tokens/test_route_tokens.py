"""Routing: XLA anywhere, Triton kernels in their interpreter and on a GPU, against numpy, a token at a time."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.experts import Held, Routing, mix, route_rows
from jpaged.models.grouped_linear import PlainProduct
from jpaged.pallas_kernels import ExpertChoice, route_tokens, route_tokens_backend
from jpaged.pallas_kernels.grouped_product.tiles import END, FIRST, GROUP, most_tiles
from tests.pallas_kernels.marks import ON_GPU, WITH_TRITON, needs_triton

BEST, ALL = ExpertChoice(per_token=8), ExpertChoice(per_token=4, renormalized=False)
EACH = ExpertChoice(per_token=8, score="sigmoid", factor=2.5, groups=8, kept_groups=4)
CORRECTED = ExpertChoice(per_token=6, factor=1.5)
CASES = {  # tokens, experts, choice, of the routers that families have
    "Qwen3-30B-A3B, one token": (1, 128, BEST),
    "Qwen3-30B-A3B, the largest single block": (32, 128, BEST),
    "Qwen3-30B-A3B, blocks of four": (70, 128, BEST),
    "Qwen3-Next": (9, 512, ExpertChoice(per_token=10)),
    "Mixtral": (40, 8, ExpertChoice(per_token=2)),
    "gpt-oss": (5, 32, ExpertChoice(per_token=4)),
    "OLMoE": (7, 64, ExpertChoice(per_token=8, renormalized=False)),
    "DeepSeek-V2": (3, 160, ExpertChoice(per_token=6, renormalized=False, factor=16.0)),
    "DeepSeek-V2 in groups": (
        11,
        16,
        ExpertChoice(per_token=3, renormalized=False, groups=4, kept_groups=2, group_best=1),
    ),
    "Mistral Small 4 in groups": (60, 16, ExpertChoice(per_token=3, groups=4, kept_groups=2)),
    "DeepSeek-V3": (19, 256, EACH),
    "dots.llm1": (6, 24, ExpertChoice(per_token=6, score="sigmoid", renormalized=False)),
    "LFM2, with more added to sums": (6, 32, ExpertChoice(per_token=4, score="sigmoid", added_to_sum=0.1)),
    "ERNIE 4.5": (9, 64, CORRECTED),
    "one expert": (3, 1, ExpertChoice(per_token=1)),
}


def scores_of(logits, choice):
    """float64, as the routers' papers say."""
    x = logits.astype(np.float64)
    if choice.score == "sigmoid":
        return 1 / (1 + np.exp(-x))
    shifted = np.exp(x - x.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


def in_order(row):
    """Numbers, the best first: of equals the lower one, and NaN as minus infinity."""
    return np.argsort(-np.where(np.isnan(row), -np.inf, row), kind="stable")


def plain_choice(scores, correction, choice):
    """Experts [T, k], from the scores that picks go by."""
    found = []
    for row in scores if correction is None else scores + correction:
        if choice.groups > 1:
            groups = row.reshape(choice.groups, -1)
            worth = np.array([group[in_order(group)[: choice.group_best]].sum() for group in groups])
            kept = in_order(worth)[: choice.kept_groups]
            row = np.where(np.isin(np.arange(len(row)) // groups.shape[1], kept), row, -np.inf)
        found.append(in_order(row)[: choice.per_token])
    return np.array(found)


def check_rows(found, logits, choice, live, first, held, height):
    """The rows of `found` are those of its experts and weights, sorted stably, and its tiles are theirs."""
    tokens, each = found.experts.shape
    experts, weights = np.asarray(found.experts), np.asarray(found.weights)
    assert (experts[~live] == -1).all()
    own = experts - first
    here = live[:, None] & (own >= 0) & (own < held)
    flat = np.where(here, own, held).ravel()
    order = np.argsort(flat, kind="stable")[: here.sum()]
    rows = jax.tree.map(np.asarray, found.rows)
    np.testing.assert_array_equal(rows.tokens[: len(order)], order // each)
    np.testing.assert_array_equal(rows.weights[: len(order)], weights.ravel()[order])
    assert rows.tokens.shape == (tokens * each,)
    assert rows.weights.shape == (tokens * each + 128,)
    np.testing.assert_array_equal(rows.places.ravel()[order], np.arange(len(order)))
    assert (rows.places >= 0).all()
    assert (rows.places < tokens * each).all()
    sizes = np.bincount(flat, minlength=held + 1)[:held]
    np.testing.assert_array_equal(rows.group_sizes, sizes)
    assert rows.tiles.listed.shape == (most_tiles(tokens * each, held, height), 3)
    np.testing.assert_array_equal(rows.tiles.ends, np.cumsum(-(-sizes // height)))
    listed = rows.tiles.listed[: rows.tiles.ends[-1]]
    covered = [(row, tile[GROUP]) for tile in listed for row in range(tile[FIRST], tile[END])]
    assert covered == list(enumerate(np.repeat(np.arange(held), sizes)))
    assert all(0 < tile[END] - tile[FIRST] <= height for tile in listed)


def draw(seed, tokens, experts, choice):
    """Logits, and a correction where scores are of each expert alone, or `CORRECTED`."""
    rng = np.random.default_rng(seed)
    corrected = choice.score == "sigmoid" or choice == CORRECTED
    correction = rng.standard_normal(experts).astype(np.float32) if corrected else None
    return rng.standard_normal((tokens, experts)).astype(np.float32) * 2, correction


def run(logits, correction, choice, backend, *, live=None, first=None, held=None, height=64):
    call = jax.jit(route_tokens, static_argnames=("choice", "held", "tile_height", "backend"))
    options = {"correction": correction, "live": live, "held": held, "tile_height": height, "backend": backend}
    return call(logits, choice=choice, first=None if first is None else jnp.int32(first), **options)


@pytest.mark.parametrize("backend", WITH_TRITON)
@pytest.mark.parametrize("name", CASES)
def test_each_token_gets_its_best_experts_their_weights_and_its_rows(name, backend):
    tokens, experts, choice = CASES[name]
    logits, correction = draw(tokens, tokens, experts, choice)
    live = np.random.default_rng(1).random(tokens) < 0.8
    held = max(1, experts // 4)
    first = held if experts > 1 else 0
    scores = scores_of(logits, choice)
    wanted = plain_choice(scores, correction, choice)
    shares = np.take_along_axis(scores, wanted, axis=1)
    if choice.renormalized:
        added = choice.added_to_sum if choice.score == "sigmoid" else 0.0
        shares = shares / (shares.sum(axis=1, keepdims=True) + added)
    for found, lives, of, count in (
        (run(logits, correction, choice, backend), np.ones(tokens, bool), 0, experts),
        (run(logits, correction, choice, backend, live=live, first=first, held=held, height=2), live, first, held),
    ):
        np.testing.assert_array_equal(found.experts, np.where(lives[:, None], wanted, -1))
        np.testing.assert_allclose(found.weights, shares * choice.factor, rtol=2e-5)
        check_rows(found, logits, choice, lives, of, count, found.rows.tiles.height)


@pytest.mark.parametrize("backend", WITH_TRITON)
def test_sigmoids_that_are_all_one_leave_experts_in_the_order_of_their_logits(backend):
    choice = ExpertChoice(per_token=2, score="sigmoid", renormalized=False)
    logits = np.array([[20.0, 40.0, 30.0, -3.0], [-1.0, 18.0, 2.0, 19.0]], np.float32)
    found = run(logits, None, choice, backend)
    np.testing.assert_array_equal(found.experts, [[1, 2], [3, 1]])
    np.testing.assert_array_equal(found.weights, np.ones((2, 2)))


@pytest.mark.parametrize("backend", WITH_TRITON)
@pytest.mark.parametrize("tokens", [16, 80])
@pytest.mark.parametrize("choice", [BEST, ALL, EACH], ids=["best", "all", "each"])
def test_ties_zeros_and_logits_that_are_no_numbers_are_as_in_xla(choice, tokens, backend):
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((tokens, 64)).astype(np.float32).round()
    logits[0], logits[1, ::2], logits[2], logits[3], logits[4] = np.nan, np.nan, -np.inf, 0, np.inf
    logits[3, 1], logits[5, 7] = -0.0, np.inf
    logits[6], logits[6, :3] = np.nan, 1.0
    correction = rng.standard_normal(64).astype(np.float32).round() if choice.score == "sigmoid" else None
    found, wanted = run(logits, correction, choice, backend), run(logits, correction, choice, "xla")
    np.testing.assert_array_equal(found.experts, wanted.experts)
    np.testing.assert_allclose(found.weights, wanted.weights, rtol=1e-5)
    assert (np.diff(np.sort(np.asarray(found.experts), axis=1)) > 0).all()
    if choice is BEST:  # by hand: of equals the lower number, and a logit that is no number last
        np.testing.assert_array_equal(found.experts[:5], plain_choice(logits[:5], None, choice))
    check_rows(found, logits, choice, np.ones(tokens, bool), 0, 64, 64)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("tokens", [3, 70])
def test_a_sparse_layer_on_rows_that_kernels_sorted_is_that_of_xla(tokens):
    rng = np.random.default_rng(tokens)
    x, logits = (rng.standard_normal((tokens, size)).astype(np.float32) for size in (32, 64))
    gate_up, down = (rng.standard_normal(s).astype(np.float32) / 5 for s in ((16, 32, 2, 16), (16, 16, 32)))
    live, held = np.arange(tokens) < tokens - 1, Held(32, 16)

    @partial(jax.jit, static_argnums=0)
    def layer(backend):
        products = PlainProduct(jnp.asarray(gate_up)), PlainProduct(jnp.asarray(down))
        experts, weights, rows = route_rows(logits, Routing(per_token=4), held=held, live=live, backend=backend)
        assert (rows is None) == (backend == "xla")
        options = {"activation": "silu", "backend": backend, "rows": rows}
        return experts, mix(jnp.asarray(x), products, 16, experts - held.first, weights, **options)

    (experts, found), (wanted_experts, wanted) = layer("triton"), layer("xla")
    np.testing.assert_array_equal(experts, wanted_experts)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert (np.asarray(found)[-1] == 0).all()
    assert route_tokens_backend(logits, Routing(per_token=4), "hopper") == "xla"  # which has no kernel of its own


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ON_GPU[1:])
@pytest.mark.parametrize("tokens", [1, 8, 32, 33, 256, 1000, 8192])
@pytest.mark.parametrize("experts", [64, 128, 512])
def test_on_the_gpu_routing_is_that_of_xla(tokens, experts, backend):
    logits, _ = draw(tokens, tokens, experts, BEST)
    logits[: tokens // 2] = logits[: tokens // 2].round(1)  # ties
    live = np.arange(tokens) < max(1, tokens - 3)
    for options in ({"live": live}, {"live": live, "first": experts // 2, "held": experts // 2}):
        found, wanted = run(logits, None, BEST, backend, **options), run(logits, None, BEST, "xla", **options)
        np.testing.assert_array_equal(found.experts, wanted.experts)
        np.testing.assert_allclose(found.weights[live], wanted.weights[live], rtol=1e-5)
        check_rows(found, logits, BEST, live, options.get("first", 0), options.get("held", experts), 64)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("logits", {"logits": jnp.zeros((4, 16), jnp.bfloat16)}),
        ("logits", {"logits": jnp.zeros((0, 16))}),
        ("per_token", {"choice": ExpertChoice(per_token=17)}),
        ("groups", {"choice": ExpertChoice(per_token=2, groups=3)}),
        ("kept_groups", {"choice": ExpertChoice(per_token=5, groups=4, kept_groups=1)}),
        ("correction", {"correction": jnp.zeros(15)}),
        ("live", {"live": jnp.ones(3, bool)}),
        ("live", {"live": jnp.ones(4)}),
        ("first and held", {"held": 4}),
        ("first", {"first": jnp.zeros(1, jnp.int32), "held": 4}),
        ("held", {"first": jnp.int32(0), "held": 17}),
        ("tile_height", {"tile_height": 0}),
        ("backend", {"backend": "cuda"}),
    ],
)
def test_an_argument_that_does_not_fit_is_named(name, changes):
    good = {"logits": jnp.zeros((4, 16)), "choice": ExpertChoice(per_token=2)}
    with pytest.raises(ValueError, match=name):
        route_tokens(**good | changes)
