"""The product of few rows against float64, in XLA and in Triton's interpreter; models that take it; refusals."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged import models
from jpaged.models.linear import Linear, Product
from jpaged.models.residual import Kernels
from jpaged.pallas_kernels import few_rows_product, few_rows_product_backend
from tests.pallas_kernels.marks import ON_GPU, WITH_TRITON, needs_triton
from tests.tiny_models import tiny_model

BITS = {"bfloat16": 8, "float16": 11}
EPS = 1e-5


def draw(rows, depth, columns, dtype, scale_dtype=None):
    """x, w, the norm's scale and the residual, rounded to their types."""
    rng = np.random.default_rng(rows * depth + columns)
    x, residual = 3 * rng.standard_normal((rows, depth)), rng.standard_normal((rows, columns))
    w, scale = rng.standard_normal((depth, columns)) * depth**-0.5, rng.uniform(0.5, 1.5, depth)
    return (
        *(jnp.asarray(a, dtype) for a in (x, w)),
        jnp.asarray(scale, scale_dtype or dtype),
        jnp.asarray(residual, dtype),
    )


def exact(x, w, scale, residual):
    """In float64: the norm, and the product with the residual added; scale, residual: or None."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    if scale is not None:
        x = x / np.sqrt((x**2).mean(1, keepdims=True) + EPS) * np.asarray(scale, np.float64)
    return x, x @ w + (0 if residual is None else np.asarray(residual, np.float64))


def check(found, x, w, scale, residual, bits):
    """Within the rounding of the norm's elements, of the product and of the sum."""
    normed, right = exact(x, w, scale, residual)
    product = exact(x, w, scale, None)[1]
    terms = np.abs(normed) @ np.abs(np.asarray(w, np.float64))
    bound = terms * (2.0 ** -(bits - 1) if scale is not None else 1e-6) + (np.abs(right) + np.abs(product)) * 2.0**-bits
    assert np.all(np.abs(np.asarray(found, np.float64) - right) <= bound)


@pytest.mark.parametrize("backend", WITH_TRITON)
@pytest.mark.parametrize(
    ("shape", "dtype", "normed", "added", "out"),
    [
        ((8, 256, 64), "bfloat16", True, False, None),
        ((8, 256, 40), "bfloat16", False, True, None),
        ((1, 200, 72), "bfloat16", True, True, "float32"),
        ((16, 136, 24), "float16", False, False, None),
    ],
)
def test_norm_product_and_sum_are_those_of_float64(backend, shape, dtype, normed, added, out):
    x, w, scale, residual = draw(*shape, dtype)
    scale, residual = scale if normed else None, residual if added else None
    found = few_rows_product(x, w, norm=scale, norm_eps=EPS, residual=residual, dtype=out, backend=backend)
    assert found.dtype == (out or dtype)
    check(found, x, w, scale, residual, BITS[dtype])


@pytest.mark.parametrize("backend", WITH_TRITON)
@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float32"])
def test_the_norm_is_given_beside_the_product(backend, scale_dtype):
    x, w, scale, _ = draw(5, 200, 40, "bfloat16", scale_dtype)
    options = {"norm": scale, "norm_eps": EPS, "dtype": jnp.float32, "backend": backend}
    found, normed = few_rows_product(x, w, **options, gives_normed=True)
    check(found, x, w, scale, None, BITS["bfloat16"])
    assert normed.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(normed, np.float64), exact(x, w, scale, None)[0], rtol=2.0**-7)


@needs_triton
def test_a_row_has_the_same_bits_alone_and_among_others():
    x, w, scale, residual = draw(11, 256, 40, "bfloat16")
    run = partial(few_rows_product, norm=scale, norm_eps=EPS, backend="triton")
    together = np.asarray(run(x, w, residual=residual), np.float32)
    alone = [np.asarray(run(x[i : i + 1], w, residual=residual[i : i + 1]), np.float32)[0] for i in range(len(x))]
    np.testing.assert_array_equal(together, alone)


