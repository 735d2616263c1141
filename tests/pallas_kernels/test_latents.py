"""Attention over latents, whose values are the first columns of their keys, against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged import pallas_kernels as ops
from jpaged.pallas_kernels.shared_prefix_attention import api as shared_prefix
from tests.pallas_kernels.drawn import dtypes, few, lengths, seeds
from tests.pallas_kernels.marks import WITH_TRITON
from tests.pallas_kernels.paged import (
    World,
    assert_close,
    assert_lse_close,
    expected_decode,
    expected_ragged,
    make_world,
    random_queries,
)
from tests.pallas_kernels.pools import check_no_copy

fewer = settings(few, max_examples=5)

HEADS = 20
"""More than a tile of the smallest kind has, and no multiple of one."""

HEAD_DIM, VALUE_DIM = 144, 128
BLOCK_SIZE = 16

backends = pytest.mark.parametrize("backend", WITH_TRITON)


def latents(seed: int, lens: list[int], dtype: str = "float32", **options: int) -> World:
    shape = {"kv_heads": 1, "head_dim": HEAD_DIM, "block_size": BLOCK_SIZE, "value_dim": VALUE_DIM}
    return make_world(seed, lens, dtype=dtype, **shape, **options)


def wide(q: jax.Array) -> np.ndarray:
    return np.asarray(q).astype(np.float32)


@backends
@fewer
@given(data=st.data(), dtype=dtypes, seed=seeds)
def test_a_decode_step_over_latents_is_right(backend, data, dtype, seed):
    lens = data.draw(st.lists(lengths(BLOCK_SIZE, 300), min_size=3, max_size=3))
    world, q = latents(seed, lens, dtype, width=20), random_queries(seed, 3, HEADS, HEAD_DIM, dtype)
    arrays = (world.pool, world.tables, world.lens)
    out, lse = ops.decode_attention(q, *arrays, scale=0.1, value_dim=VALUE_DIM, return_lse=True, backend=backend)
    want, want_lse = expected_decode(world, wide(q), scale=0.1)
    assert out.dtype == q.dtype
    assert_close(out, want, dtype)
    assert_lse_close(lse, want_lse, dtype)


@backends
@fewer
@given(data=st.data(), dtype=dtypes, seed=seeds)
def test_a_mixed_step_over_latents_is_right(backend, data, dtype, seed):
    queries = [1, 1, 17, 0, 5]
    cached = data.draw(st.lists(lengths(BLOCK_SIZE, 150), min_size=5, max_size=5))
    lens = [n + c if n else c for n, c in zip(queries, cached, strict=True)]
    world, q = latents(seed, lens, dtype, width=12), random_queries(seed, 24, HEADS, HEAD_DIM, dtype)
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    arrays = (world.pool, world.tables, world.lens, starts)
    options = {"scale": 0.1, "value_dim": VALUE_DIM, "backend": backend}
    want, want_lse = expected_ragged(world, wide(q), starts, scale=0.1)
    out, lse = ops.ragged_attention(q, *arrays, return_lse=True, **options)
    assert_close(out, want, dtype)
    assert_lse_close(lse, want_lse, dtype)
    assert_close(ops.mixed_attention(q, *arrays, jnp.int32(2), **options), want, dtype)


@backends
def test_a_shared_prefix_of_latents_is_read_once_for_all(backend, monkeypatch):
    monkeypatch.setattr(shared_prefix, "num_multiprocessors", lambda: 2)  # few parts
    world = latents(4, [70, 64, 100], shared_prefix=3)
    q = random_queries(4, 3, HEADS, HEAD_DIM, "float32")
    shared = (jnp.int32(3), jnp.int32(48))
    options = {"scale": 0.1, "value_dim": VALUE_DIM, "backend": backend}
    out = ops.shared_prefix_attention(q, world.pool, world.tables, world.lens, *shared, **options)
    assert_close(out, expected_decode(world, wide(q), scale=0.1)[0], "float32")


@backends
def test_a_row_of_latents_has_the_same_bits_alone_and_among_others(backend):
    world, q = latents(6, [33, 300, 1], "bfloat16"), random_queries(6, 3, HEADS, HEAD_DIM, "bfloat16")
    call = jax.jit(lambda q, t, n: ops.decode_attention(q, world.pool, t, n, value_dim=VALUE_DIM, backend=backend))
    np.testing.assert_array_equal(
        call(q, world.tables, world.lens)[1:2], call(q[1:2], world.tables[1:2], world.lens[1:2])
    )


@backends
def test_no_rows_and_empty_rows_give_zeros(backend):
    for rows in (0, 2):
        world, q = latents(7, [0, 0]), random_queries(7, rows, HEADS, HEAD_DIM, "float32")
        arrays = (q, world.pool, world.tables[:rows], world.lens[:rows])
        out = ops.decode_attention(*arrays, value_dim=VALUE_DIM, backend=backend)
        assert out.shape == (rows, HEADS, VALUE_DIM)
        assert not out.any()


@backends
def test_latents_are_written_into_their_slots_and_nowhere_else(backend):
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((9, 1, 1, 16, HEAD_DIM)).astype(np.float32)
    new, slots = rng.standard_normal((3, 1, HEAD_DIM)).astype(np.float32), np.array([17, 0, 140], np.int32)
    written = np.asarray(ops.write_kv(jnp.asarray(pool), new, None, slots, backend=backend))
    expected = pool.copy()
    expected.reshape(-1, HEAD_DIM)[slots] = new[:, 0]
    np.testing.assert_array_equal(written, expected)


def test_writing_latents_copies_no_pool():
    pool = jax.ShapeDtypeStruct((4096, 1, 1, 16, 576), jnp.float32)
    new, slots = jax.ShapeDtypeStruct((8, 1, 576), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)

    def write(pool: jax.Array, new: jax.Array, slots: jax.Array, backend: str) -> jax.Array:
        return ops.write_kv(pool, new, None, slots, backend=backend)

    check_no_copy(write, (pool, new, slots), 1, pool)


@backends
def test_blocks_of_latents_are_copied_gathered_and_scattered(backend):
    pools = tuple(jnp.asarray(np.random.default_rng(i).standard_normal((9, 1, 1, 16, 144)), "float32") for i in (0, 1))
    one, two = np.array([3, 4], np.int32), np.array([7, 1], np.int32)
    copied = ops.copy_blocks(pools, one, two, backend=backend)
    staging = ops.gather_blocks(pools, one, backend=backend)
    scattered = ops.scatter_blocks(pools, staging, two, backend=backend)
    for pool, by_copy, by_way_of_host in zip(pools, copied, scattered, strict=True):
        expected = np.array(pool)
        expected[two] = expected[one]
        np.testing.assert_array_equal(by_copy, expected)
        np.testing.assert_array_equal(by_way_of_host, expected)


@pytest.mark.parametrize("value_dim", [None, 0, HEAD_DIM + 1, True, 16.0])
def test_values_must_be_columns_of_latents(value_dim):
    world, q = latents(7, [4]), random_queries(7, 1, HEADS, HEAD_DIM, "float32")
    with pytest.raises(ValueError, match="value_dim must be an int from 1 to the 144 columns"):
        ops.decode_attention(q, world.pool, world.tables, world.lens, value_dim=value_dim)


def test_a_pool_with_values_takes_no_value_dim_and_one_of_latents_no_values():
    world = make_world(1, [4], kv_heads=1, head_dim=16, block_size=16)
    q = random_queries(1, 1, 2, 16, "float32")
    with pytest.raises(ValueError, match="value_dim must be None"):
        ops.decode_attention(q, world.pool, world.tables, world.lens, value_dim=8)
    new, slots = jnp.zeros((1, 1, 16)), jnp.zeros((1,), jnp.int32)
    with pytest.raises(ValueError, match="v must be None for a pool of latents"):
        ops.write_kv(world.pool, new, None, slots)
    with pytest.raises(ValueError, match="v must be None for a pool of latents"):
        ops.write_kv(world.pool[:, :1], new, new, slots)
