"""Block copy, gather and scatter on every backend: right, and nothing else touched; in XLA, in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.pallas_kernels import copy_blocks, gather_blocks, scatter_blocks
from tests.pallas_kernels.marks import ON_GPU, over_backends
from tests.pallas_kernels.pools import check_no_copy, random_pool

few = settings(max_examples=15, deadline=None)


def moved(pool: jax.Array, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
    """What is expected where blocks are moved within a pool."""
    blocks = np.array(pool)
    blocks[dst] = blocks[src]
    return blocks


@over_backends
@few
@given(seed=st.integers(0, 2**31), pairs=st.sampled_from([0, 1, 3]), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_copied_blocks_equal_their_sources_in_every_layer(backend, seed, pairs, dtype):
    rng = np.random.default_rng(seed)
    pools = tuple(random_pool(rng, dtype=dtype) for _ in range(3))
    ids = (rng.permutation(8) + 1).astype(np.int32)
    src, dst = (np.concatenate([x, [0]]).astype(np.int32) for x in (ids[:pairs], ids[pairs : 2 * pairs]))
    for pool, got in zip(pools, copy_blocks(pools, src, dst, backend=backend), strict=True):
        np.testing.assert_array_equal(got, moved(pool, src, dst))


@over_backends
@few
@given(seed=st.integers(0, 2**31), n=st.sampled_from([0, 1, 4]), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_blocks_come_back_from_a_swap_unchanged_in_other_places(backend, seed, n, dtype):
    rng = np.random.default_rng(seed)
    pools = tuple(random_pool(rng, dtype=dtype) for _ in range(3))
    ids = (rng.permutation(8) + 1).astype(np.int32)
    out, back = ids[:n], ids[n : 2 * n]
    staging = gather_blocks(pools, out, backend=backend)
    assert staging.shape == (3, n, *pools[0].shape[1:])
    for pool, got in zip(pools, scatter_blocks(pools, staging, back, backend=backend), strict=True):
        np.testing.assert_array_equal(got, moved(pool, out, back))


@over_backends
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_blocks_of_any_size_are_moved_whole(backend, head_dim):
    rng = np.random.default_rng(head_dim)
    pools = tuple(jnp.asarray(rng.standard_normal((5, 2, 3, 32, head_dim)), "bfloat16") for _ in range(2))
    src, dst = np.array([3, 1], np.int32), np.array([4, 2], np.int32)
    copied = copy_blocks(pools, src, dst, backend=backend)
    scattered = scatter_blocks(pools, gather_blocks(pools, src, backend=backend), dst, backend=backend)
    for pool, *got in zip(pools, copied, scattered, strict=True):
        for one in got:
            np.testing.assert_array_equal(one, moved(pool, src, dst))


@pytest.mark.parametrize("backend", ["xla", *ON_GPU])
def test_more_blocks_are_moved_than_most_axes_of_a_grid_have_ctas(backend):
    """As many as a few pages of the virtual layout can be."""
    num_blocks = 65_536
    rng = np.random.default_rng(1)
    pools = tuple(jnp.asarray(rng.standard_normal((2 * num_blocks + 1, 2, 1, 2, 16)), "float32") for _ in range(2))
    src = 1 + np.arange(num_blocks, dtype=np.int32)
    dst = src + num_blocks
    copied = copy_blocks(pools, src, dst, backend=backend)
    scattered = scatter_blocks(pools, gather_blocks(pools, src, backend=backend), dst, backend=backend)
    for pool, *got in zip(pools, copied, scattered, strict=True):
        for one in got:
            np.testing.assert_array_equal(one, moved(pool, src, dst))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_donated_pools_are_not_copied(dtype):
    shape = jax.ShapeDtypeStruct
    pool, ids = shape((2000, 2, 4, 16, 64), dtype), shape((8,), jnp.int32)
    check_no_copy(copy_blocks, ((pool, pool), ids, ids), 2, pool)
    check_no_copy(scatter_blocks, ((pool, pool), shape((2, 8, 2, 4, 16, 64), dtype), ids), 2, pool)
