"""Attention of a step that decodes and computes prompts: in one call and in two, against float64 numpy."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.pallas_kernels import decode_attention, mixed_attention
from jpaged.pallas_kernels.common.attention_arguments import Operands
from jpaged.pallas_kernels.mixed_attention.api import attend_apart
from tests.pallas_kernels.drawn import block_sizes, dtypes, few, options, seeds, shapes, world_of_a_step
from tests.pallas_kernels.marks import WITH_TRITON, on_gpus
from tests.pallas_kernels.paged import (
    assert_close,
    expected_ragged,
    make_world,
    random_queries,
)


@pytest.mark.parametrize("backend", WITH_TRITON)
@few
@given(data=st.data(), shape=shapes, block_size=block_sizes, dtype=dtypes, seed=seeds)
def test_a_step_of_decode_rows_and_chunks_computed_apart_is_right(backend, data, shape, block_size, dtype, seed):
    heads, kv_heads, head_dim = shape
    chosen = data.draw(options(heads))
    num_decodes = data.draw(st.integers(0, 5))
    chunks = data.draw(st.lists(st.sampled_from([0, 1, 5, 33, 70]), min_size=5 - num_decodes, max_size=5 - num_decodes))
    queries = [1] * num_decodes + chunks
    world, starts = world_of_a_step(data, queries, seed, kv_heads, head_dim, block_size, dtype)
    q = random_queries(seed, 360, heads, head_dim, dtype)
    arrays, rows = (q, world.pool, world.tables, world.lens), (starts, jnp.int32(num_decodes))
    want, _ = expected_ragged(world, np.asarray(q).astype(np.float32), starts, **chosen)
    assert_close(mixed_attention(*arrays, *rows, backend=backend, **chosen), want, dtype)
    operands = Operands(*arrays, chosen.pop("alibi_slopes", None))
    apart = jax.jit(partial(attend_apart, backend=backend, **chosen))
    assert_close(apart(operands, *rows)[0], want, dtype)


@pytest.mark.parametrize("backend", WITH_TRITON)
def test_a_step_of_fewer_tokens_than_rows_may_be_computed_apart(backend):
    world = make_world(4, [3, 20, 0, 0], kv_heads=2, head_dim=16, block_size=16)
    q = random_queries(4, 2, 4, 16, "float32")
    starts = np.array([0, 1, 2, 2, 2], np.int32)
    operands = Operands(q, world.pool, world.tables, world.lens, None)
    out, _ = attend_apart(operands, starts, jnp.int32(2), backend=backend)
    want, _ = expected_ragged(world, np.asarray(q), starts)
    assert_close(out, want, "float32")


@pytest.mark.gpu
@on_gpus("head_dim, dtype", product([64, 80, 128, 256], ["bfloat16", "float16"]), lambda d, t: d == 128 or t[0] == "b")
@pytest.mark.parametrize(
    ("decodes", "chunks"),
    [
        ([40] * 300 + [1, 5000], [(18, 18)] * 30),
        ([9000, 4], [(300, 300), (0, 50), (260, 900)]),
        ([], [(600, 600)]),
        ([77] * 520, []),
    ],
    ids=["short", "long", "chunks", "decodes"],
)
def test_on_the_gpu_a_step_computed_apart_is_right_and_its_decode_rows_are_those_of_a_decode_step(
    decodes, chunks, head_dim, dtype, backend
):
    lens = [*decodes, *(kv for _, kv in chunks)]
    queries = [1] * len(decodes) + [count for count, _ in chunks]
    world = make_world(5, lens, kv_heads=2, head_dim=head_dim, block_size=16, dtype=dtype)
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    q = random_queries(5, max(1024, starts[-1] + 7), 8, head_dim, dtype)
    tables = np.where((world.tables >= 0) & (world.tables < world.pool.shape[0]), world.tables, 0)
    attend = jax.jit(partial(mixed_attention, backend=backend))
    arguments = (q, world.pool, jnp.asarray(tables), jnp.asarray(world.lens), jnp.asarray(starts))
    out = attend(*arguments, jnp.int32(len(decodes)))
    want, _ = expected_ragged(world, np.asarray(q).astype(np.float32), starts)
    assert_close(out, want, dtype)
    assert (out == attend(*arguments, jnp.int32(len(decodes)))).all()
    if decodes:
        n = len(decodes)
        alone = jax.jit(partial(decode_attention, backend=backend))(
            q[:n], world.pool, jnp.asarray(tables[:n]), jnp.asarray(world.lens[:n])
        )
        assert (out[:n] == alone).all()
