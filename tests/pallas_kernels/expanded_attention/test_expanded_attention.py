"""A mixed step over latents whose chunks attend among themselves by keys and values of heads, against float64 numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import pallas_kernels as ops
from jpaged.pallas_kernels.mixed_attention import api as mixed_attention
from tests.pallas_kernels.marks import WITH_TRITON
from tests.pallas_kernels.paged import assert_close, attend, expected_ragged, make_world, random_queries

HEADS, RANK, ROTATED, PLAIN, HEAD_VALUES = 3, 64, 16, 32, 32
TOKENS = 64
SCALE = 0.2

backends = pytest.mark.parametrize("backend", WITH_TRITON)


def float64(x):
    return np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)


def step(seed, queries, cached, dtype="float32", tokens=TOKENS):
    """Arguments of a step of rows with so many queries and cached tokens, and its starts; NaN where no chunk's token
    is."""
    rng = np.random.default_rng(seed)
    lens = [n + c for n, c in zip(queries, cached, strict=True)]
    sizes = {"kv_heads": 1, "head_dim": RANK + ROTATED, "block_size": 16, "value_dim": RANK, "width": 12}
    world = make_world(seed, lens, dtype=dtype, **sizes)
    of_heads = random_queries(seed, tokens, HEADS, PLAIN + ROTATED, dtype)
    to_keys = jnp.asarray(rng.standard_normal((HEADS, PLAIN, RANK)) / 8, dtype)
    to_values = jnp.asarray(rng.standard_normal((HEADS, HEAD_VALUES, RANK)) / 8, dtype)
    absorbed = np.einsum("thn,hnr->thr", float64(of_heads)[..., :PLAIN], float64(to_keys))
    q = jnp.concatenate([jnp.asarray(absorbed, dtype), of_heads[..., PLAIN:]], -1)
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    latents = np.full((tokens, RANK + ROTATED), np.nan, np.float32)
    for row, n in enumerate(queries):
        latents[starts[row] : starts[row + 1]] = world.keys[row][len(world.keys[row]) - n :, 0]
    expansion = ops.Expansion(of_heads, to_keys, to_values)
    arguments = (q, jnp.asarray(latents, dtype), expansion, world.pool, world.tables, world.lens, jnp.asarray(starts))
    return world, arguments


def expected(world, arguments):
    """By keys and values of heads, of all tokens."""
    *_, (of_heads, to_keys, to_values), _, _, _, starts = arguments
    of_heads, to_keys, to_values = (float64(x) for x in (of_heads, to_keys, to_values))
    out = np.zeros((of_heads.shape[0], HEADS, HEAD_VALUES))
    for row, keys in enumerate(world.keys):
        first, end, latents = starts[row], starts[row + 1], keys[:, 0]
        plain = np.einsum("tr,hnr->thn", latents[:, :RANK], to_keys)
        rotated = np.broadcast_to(latents[:, None, RANK:], (len(latents), HEADS, ROTATED))
        values = np.einsum("tr,hvr->thv", latents[:, :RANK], to_values)
        if end > first:
            keys = np.concatenate([plain, rotated], -1)
            out[first:end], _ = attend(of_heads[first:end], keys, values, len(keys) - (end - first), scale=SCALE)
    return out


@backends
@pytest.mark.parametrize(
    ("queries", "cached", "num_decodes", "dtype", "apart"),
    [
        ([1, 1, 0, 17, 1, 33, 0], [40, 0, 0, 30, 5, 0, 7], 2, "float32", False),
        ([1, 1, 0, 17, 1, 33, 0], [40, 0, 0, 30, 5, 0, 7], 2, "float32", True),
        ([1, 1, 20, 16, 1], [90, 3, 0, 64, 0], 2, "bfloat16", True),
        ([64], [100], 0, "float32", False),
        ([1] * 6, [3, 0, 18, 99, 16, 31], 6, "float32", True),
    ],
    ids=["mixed", "mixed, apart", "in 16 bits, apart", "one chunk", "no chunk, apart"],
)
def test_a_step_with_chunks_is_that_of_keys_and_values_of_heads(
    backend, queries, cached, num_decodes, dtype, apart, monkeypatch
):
    if apart:  # as large steps compute their decode rows, where there are kernels
        monkeypatch.setattr(mixed_attention, "LEAST_TOKENS", 1)
        monkeypatch.setattr(mixed_attention, "REFERENCE", "none")
    world, arguments = step(len(queries), queries, cached, dtype)
    call = jax.jit(partial(ops.expanded_attention, scale=SCALE, backend=backend))
    out = call(*arguments, jnp.int32(num_decodes))
    assert out.dtype == dtype
    assert_close(out, expected(world, arguments), dtype)


@backends
def test_a_part_of_the_columns_of_values_may_count(backend):
    world = make_world(3, [40, 7], kv_heads=2, head_dim=48, block_size=16)
    q, starts = random_queries(3, 30, 4, 48, "float32"), np.array([0, 20, 27], np.int32)
    out = ops.ragged_attention(q, world.pool, world.tables, world.lens, starts, value_dim=32, backend=backend)
    assert_close(out, expected_ragged(world, np.asarray(q), starts)[0][..., :32], "float32")


@backends
def test_what_is_cached_alone_is_what_all_of_a_rows_queries_see(backend):
    world = make_world(3, [41, 27, 9], kv_heads=2, head_dim=32, block_size=16)
    q, starts = random_queries(3, 30, 4, 32, "float32"), np.array([0, 1, 18, 27], np.int32)
    arrays = world.pool, world.tables, world.lens, starts, jnp.int32(1)
    out, lse = ops.mixed_attention(q, *arrays, cached_only=True, return_lse=True, backend=backend)
    want = np.zeros(out.shape)
    for row, (first, end, seen) in enumerate([(0, 1, 41), (1, 18, 10), (18, 18, 0)]):
        for token in range(first, end):
            keys, values = world.keys[row][:seen], world.values[row][:seen]
            want[token : token + 1], _ = attend(np.asarray(q[token : token + 1]), keys, values, seen - 1)
    assert_close(out, want, "float32")
    np.testing.assert_array_equal(np.isneginf(lse).all(1), ~want.any((1, 2)))


def test_the_workspace_is_bounded_by_the_tokens_of_the_step():
    """Not by how long the sequences are: temporary memory grows by no more than the block tables do."""
    _, small = step(1, [40], [100], tokens=4096)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), small)
    q, latents, expansion, _, _, _, _ = shapes

    def temporary(blocks, width):
        pool = jax.ShapeDtypeStruct((blocks, 1, 1, 16, RANK + ROTATED), jnp.float32)
        ids = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        call = jax.jit(partial(ops.expanded_attention, scale=SCALE, backend="xla"))
        lowered = call.lower(q, latents, expansion, pool, ids((8, width)), ids((8,)), ids((9,)), ids(()))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    few, many = temporary(300, 32), temporary(30_000, 8192)
    assert many - few <= 4 * 8 * 8192 * 4


def of_shapes(*shapes):
    return {"expansion": ops.Expansion(*(jnp.zeros(shape) for shape in shapes))}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"latents": jnp.zeros((3, 80))}, "latents must be"),
        ({"kv_pool": jnp.zeros((4, 2, 1, 16, 80))}, "kv_pool must hold latents"),
        (of_shapes((64, 3, 48), (2, 32, 64), (3, 32, 64)), "to_keys"),
        (of_shapes((64, 3, 48), (3, 32, 96), (3, 32, 96)), "rank"),
        (of_shapes((64, 3, 40), (3, 32, 64), (3, 32, 64)), "expansion.q"),
        (of_shapes((64, 3, 48), (3, 32, 64), (3, 49, 64)), "at most 48"),
        ({"query_starts": jnp.zeros((5,), jnp.int32)}, "query_starts"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, said):
    _, arguments = step(1, [40], [100])
    names = ("q", "latents", "expansion", "kv_pool", "block_tables", "kv_lens", "query_starts")
    with pytest.raises(ValueError, match=said):
        ops.expanded_attention(**dict(zip(names, arguments, strict=True)) | change, num_decodes=jnp.int32(0))
