"""Hopper's product of few rows with FP8 weights against float64: in the interpreter with its race detector, and on a
GPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import devices, fp8_product
from jpaged.pallas_kernels.devices import Device
from jpaged.pallas_kernels.fp8_product.api import takes_rounded_rows
from jpaged.pallas_kernels.fp8_product.operands import Operands, Options
from jpaged.pallas_kernels.registry import missing
from tests.pallas_kernels.fp8_product.test_reference import E4M3, exact, operands
from tests.pallas_kernels.marks import on_gpu

if missing("hopper") is not None:
    pytest.skip(str(missing("hopper")), allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.fp8_product import hopper
from jpaged.pallas_kernels.narrow_product.hopper_kernel import Tiling

BITS = {"bfloat16": 8, "float16": 11, "float32": 23}


def product(x, w, scale, group, dtype, tiling, interpret):
    given, options = Operands(x, jnp.asarray(w), jnp.asarray(scale), None), Options(group, "none", None, dtype)
    return hopper.fp8_product(given, options, tiling, interpret)


def compared(dtype, size, tiling=None, *, result=None, interpret=None):
    """Checks a product against float64, within what rounding allows."""
    rows, outputs, inputs, group = size
    x, w, scale = operands(rows, outputs, inputs, 1 if group is None else -(-inputs // group))
    x, kind = jnp.asarray(x, dtype), result or dtype
    y = product(x, w, scale, group, jnp.dtype(kind), tiling, interpret)
    assert y.dtype == kind
    assert y.shape == (rows, outputs)
    right, terms = exact(np.asarray(x, np.float64), w, scale, group)
    bound = terms * inputs * 2.0**-24 + np.abs(right) * 2.0 ** -BITS[kind]
    assert np.all(np.abs(np.asarray(y, np.float64) - right) <= bound)


def exactly(dtype, size, tiling=None, *, interpret=None, dense=True):
    """Checks a product whose sums are exact in any order, and that a row of NaN spoils itself alone.

    dense: of small integers. Otherwise one input of each row is not zero, and weights are all numbers of e4m3 but NaN.
    """
    rows, outputs, inputs, group = size
    rng = np.random.default_rng(5)
    if dense:
        x = rng.integers(-2, 3, (rows, inputs)).astype(np.float32)
        w = rng.integers(-15, 16, (outputs, inputs)).astype(E4M3)
    else:
        x = np.zeros((rows, inputs), np.float32)
        x[np.arange(rows), rng.integers(0, inputs, rows)] = rng.choice([-2.0, -1.0, 0.5, 1.0], rows)
        bits = np.array([one for one in range(256) if one & 0x7F != 0x7F], np.uint8)
        w = rng.choice(bits, (outputs, inputs)).view(E4M3)
    groups = 1 if group is None else -(-inputs // group)
    scale = (2.0 ** rng.integers(-3, 4, (outputs, groups))).astype(np.float32)
    right, _ = exact(x, w, scale, group)
    x[-1] = np.nan
    y = np.asarray(product(jnp.asarray(x, dtype), w, scale, group, jnp.dtype("float32"), tiling, interpret))
    np.testing.assert_array_equal(y[:-1], right[:-1])
    assert np.isnan(y[-1]).all()


@pytest.mark.parametrize(
    ("dtype", "size", "tiling"),
    [
        ("bfloat16", (5, 72, 512, None), Tiling(8)),  # outputs, rows and tiles that end one inside the other
        ("float16", (1, 200, 1408, 64), Tiling(8, blocks=2, consumers=1, stages=2, splits=1)),  # more steps than stages
        ("bfloat16", (19, 130, 720, 32), Tiling(16, stages=3, splits=2)),  # inputs end in a step, and in a group
        ("bfloat16", (3, 136, 912, None), Tiling(8, 2, 2, splits=3)),
        ("bfloat16", (2, 64, 304, 128), None),
    ],
)
def test_the_interpreter_agrees_and_finds_no_race(dtype, size, tiling):
    compared(dtype, size, tiling, interpret=plgpu.InterpretGPUParams(detect_races=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("group", "dense"), [(None, True), (32, True), (128, False)])
def test_the_interpreter_is_exact_where_sums_are(dtype, group, dense):
    exactly(dtype, (9, 40, 384, group), Tiling(16, stages=2), interpret=plgpu.InterpretGPUParams(), dense=dense)


def test_what_the_kernel_refuses_it_names():
    x, w, scale = operands(3, 8, 256)
    with pytest.raises(ValueError, match="bfloat16 and float16, not float32"):
        fp8_product(x, w, scale, backend="hopper")
    for inputs in (112, 264):
        x, w, scale = operands(3, 8, inputs)
        with pytest.raises(ValueError, match=f"multiples of 16 inputs from 128 on, and there are {inputs}"):
            fp8_product(jnp.asarray(x, "bfloat16"), w, scale, backend="hopper")
    with pytest.raises(ValueError, match="tiles of at most 16 rows, got 32"):
        compared("bfloat16", (3, 64, 256, None), Tiling(32))
    x, w, scale = operands(3, 8, 256, 16)
    with pytest.raises(ValueError, match="groups of 16 inputs; it takes groups of 32, 64, 128, or a scale an output"):
        fp8_product(jnp.asarray(x, "bfloat16"), w, scale, group=16, backend="hopper")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("bfloat16", (1, 6144, 4096, None)),
        ("bfloat16", (8, 4096, 14_336, None)),
        ("bfloat16", (16, 28_672, 4096, 128)),
        ("float16", (16, 4864, 896, 64)),
        ("bfloat16", (3, 896, 4864, 32)),
        ("bfloat16", (40, 1000, 1312, 128)),
    ],
)
def test_on_the_gpu_products_are_those_of_float64_within_rounding(dtype, size):
    compared(dtype, size)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("tiling", [*hopper.TILINGS, Tiling(8, 1, 2, 3, 1), Tiling(16, 1, 2, 3, 3)], ids=str)
def test_on_the_gpu_every_tiling_is_right(tiling):
    compared("bfloat16", (30, 1000, 2048, 64), tiling, result="float32")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(
    "size",
    [
        (8, 6144, 4096, None),
        (3, 40, 128, None),  # fewer outputs than a tile, one step
        (9, 1001, 1392, 32),  # nothing that divides
        (16, 512, 1792, 64),
        (13, 1000, 14_336, 128),
    ],
)
def test_on_the_gpu_products_are_exact_where_sums_are(dtype, size, dense):
    exactly(dtype, size, dense=dense)


@pytest.mark.parametrize(("rows", "rounded"), [(1, False), (16, False), (17, True), (8192, True)])
def test_few_rows_are_not_rounded(rows, rounded, monkeypatch):
    monkeypatch.setattr(devices, "default_device", lambda: Device("gpu", (9, 0)))
    w, scale = jnp.zeros((64, 256), jnp.float8_e4m3fn), jnp.ones((64, 1), jnp.float32)
    arguments = (w, scale, jnp.dtype(jnp.bfloat16), None, "dynamic")
    assert takes_rounded_rows(rows, *arguments, None) == rounded
    assert takes_rounded_rows(rows, *arguments, "xla")
