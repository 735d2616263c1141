"""KV write on the XLA backend: right, in place, and nothing else touched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.pallas_kernels import write_kv
from tests.pallas_kernels.pools import check_no_copy, random_pool

few = settings(max_examples=15, deadline=None)


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_donated_pool_is_not_copied(dtype):
    shape = jax.ShapeDtypeStruct
    pool, new = shape((2000, 2, 4, 16, 64), dtype), shape((32, 4, 64), dtype)
    check_no_copy(write_kv, (pool, new, new, shape((32,), jnp.int32)), 1, pool)
