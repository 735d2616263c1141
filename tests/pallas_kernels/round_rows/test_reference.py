"""Rows are rounded to e4m3 by XLA as float64 says, together with what comes before; bad input is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import round_rows
from jpaged.pallas_kernels.round_rows import reference
from jpaged.pallas_kernels.round_rows.operands import Sums
from tests.pallas_kernels.round_rows.drawn import CASES, check, operands


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_rounded_as_float64_says(case):
    arguments, options = operands(case)
    check(case, arguments, reference.round_rows(arguments, options))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows_in_its_row_alone(bad):
    x = jnp.ones((3, 512)).at[1, 7].set(bad)
    rows, _ = round_rows(x, backend="xla")  # on a CPU a maximum may lose a NaN, and the value alone shows it
    finite = np.isfinite(np.asarray(rows.values, np.float32) * rows.scales).all(1)
    assert finite[:3].tolist() == [True, False, True]


def test_sums_are_what_their_scales_make_of_them():
    sums = Sums(jnp.ones((16, 3)), jnp.full((16, 1), 2.0), jnp.asarray([1.0, 10.0, 0.5]), 2, jnp.dtype(jnp.bfloat16))
    np.testing.assert_array_equal(sums.array(), [[2, 20, 1]] * 2)
    np.testing.assert_array_equal(sums.added_to(jnp.ones((2, 3), jnp.bfloat16)), [[3, 21, 2]] * 2)


def test_no_rows_are_no_rows():
    rows, after = round_rows(jnp.ones((0, 512)), residual=jnp.ones((0, 512)))
    assert (rows.values.shape, after.shape) == ((0, 512), (0, 512))


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


BAD = [
    ("x", {"x": array(4, 8, dtype=jnp.int32)}),
    ("x", {"x": array(4, 9), "activation": "silu"}),
    ("x.of_rows", {"x": Sums(array(16, 8, dtype=jnp.float32), array(8), array(8), 4, jnp.dtype(jnp.bfloat16))}),
    ("activation", {"activation": "swish"}),
    ("activation", {"activation": "silu", "norm": array(4)}),
    ("residual", {"residual": array(4, 9)}),
    ("residual", {"residual": array(4, 8, dtype=jnp.float32)}),
    ("norm", {"norm": array(8, dtype=jnp.float16)}),
    ("norm_eps", {"norm_eps": -1.0}),
    ("input_scale", {"input_scale": array(8, dtype=jnp.float32)}),
]


@pytest.mark.parametrize(("name", "changed"), BAD, ids=str)
def test_bad_input_is_refused_by_name(name, changed):
    given = {"x": array(4, 8)} | changed
    with pytest.raises(ValueError, match=f"^{name}"):
        jax.eval_shape(lambda: round_rows(**given))
