"""Decode and ragged attention on the XLA backend against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jpaged.pallas_kernels import decode_attention, mixed_attention, ragged_attention
from jpaged.pallas_kernels.mixed_attention.api import attend_apart
from jpaged.pallas_kernels.registry import runs_here
from tests.pallas_kernels.paged import (
    assert_close,
    assert_lse_close,
    expected_decode,
    expected_ragged,
    make_world,
    random_queries,
)

few = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# Shapes come from short lists, since each new one is compiled; lengths and contents are what is drawn.
shapes = st.sampled_from([(4, 4, 16), (8, 2, 64), (4, 1, 80), (6, 2, 96), (4, 2, 128), (2, 1, 256)])
block_sizes = st.sampled_from([16, 32, 64, 128])
dtypes = st.sampled_from(["float32", "bfloat16", "float16"])
seeds = st.integers(0, 2**31)


@st.composite
def options(draw: st.DrawFn, heads: int) -> dict:
    chosen: dict = {}
    if draw(st.booleans()):
        chosen["sliding_window"] = draw(st.sampled_from([1, 7, 16, 100]))
    if draw(st.booleans()):
        chosen["logit_softcap"] = draw(st.sampled_from([1.5, 30.0]))
    if draw(st.booleans()):
        chosen["alibi_slopes"] = np.linspace(0.02, 0.5, heads, dtype=np.float32)
    if draw(st.booleans()):
        chosen["scale"] = draw(st.sampled_from([0.05, 0.3]))
    return chosen


def lengths(block_size: int, longest: int) -> st.SearchStrategy[int]:
    """Lengths with an eye on what breaks: nothing, one, and either side of a block's end."""
    edges = [0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size, longest]
    return st.one_of(st.sampled_from(edges), st.integers(0, longest))


@few
@given(data=st.data(), shape=shapes, block_size=block_sizes, dtype=dtypes, seed=seeds)
def test_decode_attention_is_right_for_ragged_rows_in_shuffled_blocks(data, shape, block_size, dtype, seed):
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
    out, lse = decode_attention(q, world.pool, world.tables, world.lens, return_lse=True, backend="xla", **chosen)
    want, want_lse = expected_decode(world, np.asarray(q.astype(jnp.float32)), **chosen)
    assert out.dtype == q.dtype
    assert_close(out, want, dtype)
    assert_lse_close(lse, want_lse, dtype)


def world_of_a_step(data, queries, seed, kv_heads, head_dim, block_size, dtype):
    """Rows with so many queries each behind drawn numbers of cached tokens, and where their queries start."""
    cached = data.draw(st.lists(lengths(block_size, 200), min_size=len(queries), max_size=len(queries)))
    lens = [n + c if n else c for n, c in zip(queries, cached, strict=True)]
    shape = {"kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    world = make_world(seed, lens, **shape, dtype=dtype, width=-(-270 // block_size))
    return world, np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)


@few
@given(data=st.data(), shape=shapes, block_size=block_sizes, dtype=dtypes, seed=seeds)
def test_ragged_attention_is_right_for_chunks_and_decode_rows_together(data, shape, block_size, dtype, seed):
    heads, kv_heads, head_dim = shape
    chosen = data.draw(options(heads))
    queries = data.draw(st.lists(st.sampled_from([0, 1, 1, 5, 31, 32, 33, 70]), min_size=4, max_size=4))
    world, starts = world_of_a_step(data, queries, seed, kv_heads, head_dim, block_size, dtype)
    q = random_queries(seed, 285, heads, head_dim, dtype)  # what follows the last row is padding
    out, lse = ragged_attention(
        q, world.pool, world.tables, world.lens, starts, return_lse=True, backend="xla", **chosen
    )
    want, want_lse = expected_ragged(world, np.asarray(q.astype(jnp.float32)), starts, **chosen)
    assert_close(out, want, dtype)
    assert_lse_close(lse, want_lse, dtype)
    assert not np.asarray(out.astype(jnp.float32))[starts[-1] :].any(), "padding must come out as 0"


@few
@given(data=st.data(), shape=shapes, block_size=block_sizes, dtype=dtypes, seed=seeds)
def test_a_step_of_decode_rows_and_chunks_computed_apart_is_right(data, shape, block_size, dtype, seed):
    heads, kv_heads, head_dim = shape
    chosen = data.draw(options(heads))
    num_decodes = data.draw(st.integers(0, 5))
    chunks = data.draw(st.lists(st.sampled_from([0, 1, 5, 33, 70]), min_size=5 - num_decodes, max_size=5 - num_decodes))
    queries = [1] * num_decodes + chunks
    world, starts = world_of_a_step(data, queries, seed, kv_heads, head_dim, block_size, dtype)
    q = random_queries(seed, 360, heads, head_dim, dtype)
    arguments = (q, world.pool, world.tables, world.lens, starts, jnp.int32(num_decodes))
    want, _ = expected_ragged(world, np.asarray(q.astype(jnp.float32)), starts, **chosen)
    assert_close(attend_apart(*arguments, backend="xla", **chosen), want, dtype)
    assert_close(mixed_attention(*arguments, backend="xla", **chosen), want, dtype)


