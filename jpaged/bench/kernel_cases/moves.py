"""Writes of keys and values, alone or with RoPE, and copies of blocks."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpaged import pallas_kernels as ops
from jpaged.bench.kernel_cases.attention import Setting
from jpaged.bench.kernel_cases.case import L2_BYTES, Built, Case, normal


def write_case(tokens: int, backend: str | None) -> Built:
    s = Setting()
    blocks = 20_000
    pool = normal(1, (blocks, 2, s.kv_heads, s.block_size, s.head_dim), s.dtype)
    copies = max(1, -(-L2_BYTES // (tokens * s.kv_heads * s.head_dim * 4)))
    copies = min(copies, 64)
    rng = np.random.default_rng(0)
    slots = [jnp.asarray(rng.permutation(blocks * s.block_size - 16)[:tokens] + 16, jnp.int32) for _ in range(copies)]
    new = [normal(i, (tokens, s.kv_heads, s.head_dim), s.dtype) for i in range(min(copies + 1, 8))]
    calls = max(copies, 64)

    @partial(jax.jit, donate_argnums=0)
    def program(pool: jax.Array, new: list[jax.Array], slots: list[jax.Array]) -> jax.Array:
        for i in range(calls):
            k, v = new[i % len(new)], new[(i + 1) % len(new)]
            pool = ops.write_kv(pool, k, v, slots[i % len(slots)], backend=backend)
        return pool

    return program, (pool, new, slots), calls, 4.0 * tokens * s.kv_heads * s.head_dim * jnp.dtype(s.dtype).itemsize


def rope_case(tokens: int, kv_heads: int, group: int, normed: bool, backend: str | None) -> Built:
    """`rope_and_write`; its work is the heads read and written, without the tables of cos and sin."""
    s = Setting()
    blocks = 20_000
    pool = normal(1, (blocks, 2, kv_heads, s.block_size, s.head_dim), s.dtype)
    shape = (tokens, kv_heads, group + 2, s.head_dim)
    work = 2.0 * float(np.prod(shape)) * jnp.dtype(s.dtype).itemsize
    copies = min(max(1, -(-L2_BYTES // int(work))), 64)
    rng = np.random.default_rng(0)
    slots = [jnp.asarray(rng.permutation(blocks * s.block_size - 16)[:tokens] + 16, jnp.int32) for _ in range(copies)]
    projected = [normal(i, shape, s.dtype) for i in range(copies)]
    angles = normal(2, (tokens, s.head_dim // 2), jnp.float32)
    rotation = (jnp.cos(angles), jnp.sin(angles))
    norms = (normal(3, (s.head_dim,), s.dtype), normal(4, (s.head_dim,), s.dtype)) if normed else None
    calls = max(copies, 64 if tokens <= 1024 else 8)

    @partial(jax.jit, donate_argnums=0)
    def program(pool: jax.Array, projected: list, slots: list, rotation: Any, norms: Any) -> jax.Array:
        q = jnp.zeros((), s.dtype)
        for i in range(calls):
            qkv, _ = lax.optimization_barrier((projected[i % copies], q))  # keeps all queries, and their order
            at = slots[i % copies]
            q, pool = ops.rope_and_write(pool, qkv, at, rotation=rotation, norms=norms, backend=backend)
        return lax.optimization_barrier((pool, q))[0]

    return program, (pool, projected, slots, rotation, norms), calls, work


def copy_case(pairs: int, layers: int, backend: str | None) -> Built:
    s = Setting()
    shape = (2 * pairs + 1, 2, s.kv_heads, s.block_size, s.head_dim)
    pools = tuple(normal(i, shape, s.dtype) for i in range(layers))
    ids = np.random.default_rng(0).permutation(2 * pairs) + 1
    src, dst = (jnp.asarray(x, jnp.int32) for x in (ids[:pairs], ids[pairs:]))
    calls = 8

    @partial(jax.jit, donate_argnums=0)
    def program(pools: tuple[jax.Array, ...], src: jax.Array, dst: jax.Array) -> tuple[jax.Array, ...]:
        for i in range(calls):
            pools = ops.copy_blocks(pools, *((src, dst) if i % 2 else (dst, src)), backend=backend)
        return pools

    return program, (pools, src, dst), calls, 2.0 * pairs * layers * pools[0][0].nbytes


def cases(backend: str | None) -> Iterator[Case]:
    yield Case("KV write, 256 tokens", "us", 6, partial(write_case, 256, backend))
    yield Case("KV write, 16,384 tokens", "GB/s", None, partial(write_case, 16384, backend))
    for model, shape in (("Llama-3.1-8B", (8, 4, False)), ("Qwen3-0.6B", (8, 2, True))):
        for tokens in (1, 32, 256, 1024, 8192):
            unit = "us" if tokens <= 1024 else "GB/s"
            name = f"RoPE and KV write, {model}, {tokens:,} tokens"
            yield Case(name, unit, None, partial(rope_case, tokens, *shape, backend))
    yield Case("block copy, 256 blocks x 32 layers", "GB/s", None, partial(copy_case, 256, 32, backend))
