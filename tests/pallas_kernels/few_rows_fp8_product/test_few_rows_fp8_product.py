"""FP8 products that round their rows: Triton's kernel, in its interpreter on a CPU, and XLA's, against float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import devices
from jpaged.pallas_kernels.devices import Device
from jpaged.pallas_kernels.few_rows_fp8_product import limits
from jpaged.pallas_kernels.few_rows_fp8_product.api import OP, activated, added_to, sums_of, takes_rows
from jpaged.pallas_kernels.registry import missing
from tests.pallas_kernels.few_rows_fp8_product.drawn import CASES, E4M3, Case, products, unrounded, weights

no_triton = pytest.mark.skipif(missing("triton") is not None, reason=str(missing("triton")))
BACKENDS = ["xla", pytest.param("triton", marks=[no_triton, pytest.mark.gpu])]
ACTIVATED = {"silu": lambda x: x / (1 + np.exp(-x)), "relu": lambda x: np.maximum(x, 0)}


def lost(case, right, terms):
    """What a sum may lose: in float32, on tensor cores of 14 bits, by an x that the norm's own sum moved to the next
    value in e4m3, and by what it is kept in."""
    kept = 2.0**-8 if case.dtype == jnp.bfloat16 else 2.0**-23
    moved = 2.0**-9 if case.norm is not None else 0.0
    return terms * (2.0**-12 + moved) + abs(right) * kept


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_are_products_of_the_rows_that_round_rows_makes(case, backend):
    rows, (w, scale) = unrounded(case), weights(case, case.outputs)
    found = sums_of(rows, w, scale, backend=backend)
    right, terms, of_rows = products(rows, w)
    assert found.shape == right.shape
    assert found.dtype == case.dtype
    np.testing.assert_array_equal(found.of_outputs, scale)
    exactly = 2.0**-7 if case.norm is not None else 2.0**-23
    np.testing.assert_allclose(found.of_rows[: case.rows], of_rows, rtol=exactly)
    got = np.asarray(found.products[: case.rows], np.float64)
    of_same_scale = got * np.asarray(found.of_rows[: case.rows]) / of_rows
    assert np.all(abs(of_same_scale - right) <= lost(case, right, terms))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_residual_is_added_and_the_sum_is_rounded_once(case, backend):
    rows, (w, scale) = unrounded(case), weights(case, case.outputs)
    residual = jnp.asarray(np.random.default_rng(2).standard_normal((case.rows, case.outputs)), case.dtype)
    found = added_to(residual, rows, w, scale, backend=backend)
    right, terms, of_rows = products(rows, w)
    factors = of_rows * np.asarray(scale, np.float64)
    total = right * factors + np.asarray(residual, np.float64)
    bound = lost(case, right, terms) * factors + abs(total) * float(jnp.finfo(case.dtype).eps)
    assert (found.shape, found.dtype) == (total.shape, case.dtype)
    assert np.all(abs(np.asarray(found, np.float64) - total) <= bound)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", ["silu", "relu"])
@pytest.mark.parametrize("case", CASES[:5], ids=str)
def test_gates_are_activated_and_multiplied_in_float32(case, activation, backend):
    rows, (w, scale) = unrounded(case), weights(case, 2 * case.outputs)
    found = activated(rows, w, scale, activation, backend=backend)
    sums = sums_of(rows, w, scale, backend="xla")
    wide = np.asarray(sums.wide(), np.float64)
    _, terms, of_rows = products(rows, w)
    bounds = lost(case, wide, terms * of_rows * np.asarray(scale, np.float64))
    (gate, up), (of_gate, of_up) = np.split(wide, 2, axis=1), np.split(bounds, 2, axis=1)
    right = ACTIVATED[activation](gate) * up
    assert (found.shape, found.x.dtype, found.dtype) == (right.shape, jnp.float32, case.dtype)
    bound = 1.2 * (of_gate * (abs(up) + of_up) + abs(gate) * of_up) + abs(right) * 2.0**-20
    assert np.all(abs(np.asarray(found.x, np.float64) - right) <= bound)


@no_triton
@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES[:5], ids=str)
def test_the_largest_magnitudes_that_go_with_activated_rows_are_theirs(case):
    rows, (w, scale) = unrounded(case), weights(case, 2 * case.outputs)
    found = activated(rows, w, scale, "silu", backend="triton")
    largest = np.asarray(found.largest).max(axis=0).view(np.float32)
    np.testing.assert_array_equal(largest, np.abs(np.asarray(found.x)).max(axis=1))
    next_w, next_scale = weights(replace(case, depth=case.outputs), 40, seed=3)
    with_them, without = (
        sums_of(one, next_w, next_scale, backend="triton") for one in (found, replace(found, largest=None))
    )
    for name in ("products", "of_rows"):
        np.testing.assert_array_equal(getattr(with_them, name), getattr(without, name))


@no_triton
@pytest.mark.gpu
@pytest.mark.parametrize("size", [1.0, 1e-32])
@pytest.mark.parametrize("rows", [1, 8])
def test_every_value_is_rounded_as_a_division_by_the_scale_rounds_it(rows, size):
    """Products with ones at places of their own are the values; some of x are halfway between two of e4m3."""
    case = Case(rows=rows, depth=256, wide=True, given=size * 0.0625)
    x = np.array(unrounded(case).x) * size
    x[:, ::3] = (np.asarray(x[:, ::3] / case.given).astype(E4M3).astype(np.float32) * np.float32(1.0625)) * case.given
    given = replace(unrounded(case), x=jnp.asarray(x, jnp.float32))
    found = sums_of(given, jnp.asarray(np.eye(256), E4M3), jnp.ones(256), backend="triton")
    values = np.asarray(found.products, np.float64)
    right, _, of_rows = products(given, np.eye(256).astype(E4M3))
    np.testing.assert_array_equal(found.of_rows, of_rows)
    np.testing.assert_array_equal(values, right)
    assert np.abs(right).max() > 10


@no_triton
@pytest.mark.gpu
def test_rows_have_the_same_bits_beside_others_and_alone():
    case = Case(rows=8, norm=jnp.bfloat16)
    rows, (w, scale) = unrounded(case), weights(case, 72)
    together = sums_of(rows, w, scale, backend="triton")
    for i in (0, 5):
        alone = sums_of(replace(rows, x=rows.x[i : i + 1]), w, scale, backend="triton")
        np.testing.assert_array_equal(alone.array()[0], together.array()[i])


@no_triton
@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows_in_its_row_alone(bad):
    rows, (w, scale) = unrounded(Case()), weights(Case(), 72)
    rows = replace(rows, x=rows.x.at[0, 7].set(bad))
    y = np.asarray(sums_of(rows, w, scale, backend="triton").array(), np.float32)
    assert np.isfinite(y).all(axis=1).tolist() == [False, True, True]
    of_next = activated(rows, w, scale, "silu", backend="triton")
    y = np.asarray(sums_of(of_next, w[:, :36], scale, backend="xla").array(), np.float32)
    assert np.isfinite(y).all(axis=1).tolist() == [False, True, True]


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_the_environment_says_up_to_how_many_rows(monkeypatch):
    monkeypatch.setattr(devices, "default_device", lambda: Device("gpu", (9, 0)))
    w = array(64, 512, dtype=jnp.float8_e4m3fn)
    monkeypatch.delenv(limits.VARIABLE, raising=False)
    assert not takes_rows(1, w, jnp.bfloat16, None)
    if missing("triton") is None:
        monkeypatch.setenv(limits.VARIABLE, "4")
        assert [takes_rows(rows, w, jnp.bfloat16, None) for rows in (0, 1, 4, 5)] == [False, True, True, False]
        monkeypatch.setenv(limits.VARIABLE, "64")
        assert [takes_rows(rows, w, jnp.bfloat16, None) for rows in (8, 9)] == [True, False]
        assert not takes_rows(1, w, jnp.float32, None)
        assert not takes_rows(1, w, jnp.bfloat16, "xla")
    monkeypatch.setenv(limits.VARIABLE, "-1")
    with pytest.raises(ValueError, match=limits.VARIABLE):
        limits.most_rows()


BAD = [
    ("rows", {"x": array(0, 64)}),
    ("rows.x", {"x": array(2, 64, dtype=jnp.int32)}),
    ("rows.x", {"x": array(2, 64, dtype=jnp.float32), "norm": array(64)}),
    ("rows.norm", {"norm": array(32)}),
    ("rows.norm_eps", {"norm_eps": -1.0}),
    ("rows.largest", {"norm": array(64), "largest": array(1, 2, dtype=jnp.int32)}),
    ("rows.largest", {"largest": array(1, 2)}),
    ("rows.input_scale", {"input_scale": array(2, dtype=jnp.float32)}),
    ("w", {"w": array(8, 64)}),
    ("scale", {"scale": array(8, 1, dtype=jnp.float32)}),
    ("residual", {"residual": array(2, 8, dtype=jnp.float32)}),
    ("activation", {"activation": "swish"}),
    ("w", {"activation": "silu", "w": array(9, 64, dtype=jnp.float8_e4m3fn)}),
]


@pytest.mark.parametrize(("name", "changed"), BAD, ids=str)
def test_bad_input_is_refused_by_name(name, changed):
    others = {"w": array(8, 64, dtype=jnp.float8_e4m3fn), "scale": array(8, dtype=jnp.float32)}
    others |= {key: changed[key] for key in changed if key in ("w", "scale", "residual", "activation")}
    rows = replace(unrounded(Case(rows=2, depth=64)), norm_eps=0.0)
    rows = replace(rows, **{key: changed[key] for key in changed if key not in others})
    op = added_to if "residual" in changed else activated if "activation" in changed else sums_of
    with pytest.raises(ValueError, match=f"^{name}"):
        jax.eval_shape(lambda: op(rows=rows, **others))


@no_triton
def test_triton_s_kernel_says_which_rows_it_does_not_take():
    rows, (w, _) = unrounded(Case(depth=24)), weights(Case(depth=24), 8)
    assert "sixteens" in str(OP.unsupported("triton", rows, w))
    assert "9 rows" in str(OP.unsupported("triton", replace(rows, x=jnp.ones((9, 24))), w))
