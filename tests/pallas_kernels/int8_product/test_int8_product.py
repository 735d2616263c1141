"""The product with 8-bit integers against float64 and whole numbers, in XLA and in Triton's interpreter; where each is
chosen, and what they refuse."""

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import devices, int8_product
from jpaged.pallas_kernels.devices import Device
from jpaged.pallas_kernels.int8_product.api import MOST_INPUTS, OP
from jpaged.pallas_kernels.int8_product.rounding import round_to_int8
from tests.pallas_kernels.marks import needs_triton, runs_triton


def operands(rows=5, outputs=24, inputs=160, groups=1, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    w = rng.integers(-128, 128, (outputs, inputs), np.int8)
    return x, w, rng.uniform(0.001, 0.01, (outputs, groups)).astype(np.float32)


BACKENDS = [("xla", jnp.float32, 23), ("xla", jnp.bfloat16, 8)]
BACKENDS += [
    pytest.param("triton", dtype, bits, marks=runs_triton) for dtype, bits in ((jnp.bfloat16, 8), (jnp.float16, 11))
]


@pytest.mark.parametrize(("backend", "dtype", "bits"), BACKENDS)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "group"), [(3, 24, 200, None), (37, 24, 256, 64), (3, 7, 256, 64)]
)
def test_weights_alone_are_multiplied_within_rounding(backend, dtype, bits, rows, outputs, inputs, group):
    x, w, scale = operands(rows, outputs, inputs, groups=1 if group is None else inputs // group)
    x = np.asarray(jnp.asarray(x, dtype))
    y = int8_product(jnp.asarray(x), w, scale, group=group, backend=backend)
    wide = w.astype(np.float64) * (scale if group is None else np.repeat(scale, group, axis=1))
    right, terms = x.astype(np.float64) @ wide.T, np.abs(x.astype(np.float64)) @ np.abs(wide).T
    # XLA rounds weights with scales of groups to x's type; sums are float32; the result is of x's type.
    of_weights = 2.0**-bits if backend == "xla" and group is not None else 0.0
    bound = terms * (of_weights + inputs * 2.0**-24) + abs(right) * 2.0**-bits
    assert y.dtype == dtype
    assert np.all(np.abs(np.asarray(y, np.float64) - right) <= bound)


@pytest.mark.gpu
@needs_triton
def test_every_integer_is_widened_exactly():
    values = np.arange(-128, 128, dtype=np.int8)
    w = np.repeat(values[:, None], 64, axis=1)
    for dtype in (jnp.bfloat16, jnp.float16):
        x = jnp.zeros((1, 64), dtype).at[0, 17].set(1)
        y = int8_product(x, w, np.ones((256, 1), np.float32), dtype=jnp.float32, backend="triton")
        np.testing.assert_array_equal(y[0], values)


@pytest.mark.parametrize("given", [None, 0.01])
def test_activations_are_rounded_row_by_row_and_sums_are_exact(given):
    x, w, scale = operands(inputs=4096)
    x *= np.array([1e-3, 1, 50, 0, 1], np.float32)[:, None]
    x[4], w[0] = 127, 127  # a sum of 2 ** 26, of which float32 would lose digits on the way
    w[0, 7] = 126
    input_scale = None if given is None else np.array([given], np.float32)
    of_rows = input_scale if given is not None else np.abs(x).max(1, keepdims=True) / np.float32(127)
    of_rows = np.where(of_rows == 0, np.float32(1), of_rows)
    rounded = np.clip(np.round(x / of_rows), -128, 127)
    sums = (rounded.astype(np.int64) @ w.astype(np.int64).T).astype(np.float32)
    found = int8_product(x, w, scale, input_scale, activations="dynamic" if given is None else "static")
    np.testing.assert_allclose(found, sums * of_rows * scale[:, 0], rtol=2.0**-22)
    assert not np.asarray(found[3]).any()


def test_a_row_that_is_not_finite_is_nan_and_harms_no_other():
    x, w, scale = operands()
    spoilt = x.copy()
    spoilt[1, 3], spoilt[2, 5] = np.nan, np.inf
    y, whole = (np.asarray(int8_product(one, w, scale, activations="dynamic")) for one in (spoilt, x))
    assert not np.isfinite(y[1:3]).any()
    np.testing.assert_array_equal(y[[0, 3, 4]], whole[[0, 3, 4]])


def test_rounding_is_to_the_nearest_and_uses_all_of_the_range():
    values, scales = round_to_int8(jnp.array([[-254.0, 1.0, 3.0, 2.9, 254.0], [0, 0, 0, 0, 0]]))
    np.testing.assert_array_equal(values, [[-127, 0, 2, 1, 127], [0] * 5])  # halves to the even one
    np.testing.assert_array_equal(scales, [[2.0], [1.0]])
    np.testing.assert_array_equal(round_to_int8(jnp.array([[-300.0, 300.0]]), jnp.ones(1))[0], [[-128, 127]])


@needs_triton
@pytest.mark.parametrize(
    ("device", "rows", "group", "activations", "chosen"),
    [
        (Device("gpu", (8, 0)), 8, None, "dynamic", "xla"),
        (Device("gpu", (8, 0)), 512, None, "none", "triton"),
        (Device("gpu", (8, 0)), 513, None, "none", "xla"),
        (Device("gpu", (9, 0)), 512, 128, "none", "triton"),
        (Device("cpu"), 8, None, "none", "xla"),
    ],
)
def test_rows_and_scales_choose_the_implementation(monkeypatch, device, rows, group, activations, chosen):
    monkeypatch.setattr(devices, "default_device", lambda: device)
    x, w = jnp.zeros((rows, 256), jnp.bfloat16), jnp.zeros((8, 256), jnp.int8)
    scale = jnp.ones((8, 1 if group is None else 2))
    assert OP.pick(None, x, w, scale, group, activations).backend == chosen


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"w": np.zeros((24, 160), np.uint8)}, "w must be int8"),
        ({"scale": np.ones((24, 3), np.float32)}, "scale .* must have G = 1"),
        ({"activations": "weekly"}, "activations must be one of none, dynamic, static"),
        ({"activations": "static"}, "input_scale goes with activations='static'"),
        ({"input_scale": np.ones(1, np.float32)}, "input_scale goes with"),
        ({"group": 80, "scale": np.ones((24, 2), np.float32), "activations": "dynamic"}, "needs one scale a row of w"),
        (
            {"x": np.zeros((1, MOST_INPUTS + 1), np.float32), "w": np.zeros((24, MOST_INPUTS + 1), np.int8)}
            | {"activations": "dynamic"},
            "takes at most 131,071 inputs, got 131,072",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, said):
    x, w, scale = operands()
    with pytest.raises(ValueError, match=said):
        int8_product(**{"x": x, "w": w, "scale": scale} | change)


@needs_triton
def test_rounded_activations_are_refused_where_the_kernel_is_forced():
    x, w, scale = operands()
    with pytest.raises(ValueError, match="activations='dynamic'; it multiplies with those that are as they were"):
        int8_product(jnp.asarray(x, jnp.bfloat16), w, scale, activations="dynamic", backend="triton")
