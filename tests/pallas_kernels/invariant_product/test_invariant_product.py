"""`invariant_product`: a row's bits depend on the row and on the weight, whatever is computed beside it."""

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import invariant_product
from jpaged.pallas_kernels.invariant_product import hopper_tiling
from jpaged.pallas_kernels.invariant_product.hopper_tiling import TILINGS, Tiling
from jpaged.pallas_kernels.registry import missing
from tests.pallas_kernels.marks import needs_mosaic, on_gpu

needs_triton = pytest.mark.skipif(missing("triton") is not None, reason=str(missing("triton")))
BACKENDS = ["xla", pytest.param("triton", marks=needs_triton)]


def draw(seed, rows, depth, columns, *, dtype="bfloat16", outputs_first=False):
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((columns, depth) if outputs_first else (depth, columns)) / depth**0.5
    return jnp.asarray(rng.standard_normal((rows, depth)), dtype), jnp.asarray(w, dtype)


def expected(x, w, outputs_first=False):
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    return x @ (w.T if outputs_first else w)


def bits(array):
    array = np.asarray(array)
    return array.view(f"uint{8 * array.itemsize}")


def relative_error(got, want):
    got = np.asarray(got, np.float64)
    assert np.isfinite(got).all()
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "outputs_first", "result", "error"),
    [
        ("bfloat16", False, None, 3e-3),
        ("float16", True, None, 4e-4),
        ("bfloat16", True, "float32", 1e-6),
        ("float16", False, "float32", 1e-6),
    ],
)
def test_rows_are_right_and_have_the_same_bits_among_any_others(backend, dtype, outputs_first, result, error):
    """Sizes that are no multiples of tiles, and rows that move to other places of other tiles."""
    x, w = draw(1, 150, 200, 90, dtype=dtype, outputs_first=outputs_first)
    product = jax.jit(partial(invariant_product, outputs_first=outputs_first, dtype=result, backend=backend))
    whole = product(x, w)
    assert whole.dtype == (result or dtype)
    assert relative_error(whole, expected(x, w, outputs_first)) < error
    for some in (slice(0, 1), slice(149, 150), slice(60, 67), slice(3, 150)):
        np.testing.assert_array_equal(bits(product(x[some], w)), bits(whole[some]))
    others = x.at[:5].set(jnp.nan).at[100:].multiply(7)
    np.testing.assert_array_equal(bits(product(others, w)[5:100]), bits(whole[5:100]))


@needs_triton
def test_triton_multiplies_by_the_same_instructions_whatever_the_rows():
    script = Path(__file__).with_name("products_in_ptx.py")
    command = [sys.executable, str(script), "80", "90", "100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for line in done.stdout.splitlines():
        one, *others = json.loads(line)["products"].values()
        assert one, line
        assert others == [one, one], line


def test_float32_takes_the_loop():
    x, w = draw(2, 5, 40, 24, dtype="float32")
    got = invariant_product(x, w)
    assert relative_error(got, expected(x, w)) < 1e-6
    assert invariant_product(x[:0], w).shape == (0, 24)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("x must have the axes", {"x": jnp.zeros((4, 16, 1), jnp.bfloat16)}),
        ("w", {"w": jnp.zeros((8, 16), jnp.bfloat16)}),
        ("w", {"w": jnp.zeros((16, 8), jnp.float32)}),
        ("x must be of floats", {"x": jnp.zeros((4, 16), jnp.int8)}),
        ("dtype must be x's, bfloat16, or float32, got float16", {"dtype": "float16"}),
        ("backend must be", {"backend": "cuda"}),
    ],
)
def test_an_argument_that_does_not_fit_is_named(message, changes):
    x, w = draw(0, 4, 16, 8)
    with pytest.raises(ValueError, match=re.escape(message)):
        invariant_product(**{"x": x, "w": w} | changes)


def test_every_tiling_fits_a_multiprocessor():
    for tiling in TILINGS:
        assert tiling.stages >= 4, tiling
        assert tiling.stages * (tiling.stage_bytes + 16) <= 227 << 10, tiling
        assert 128 * (232 * tiling.consumers + 40) <= 65536, tiling


@pytest.mark.parametrize("rows", [1, 64, 512, 8192])
@pytest.mark.parametrize(("depth", "columns"), [(3072, 1024), (4096, 28672), (1024, 151_936)])
def test_small_outputs_get_small_tiles_and_large_ones_large(rows, depth, columns):
    picked = hopper_tiling.pick_tiling(rows, depth, columns, ctas=132)
    if rows <= 64:
        assert picked.consumers == 1
    if rows == 8192:
        assert picked.rows * picked.columns >= 128 * 128


@needs_mosaic
@pytest.mark.parametrize(
    ("shape", "tiling", "outputs_first", "result"),
    [
        ((200, 200, 136), Tiling(64, 2, "w"), False, "bfloat16"),  # clusters; all sizes end inside tiles
        ((70, 840, 72), Tiling(128, 1, "x"), True, "float32"),  # more steps than stages
    ],
)
def test_the_interpreter_agrees_and_finds_no_race(shape, tiling, outputs_first, result):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jpaged.pallas_kernels.invariant_product import hopper as kernel

    x, w = draw(3, *shape, outputs_first=outputs_first)
    options = {"outputs_first": outputs_first, "dtype": jnp.dtype(result), "tiling": tiling, "ctas": 2}
    got = kernel.invariant_product(x, w, **options, interpret=plgpu.InterpretGPUParams(detect_races=True))
    assert got.dtype == result
    assert relative_error(got, expected(x, w, outputs_first)) <= 3e-3


@needs_mosaic
def test_what_the_kernel_refuses_it_names():
    from jpaged.pallas_kernels.invariant_product import hopper as kernel

    x, w = draw(0, 4, 16, 8)
    assert kernel.unsupported(x, w) is None
    assert "float32" in kernel.unsupported(x.astype(jnp.float32), w.astype(jnp.float32))
    assert "multiples of 8" in kernel.unsupported(x, w[:, :5])


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("outputs_first", [False, True])
def test_on_the_gpu_every_tiling_gives_the_same_right_bits(tiling, outputs_first):
    from jpaged.pallas_kernels.invariant_product import hopper as kernel

    x, w = draw(4, 1000, 1000, 1224, outputs_first=outputs_first)
    options = {"outputs_first": outputs_first, "dtype": jnp.dtype("float32")}
    got = kernel.invariant_product(x, w, **options, tiling=tiling)
    assert relative_error(got, expected(x, w, outputs_first)) < 1e-5
    np.testing.assert_array_equal(bits(got), bits(kernel.invariant_product(x, w, **options, tiling=Tiling(64, 1))))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("rows", [7, 64, 129, 512, 2048])
@pytest.mark.parametrize("backend", [None, "triton"])
def test_on_the_gpu_rows_of_models_have_the_bits_of_the_row_alone(rows, backend):
    x, w = draw(5, rows, 1024, 4096)
    whole = invariant_product(x, w, backend=backend)
    for row in {0, rows // 3, rows - 1}:
        np.testing.assert_array_equal(
            bits(invariant_product(x[row : row + 1], w, backend=backend)[0]), bits(whole[row])
        )
