"""Ragged attention on the XLA backend, and in Triton, against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.pallas_kernels import ragged_attention
from tests.pallas_kernels.drawn import block_sizes, dtypes, few, options, seeds, shapes, world_of_a_step
from tests.pallas_kernels.marks import WITH_TRITON
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
