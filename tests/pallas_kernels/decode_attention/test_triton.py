"""Attention in Triton: a sequence's bits in a decode step depend on nothing but the sequence; the largest heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import pallas_kernels as ops
from jpaged.pallas_kernels.common.attention_arguments import Features, Operands
from jpaged.pallas_kernels.registry import missing
from tests.pallas_kernels.marks import on_gpu_with_triton
from tests.pallas_kernels.paged import assert_close, expected_decode, expected_ragged, make_world, random_queries

if missing("triton") is not None:
    pytest.skip(str(missing("triton")), allow_module_level=True)

from jpaged.pallas_kernels.decode_attention import triton as kernel


def batch(lens: list[int], heads: int, kv_heads: int, dtype: str) -> tuple[jax.Array, ...]:
    """Queries, pool, tables and lengths of a batch of sequences."""
    rng = np.random.default_rng(1)
    blocks = [-(-n // 16) for n in lens]
    ids = rng.permutation(sum(blocks)).astype(np.int32) + 1
    tables = np.zeros((len(lens), max(blocks)), np.int32)
    for row, own in enumerate(np.split(ids, np.cumsum(blocks)[:-1])):
        tables[row, : len(own)] = own
    q, pool = (
        jnp.asarray(rng.standard_normal(shape, np.float32), dtype)
        for shape in ((len(lens), heads, 64), (sum(blocks) + 1, 2, kv_heads, 16, 64))
    )
    return q, pool, jnp.asarray(tables), jnp.asarray(lens, jnp.int32)


def attend(arrays: tuple[jax.Array, ...], rows: slice) -> tuple[jax.Array, jax.Array]:
    """Some of the rows of a batch, computed without the others."""
    q, pool, tables, lens = arrays
    return kernel.decode_attention(Operands(q[rows], pool, tables[rows], lens[rows], None), Features(0.125))


@pytest.mark.gpu
@pytest.mark.parametrize("lens", [[4500, 300], [2500]])
def test_whole_chunks_and_leaves_give_the_same_bits(lens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, found = batch(lens, 4, 2, "bfloat16"), []
    for multiprocessors in (1, 132):  # few: whole chunks; many: leaves
        monkeypatch.setattr(kernel, "num_multiprocessors", lambda count=multiprocessors: count)
        jax.clear_caches()
        found.append(attend(arrays, slice(None)))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "dtype"), [(512, "bfloat16"), (256, "float32")])
def test_the_largest_heads_are_taken_in_large_groups(head_dim: int, dtype: str) -> None:
    world = make_world(1, [70, 0, 33], kv_heads=1, head_dim=head_dim, block_size=16, dtype=dtype)
    arrays = (world.pool, world.tables, world.lens)
    q = random_queries(1, 3, 20, head_dim, dtype)
    out = ops.decode_attention(q, *arrays, backend="triton")
    assert_close(out, expected_decode(world, np.asarray(q).astype(np.float32))[0], dtype)
    q, starts = random_queries(2, 8, 20, head_dim, dtype), np.array([0, 5, 5, 8], np.int32)
    out = ops.ragged_attention(q, *arrays, starts, backend="triton")
    assert_close(out, expected_ragged(world, np.asarray(q).astype(np.float32), starts)[0], dtype)
    too_large = jax.ShapeDtypeStruct((4, 2, 1, 16, 2 * head_dim), dtype)
    assert f"head_dim {2 * head_dim}" in str(kernel.unsupported(q, too_large))


@pytest.mark.gpu
@on_gpu_with_triton
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_the_gpu_a_sequence_alone_and_among_others_has_the_same_bits(dtype: str) -> None:
    lens = [*np.random.default_rng(0).integers(1, 3000, 200).tolist(), 9000, 4097]
    arrays = batch(lens, 16, 4, dtype)
    whole = attend(arrays, slice(None))
    for rows in (slice(0, 1), slice(200, 201), slice(150, None)):
        jax.tree.map(np.testing.assert_array_equal, attend(arrays, rows), tuple(x[rows] for x in whole))
