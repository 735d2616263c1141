"""The Mosaic kernels in Pallas' GPU interpreter, on a CPU, with its race detector. Needs JAX >= 0.11."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import reference
from jpaged.pallas_kernels.backends import mosaic_missing
from tests.pallas_kernels.paged import assert_close, assert_lse_close, expected_decode, make_world, random_queries

if mosaic_missing() is not None:
    pytest.skip(str(mosaic_missing()), allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels import (
    decode_attention_mosaic,
    move_blocks_mosaic,
    rope_and_write_mosaic,
    write_kv_mosaic,
)
from jpaged.pallas_kernels.thread_layout_mosaic import thread_layout

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


@pytest.mark.parametrize(
    ("lens", "heads", "kv_heads", "block_size", "consumers", "options"),
    [
        ([300, 0, 65], 8, 2, 16, 2, {}),
        ([300, 1, 256], 4, 2, 32, 2, {"sliding_window": 100, "logit_softcap": 4.0, "alibi": True}),
        ([130, 128], 6, 2, 128, 2, {"alibi": True}),
        ([64, 129], 4, 4, 64, 1, {}),
    ],
)
def test_split_decode_is_right_where_unowned_slots_are_nan(lens, heads, kv_heads, block_size, consumers, options):
    options = dict(options)
    slopes = np.linspace(0.01, 0.2, heads, dtype=np.float32) if options.pop("alibi", False) else None
    world = make_world(
        1,
        lens,
        kv_heads=kv_heads,
        head_dim=64,
        block_size=block_size,
        dtype="bfloat16",
        window=options.get("sliding_window"),
    )
    q = random_queries(1, len(lens), heads, 64, "bfloat16")
    config = decode_attention_mosaic.Config(tile=64, stages=2, chunk=128, ctas=2, consumers=consumers)
    out, lse = decode_attention_mosaic.decode_attention(
        q,
        world.pool,
        jnp.asarray(world.tables),
        jnp.asarray(world.lens),
        None if slopes is None else jnp.asarray(slopes),
        scale=0.125,
        sliding_window=options.get("sliding_window"),
        logit_softcap=options.get("logit_softcap"),
        config=config,
        interpret=INTERPRET,
    )
    want, want_lse = expected_decode(world, np.asarray(q.astype(jnp.float32)), alibi_slopes=slopes, **options)
    assert_close(out, want, "bfloat16")
    assert_lse_close(lse, want_lse, "bfloat16")


def test_kv_write_and_block_moves_equal_the_reference():
    rng = np.random.default_rng(0)
    pools = tuple(jnp.asarray(rng.standard_normal((12, 2, 2, 16, 64)), jnp.bfloat16) for _ in range(3))
    k = jnp.asarray(rng.standard_normal((6, 2, 64)), jnp.bfloat16)
    slots = jnp.asarray([17, 191, 40, -1, 33, 100], jnp.int32)
    src, dst = jnp.asarray([3, 4], jnp.int32), jnp.asarray([7, 9], jnp.int32)

    def run(op, *arguments):
        return jax.jit(lambda *a: op(*a, interpret=INTERPRET))(*arguments)

    staging = reference.gather_blocks(pools, src)
    pairs = [
        (run(write_kv_mosaic.write_kv, pools[0], k, 2 * k, slots), reference.write_kv(pools[0], k, 2 * k, slots)),
        (run(move_blocks_mosaic.copy_blocks, pools, src, dst), reference.copy_blocks(pools, src, dst)),
        (run(move_blocks_mosaic.gather_blocks, pools, src), staging),
        (
            run(move_blocks_mosaic.scatter_blocks, pools, staging, dst),
            reference.scatter_blocks(pools, staging, dst),
        ),
    ]
    for got, want in pairs:
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "rotated", "normed"),
    [(2, 3, 32, True, True), (4, 1, 64, False, False), (128, 1, 32, True, False)],
)
def test_queries_and_a_pool_written_from_a_projection_equal_the_reference(kv_heads, group, head_dim, rotated, normed):
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    pool, qkv = normal(6, 2, kv_heads, 16, head_dim), normal(4, kv_heads, group + 2, head_dim)
    angles = normal(4, head_dim // 2, dtype=jnp.float32)
    rotation = (jnp.cos(angles), jnp.sin(angles)) if rotated else None
    norms = (normal(head_dim), normal(head_dim)) if normed else None
    arguments = (pool, qkv, jnp.asarray([17, 95, -1, 33], jnp.int32), rotation, norms)
    run = jax.jit(lambda *a: rope_and_write_mosaic.rope_and_write(*a, norm_eps=1e-6, interpret=INTERPRET))
    want = reference.rope_and_write(*arguments, norm_eps=1e-6)
    for got, expected in zip(run(*arguments), want, strict=True):
        got, expected = (np.asarray(x.astype(jnp.float32)) for x in (got, expected))
        np.testing.assert_allclose(got, expected, rtol=2**-7, atol=1e-6)
        assert (got == expected).mean() > 0.99  # a sum in another order moves a rounding here and there


def test_as_many_threads_as_can_share_an_array_and_cover_it():
    shapes = [(a, b, c) for a in (1, 2, 3, 8) for b in (1, 4, 7) for c in (8, 32, 40, 64, 128)]
    for shape in [*shapes, (8, 64), (1, 64), (32, 40)]:
        layout = thread_layout(shape, 4).to_mgpu()
        registers = np.prod(layout.registers_shape(shape)) * layout.vector_length
        assert registers * 128 == np.prod(shape) * layout.replication_factor, shape
        rows = np.prod(shape[:-1])  # a row is at most a warp's
        columns = np.gcd(32, shape[-1])
        assert layout.replication_factor == 128 // (columns * np.gcd(128 // columns, rows)), shape


def test_the_plan_covers_every_position_once_and_cuts_only_at_multiples_of_the_chunk():
    lens = np.array([0, 1, 1024, 1025, 5000, 4096], np.int32)
    for window in (None, 1, 1500):
        work = decode_attention_mosaic.plan(jnp.asarray(lens), 5120, 1024, 64, window)
        units = np.asarray(work.units)[: int(work.num_units[0])]
        assert len({(row, slot) for row, slot, *_ in units}) == len(units), "two units share a result slot"
        for row, n in enumerate(lens):
            own = sorted((begin, end) for r, _, begin, end, _ in units if r == row)
            first = 0 if window is None else max(0, n - window) // 64 * 64
            assert len(own) == work.num_chunks[row]
            assert own[0][0] == first
            assert own[-1][1] == max(n, first)
            for (_, end), (begin, _) in itertools.pairwise(own):
                assert end == begin
                assert begin % 1024 == 0
