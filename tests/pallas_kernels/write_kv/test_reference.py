"""KV write on every backend: right, and nothing else touched; in XLA, in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.pallas_kernels import write_kv
from tests.pallas_kernels.marks import over_backends
from tests.pallas_kernels.pools import check_no_copy, random_pool

few = settings(max_examples=15, deadline=None)


@over_backends
@few
@given(
    seed=st.integers(0, 2**31),
    tokens=st.sampled_from([1, 7, 40]),
    padding=st.sampled_from([0, 3]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_write_kv_fills_the_slots_and_no_others(backend, seed, tokens, padding, dtype):
    rng = np.random.default_rng(seed)
    pool = random_pool(rng, dtype=dtype)
    check_write(rng, pool, tokens, padding, backend)


@over_backends
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("kv_heads", "block_size", "dtype"), [(1, 128, "float32"), (3, 32, "bfloat16")])
def test_heads_of_any_size_and_number_reach_blocks_of_any_size(backend, head_dim, kv_heads, block_size, dtype):
    rng = np.random.default_rng(head_dim)
    pool = jnp.asarray(rng.standard_normal((9, 2, kv_heads, block_size, head_dim)), dtype)
    check_write(rng, pool, 5, 1, backend)


def check_write(rng, pool, tokens, padding, backend):
    """Writes new tokens, and padding to the null block, and compares with numpy."""
    num_blocks, _, kv_heads, size, head_dim = pool.shape
    dtype = pool.dtype
    k, v = (jnp.asarray(rng.standard_normal((tokens + padding, kv_heads, head_dim)), dtype) for _ in range(2))
    k = k.at[tokens:].set(jnp.nan)
    own = rng.permutation((num_blocks - 1) * size)[:tokens] + size
    slots = np.concatenate([own, rng.integers(0, size, padding)]).astype(np.int32)
    got = np.asarray(write_kv(pool, k, v, slots, backend=backend).astype(jnp.float32))
    want = np.asarray(pool.astype(jnp.float32)).copy()
    for i in range(tokens):
        want[slots[i] // size, 0, :, slots[i] % size] = np.asarray(k[i].astype(jnp.float32))
        want[slots[i] // size, 1, :, slots[i] % size] = np.asarray(v[i].astype(jnp.float32))
    np.testing.assert_array_equal(got[1:], want[1:])  # block 0 is the null block, which padding may write
    assert np.isfinite(got[1:]).all()


@over_backends
def test_write_kv_drops_slots_outside_the_pool(backend):
    rng = np.random.default_rng(0)
    pool = random_pool(rng)
    k = jnp.ones((2, 2, 16))
    got = write_kv(pool, k, k, np.array([-1, 9 * 16], np.int32), backend=backend)
    np.testing.assert_array_equal(got, pool)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_donated_pool_is_not_copied(dtype):
    shape = jax.ShapeDtypeStruct
    pool, new = shape((2000, 2, 4, 16, 64), dtype), shape((32, 4, 64), dtype)
    check_no_copy(write_kv, (pool, new, new, shape((32,), jnp.int32)), 1, pool)
