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


def widened(values, scales, group=None):
    """What the kernel multiplies: values in e4m3 times their scales, in float64."""
    if group is not None:
        scales = np.repeat(scales, group, axis=1)[:, : values.shape[1]]
    return values.astype(np.float64) * scales


SHORT_SUMS = {(8, 9), (9, 0)}
"""GPUs whose tensor cores add products of e4m3 up in 14 bits. Others, and the interpreter, do so in float32."""


def cut_off(values, w, of_rows, scale, group=None):
    """float64 [M, N]: at most what tensor cores of 14 bits lose of a product, in sums of one group or of 128.

    They add 32 products to a sum at a time. Each of the 33 is cut off 13 bits behind the point of the largest, or 12,
    as the largest is told by exponents of factors, whose product may be twice as large. values: e4m3 [M, K]; of_rows,
    scale: of these and of w.
    """
    x, w = values.astype(np.float64), w.astype(np.float64)
    length = 128 if group is None else min(group, 128)
    lost = np.zeros((len(x), len(w)))
    for begin in range(0, x.shape[1], length):
        total, here = np.zeros_like(lost), np.zeros_like(lost)
        for start in range(begin, min(begin + length, x.shape[1]), 32):
            few = slice(start, min(start + 32, begin + length))
            products = x[:, None, few] * w[None, :, few]
            largest = np.maximum(np.abs(products).max(axis=2), np.abs(total))
            unit = np.exp2(np.floor(np.log2(np.maximum(largest, 2.0**-20))) - 12)
            here += unit + np.abs(np.fmod(products, unit[..., None])).sum(axis=2)
            total += products.sum(axis=2)
        g = 0 if group is None else begin // group
        lost += here * of_rows[:, g, None] * scale[None, :, g]
    return lost


def assert_within(y, right, **bounds):
    """That y is `right` but for the sum of these bounds. Prints how much of each part the largest error is."""
    error, bound = np.abs(np.asarray(y, np.float64) - right), sum(bounds.values())
    worst = np.unravel_index(np.argmax(error - bound), error.shape)
    parts = {name: float(part[worst]) for name, part in bounds.items()}
    said = f"error {error[worst]:.3e} of {right[worst]:.4g}; bounds {parts}; {np.sum(error > bound)} beyond"
    print(said)
    assert np.all(error <= bound), said


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
    y = fp8_product(jnp.asarray(x), w, scale, group=group, activations=activations, backend="triton")
    values, of_rows = (np.asarray(one) for one in round_to_fp8(jnp.asarray(x), group=group))
    right, terms = exact(x if activations == "none" else widened(values, of_rows, group), w, scale, group)
    # Each operand is exact in the kernel; sums are float32, and the result is rounded to x's type.
    bits = 8 if dtype == jnp.bfloat16 else 11
    bounds = {"sums": terms * (inputs + 8) * 2.0**-24, "result": abs(right) * 2.0**-bits}
    if activations != "none" and devices.default_device().capability in SHORT_SUMS:
        bounds["tensor cores"] = cut_off(values, w, of_rows, scale, group)
    assert_within(y, right, **bounds)


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
@pytest.mark.parametrize("signs", [True, False])
def test_a_given_scale_rounds_activations_and_parts_of_the_inputs_add_up(signs):
    x, w, scale = operands(2, 24, 4096)
    if not signs:  # of which sums kept in 14 bits throughout would lose 7 %
        x, w = np.abs(x), np.abs(w.astype(np.float32)).astype(E4M3)
    x = np.asarray(jnp.asarray(x, jnp.bfloat16))
    given = np.array([0.01], np.float32)
    y = fp8_product(jnp.asarray(x), w, scale, given, activations="static", dtype=jnp.float32, backend="triton")
    values, of_rows = np.clip(x.astype(np.float32) / given, -448, 448).astype(E4M3), np.full((2, 1), given)
    right, terms = exact(widened(values, of_rows), w, scale)
    bounds = {"sums": terms * 4096 * 2.0**-24}
    if devices.default_device().capability in SHORT_SUMS:
        bounds["tensor cores"] = cut_off(values, w, of_rows, scale)
    assert_within(y, right, **bounds)


def in_14_bits(x, w, length):
    """float64 [M, N]: x @ w.T as such tensor cores compute it, in sums of so many inputs that are added up exactly."""
    whole = np.zeros((len(x), len(w)))
    for begin in range(0, x.shape[1], length):
        total = np.zeros_like(whole)
        for start in range(begin, begin + length, 32):
            products = x[:, None, start : start + 32] * w[None, :, start : start + 32]
            largest = np.maximum(np.abs(products).max(axis=2), np.abs(total))
            unit = np.exp2(np.floor(np.log2(largest)) - 13)
            total = (np.trunc(products / unit[..., None]).sum(axis=2) + np.trunc(total / unit)) * unit
        whole += total
    return whole


@pytest.mark.parametrize("signs", [True, False])
def test_short_sums_in_14_bits_are_within_their_bound_and_long_ones_of_one_sign_are_not(signs):
    x, w, scale = operands(2, 24, 4096)
    values, one = (x * 60).astype(E4M3), np.ones((2, 1))
    if not signs:
        values, w = np.abs(values.astype(np.float32)).astype(E4M3), np.abs(w.astype(np.float32)).astype(E4M3)
    x, wide = values.astype(np.float64), w.astype(np.float64)
    bound, right = cut_off(values, w, one, np.ones_like(scale)), x @ wide.T
    assert np.all(np.abs(in_14_bits(x, wide, 128) - right) <= bound)
    assert signs or np.all(np.abs(in_14_bits(x, wide, 4096) - right) > 2 * bound)


@pytest.mark.parametrize(
    ("device", "rows", "groups", "activations", "chosen"),
    [
        (HOPPER, 8, 1, "dynamic", "hopper"),
        (HOPPER, 16, 2, "none", "hopper"),
        (HOPPER, 17, 1, "dynamic", "xla"),
        (HOPPER, 17, 1, "none", "triton"),
        (HOPPER, 256, 1, "dynamic", "xla"),
        (HOPPER, 1024, 2, "dynamic", "triton"),
        (HOPPER, 8192, 2, "dynamic", "xla"),
        (ADA, 8192, 2, "dynamic", "triton"),
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
