"""The kernel in Pallas' GPU interpreter, on a CPU, with its race detector. Needs JAX >= 0.11."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels.registry import missing

if missing("hopper") is not None:
    pytest.skip(str(missing("hopper")), allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.write_kv import hopper, reference
from jpaged.pallas_kernels.write_kv.destination import Destination

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def test_the_kernel_writes_what_the_reference_writes():
    rng = np.random.default_rng(0)
    pool = jnp.asarray(rng.standard_normal((12, 2, 2, 16, 64)), jnp.bfloat16)
    k = jnp.asarray(rng.standard_normal((6, 2, 64)), jnp.bfloat16)
    slots = Destination(jnp.asarray([17, 191, 40, -1, 33, 100], jnp.int32))
    got = jax.jit(lambda *a: hopper.write_kv(*a, interpret=INTERPRET))(pool, k, 2 * k, slots)
    np.testing.assert_array_equal(got, reference.write_kv(pool, k, 2 * k, slots))
