"""The 4-bit product against float64, in XLA and in Triton's interpreter, and what it refuses."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jpaged.pallas_kernels import int4_product
from jpaged.pallas_kernels.int4_product.reference import dequantized, nvfp4_dequantized, pack
from tests.pallas_kernels.marks import needs_triton, runs_triton

SIZES = [(5, 40, 192, 32, True), (1, 24, 256, 128, False), (37, 72, 128, 64, True), (9, 40, 192, 64, False)]
SIZES += [(3, 72, 2080, 32, True)]  # in two parts, the second of which does not fill its steps
SIZES += [(3, 7, 128, 32, False)]
SIZES += [(5, 40, 256, 32, True), (8, 72, 1024, 128, False)]  # several steps at a time
"""Rows, outputs and inputs, of which no tile has just as many; groups; and whether these have zero points."""


BACKENDS = [("xla", jnp.float32, 23), ("xla", jnp.bfloat16, 8), ("xla", jnp.float16, 11)]
BACKENDS += [pytest.param("triton", dtype, bits, marks=runs_triton) for _, dtype, bits in BACKENDS[1:]]


def operands(rows, outputs, inputs, group, zeros=True, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    values = rng.integers(0, 16, (outputs, inputs), np.uint8)
    scale = rng.uniform(0.01, 0.1, (outputs, inputs // group)).astype(np.float32)
    zero = rng.integers(0, 17, scale.shape).astype(np.uint8) if zeros else None
    return x, values, scale, zero


def exact(values, scale, zero, group):
    middle = 8 if zero is None else np.repeat(zero, group, axis=1).astype(np.float64)
    return (values.astype(np.float64) - middle) * np.repeat(scale, group, axis=1).astype(np.float64)


@pytest.mark.parametrize("group", [2, 32, 64, 128])
def test_what_is_packed_is_found_again(group):
    _, values, scale, zero = operands(1, 24, 256, group)
    found = np.asarray(dequantized(pack(values, group), scale, zero, group))
    np.testing.assert_array_equal(found, exact(values, scale, zero, group).astype(np.float32))


@pytest.mark.parametrize(("backend", "dtype", "bits"), BACKENDS)
@pytest.mark.parametrize(("rows", "outputs", "inputs", "group", "zeros"), SIZES)
def test_products_are_those_of_float64_within_rounding(backend, dtype, bits, rows, outputs, inputs, group, zeros):
    x, values, scale, zero = operands(rows, outputs, inputs, group, zeros)
    x = np.asarray(jnp.asarray(x, dtype))
    y = int4_product(jnp.asarray(x), pack(values, group), scale, zero, group=group, backend=backend)
    w, wide = exact(values, scale, zero, group), x.astype(np.float64)
    right, terms = wide @ w.T, np.abs(wide) @ np.abs(w).T
    assert y.dtype == dtype
    bound = terms * (2.0**-bits + inputs * 2.0**-24) + np.abs(right) * 2.0**-bits
    assert np.all(np.abs(np.asarray(y, np.float64) - right) <= bound)


def nvfp4(rows, outputs, inputs, seed=0):
    """x, the op's weights, and what they stand for in float64."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 16, (outputs, inputs), np.uint8)
    scale = rng.uniform(2**-9, 448, (outputs, inputs // 16)).astype(ml_dtypes.float8_e4m3fn)
    scale[0, :2] = 2**-9, 448
    outer = rng.uniform(500, 4000, outputs).astype(np.float32)
    outer[-1] = 0
    divisor = np.where(outer == 0, np.inf, outer)[:, None]
    wide = np.repeat((scale.astype(np.float32) / divisor.astype(np.float32)), 16, axis=1)
    right = np.array([*E2M1, *(-one for one in E2M1)], np.float32)[values] * wide
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    return x, {"w": pack(values, 32), "scale": scale, "outer": outer, "form": "nvfp4", "group": 16}, right


E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def test_nvfp4_is_found_again():
    _, given, right = nvfp4(1, 24, 160)
    np.testing.assert_array_equal(nvfp4_dequantized(given["w"], given["scale"], given["outer"]), right)


@pytest.mark.parametrize(("backend", "dtype", "bits"), BACKENDS)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(5, 40, 160), (37, 72, 128), (1, 24, 32)])
def test_products_in_nvfp4_are_those_of_float64_within_rounding(backend, dtype, bits, rows, outputs, inputs):
    x, given, right = nvfp4(rows, outputs, inputs)
    x = np.asarray(jnp.asarray(x, dtype))
    y = int4_product(jnp.asarray(x), **given, backend=backend)
    w, wide = right.astype(np.float64), x.astype(np.float64)
    right, terms = wide @ w.T, np.abs(wide) @ np.abs(w).T
    assert y.dtype == dtype
    small = 2.0**-24 * np.abs(wide).sum(axis=1, keepdims=True) if dtype == jnp.float16 else 0  # subnormal weights
    bound = terms * (2.0**-bits + inputs * 2.0**-24) + np.abs(right) * 2.0**-bits + small
    assert np.all(np.abs(np.asarray(y, np.float64) - right) <= bound)
    assert not np.asarray(y)[:, -1].any()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"group": 32}, "group of form='nvfp4' must be 16, and K a multiple of 32, got 32, 64"),
        ({"outer": None}, "outer goes with form='nvfp4', and with no other"),
        ({"form": "int4"}, "scale must be float32"),
        ({"form": "nf4"}, "form must be one of int4, nvfp4, got 'nf4'"),
        ({"scale": np.ones((8, 4), np.float32)}, "scale must be float8_e4m3fn"),
        ({"outer": np.ones(1, np.float32)}, "outer .* must have N = 8"),
        ({"zero": np.ones((8, 4), np.uint8)}, "zero goes with form='int4', and not with 'nvfp4'"),
    ],
)
def test_arguments_that_do_not_fit_nvfp4_are_named(change, said):
    x, given, _ = nvfp4(3, 8, 64)
    with pytest.raises(ValueError, match=said):
        int4_product(**given | {"x": x} | change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"group": 7}, "group must be even and divide K=64"),
        ({"w": np.zeros((8, 64), np.uint8)}, "w .* must have K / 2 = 32"),
        ({"scale": np.ones((8, 1), np.float32)}, "scale .* must have G = 2"),
        ({"zero": np.ones((8, 2), np.int32)}, "zero must be uint8"),
        ({"x": np.zeros((3, 64), np.int32)}, "x must be of floats"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, said):
    x, values, scale, zero = operands(3, 8, 64, 32)
    with pytest.raises(ValueError, match=said):
        int4_product(**{"x": x, "w": pack(values, 32), "scale": scale, "zero": zero, "group": 32} | change)


@needs_triton
def test_what_the_kernel_does_not_take_is_refused_where_it_is_forced():
    x, values, scale, zero = operands(3, 8, 64, 8)
    with pytest.raises(ValueError, match="dtype float32; it multiplies in 16 bits"):
        int4_product(x, pack(values, 8), scale, zero, group=8, backend="triton")
    x = jnp.asarray(x, jnp.bfloat16)
    with pytest.raises(ValueError, match="groups of 8; it takes 32, 64, 128"):
        int4_product(x, pack(values, 8), scale, zero, group=8, backend="triton")
