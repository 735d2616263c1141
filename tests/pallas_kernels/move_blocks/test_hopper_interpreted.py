"""The kernel in Pallas' GPU interpreter, on a CPU, with its race detector. Needs JAX >= 0.11."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels.registry import missing

if missing("hopper") is not None:
    pytest.skip(str(missing("hopper")), allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.move_blocks import hopper, reference

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def test_blocks_are_moved_as_the_reference_moves_them():
    rng = np.random.default_rng(0)
    pools = tuple(jnp.asarray(rng.standard_normal((12, 2, 2, 16, 64)), jnp.bfloat16) for _ in range(3))
    src, dst = jnp.asarray([3, 4], jnp.int32), jnp.asarray([7, 9], jnp.int32)

    def run(op, *arguments):
        return jax.jit(lambda *a: op(*a, interpret=INTERPRET))(*arguments)

    staging = reference.gather_blocks(pools, src)
    pairs = [
        (run(hopper.copy_blocks, pools, src, dst), reference.copy_blocks(pools, src, dst)),
        (run(hopper.gather_blocks, pools, src), staging),
        (run(hopper.scatter_blocks, pools, staging, dst), reference.scatter_blocks(pools, staging, dst)),
    ]
    for got, want in pairs:
        jax.tree.map(np.testing.assert_array_equal, got, want)
