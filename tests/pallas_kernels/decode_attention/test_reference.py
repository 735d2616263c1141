"""Decode attention on the XLA backend, and in Triton, against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.pallas_kernels import decode_attention
from tests.pallas_kernels.drawn import block_sizes, dtypes, few, lengths, options, seeds, shapes
from tests.pallas_kernels.marks import WITH_TRITON
from tests.pallas_kernels.paged import (
    assert_close,
    assert_lse_close,
    expected_decode,
    make_world,
    random_queries,
)


@pytest.mark.parametrize("backend", WITH_TRITON)
@few
@given(data=st.data(), shape=shapes, block_size=block_sizes, dtype=dtypes, seed=seeds)
def test_decode_attention_is_right_for_ragged_rows_in_shuffled_blocks(backend, data, shape, block_size, dtype, seed):
    heads, kv_heads, head_dim = shape
    lens = data.draw(st.lists(lengths(block_size, 300), min_size=5, max_size=5))
    chosen = data.draw(options(heads))
    world = make_world(
        seed,
        lens,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        width=-(-300 // block_size),
        window=chosen.get("sliding_window"),
    )
    q = random_queries(seed, 5, heads, head_dim, dtype)
    out, lse = decode_attention(q, world.pool, world.tables, world.lens, return_lse=True, backend=backend, **chosen)
    want, want_lse = expected_decode(world, np.asarray(q).astype(np.float32), **chosen)
    assert out.dtype == q.dtype
    assert_close(out, want, dtype)
    assert_lse_close(lse, want_lse, dtype)


@pytest.mark.parametrize("backend", WITH_TRITON)
def test_one_very_long_sequence_among_short_ones(backend):
    world = make_world(3, [1, 1500, 17, 2], kv_heads=2, head_dim=16, block_size=16)
    q = random_queries(3, 4, 4, 16, "float32")
    out = decode_attention(q, world.pool, world.tables, world.lens, backend=backend)
    assert_close(out, expected_decode(world, np.asarray(q))[0], "float32")


@pytest.mark.parametrize("backend", WITH_TRITON)
def test_sequences_may_share_blocks(backend):
    world = make_world(4, [70, 64, 100], kv_heads=2, head_dim=16, block_size=16, shared_prefix=3)
    assert (world.tables[0, :3] == world.tables[2, :3]).all()
    q = random_queries(4, 3, 4, 16, "float32")
    out = decode_attention(q, world.pool, world.tables, world.lens, backend=backend)
    assert_close(out, expected_decode(world, np.asarray(q))[0], "float32")


@pytest.mark.parametrize("backend", WITH_TRITON)
def test_partial_results_merge_by_their_log_sum_exp(backend):
    """Attention over all keys is the lse-weighted mean of attention over two parts of them (shared-prefix schemes)."""
    world = make_world(5, [160], kv_heads=1, head_dim=16, block_size=16, garbage=False)
    q = random_queries(5, 1, 2, 16, "float32")
    call = jax.jit(lambda t, n: decode_attention(q, world.pool, t, n, return_lse=True, backend=backend))
    whole, _ = call(world.tables, world.lens)
    (o1, l1), (o2, l2) = (
        call(world.tables[:, :4], np.array([64], np.int32)),
        call(world.tables[:, 4:], np.array([96], np.int32)),
    )
    w1 = np.exp(l1 - np.logaddexp(l1, l2))[..., None]
    np.testing.assert_allclose(w1 * o1 + (1 - w1) * o2, whole, atol=1e-6)


@pytest.mark.parametrize("backend", WITH_TRITON)
def test_the_same_inputs_give_the_same_bits_and_a_row_does_not_depend_on_its_neighbours(backend):
    world = make_world(6, [33, 290, 1], kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16")
    q = random_queries(6, 3, 4, 64, "bfloat16")
    both = [decode_attention(q, world.pool, world.tables, world.lens, backend=backend) for _ in range(2)]
    assert (both[0] == both[1]).all()
    alone = decode_attention(q[1:2], world.pool, world.tables[1:2], world.lens[1:2], backend=backend)
    assert_close(alone, np.asarray(both[0][1:2].astype(jnp.float32), np.float64), "float32")


@pytest.mark.parametrize("backend", WITH_TRITON)
@pytest.mark.parametrize("rows", [0, 3])
def test_empty_batches_and_empty_rows_give_zeros(rows, backend):
    world = make_world(7, [0, 0, 0][:rows] or [4], kv_heads=1, head_dim=16, block_size=16)
    q = random_queries(7, rows, 2, 16, "float32")
    out, lse = decode_attention(q, world.pool, world.tables[:rows], world.lens[:rows], return_lse=True, backend=backend)
    assert out.shape == (rows, 2, 16)
    assert not out.any()
    assert np.isneginf(lse).all()
