"""Products of rounded rows against float64, in XLA and in Triton's interpreter, and what they refuse."""

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import RoundedRows, Sums, devices, round_rows, rounded_product
from jpaged.pallas_kernels.devices import Device
from jpaged.pallas_kernels.rounded_product.api import OP
from tests.pallas_kernels.fp8_product.test_reference import exact, operands
from tests.pallas_kernels.marks import needs_triton


@pytest.mark.parametrize("backend", ["xla", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(3, 72, 272), (17, 40, 2048)])
@pytest.mark.parametrize(("dtype", "kept"), [(jnp.bfloat16, jnp.bfloat16), (jnp.float16, jnp.float32)])
def test_products_are_those_of_float64_within_rounding(backend, rows, outputs, inputs, dtype, kept):
    x, w, scale = operands(rows, outputs, inputs)
    rounded, _ = round_rows(jnp.asarray(x, dtype))
    y = rounded_product(rounded, w, scale[:, 0], backend=backend)
    if backend == "xla":
        assert isinstance(y, Sums)
        assert y.products.dtype == kept
        y = y.array()
    assert (y.shape, y.dtype) == ((rows, outputs), dtype)
    wide = np.asarray(rounded.values, np.float64) * np.asarray(rounded.scales, np.float64)
    right, terms = exact(wide[:rows], w, scale)
    # Sums are float32; they are rounded to 16 bits once, or twice where they wait for their scales in such.
    bits = 8 if dtype == jnp.bfloat16 else 11
    assert np.all(
        np.abs(np.asarray(y, np.float64) - right) <= terms * (inputs + 8) * 2.0**-24 + abs(right) * 2.0 ** (1 - bits)
    )


def test_a_kernel_takes_few_rows_on_hopper_alone(monkeypatch):
    def picked(rows):
        x = RoundedRows(jnp.zeros((-(-rows // 16) * 16, 64), jnp.float8_e4m3fn), jnp.ones((1, 1)), rows, jnp.bfloat16)
        return OP.pick(None, x, jnp.zeros((8, 64), jnp.float8_e4m3fn)).backend

    assert picked(1) == "xla"
    monkeypatch.setattr(devices, "default_device", lambda: Device("gpu", (9, 0)))
    assert picked(512) == "xla"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"w": np.zeros((8, 64), np.float32)}, "w must be float8_e4m3fn"),
        ({"w": jnp.zeros((8, 32), jnp.float8_e4m3fn)}, "w .* must have K = 64"),
        ({"scale": np.ones(7, np.float32)}, "scale .* must have N = 8"),
        ({"x": RoundedRows(jnp.ones((16, 64)), jnp.ones((16, 1)), 3, jnp.bfloat16)}, "x.values must be float8_e4m3fn"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, said):
    x, _ = round_rows(jnp.ones((3, 64), jnp.bfloat16))
    given = {"x": x, "w": jnp.zeros((8, 64), jnp.float8_e4m3fn), "scale": np.ones(8, np.float32)} | change
    with pytest.raises(ValueError, match=said):
        rounded_product(**given)
