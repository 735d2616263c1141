"""A projection's output split, normed, rotated and written on every backend, against float64 numpy."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.pallas_kernels import rope_and_write, split_qkv, split_queries
from jpaged.pallas_kernels.round_rows.operands import Sums
from tests.pallas_kernels.marks import over_backends
from tests.pallas_kernels.paged import TOLERANCE

few = settings(max_examples=15, deadline=None)


def wide(x):
    return np.asarray(x).astype(np.float64)


def relative_error(got, want):
    return np.linalg.norm(wide(got) - want) / np.linalg.norm(want)


def normed(x, scale, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def turned(x, angles):
    """Rotates pairs (i, i + head_dim / 2), as complex numbers."""
    half = x.shape[-1] // 2
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([z.real, z.imag], -1)


@over_backends
@few
@given(
    seed=st.integers(0, 2**31),
    heads=st.sampled_from([(1, 1), (2, 3), (4, 1)]),
    norms=st.sampled_from([False, True, "float32"]),
    rotation=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_queries_keys_and_values_are_split_normed_and_rotated_and_reach_their_slots(
    backend, seed, heads, norms, rotation, dtype
):
    check_rope_and_write(seed, heads, 16, 16, norms, rotation, dtype, backend)


@over_backends
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(
    ("heads", "block_size", "norms", "rotation", "dtype"),
    [((2, 4), 32, True, True, "bfloat16"), ((1, 7), 128, False, True, "float16"), ((3, 2), 64, True, False, "float32")],
)
def test_heads_of_any_size_and_number_reach_blocks_of_any_size(
    backend, head_dim, heads, block_size, norms, rotation, dtype
):
    check_rope_and_write(head_dim, heads, head_dim, block_size, norms, rotation, dtype, backend)


def check_rope_and_write(seed, heads, head_dim, size, norms, rotation, dtype, backend):
    rng = np.random.default_rng(seed)
    (kv_heads, group), tokens = heads, 5
    qkv = jnp.asarray(rng.standard_normal((tokens, kv_heads, group + 2, head_dim)), dtype)
    of_scales = norms if norms == "float32" else dtype
    scales = tuple(jnp.asarray(rng.uniform(0.5, 2, head_dim), of_scales) for _ in range(2)) if norms else None
    angles = rng.uniform(-9, 9, (tokens, head_dim // 2)).astype(np.float32)
    tables = (np.cos(angles), np.sin(angles)) if rotation else None
    pool = jnp.asarray(rng.standard_normal((9, 2, kv_heads, size, head_dim)), dtype)
    slots = (rng.permutation(8 * size)[:tokens] + size).astype(np.int32)

    q, k, v = (wide(qkv)[:, :, at] for at in (slice(group), group, group + 1))
    q = q.reshape(tokens, -1, head_dim)
    if norms:
        q, k = (normed(x, wide(s), 1e-3) for x, s in zip((q, k), scales, strict=True))
    if rotation:
        q, k = turned(q, angles), turned(k, angles)

    options = {"rotation": tables, "norms": scales, "norm_eps": 1e-3}
    got_q, written = map(np.asarray, rope_and_write(pool, qkv, slots, backend=backend, **options))
    got_k, got_v = written[slots // size, 0, :, slots % size], written[slots // size, 1, :, slots % size]
    assert got_q.dtype == written.dtype == qkv.dtype
    assert relative_error(got_q, q) < TOLERANCE[dtype]
    assert relative_error(got_k, k) < TOLERANCE[dtype]
    np.testing.assert_array_equal(wide(got_v), v)
    untouched = np.delete(np.arange(9 * size), slots)
    by_slot = (np.asarray(x).astype(np.float32).swapaxes(1, 3).reshape(9 * size, -1) for x in (written, pool))
    np.testing.assert_array_equal(*(x[untouched] for x in by_slot))
    if backend != "xla":
        return
    if not norms:
        alone = split_queries(qkv[:, :, :-2], rotation=options["rotation"])
        np.testing.assert_array_equal(alone, split_qkv(qkv, **options)[0])
    for got, want in zip(split_qkv(qkv, **options), (got_q, got_k, got_v), strict=True):
        np.testing.assert_array_equal(got, want)


def test_queries_are_rounded_before_a_scale_of_their_type_and_once_with_a_float32_scale():
    rng = np.random.default_rng(0)
    qkv = jnp.asarray(rng.standard_normal((7, 1, 3, 64)), jnp.bfloat16)
    scale = jnp.asarray(rng.uniform(0.5, 2, 64), jnp.bfloat16)
    exact = normed(wide(qkv[:, :, 0]), wide(scale), 1e-6).astype(np.float32)
    errors = [
        np.abs(wide(split_qkv(qkv, norms=(kind, kind))[0]) / exact - 1).max()
        for kind in (scale.astype(jnp.float32), scale)
    ]
    assert errors[0] < 2**-8 * 1.01 < errors[1]


def test_norms_of_two_types_are_refused():
    qkv = jnp.zeros((2, 1, 3, 16), jnp.bfloat16)
    with pytest.raises(ValueError, match="norms must be of one dtype"):
        split_qkv(qkv, norms=(jnp.ones(16, jnp.bfloat16), jnp.ones(16)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_writing_from_a_projection_does_not_copy_a_donated_pool(dtype):
    shape = jax.ShapeDtypeStruct
    pool = shape((2000, 2, 4, 16, 64), dtype)
    arguments = (pool, shape((32, 4, 5, 64), dtype), shape((32,), jnp.int32))
    write = jax.jit(lambda *a: rope_and_write(*a, backend="xla"), donate_argnums=0)
    memory = write.lower(*arguments).compile().memory_analysis()
    pool_bytes = int(np.prod(pool.shape)) * jnp.dtype(dtype).itemsize
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 10


def test_sums_whose_scales_are_to_be_multiplied_are_the_array_that_they_stand_for():
    rng = np.random.default_rng(0)
    arrays = (jnp.asarray(rng.uniform(0.5, 2, shape), jnp.float32) for shape in ((16, 96), (16, 1), 96))
    sums = Sums(*arrays, 3, jnp.dtype(jnp.bfloat16))
    pool, slots = jnp.zeros((4, 2, 2, 8, 16), jnp.bfloat16), jnp.asarray([9, -1, 20], jnp.int32)
    found = rope_and_write(pool, sums, slots, backend="xla")
    for got, right in zip(found, rope_and_write(pool, sums.array().reshape(3, 2, 3, 16), slots), strict=True):
        np.testing.assert_array_equal(wide(got), wide(right))
    with pytest.raises(ValueError, match="qkv must have whole heads of 16 for 2 KV heads, got 80 columns"):
        rope_and_write(pool, replace(sums, products=sums.products[:, :80]), slots)
