"""The Mosaic kernels in Pallas' GPU interpreter, on a CPU, with its race detector. Needs JAX >= 0.11."""

from functools import partial

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
    decode_attention_rows_mosaic,
    decode_plan,
    move_blocks_mosaic,
    rope_and_write_mosaic,
    write_kv_mosaic,
)
from jpaged.pallas_kernels.thread_layout_mosaic import thread_layout

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def attend(kernel, config, lens, heads, kv_heads, block_size, head_dim, options):
    """Runs a decode kernel in the interpreter and compares it with float64 numpy."""
    options = dict(options)
    slopes = np.linspace(0.01, 0.2, heads, dtype=np.float32) if options.pop("alibi", False) else None
    world = make_world(
        1,
        lens,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype="bfloat16",
        window=options.get("sliding_window"),
    )
    q = random_queries(1, len(lens), heads, head_dim, "bfloat16")
    out, lse = kernel(
        q,
        world.pool,
        jnp.asarray(world.tables),
        jnp.asarray(world.lens),
        None if slopes is None else jnp.asarray(slopes),
        scale=head_dim**-0.5,
        sliding_window=options.get("sliding_window"),
        logit_softcap=options.get("logit_softcap"),
        config=config,
        interpret=INTERPRET,
    )
    want, want_lse = expected_decode(world, np.asarray(q.astype(jnp.float32)), alibi_slopes=slopes, **options)
    assert_close(out, want, "bfloat16")
    assert_lse_close(lse, want_lse, "bfloat16")
    return out, lse


def small_config(**fields):
    """Two leaves a chunk, each two tiles, on one CTA: what the interpreter can run."""
    fields = {"leaf": 128, "chunk": 256, "ctas": 1, **fields}
    return decode_attention_mosaic.Config(tile=64, stages=2, **fields)


@pytest.fixture
def cut(monkeypatch):
    """Has `plan` cut every chunk into leaves, as if there were many CTAs; the interpreter has one."""
    monkeypatch.setattr(decode_plan, "max_cut_chunks", lambda batch, groups, slots, cuts: batch * slots)


@pytest.mark.parametrize(
    ("lens", "heads", "kv_heads", "block_size", "options"),
    [
        ([300, 0, 65], 8, 2, 16, {}),
        ([300, 1, 256], 4, 2, 32, {"sliding_window": 100, "logit_softcap": 4.0, "alibi": True}),
        ([130, 128], 6, 2, 128, {"alibi": True}),  # groups of 3 heads start anywhere in a tile of queries
        ([600], 4, 4, 64, {}),  # three chunks, the last of them less than a leaf
    ],
)
@pytest.mark.usefixtures("cut")
def test_decode_cut_into_leaves_is_right_where_unowned_slots_are_nan(lens, heads, kv_heads, block_size, options):
    attend(decode_attention_mosaic.decode_attention, small_config(), lens, heads, kv_heads, block_size, 64, options)


def test_decode_of_whole_chunks_is_right_on_two_ctas_that_share_no_sequence():
    config = small_config(ctas=2)
    attend(decode_attention_mosaic.decode_attention, config, [200, 129, 64], 4, 2, 16, 64, {})


def test_whole_chunks_and_leaves_give_the_same_bits(request):
    run = partial(attend, decode_attention_mosaic.decode_attention, heads=2, kv_heads=1, block_size=64, head_dim=64)
    whole = run(small_config(), [250], options={})
    request.getfixturevalue("cut")
    cut = run(small_config(q_stages=3), [250], options={})  # another config, or the program of before runs again
    jax.tree.map(np.testing.assert_array_equal, cut, whole)


def test_decode_with_heads_as_rows_is_right_where_unowned_slots_are_nan():
    config = decode_attention_rows_mosaic.Config(tile=64, stages=2, chunk=128, ctas=2)
    options = {"sliding_window": 100, "logit_softcap": 4.0, "alibi": True}
    attend(decode_attention_rows_mosaic.decode_attention, config, [300, 0, 65], 8, 2, 16, 80, options)


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


@pytest.mark.parametrize("window", [None, 1, 1500])
@pytest.mark.parametrize("ctas", [1, 132])  # one CTA: whole chunks; many: leaves
def test_the_plan_covers_every_position_once_and_cuts_only_at_fixed_positions(window, ctas):
    lens = np.array([0, 1, 1024, 1025, 5000, 4096], np.int32)
    config = decode_attention_mosaic.Config(tile=64, stages=2, leaf=128, chunk=2048, ctas=ctas)
    work = decode_attention_mosaic.plan(jnp.asarray(lens), 5120, 4, window, config)
    units = np.asarray(work.units)[: int(work.num_units[0])]
    assert len(units) == len(np.unique(units, axis=0))
    assert (units[:, 8] > 1).any() == (ctas == 132 and window != 1)
    for row, n in enumerate(lens):
        own = units[units[:, 0] == row]
        own = own[np.lexsort((own[:, 7], own[:, 1]))]
        first = 0 if window is None else max(0, n - window) // 64 * 64
        assert own[0, 3] == first
        assert own[-1, 4] == max(n, first)
        assert (own[1:, 3] == own[:-1, 4]).all(), "every unit begins where the one before it ends"
        assert (own[:, 2] == own[-1, 1] + 1).all()
        assert (own[:, 5] == n).all()
        assert (own[:, 6] * 64 == (128 if n <= 1024 else 256 if n <= 2048 else 512)).all()
        for chunk in range(own[-1, 1] + 1):
            leaves = own[own[:, 1] == chunk]
            assert leaves[0, 3] == first or leaves[0, 3] % 2048 == 0
            assert (leaves[:, 8] == len(leaves)).all(), "as many units as the finisher waits for"
            assert (leaves[:, 7] == np.arange(len(leaves))).all()
            assert len(leaves) <= config.most_leaves
            assert (np.diff(leaves[:, 3]) == leaves[0, 6] * 64).all()
            counters = units[(units[:, 9] == leaves[0, 9]) & (units[:, 8] > 1)]
            assert len(leaves) == 1 or len(counters) == len(leaves), "one counter a cut chunk"
