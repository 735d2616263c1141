"""What the Triton kernels launch, which no call on a CPU shows."""

import jax
import jax.numpy as jnp
import pytest

from jpaged.pallas_kernels.registry import missing

if missing("triton") is not None:
    pytest.skip(str(missing("triton")), allow_module_level=True)

from jpaged.pallas_kernels.move_blocks import triton


@pytest.mark.parametrize("num_blocks", [1, 65_535, 200_000])
def test_any_number_of_blocks_fits_a_grid(num_blocks, monkeypatch):
    grids = []

    def call(kernel, launch, *arrays, updated, **constants):
        grids.append(launch.grid)
        return tuple(updated)

    monkeypatch.setattr(triton, "call", call)
    shape = jax.ShapeDtypeStruct
    pool, ids = shape((2000, 2, 4, 16, 64), jnp.bfloat16), shape((num_blocks,), jnp.int32)
    jax.eval_shape(triton.copy_blocks.__wrapped__, (pool,), ids, ids)
    staging = jax.eval_shape(triton.gather_blocks.__wrapped__, (pool,), ids)
    jax.eval_shape(triton.scatter_blocks.__wrapped__, (pool,), staging, ids)
    assert grids == [(2 * num_blocks,)] * 3  # of a grid's other axes CUDA allows 65,535
