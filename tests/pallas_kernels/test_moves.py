"""KV write, block copy, gather and scatter on the XLA backend: right, in place, and nothing else touched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.pallas_kernels import copy_blocks, gather_blocks, scatter_blocks, write_kv

few = settings(max_examples=15, deadline=None)


def random_pool(rng, num_blocks=9, kv_heads=2, block_size=16, head_dim=16, dtype="float32"):
    return jnp.asarray(rng.standard_normal((num_blocks, 2, kv_heads, block_size, head_dim)), dtype)


@few
@given(
    seed=st.integers(0, 2**31),
    tokens=st.sampled_from([1, 7, 40]),
    padding=st.sampled_from([0, 3]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_write_kv_fills_the_slots_and_no_others(seed, tokens, padding, dtype):
    rng = np.random.default_rng(seed)
    pool = random_pool(rng, dtype=dtype)
    k, v = (jnp.asarray(rng.standard_normal((tokens + padding, 2, 16)), dtype) for _ in range(2))
    k = k.at[tokens:].set(jnp.nan)
    slots = np.concatenate([rng.permutation(8 * 16)[:tokens] + 16, rng.integers(0, 16, padding)]).astype(np.int32)
    got = np.asarray(write_kv(pool, k, v, slots, backend="xla").astype(jnp.float32))
    want = np.asarray(pool.astype(jnp.float32)).copy()
    for i in range(tokens):
        want[slots[i] // 16, 0, :, slots[i] % 16] = np.asarray(k[i].astype(jnp.float32))
        want[slots[i] // 16, 1, :, slots[i] % 16] = np.asarray(v[i].astype(jnp.float32))
    np.testing.assert_array_equal(got[1:], want[1:])  # block 0 is the null block, which padding may write
    assert np.isfinite(got[1:]).all()


def test_write_kv_drops_slots_outside_the_pool():
    rng = np.random.default_rng(0)
    pool = random_pool(rng)
    k = jnp.ones((2, 2, 16))
    got = write_kv(pool, k, k, np.array([-1, 9 * 16], np.int32), backend="xla")
    np.testing.assert_array_equal(got, pool)


@few
@given(seed=st.integers(0, 2**31), pairs=st.sampled_from([0, 1, 3]), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_copied_blocks_equal_their_sources_in_every_layer(seed, pairs, dtype):
    rng = np.random.default_rng(seed)
    pools = tuple(random_pool(rng, dtype=dtype) for _ in range(3))
    ids = (rng.permutation(8) + 1).astype(np.int32)
    src, dst = (np.concatenate([x, [0]]).astype(np.int32) for x in (ids[:pairs], ids[pairs : 2 * pairs]))
    for pool, got in zip(pools, copy_blocks(pools, src, dst, backend="xla"), strict=True):
        np.testing.assert_array_equal(got, pool.at[dst].set(pool[src]))


@few
@given(seed=st.integers(0, 2**31), n=st.sampled_from([0, 1, 4]), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_blocks_come_back_from_a_swap_unchanged_in_other_places(seed, n, dtype):
    rng = np.random.default_rng(seed)
    pools = tuple(random_pool(rng, dtype=dtype) for _ in range(3))
    ids = (rng.permutation(8) + 1).astype(np.int32)
    out, back = ids[:n], ids[n : 2 * n]
    staging = gather_blocks(pools, out, backend="xla")
    assert staging.shape == (3, n, *pools[0].shape[1:])
    for pool, got in zip(pools, scatter_blocks(pools, staging, back, backend="xla"), strict=True):
        np.testing.assert_array_equal(got, pool.at[back].set(pool[out]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_update_of_a_donated_pool_copies_it(dtype):
    shape = jax.ShapeDtypeStruct
    pool = shape((2000, 2, 4, 16, 64), dtype)
    pool_bytes = int(np.prod(pool.shape)) * jnp.dtype(dtype).itemsize
    new, ids = shape((32, 4, 64), dtype), shape((8,), jnp.int32)
    programs = {
        "write_kv": (write_kv, (pool, new, new, shape((32,), jnp.int32)), 1),
        "copy_blocks": (copy_blocks, ((pool, pool), ids, ids), 2),
        "scatter_blocks": (scatter_blocks, ((pool, pool), shape((2, 8, 2, 4, 16, 64), dtype), ids), 2),
    }
    for name, (op, arguments, pools) in programs.items():
        compiled = jax.jit(lambda *a, op=op: op(*a, backend="xla"), donate_argnums=0).lower(*arguments).compile()
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == pools * pool_bytes, name
        assert memory.temp_size_in_bytes < pool_bytes / 10, name
