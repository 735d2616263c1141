"""The Mosaic kernel in Pallas' GPU interpreter, on a CPU, with its race detector. Needs JAX >= 0.11."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels.registry import missing

if missing("hopper") is not None:
    pytest.skip(str(missing("hopper")), allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.round_rows import hopper, reference
from jpaged.pallas_kernels.round_rows.operands import Operands, Options
from tests.pallas_kernels.round_rows.drawn import CASES, check, operands

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


@pytest.mark.parametrize("case", CASES[1:], ids=str)
def test_the_kernel_rounds_rows_as_float64_says(case):
    arguments, options = operands(case)
    run = jax.jit(lambda given: hopper.round_rows(given, options, interpret=INTERPRET))
    found = run(arguments)
    check(case, arguments, found)
    rows, _ = reference.round_rows(arguments, options)
    same = np.asarray(found[0].values[: case.rows]) == np.asarray(rows.values[: case.rows])
    assert same.mean() > 0.99


def test_what_is_not_finite_shows_in_the_scale_of_its_row_alone():
    x = jnp.ones((3, 1024)).at[1, 700].set(jnp.nan)
    rows, _ = hopper.round_rows(Operands(x, None, None, None), Options(0.0, None, 3.0), interpret=INTERPRET)
    assert np.isnan(rows.scales[:3, 0]).tolist() == [False, True, False]


def test_warpgroups_share_the_rows_of_known_models_evenly():
    sizes = {2048: 4, 2560: 5, 4096: 8, 5120: 5, 8192: 8, 14_336: 7, 16_384: 8, 18_944: None, 28_672: 8}
    assert {size: hopper._warpgroups(size) for size in sizes} == sizes
    for size in (1000, 256, 27_648, 65_536):
        assert hopper._warpgroups(size) is None
        assert "do not divide" in str(hopper.unsupported(jnp.ones((1, size)), size))
