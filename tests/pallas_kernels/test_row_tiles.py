"""`models.row_tiles` where products have a kernel: of all rows at once, with bits that depend on the row alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models import ModelConfig, build, row_tiles
from jpaged.pallas_kernels import invariant_product
from jpaged.pallas_kernels.registry import missing
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.skipif(missing("triton") is not None, reason=str(missing("triton")))


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """The shapes of the products that are computed for all rows."""
    calls = []

    def count(x, w, **options):
        calls.append((x.shape, w.shape))
        return invariant_product(x, w, **options)

    monkeypatch.setattr(row_tiles, "invariant_product", count)
    return calls


def hidden_and_logits(model, weights, tokens, backend):
    """Without attention between tokens, so that a row is what it is alone."""

    def compute(weights, tokens):
        live = jnp.ones(tokens.shape, bool)
        positions = jnp.zeros_like(tokens)
        hidden = row_tiles.forward_in_row_tiles(
            model, weights, tokens, positions, live, lambda asked: asked.q + 1, backend
        )
        return hidden, row_tiles.with_weights(model.head_logits, model.head_weights(weights), live, hidden, backend)

    return jax.jit(compute)(weights, tokens)


@pytest.mark.parametrize(("name", "products"), [("llama-biases", 4), ("qwen3-moe", 3)])
def test_products_are_of_all_rows_and_rows_have_the_bits_that_they_have_alone(name, products, counted):
    """Of a dense layer qkv, out, gate and up, down; of a sparse one qkv, out and the router; and the head."""
    config = ModelConfig.from_dict(tiny_model(name).config)
    model = build(config, "bfloat16")
    weights = model.init(1)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 150, 41), jnp.int32)
    together = hidden_and_logits(model, weights, tokens, "triton,xla")
    assert len(counted) == products * config.num_layers + 1
    assert {x[0] for x, _ in counted} == {41}
    for some in (slice(0, 1), slice(7, 30)):
        for one, whole in zip(hidden_and_logits(model, weights, tokens[some], "triton,xla"), together, strict=True):
            np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(whole[some], np.float32))
    in_tiles = hidden_and_logits(model, weights, tokens, "xla")
    for kernel, xla in zip(together, in_tiles, strict=True):
        kernel, xla = np.asarray(kernel, np.float32), np.asarray(xla, np.float32)
        assert np.linalg.norm(kernel - xla) < 0.03 * np.linalg.norm(xla)


def test_float32_stays_in_tiles(counted):
    model = build(ModelConfig.from_dict(tiny_model("llama-biases").config), "float32")
    hidden_and_logits(model, model.init(0), jnp.arange(3, dtype=jnp.int32), "triton,xla")
    assert not counted


@pytest.mark.parametrize(
    ("pattern", "x_shape", "w_shape", "found"),
    [
        ("tk,kn->tn", (5, 16), (16, 24), True),
        ("tab,abn->tn", (5, 2, 8), (2, 8, 24), True),
        ("tba,abn->tn", (5, 8, 2), (2, 8, 24), True),  # the rows' axes are put in the weight's order
        ("tk,knm->tnm", (5, 16), (16, 3, 8), True),
        ("tk,nk->tn", (5, 16), (24, 16), True),
        ("tk,nmk->tnm", (5, 16), (3, 8, 16), True),
        ("tk,nkm->tnm", (5, 16), (3, 16, 8), False),  # the weight would be copied
        ("thk,hkn->thn", (5, 2, 8), (2, 8, 24), False),  # a product for each head
    ],
)
def test_which_products_are_cut_out(pattern, x_shape, w_shape, found, counted):
    keys = jax.random.split(jax.random.key(0))
    x, w = (jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, (x_shape, w_shape), strict=True))
    product = partial(jnp.einsum, pattern)
    live = jnp.ones(5, bool)
    got = row_tiles.with_weights(lambda weights, x: product(x, weights[0]), [w], live, x, "triton,xla")
    assert bool(counted) == found
    expected = np.einsum(pattern, *(np.asarray(a, np.float64) for a in (x, w)))
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=0.06, rtol=0.01)
