"""Ragged attention on the XLA backend, and in Triton, against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.pallas_kernels import ragged_attention
from tests.pallas_kernels.drawn import block_sizes, dtypes, few, options, seeds, shapes, world_of_a_step
from tests.pallas_kernels.marks import WITH_TRITON, needs_triton
from tests.pallas_kernels.paged import (
    assert_close,
    assert_lse_close,
    expected_ragged,
    make_world,
    random_queries,
)


@pytest.mark.parametrize("backend", WITH_TRITON)
@few
@given(data=st.data(), shape=shapes, block_size=block_sizes, dtype=dtypes, seed=seeds)
def test_ragged_attention_is_right_for_chunks_and_decode_rows_together(backend, data, shape, block_size, dtype, seed):
    heads, kv_heads, head_dim = shape
    chosen = data.draw(options(heads))
    queries = data.draw(st.lists(st.sampled_from([0, 1, 1, 5, 31, 32, 33, 70]), min_size=4, max_size=4))
    world, starts = world_of_a_step(data, queries, seed, kv_heads, head_dim, block_size, dtype)
    q = random_queries(seed, 285, heads, head_dim, dtype)  # what follows the last row is padding
    out, lse = ragged_attention(
        q, world.pool, world.tables, world.lens, starts, return_lse=True, backend=backend, **chosen
    )
    want, want_lse = expected_ragged(world, np.asarray(q).astype(np.float32), starts, **chosen)
    assert_close(out, want, dtype)
    assert_lse_close(lse, want_lse, dtype)
    assert not np.asarray(out)[starts[-1] :].any(), "padding must come out as 0"


@pytest.mark.parametrize("backend", WITH_TRITON)
@pytest.mark.parametrize("rows", [0, 3])
def test_empty_batches_and_empty_rows_give_zeros(rows, backend):
    world = make_world(7, [0, 0, 0][:rows] or [4], kv_heads=1, head_dim=16, block_size=16)
    starts = np.zeros(rows + 1, np.int32)
    q = random_queries(7, 5, 2, 16, "float32")
    out = ragged_attention(q, world.pool, world.tables[:rows], world.lens[:rows], starts, backend=backend)
    assert not out.any()


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize(
    ("head_dim", "block_size", "block_kv", "dtype", "causal"),
    [
        (16, 16, 64, "float32", True),
        (16, 64, 64, "float32", False),
        (80, 128, 32, "bfloat16", True),
        (128, 32, 64, "bfloat16", True),
    ],
)
def test_scores_made_a_step_ahead_are_those_made_in_the_step(head_dim, block_size, block_kv, dtype, causal):
    from jpaged.pallas_kernels.common.attention_arguments import Features, Operands
    from jpaged.pallas_kernels.ragged_attention import triton

    lens = [130, 0, 7, 70, block_kv]
    world = make_world(11, lens, kv_heads=2, head_dim=head_dim, block_size=block_size, dtype=dtype)
    starts = np.array([0, 40, 40, 47, 48, 64], np.int32)  # a chunk, nothing, a whole prompt, one token, a chunk
    q = random_queries(11, 70, 4, head_dim, dtype)  # what follows the last row is padding
    operands = Operands(*map(jnp.asarray, (q, world.pool, world.tables, world.lens)), None)
    features = Features(head_dim**-0.5)
    found = [
        triton.ragged_attention(
            operands,
            jnp.asarray(starts),
            features,
            causal=causal,
            config=triton.Config(rows=64, block_kv=block_kv, warps=4, stages=3, ahead=ahead),
        )
        for ahead in (False, True)
    ]
    for of_step, ahead in zip(*found, strict=True):
        np.testing.assert_array_equal(np.asarray(of_step, np.float32), np.asarray(ahead, np.float32))
    if causal:
        want, want_lse = expected_ragged(world, np.asarray(q).astype(np.float32), starts)
        assert_close(found[1][0], want, dtype)
        assert_lse_close(found[1][1], want_lse, dtype)


def test_a_mixed_step_of_an_8b_model_stays_below_a_gibibyte_of_temporaries():
    def arguments(dtype):
        shape = jax.ShapeDtypeStruct
        return (
            shape((2048, 32, 128), dtype),
            shape((4096, 2, 8, 16, 128), dtype),
            *(shape(s, jnp.int32) for s in ((256, 1024), (256,), (257,))),
        )

    compiled = jax.jit(lambda *a: ragged_attention(*a, backend="xla")).lower(*arguments(jnp.float32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**30
