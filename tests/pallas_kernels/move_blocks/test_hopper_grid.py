"""What the Mosaic kernel launches, which no interpreter checks."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jpaged.pallas_kernels.registry import missing

if missing("hopper") is not None:
    pytest.skip(str(missing("hopper")), allow_module_level=True)

from jpaged.pallas_kernels.move_blocks import hopper


@pytest.mark.parametrize("num_blocks", [1, 65_536, 200_000])
def test_any_number_of_blocks_of_several_layers_fits_a_grid(num_blocks, monkeypatch):
    grids = []

    def kernel(body, *, grid, **options):
        grids.append(grid[::-1])  # Pallas' last axis is CUDA's first
        return lambda *arrays: None

    monkeypatch.setattr(hopper, "plgpu", SimpleNamespace(**vars(hopper.plgpu) | {"kernel": kernel}))
    shape = jax.ShapeDtypeStruct
    pools, ids = (shape((2000, 2, 4, 16, 80), jnp.float32),) * 10, shape((num_blocks,), jnp.int32)
    jax.eval_shape(hopper.copy_blocks, pools, ids, ids)
    staging = jax.eval_shape(hopper.gather_blocks, pools, ids)
    jax.eval_shape(hopper.scatter_blocks, pools, staging, ids)
    assert [grid[:2] for grid in grids] == [(num_blocks, 8), (num_blocks, 2)] * 3
    assert all(axis <= 65_535 for grid in grids for axis in grid[1:])  # of its other axes CUDA allows no more
