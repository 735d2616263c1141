"""The FP8 product against float64, with rounded activations and without, and what it refuses."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jpaged.pallas_kernels import devices, fp8_product
from jpaged.pallas_kernels.devices import Device

E4M3 = ml_dtypes.float8_e4m3fn
OLD, NEW = Device("gpu", (8, 0)), Device("gpu", (9, 0))


def operands(rows=5, outputs=24, inputs=160, groups=1, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    w = (rng.standard_normal((outputs, inputs)) * 60).astype(E4M3)
    return x, w, rng.uniform(0.001, 0.01, (outputs, groups)).astype(np.float32)


def exact(x, w, scale, group=None):
    wide = scale if group is None else np.repeat(scale, group, axis=1)[:, : w.shape[1]]
    return x.astype(np.float64) @ (w.astype(np.float64) * wide).T, np.abs(x.astype(np.float64)) @ np.abs(w * wide).T


@pytest.mark.parametrize(("dtype", "bits"), [(jnp.float32, 23), (jnp.bfloat16, 8), (jnp.float16, 11)])
@pytest.mark.parametrize("group", [None, 128, 32])
def test_weights_alone_are_multiplied_within_rounding(dtype, bits, group):
    x, w, scale = operands(groups=1 if group is None else -(-160 // group))
    x = np.asarray(jnp.asarray(x, dtype))
    y = fp8_product(jnp.asarray(x), w, scale, group=group)
    right, terms = exact(x, w, scale, group)
    assert y.dtype == dtype
    # The weights are rounded to x's type, the sums of 160 terms to float32, the result to x's type.
    assert np.all(
        np.abs(np.asarray(y, np.float64) - right) <= terms * (2.0**-bits + 160 * 2.0**-24) + abs(right) * 2.0**-bits
    )


@pytest.mark.parametrize("scale_of_x", [None, 0.01])
def test_activations_are_rounded_to_e4m3_row_by_row(scale_of_x):
    x, w, scale = operands()
    x *= np.array([1e-3, 1, 50, 0, 1], np.float32)[:, None]
    given = None if scale_of_x is None else np.array([scale_of_x], np.float32)
    activations = "dynamic" if given is None else "static"
    y = np.asarray(fp8_product(x, w, scale, given, activations=activations))
    of_rows = np.abs(x).max(1, keepdims=True) / np.float32(448) if given is None else given
    of_rows = np.where(of_rows == 0, np.float32(1), of_rows)
    rounded = np.clip(x / of_rows, -448, 448).astype(E4M3).astype(np.float32) * of_rows
    right, terms = exact(rounded, w, scale)
    assert np.all(np.abs(y - right) <= terms * 200 * 2.0**-24)
    assert not y[3].any()


def test_what_is_beyond_the_upper_bound_is_clipped():
    x, w, scale = operands()
    x[0, 0] = 1000.0
    clipped = np.where(x > 100.0, np.float32(100.0), x)
    bounded = fp8_product(x, w, scale, activations="dynamic", upper_bound=100.0)
    np.testing.assert_allclose(bounded, fp8_product(clipped, w, scale, activations="dynamic"), rtol=1e-6)


def test_a_row_that_is_not_finite_is_nan_and_harms_no_other():
    x, w, scale = operands()
    spoilt = x.copy()
    spoilt[1, 3], spoilt[2, 5] = np.nan, np.inf
    y = np.asarray(fp8_product(spoilt, w, scale, activations="dynamic"))
    assert np.isnan(y[1:3]).all()
    np.testing.assert_array_equal(y[[0, 3, 4]], np.asarray(fp8_product(x, w, scale, activations="dynamic"))[[0, 3, 4]])


def test_gpus_without_fp8_units_leave_activations_as_they_are(monkeypatch):
    x, w, scale = operands()
    right, terms = exact(x, w, scale)
    monkeypatch.setattr(devices, "default_device", lambda: OLD)
    y = np.asarray(fp8_product(x, w, scale, activations="dynamic"))
    assert np.all(np.abs(y - right) <= terms * 200 * 2.0**-24)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"w": np.zeros((24, 160), np.float32)}, "w must be float8_e4m3fn"),
        ({"scale": np.ones((24, 3), np.float32)}, "scale .* must have G = 1"),
        ({"activations": "weekly"}, "activations must be one of none, dynamic, static"),
        ({"activations": "static"}, "input_scale goes with activations='static'"),
        ({"input_scale": np.ones(1, np.float32)}, "input_scale goes with"),
        (
            {"group": 128, "scale": np.ones((24, 2), np.float32), "activations": "static", "input_scale": np.ones(1)},
            "needs one scale a row",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, said):
    x, w, scale = operands()
    with pytest.raises(ValueError, match=said):
        fp8_product(**{"x": x, "w": w, "scale": scale} | change)
