"""The Triton kernel in Triton's interpreter on a CPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import devices, round_rows
from jpaged.pallas_kernels.devices import Device
from jpaged.pallas_kernels.registry import missing

if missing("triton") is not None:
    pytest.skip(str(missing("triton")), allow_module_level=True)

from jpaged.pallas_kernels.round_rows import triton
from jpaged.pallas_kernels.round_rows.api import OP
from tests.pallas_kernels.round_rows.drawn import CASES, Case, check, operands


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, Case(depth=200, norm=jnp.bfloat16, residual=True)], ids=str)
def test_the_kernel_rounds_rows_as_float64_says(case):
    arguments, options = operands(case)
    check(case, arguments, triton.round_rows(arguments, options))


@pytest.mark.gpu
def test_what_is_not_finite_shows_in_the_scale_of_its_row_alone():
    x = jnp.ones((3, 300)).at[1, 7].set(jnp.nan)
    for options in ({"upper_bound": 3.0}, {"activation": "relu"}):
        rows, _ = round_rows(x, **options, backend="triton")
        assert np.isnan(rows.scales[:3, 0]).tolist() == [False, True, False]


def test_hopper_takes_its_own_kernel_for_rows_that_divide_and_triton_s_for_others(monkeypatch):
    monkeypatch.setattr(devices, "default_device", lambda: Device("gpu", (9, 0)))
    assert OP.pick(None, jnp.ones((2, 4096)), 4096).backend == "hopper"
    assert OP.pick(None, jnp.ones((2, 1000)), 1000).backend == "triton"
    monkeypatch.setattr(devices, "default_device", lambda: Device("gpu", (8, 9)))
    assert OP.pick(None, jnp.ones((2, 4096)), 4096).backend == "triton"
    monkeypatch.setattr(devices, "default_device", lambda: Device("cpu"))
    assert OP.pick(None, jnp.ones((2, 4096)), 4096).backend == "xla"
