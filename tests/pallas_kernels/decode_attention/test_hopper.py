"""The decode attention kernels on a GPU: Triton's, and Hopper's, where warps of its own bring keys, values and queries.

The interpreter, which has no warps, runs it in `test_hopper_interpreted.py`. What these warps do depends on

    head_dim      64, 128, 256: tokens of a tile, depth of the rings
    block size    16 to 128: copies of a tile, 8 to 1, or two tiles of one block
    query heads   of a KV head: copies of a unit's queries, 1 to 4
    units         of a CTA: none, one, or more than its rings hold at once; empty, of some tiles, or leaves
"""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import pallas_kernels as ops
from tests.pallas_kernels.marks import ON_GPU, on_gpus
from tests.pallas_kernels.paged import assert_close, assert_lse_close, expected_decode, make_world, random_queries

AROUND_BOUNDARIES = [2500, 0, 1, 16, 17, 700, 2048, 2049, 64, 1023]
OF_ANY_AGE = [0, *np.random.default_rng(0).integers(1, 600, 62), 2049]
"""With 8 KV heads, 4 units for each of 132 CTAs, and more than the rings hold: 768 tokens at head_dim 64."""


def check(lens, heads=16, kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16", backend="hopper", **options):
    """Compares with float64 numpy where slots that no sequence owns are NaN, and two more calls with the first.
    value_dim: of a pool of latents."""
    world = make_world(
        3,
        lens,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        window=options.get("sliding_window"),
        value_dim=options.get("value_dim"),
    )
    q = random_queries(3, len(lens), heads, head_dim, dtype)
    arguments = (q, world.pool, jnp.asarray(world.tables), jnp.asarray(world.lens))
    runs = [ops.decode_attention(*arguments, return_lse=True, backend=backend, **options) for _ in range(3)]
    scored = {name: value for name, value in options.items() if name != "value_dim"}
    want, want_lse = expected_decode(world, np.asarray(q).astype(np.float32), **scored)
    assert_close(runs[0][0], want, dtype)
    assert_lse_close(runs[0][1], want_lse, dtype)
    for run in runs[1:]:
        jax.tree.map(np.testing.assert_array_equal, run, runs[0])


@pytest.mark.gpu
@on_gpus("head_dim, block_size", product([64, 128, 256], [16, 32, 64, 128]), lambda d, size: d == 128 or size == 16)
def test_on_the_gpu_more_units_than_the_rings_hold_are_right(head_dim, block_size, backend):
    check(OF_ANY_AGE, head_dim=head_dim, block_size=block_size, backend=backend)


@pytest.mark.gpu
# Queries are brought by 1, 2, 3 and 4 copies.
@on_gpus("head_dim, group", product([64, 128, 256], [1, 7, 24, 32]), lambda d, group: d == 128 or group == 7)
def test_on_the_gpu_groups_of_any_size_are_right(head_dim, group, backend):
    check(OF_ANY_AGE * 5, heads=group, kv_heads=1, head_dim=head_dim, backend=backend)


@pytest.mark.gpu
@on_gpus("head_dim", [(64,), (128,), (256,)], lambda d: d == 128)
@pytest.mark.parametrize(
    ("lens", "heads", "kv_heads"),
    [
        (AROUND_BOUNDARIES, 16, 8),  # most CTAs have one unit
        ([5000, 2500, 0, 700], 16, 8),  # leaves
        ([16_384], 64, 1),  # leaves of several tiles of two groups, and CTAs without a unit
        ([1], 4, 4),
        ([300] * 700, 8, 2),  # ten short units a CTA
        ([0] * 300, 16, 8),  # queries alone are brought
    ],
    ids=["boundaries", "leaves", "one long", "one token", "many short", "empty"],
)
def test_on_the_gpu_units_of_any_number_and_length_are_right(lens, heads, kv_heads, head_dim, backend):
    check(lens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ON_GPU)
@pytest.mark.parametrize(
    "case",
    [
        {"dtype": "float16", "head_dim": 64},
        {"dtype": "float16"},
        {"sliding_window": 200, "logit_softcap": 3.0, "head_dim": 64},
        {"sliding_window": 200, "block_size": 128},  # units begin in the second tile of a block
        {"sliding_window": 1, "head_dim": 256},
        {"head_dim": 80},  # by the kernel that has heads as rows
        {"head_dim": 96, "block_size": 64},
    ],
    ids=str,
)
def test_on_the_gpu_windows_and_other_types_are_right(case, backend):
    check(AROUND_BOUNDARIES, **case, backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ON_GPU)
@pytest.mark.parametrize(
    ("lens", "heads", "head_dim", "value_dim", "block_size"),
    [
        (AROUND_BOUNDARIES, 16, 576, 512, 16),
        (OF_ANY_AGE * 8, 16, 576, 512, 64),  # some four units a CTA, more than queries are held for
        ([16_384, 5000], 128, 576, 512, 128),  # leaves and chunks of eight groups
        ([0] * 300, 16, 576, 512, 16),
        (AROUND_BOUNDARIES, 20, 320, 256, 32),
    ],
    ids=["boundaries", "many", "long", "empty", "narrow"],
)
def test_on_the_gpu_latents_are_right(lens, heads, head_dim, value_dim, block_size, backend):
    options = {"head_dim": head_dim, "value_dim": value_dim, "block_size": block_size}
    check(lens, heads=heads, kv_heads=1, backend=backend, **options)
