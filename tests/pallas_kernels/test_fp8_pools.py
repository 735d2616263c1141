"""Pools in e4m3: written rounded, read as they stand by every attention op, moved as they are, in every backend."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jpaged import pallas_kernels as ops
from jpaged.pallas_kernels import devices
from jpaged.pallas_kernels.decode_attention.api import OP as DECODE
from jpaged.pallas_kernels.devices import Device
from jpaged.pallas_kernels.move_blocks.api import COPY
from jpaged.pallas_kernels.write_kv.api import OP as WRITE
from tests.pallas_kernels.marks import WITH_TRITON, needs_triton
from tests.pallas_kernels.paged import (
    assert_close,
    assert_lse_close,
    expected_decode,
    expected_ragged,
    make_world,
    random_queries,
)

E4M3 = ml_dtypes.float8_e4m3fn
FP8 = "float8_e4m3fn"


@pytest.mark.parametrize("backend", WITH_TRITON)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "empty"),  # with head_dim 128, tiles of more than 32 sequences are others
    [("bfloat16", 64, 0), ("float16", 64, 0), ("bfloat16", 128, 0), ("bfloat16", 128, 30)],
)
def test_attention_is_that_of_float64_over_what_the_pool_holds(backend, dtype, head_dim, empty):
    lens = [70, 0, 300, 1]
    world = make_world(3, lens + [0] * empty, kv_heads=2, head_dim=head_dim, block_size=16, dtype=FP8)
    q = random_queries(3, 4 + empty, 8, head_dim, dtype)
    wide = np.asarray(q).astype(np.float64)
    options = {"sliding_window": 90, "logit_softcap": 20.0}
    for some in ({}, options):
        out, lse = ops.decode_attention(
            q, world.pool, world.tables, world.lens, return_lse=True, backend=backend, **some
        )
        want, want_lse = expected_decode(world, wide, **some)
        assert out.dtype == q.dtype
        assert_close(out, want, dtype)
        assert_lse_close(lse, want_lse, dtype)
    if empty:
        return
    starts = np.array([0, 30, 30, 100, 101], np.int32)
    q = random_queries(4, 101, 8, head_dim, dtype)
    wide = np.asarray(q).astype(np.float64)
    out, lse = ops.ragged_attention(q, world.pool, world.tables, world.lens, starts, return_lse=True, backend=backend)
    want, want_lse = expected_ragged(world, wide, starts)
    assert_close(out, want, dtype)
    assert_lse_close(lse, want_lse, dtype)


def test_a_shared_prefix_in_e4m3_is_read_once_for_all():
    world = make_world(5, [70, 90, 40], kv_heads=2, head_dim=16, block_size=16, dtype=FP8, shared_prefix=2)
    q = random_queries(5, 3, 4, 16, "float32")
    out = ops.shared_prefix_attention(q, world.pool, world.tables, world.lens, jnp.int32(3), jnp.int32(32))
    assert_close(out, expected_decode(world, np.asarray(q))[0], "float32")


@pytest.mark.parametrize("backend", WITH_TRITON)
@pytest.mark.parametrize("scaled", [False, True])
def test_keys_and_values_are_rounded_as_they_are_written(backend, scaled):
    rng = np.random.default_rng(0)
    pool = jnp.asarray(rng.standard_normal((6, 2, 2, 16, 32)), E4M3)
    k, v = (
        jnp.asarray(rng.standard_normal((5, 2, 32)) * 10.0 ** rng.integers(-4, 4, (5, 2, 32)), jnp.bfloat16)
        for _ in "kv"
    )
    k = k.at[0, 0, :4].set(jnp.asarray([1e30, -jnp.inf, 464, 0.0009765625], jnp.bfloat16))
    slots = jnp.asarray([17, 95, -1, 33, 64], jnp.int32)
    scales = jnp.asarray([0.25, 3.0], jnp.float32) if scaled else None
    got = np.asarray(ops.write_kv(pool, k, v, slots, kv_scales=scales, backend=backend)).view(np.uint8)
    want = np.asarray(pool).copy()
    for token, slot in enumerate(np.asarray(slots)):
        for which, x in enumerate((k, v)):
            by = np.float32(1) if scales is None else np.asarray(scales)[which]
            rounded = np.clip(np.asarray(x[token], np.float32) / by, -448, 448).astype(E4M3)
            if slot >= 0:
                want[slot // 16, which, :, slot % 16] = rounded
    np.testing.assert_array_equal(got, want.view(np.uint8))
    # The fused write rounds what the plain one does, and hands queries on as they are.
    qkv = jnp.concatenate([k[:, :, None] * 2, k[:, :, None], v[:, :, None]], axis=2)
    q, fused = ops.rope_and_write(pool, qkv, slots, kv_scales=scales, backend=backend)
    np.testing.assert_array_equal(np.asarray(fused).view(np.uint8), got)
    np.testing.assert_array_equal(np.asarray(q, np.float32), np.asarray(k * 2, np.float32))


@pytest.mark.gpu
@needs_triton
def test_every_float_is_rounded_as_the_nearest_e4m3():
    around = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    around = np.sort(around[np.isfinite(around)])
    halves = np.concatenate([around, (around[1:] + around[:-1]) / 2])
    x = np.concatenate([np.nextafter(halves, np.float32(sign) * np.inf) for sign in (-1, 1)] + [halves, [np.nan]])
    x = np.pad(x, (0, -len(x) % 32)).astype(np.float32).reshape(-1, 1, 32)
    pool = jnp.zeros((-(-len(x) // 16), 2, 1, 16, 32), E4M3)
    slots = jnp.arange(len(x), dtype=jnp.int32)
    got = np.asarray(ops.write_kv(pool, jnp.asarray(x), jnp.asarray(x), slots, backend="triton"))
    got = got[:, 0, 0].reshape(-1, 32)[: len(x)].view(np.uint8)
    want = np.clip(x[:, 0], -448, 448).astype(E4M3).view(np.uint8)
    nan = np.isnan(x[:, 0])
    np.testing.assert_array_equal(got[~nan], want[~nan])
    assert np.all(got[nan] & 0x7F == 0x7F)


@pytest.mark.parametrize("backend", WITH_TRITON)
def test_blocks_are_moved_bit_by_bit(backend):
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 256, (2, 9, 2, 2, 16, 16), np.uint8)
    pools = tuple(jnp.asarray(one.view(E4M3)) for one in bits)
    copied = ops.copy_blocks(pools, jnp.asarray([3, 0]), jnp.asarray([5, 0]), backend=backend)
    staging = ops.gather_blocks(pools, jnp.asarray([4, 2]), backend=backend)
    back = ops.scatter_blocks(pools, staging, jnp.asarray([7, 8]), backend=backend)
    for i in range(2):
        np.testing.assert_array_equal(np.asarray(copied[i]).view(np.uint8)[5], bits[i, 3])
        np.testing.assert_array_equal(np.asarray(staging[i]).view(np.uint8), bits[i, [4, 2]])
        np.testing.assert_array_equal(np.asarray(back[i]).view(np.uint8)[[7, 8]], bits[i, [4, 2]])


@needs_triton
def test_hopper_takes_triton_for_such_pools_and_its_own_kernels_for_others(monkeypatch):
    monkeypatch.setattr(devices, "default_device", lambda: Device("gpu", (9, 0)))
    shape, q = (8, 2, 2, 16, 128), jax.ShapeDtypeStruct((4, 8, 128), jnp.bfloat16)
    for dtype, chosen in ((E4M3, "triton"), (jnp.bfloat16, "hopper")):
        pool = jax.ShapeDtypeStruct(shape, dtype)
        assert {DECODE.pick(None, q, pool).backend, *(op.pick(None, pool).backend for op in (WRITE, COPY))} == {chosen}


def test_what_does_not_go_with_a_pool_is_named():
    pool, new = jnp.zeros((3, 2, 1, 16, 16)), jnp.zeros((1, 1, 16))
    slots = jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="kv_scales are of a pool in float8_e4m3fn, and this one is in float32"):
        ops.write_kv(pool, new, new, slots, kv_scales=jnp.ones(2))
    with pytest.raises(ValueError, match="k must have the pool's dtype float8_e4m3fn, got int32"):
        ops.write_kv(pool.astype(E4M3), new.astype(jnp.int32), new, slots)