def test_a_step_of_fewer_tokens_than_rows_may_be_computed_apart():
    world = make_world(4, [3, 20, 0, 0], kv_heads=2, head_dim=16, block_size=16)
    q = random_queries(4, 2, 4, 16, "float32")
    starts = np.array([0, 1, 2, 2, 2], np.int32)
    out = attend_apart(q, world.pool, world.tables, world.lens, starts, jnp.int32(2), backend="xla")
    want, _ = expected_ragged(world, np.asarray(q), starts)
    assert_close(out, want, "float32")


@pytest.mark.gpu
@pytest.mark.skipif(not runs_here("hopper"), reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
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
    decodes, chunks, head_dim, dtype
):
    lens = [*decodes, *(kv for _, kv in chunks)]
    queries = [1] * len(decodes) + [count for count, _ in chunks]
    world = make_world(5, lens, kv_heads=2, head_dim=head_dim, block_size=16, dtype=dtype)
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    q = random_queries(5, max(1024, starts[-1] + 7), 8, head_dim, dtype)
    tables = np.where((world.tables >= 0) & (world.tables < world.pool.shape[0]), world.tables, 0)
    attend = jax.jit(mixed_attention)
    arguments = (q, world.pool, jnp.asarray(tables), jnp.asarray(world.lens), jnp.asarray(starts))
    out = attend(*arguments, jnp.int32(len(decodes)))
    want, _ = expected_ragged(world, np.asarray(q.astype(jnp.float32)), starts)
    assert_close(out, want, dtype)
    assert (out == attend(*arguments, jnp.int32(len(decodes)))).all()
    if decodes:
        n = len(decodes)
        alone = jax.jit(decode_attention)(q[:n], world.pool, jnp.asarray(tables[:n]), jnp.asarray(world.lens[:n]))
        assert (out[:n] == alone).all()


def test_one_very_long_sequence_among_short_ones():
    world = make_world(3, [1, 5000, 17, 2], kv_heads=2, head_dim=16, block_size=16)
    q = random_queries(3, 4, 4, 16, "float32")
    out = decode_attention(q, world.pool, world.tables, world.lens, backend="xla")
    assert_close(out, expected_decode(world, np.asarray(q))[0], "float32")


def test_sequences_may_share_blocks():
    world = make_world(4, [70, 64, 100], kv_heads=2, head_dim=16, block_size=16, shared_prefix=3)
    assert (world.tables[0, :3] == world.tables[2, :3]).all()
    q = random_queries(4, 3, 4, 16, "float32")
    out = decode_attention(q, world.pool, world.tables, world.lens, backend="xla")
    assert_close(out, expected_decode(world, np.asarray(q))[0], "float32")


def test_partial_results_merge_by_their_log_sum_exp():
    """Attention over all keys is the lse-weighted mean of attention over two parts of them (shared-prefix schemes)."""
    world = make_world(5, [160], kv_heads=1, head_dim=16, block_size=16, garbage=False)
    q = random_queries(5, 1, 2, 16, "float32")
    call = jax.jit(lambda t, n: decode_attention(q, world.pool, t, n, return_lse=True, backend="xla"))
    whole, _ = call(world.tables, world.lens)
    (o1, l1), (o2, l2) = (
        call(world.tables[:, :4], np.array([64], np.int32)),
        call(world.tables[:, 4:], np.array([96], np.int32)),
    )
    w1 = np.exp(l1 - np.logaddexp(l1, l2))[..., None]
    np.testing.assert_allclose(w1 * o1 + (1 - w1) * o2, whole, atol=1e-6)


def test_the_same_inputs_give_the_same_bits_and_a_row_does_not_depend_on_its_neighbours():
    world = make_world(6, [33, 290, 1], kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16")
    q = random_queries(6, 3, 4, 64, "bfloat16")
    both = [decode_attention(q, world.pool, world.tables, world.lens, backend="xla") for _ in range(2)]
    assert (both[0] == both[1]).all()
    alone = decode_attention(q[1:2], world.pool, world.tables[1:2], world.lens[1:2], backend="xla")
    assert_close(alone, np.asarray(both[0][1:2].astype(jnp.float32), np.float64), "float32")


@pytest.mark.parametrize("rows", [0, 3])
def test_empty_batches_and_empty_rows_give_zeros(rows):
    world = make_world(7, [0, 0, 0][:rows] or [4], kv_heads=1, head_dim=16, block_size=16)
    q = random_queries(7, rows, 2, 16, "float32")
    out, lse = decode_attention(q, world.pool, world.tables[:rows], world.lens[:rows], return_lse=True, backend="xla")
    assert out.shape == (rows, 2, 16)
    assert not out.any()
    assert np.isneginf(lse).all()
    starts = np.zeros(rows + 1, np.int32)
    out = ragged_attention(
        random_queries(7, 5, 2, 16, "float32"), world.pool, world.tables[:rows], world.lens[:rows], starts
    )
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
