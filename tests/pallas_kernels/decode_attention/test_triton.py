"""The decode attention kernel in Triton: a sequence's bits depend on nothing but the sequence."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels.common.attention_arguments import Features, Operands
from jpaged.pallas_kernels.registry import missing
from tests.pallas_kernels.marks import on_gpu_with_triton
from tests.pallas_kernels.paged import make_world, random_queries

if missing("triton") is not None:
    pytest.skip(str(missing("triton")), allow_module_level=True)

from jpaged.pallas_kernels.decode_attention import triton as kernel


def attend(lens: list[int], rows: slice, heads: int, kv_heads: int, dtype: str, **options: Any) -> tuple[Any, Any]:
    """Some of the rows of a batch of sequences, computed without the others."""
    world = make_world(1, lens, kv_heads=kv_heads, head_dim=64, block_size=16, dtype=dtype, garbage=False)
    q = random_queries(1, len(lens), heads, 64, dtype)
    arrays = (q[rows], world.pool, jnp.asarray(world.tables[rows]), jnp.asarray(world.lens[rows]))
    return kernel.decode_attention(Operands(*arrays, None), Features(0.125), **options)


@pytest.mark.parametrize("lens", [[4500, 300], [2500]])
def test_whole_chunks_and_leaves_give_the_same_bits(lens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    cut = []
    for multiprocessors in (1, 132):  # few: whole chunks; many: leaves
        monkeypatch.setattr(kernel, "num_multiprocessors", lambda count=multiprocessors: count)
        jax.clear_caches()
        cut.append(attend(lens, slice(None), 4, 2, "bfloat16"))
    jax.tree.map(np.testing.assert_array_equal, *cut)


@pytest.mark.gpu
@on_gpu_with_triton
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_the_gpu_a_sequence_alone_and_among_others_has_the_same_bits(dtype: str) -> None:
    lens = [*np.random.default_rng(0).integers(1, 3000, 200).tolist(), 9000, 4097]
    whole = attend(lens, slice(None), 16, 4, dtype)
    for rows in (slice(0, 1), slice(7, 9), slice(200, 201), slice(150, None)):
        part = attend(lens, rows, 16, 4, dtype)
        jax.tree.map(np.testing.assert_array_equal, part, tuple(x[rows] for x in whole))
