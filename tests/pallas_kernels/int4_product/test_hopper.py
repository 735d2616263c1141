"""Hopper's 4-bit product against float64: in the interpreter with its race detector, and on a GPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import int4_product
from jpaged.pallas_kernels.int4_product.operands import Operands
from jpaged.pallas_kernels.int4_product.reference import pack
from jpaged.pallas_kernels.registry import missing
from tests.pallas_kernels.int4_product.test_int4_product import exact, operands
from tests.pallas_kernels.marks import on_gpu

if missing("hopper") is not None:
    pytest.skip(str(missing("hopper")), allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.int4_product import hopper
from jpaged.pallas_kernels.int4_product.hopper import TILINGS
from jpaged.pallas_kernels.narrow_product.hopper_kernel import Tiling

BITS = {"bfloat16": 8, "float16": 11, "float32": 23}


def compared(dtype, size, tiling=None, *, result=None, interpret=None):
    """Checks a product against float64, within what rounding allows."""
    rows, outputs, inputs, group, zeros = size
    x, values, scale, zero = operands(rows, outputs, inputs, group, zeros)
    x = jnp.asarray(x, dtype)
    given = Operands(x, jnp.asarray(pack(values, group)), jnp.asarray(scale), zero, None)
    kind = result or dtype
    y = hopper.int4_product(given, group=group, dtype=jnp.dtype(kind), tiling=tiling, interpret=interpret)
    assert y.dtype == kind
    assert y.shape == (rows, outputs)
    w, wide = exact(values, scale, zero, group), np.asarray(x, np.float64)
    right, terms = wide @ w.T, np.abs(wide) @ np.abs(w).T
    bound = terms * inputs * 2.0**-24 + np.abs(right) * 2.0 ** -BITS[kind]
    assert np.all(np.abs(np.asarray(y, np.float64) - right) <= bound)


@pytest.mark.parametrize(
    ("dtype", "size", "tiling"),
    [
        (
            "bfloat16",
            (5, 72, 512, 128, True),
            Tiling(8),
        ),  # outputs, rows and tiles that end one inside the other
        (
            "float16",
            (1, 200, 1792, 64, False),
            Tiling(8, blocks=2, consumers=1, stages=2, splits=1),
        ),  # more steps than stages
        ("bfloat16", (37, 130, 1056, 32, True), Tiling(16, stages=3, splits=2)),  # inputs end in a step
        ("bfloat16", (3, 136, 896, 128, True), Tiling(8, 2, 2, splits=3)),  # groups that no whole step has
    ],
)
def test_the_interpreter_agrees_and_finds_no_race(dtype, size, tiling):
    compared(dtype, size, tiling, interpret=plgpu.InterpretGPUParams(detect_races=True))


def exactly(dtype, size, tiling=None, *, interpret=None):
    """Checks a product whose numbers are such that any order of sums is exact, and that a row of NaN spoils itself
    alone: all bits of weights, zero points up to 255 among them, in their places."""
    rows, outputs, inputs, group, zeros = size
    rng = np.random.default_rng(5)
    x = rng.integers(-2, 3, (rows, inputs)).astype(np.float32)
    values = rng.integers(0, 16, (outputs, inputs), np.uint8)
    scale = 2.0 ** rng.integers(-3, 4, (outputs, inputs // group))
    zero = rng.choice(np.array([0, 1, 8, 15, 17, 255], np.uint8), scale.shape) if zeros else None
    right = x.astype(np.float64) @ exact(values, scale, zero, group).T
    x[-1] = np.nan
    given = Operands(jnp.asarray(x, dtype), jnp.asarray(pack(values, group)), jnp.asarray(scale, "float32"), zero, None)
    y = hopper.int4_product(given, group=group, dtype=jnp.dtype("float32"), tiling=tiling, interpret=interpret)
    np.testing.assert_array_equal(np.asarray(y)[:-1], right[:-1])
    assert np.isnan(np.asarray(y)[-1]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_interpreter_is_exact_where_sums_are(dtype, group):
    exactly(dtype, (3, 40, 384, group, True), Tiling(8, stages=2), interpret=plgpu.InterpretGPUParams())


@pytest.mark.parametrize(
    ("rows", "group", "zeros", "tiling"),
    [
        (1, 128, True, (8, 2, 1, 3)),
        (1, 32, False, (8, 1, 2, 3)),
        (9, 64, True, (16, 2, 1, 3)),
        (32, 128, False, (32, 1, 4, 3)),
        (17, 128, True, (32, 2, 2, 3)),
        (32, 64, False, (32, 1, 2, 3)),
        (64, 128, True, (64,)),
        (65, 128, True, (128, 1, 2, 2)),
        (300, 128, False, (128, 1, 2, 2)),
        (300, 64, False, (64,)),
    ],
)
def test_more_groups_and_zero_points_take_narrower_tiles(rows, group, zeros, tiling):
    assert hopper.pick_tiling(rows, group, zeros=zeros) == Tiling(*tiling)


def test_what_the_kernel_refuses_it_names():
    x, values, scale, _ = operands(3, 8, 64, 16)
    with pytest.raises(ValueError, match="bfloat16 and float16, not float32"):
        int4_product(x, pack(values, 16), scale, group=16, backend="hopper")
    x = jnp.asarray(x, "bfloat16")
    with pytest.raises(ValueError, match="it takes at least 256 inputs, and there are 64"):
        int4_product(x, pack(values, 16), scale, group=16, backend="hopper")
    x, values, scale, _ = operands(3, 8, 256, 16)
    with pytest.raises(ValueError, match="groups of 16 of form='int4'; it takes 32, 64, 128 of 'int4'"):
        int4_product(jnp.asarray(x, "bfloat16"), pack(values, 16), scale, group=16, backend="hopper")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("bfloat16", (1, 6144, 4096, 128, False)),
        ("bfloat16", (8, 4096, 14_336, 128, True)),
        ("float16", (16, 4864, 896, 64, True)),
        ("bfloat16", (3, 896, 4864, 32, True)),
        ("bfloat16", (32, 4096, 4096, 128, True)),
        ("float16", (64, 3072, 1024, 32, False)),
        ("bfloat16", (200, 1000, 1312, 32, True)),
        ("bfloat16", (1000, 4096, 4096, 128, True)),
    ],
)
def test_on_the_gpu_products_are_those_of_float64_within_rounding(dtype, size):
    compared(dtype, size)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    "tiling", [*TILINGS, Tiling(8, 1, 2, 3, 1), Tiling(16, 1, 2, 3, 3), Tiling(32, 1, 4, 3)], ids=str
)
def test_on_the_gpu_every_tiling_is_right(tiling):
    compared("bfloat16", (70, 1000, 2048, 64, True), tiling, result="float32")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "size",
    [
        (8, 6144, 4096, 128, True),
        (3, 40, 256, 128, False),  # fewer outputs than a tile, one step
        (9, 1001, 1376, 32, True),  # nothing that divides
        (16, 512, 1792, 64, True),
        (33, 4096, 4096, 64, False),
        (64, 1000, 14_336, 128, True),
        (130, 1000, 4096, 128, True),
        (65, 257, 512, 128, False),
    ],
)
def test_on_the_gpu_products_are_exact_where_sums_are(dtype, size):
    exactly(dtype, size)