@needs_triton
def test_it_is_taken_for_few_rows_of_small_matrices_in_16_bits():
    shape = jax.ShapeDtypeStruct

    def taken(rows, depth, columns, dtype, backend="triton,xla"):
        return few_rows_product_backend(shape((rows, depth), dtype), shape((depth, columns), dtype), backend)

    assert taken(16, 2048, 5120, jnp.bfloat16) == "triton"
    assert taken(17, 2048, 5120, jnp.bfloat16) == "xla"
    assert taken(8, 4096, 28_672, jnp.bfloat16) == "xla"
    assert taken(8, 2048, 5120, jnp.float32, "triton") == "xla"
    assert taken(8, 2048, 5120, jnp.bfloat16, "hopper") == "xla"  # which has no kernel of its own
    with pytest.raises(ValueError, match="17 rows"):
        few_rows_product(jnp.ones((17, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16), backend="triton")


@needs_triton
def test_norms_of_large_rows_in_float16_are_left_to_xla():
    """12,000 times a scale of 6 is more than float16 holds; the norm is not."""
    x, w, scale, _ = draw(8, 256, 64, "float16")
    x, scale = 4000 * x, 4 * scale
    options = {"norm": scale, "norm_eps": EPS}
    found, normed = few_rows_product(x, w, **options, gives_normed=True, backend="triton,xla")
    check(found, x, w, scale, None, BITS["float16"])
    np.testing.assert_allclose(np.asarray(normed, np.float64), exact(x, w, scale, None)[0], rtol=2.0**-9)
    with pytest.raises(ValueError, match="float16 has not the range"):
        few_rows_product(x, w, **options, backend="triton")
    for backend in ("triton", "triton,xla"):
        assert few_rows_product_backend(x, w, backend, normed=True) == "xla"
        assert few_rows_product_backend(x, w, backend) == "triton"
    layer = Linear((256,), (64,), 0.02, jnp.dtype(jnp.float16), nnx.Rngs(0))
    assert not layer.takes_unnormed(x, "triton,xla")
    assert isinstance(layer._term(x, "triton,xla"), Product)  # without a norm


@needs_triton
@pytest.mark.parametrize("name", ["qwen3-moe", "gemma3"])
def test_a_model_computes_norms_and_sums_in_its_products(name, monkeypatch):
    """As far from float32 as with XLA, whose products and norms are apart."""
    from jpaged.pallas_kernels.common import triton_interpreted

    config, tokens, called = models.ModelConfig.from_dict(tiny_model(name).config), jnp.arange(3, 11), []
    interpreted = triton_interpreted.call
    monkeypatch.setattr(
        triton_interpreted,
        "call",
        lambda kernel, *rest: called.append(kernel.fn.__name__) or interpreted(kernel, *rest),
    )

    def logits(dtype, backend, weights=None):
        model = models.build(config, dtype)
        weights = model.init(0, None) if weights is None else tuple(w.astype(jnp.float32) for w in weights)
        kernels = Kernels(None, backend, jnp.ones(8, bool))
        hidden = jax.jit(
            lambda w: model.logits(w, model.forward(w, tokens, jnp.arange(8), models.dense_causal_attend, kernels))
        )(weights)
        return np.asarray(hidden, np.float64), weights

    plain, weights = logits("bfloat16", "xla")
    assert not called
    found, _ = logits("bfloat16", "triton,xla")
    assert called.count("_few_rows_product") >= 2
    right, _ = logits("float32", "xla", weights)
    assert np.abs(found - right).mean() <= 1.3 * np.abs(plain - right).mean()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ON_GPU[1:])
@pytest.mark.parametrize("shape", [(8, 2048, 5120), (1, 4096, 2048), (16, 2048, 128)])
def test_on_the_gpu_it_is_that_of_float64(shape, backend):
    x, w, scale, residual = draw(*shape, "bfloat16")
    options = {"norm": scale, "norm_eps": EPS, "residual": residual, "backend": backend}
    found, normed = few_rows_product(x, w, **options, gives_normed=True)
    check(found, x, w, scale, residual, BITS["bfloat16"])
    np.testing.assert_allclose(np.asarray(normed, np.float64), exact(x, w, scale, None)[0], rtol=2.0**-7)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("x", {"x": jnp.ones((4,))}),
        ("w", {"w": jnp.ones((5, 6))}),
        ("w", {"w": jnp.ones((8, 6), jnp.bfloat16)}),
        ("empty", {"x": jnp.ones((0, 8))}),
        ("norm", {"norm": jnp.ones(6)}),
        ("norm", {"norm": jnp.ones(8, jnp.bfloat16)}),
        ("gives_normed", {"gives_normed": True}),
        ("residual", {"residual": jnp.ones((4, 8))}),
        ("backend", {"backend": "cuda"}),
    ],
)
def test_an_argument_that_does_not_fit_is_named(name, changes):
    with pytest.raises(ValueError, match=name):
        few_rows_product(**{"x": jnp.ones((4, 8)), "w": jnp.ones((8, 6))} | changes)
