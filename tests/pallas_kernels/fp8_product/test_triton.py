"""The FP8 product in Triton's interpreter against float64, and where it is chosen."""

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import devices, fp8_product
from jpaged.pallas_kernels.devices import Device
from jpaged.pallas_kernels.fp8_product.api import OP
from jpaged.pallas_kernels.fp8_product.rounding import round_to_fp8
from jpaged.pallas_kernels.registry import missing
from tests.pallas_kernels.fp8_product.test_reference import E4M3, exact, operands

if missing("triton") is not None:
    pytest.skip(str(missing("triton")), allow_module_level=True)

OLD, ADA, HOPPER = Device("gpu", (8, 0)), Device("gpu", (8, 9)), Device("gpu", (9, 0))


def rounded(x, group=None):
    """What the kernel multiplies: x in e4m3 times its scales, in float64."""
    values, scales = round_to_fp8(jnp.asarray(x), group=group)
    scales = np.asarray(scales, np.float64)
    if group is not None:
        scales = np.repeat(scales, group, axis=1)[:, : x.shape[1]]
    return np.asarray(values, np.float64) * scales


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("activations", ["dynamic", "none"])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "group"),
    [(3, 72, 272, None), (1, 40, 200, 128), (37, 24, 256, 64), (130, 24, 320, 128), (5, 40, 176, 32)],
)
def test_products_are_those_of_float64_within_rounding(dtype, activations, rows, outputs, inputs, group):
    x, w, scale = operands(rows, outputs, inputs, 1 if group is None else -(-inputs // group))
    x = np.asarray(jnp.asarray(x * np.exp(np.arange(rows) % 5)[:, None], dtype))
    y = np.asarray(
        fp8_product(jnp.asarray(x), w, scale, group=group, activations=activations, backend="triton"), np.float64
    )
    right, terms = exact(x if activations == "none" else rounded(x, group), w, scale, group)
    # Each operand is exact in the kernel; sums are float32, and the result is rounded to x's type.
    bits = 8 if dtype == jnp.bfloat16 else 11
    assert np.all(np.abs(y - right) <= terms * (inputs + 8) * 2.0**-24 + abs(right) * 2.0**-bits)


@pytest.mark.gpu
def test_every_e4m3_value_is_widened_exactly():
    values = np.arange(256, dtype=np.uint8)
    values = np.where((values & 0x7F) == 0x7F, 0, values).astype(np.uint8).view(E4M3)
    w, scale = np.broadcast_to(values[:, None], (256, 64)), np.ones((256, 1), np.float32)
    for dtype in (jnp.bfloat16, jnp.float16):
        x = jnp.zeros((1, 64), dtype).at[0, 17].set(1)
        y = fp8_product(x, np.ascontiguousarray(w), scale, dtype=jnp.float32, backend="triton")
        np.testing.assert_array_equal(y[0], values.astype(np.float32))


@pytest.mark.gpu
def test_a_given_scale_rounds_activations_and_parts_of_the_inputs_add_up():
    x, w, scale = operands(2, 24, 4096)
    x = np.asarray(jnp.asarray(x, jnp.bfloat16))
    given = np.array([0.01], np.float32)
    y = fp8_product(jnp.asarray(x), w, scale, given, activations="static", dtype=jnp.float32, backend="triton")
    values = np.clip(x.astype(np.float32) / given, -448, 448).astype(E4M3).astype(np.float64) * given
    right, terms = exact(values, w, scale)
    assert np.all(np.abs(np.asarray(y) - right) <= terms * 4096 * 2.0**-24)


@pytest.mark.parametrize(
    ("device", "rows", "groups", "activations", "chosen"),
    [
        (HOPPER, 8, 1, "dynamic", "xla"),
        (HOPPER, 8, 1, "none", "triton"),
        (HOPPER, 256, 1, "dynamic", "xla"),
        (HOPPER, 8192, 2, "dynamic", "triton"),
        (HOPPER, 8192, 2, "none", "xla"),
        (ADA, 1, 1, "none", "triton"),
        (OLD, 8192, 2, "dynamic", "xla"),  # which leaves activations as they are
        (OLD, 64, 2, "dynamic", "triton"),
        (Device("cpu"), 8, 2, "dynamic", "xla"),
    ],
)
def test_rows_and_scales_choose_the_implementation(monkeypatch, device, rows, groups, activations, chosen):
    monkeypatch.setattr(devices, "default_device", lambda: device)
    x, w = jnp.zeros((rows, 256), jnp.bfloat16), jnp.zeros((8, 256), jnp.float8_e4m3fn)
    group = None if groups == 1 else 128
    assert OP.pick(None, x, w, jnp.ones((8, groups)), group, activations).backend == chosen


def test_what_the_kernel_does_not_take_is_refused_where_it_is_forced():
    x, w, scale = operands(groups=10)
    with pytest.raises(ValueError, match="dtype float32 is not bfloat16 or float16"):
        fp8_product(x, w, scale, group=16, backend="triton")
    with pytest.raises(ValueError, match="groups of 16; it takes 32, 64, 128"):
        fp8_product(jnp.asarray(x, jnp.bfloat16), w, scale, group=16, backend="triton")
