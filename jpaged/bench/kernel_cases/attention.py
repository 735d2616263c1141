"""Decode, shared-prefix, prefill and mixed attention over block tables; cuDNN's dense attention beside prefill."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged import pallas_kernels as ops
from jpaged.bench.kernel_cases.case import L2_BYTES, Built, Case, normal
from jpaged.bench.workloads import TRACES

_PROGRAM_S = 4e-3  # length of one program, far above its dispatch
_LAYERS = 32  # least decode calls in a program: a step plans once, so a call bears a layer's share of that


@dataclass(frozen=True)
class Setting:
    """Shape of an attention case. max_len: tokens that a row of the table has room for; the longest sequence's if 0.
    value_dim: of latents, whose values are the first so many columns of keys; None for keys and values apart.
    kv_dtype: of the pool; None for that of the queries."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: Any = jnp.bfloat16
    max_len: int = 0
    value_dim: int | None = None
    kv_dtype: Any = None

    @property
    def pool_dtype(self) -> Any:
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    @property
    def columns(self) -> int:
        """Of a token's key and value, as they are kept for a head."""
        return 2 * self.head_dim if self.value_dim is None else self.head_dim

    @property
    def block(self) -> tuple[int, int, int, int]:
        """The shape of a block of the pool."""
        return self.columns // self.head_dim, self.kv_heads, self.block_size, self.head_dim

    def kv_bytes(self, lens: np.ndarray) -> float:
        """Of the keys and values of sequences of these lengths."""
        return float(lens.sum()) * self.kv_heads * self.columns * jnp.dtype(self.pool_dtype).itemsize

    def copies(self, lens: np.ndarray) -> int:
        """Of such sequences: as many as exceed an L2 cache, 64 at most."""
        return min(64, max(1, -(-L2_BYTES // int(self.kv_bytes(lens)))))

    def operations(self, lens: np.ndarray, queries: np.ndarray) -> float:
        """Of attention of so many last tokens of each sequence: of the scores that the causal mask leaves, alone."""
        scores = float((queries * (lens - queries) + queries * (queries + 1) / 2).sum())
        return 2 * scores * self.heads * (self.head_dim + (self.value_dim or self.head_dim))

    def next_queries(self, q: jax.Array, out: jax.Array) -> jax.Array:
        """Queries that need the output of others."""
        return out if self.value_dim is None else jnp.concatenate([out, q[..., self.value_dim :]], axis=-1)


DEEPSEEK_V2_LITE = Setting(heads=16, kv_heads=1, head_dim=576, value_dim=512)


def _tables(
    rng: np.random.Generator, copies: int, lens: np.ndarray, block_size: int, max_len: int = 0, counts_up: bool = False
) -> tuple[int, list[jax.Array]]:
    """Block tables of `copies` disjoint sets of sequences, shuffled unless they count up; and the size of the pool that
    they need."""
    need = -(-lens // block_size)
    width, total = max(int(need.max()), -(-max_len // block_size)), int(need.sum())
    ids = (np.arange(copies * total) if counts_up else rng.permutation(copies * total)).astype(np.int32) + 1
    tables = []
    for c in range(copies):
        table = np.zeros((len(lens), width), np.int32)
        at = c * total
        for row, n in enumerate(need):
            table[row, :n] = ids[at : at + n]
            at += n
        tables.append(jnp.asarray(table))
    return copies * total + 1, tables


def calls_and_work(lens: np.ndarray, queries: np.ndarray | None, s: Setting, copies: int) -> tuple[int, float]:
    """How often a program calls attention, a multiple of `copies`; and the bytes of decode (queries None) or the
    operations of others in a call."""
    if queries is None:
        work, rate, least = s.kv_bytes(lens), 3.5e12, -(-_LAYERS // copies) * copies
    else:
        work, rate, least = s.operations(lens, queries), 4e14, copies
    return int(np.clip(_PROGRAM_S / (work / rate + 5e-6), least, 256)) // copies * copies, work


def attention_case(
    lens: np.ndarray,
    queries: np.ndarray | None,
    setting: Setting,
    backend: str | None,
    num_decodes: int | None = None,
    *,
    is_contiguous: bool = False,
) -> Built:
    """Decode (queries None; work in bytes) or ragged attention (queries a row; work in operations), with the first
    `num_decodes` rows, if given, left to `mixed_attention`. is_contiguous: each sequence's blocks lie in a row."""
    rng = np.random.default_rng(0)
    s = setting
    num_blocks, tables = _tables(rng, s.copies(lens), lens, s.block_size, s.max_len, counts_up=is_contiguous)
    pool = normal(1, (num_blocks, *s.block), s.dtype).astype(s.pool_dtype)
    kv_lens = jnp.asarray(lens, jnp.int32)
    if queries is None:
        q = normal(2, (len(lens), s.heads, s.head_dim), s.dtype)
        call: Callable[..., Any] = partial(ops.decode_attention, backend=backend)
        extra: tuple[Any, ...] = ()
    else:
        q = normal(2, (int(queries.sum()), s.heads, s.head_dim), s.dtype)
        call = partial(ops.ragged_attention, backend=backend)
        extra = (jnp.asarray(np.concatenate([[0], np.cumsum(queries)]), jnp.int32),)
        if num_decodes is not None:
            call, extra = partial(ops.mixed_attention, backend=backend), (*extra, jnp.int32(num_decodes))
    if s.value_dim is not None:
        call = partial(call, value_dim=s.value_dim)
    calls, work = calls_and_work(lens, queries, s, len(tables))

    @jax.jit
    def program(q: jax.Array, pool: jax.Array, tables: list[jax.Array], lens: jax.Array, *extra: Any) -> jax.Array:
        for i in range(calls):
            q = s.next_queries(q, call(q, pool, tables[i % len(tables)], lens, *extra))
        return q

    return program, (q, pool, tables, kv_lens, *extra), calls, work


def shared_prefix_case(rows: int, shared: int, own: int, setting: Setting, backend: str | None, *, once: bool) -> Built:
    """A decode step of `rows` sequences that share their first tokens and have `own` of their own; the shared ones read
    once for all, or by each for itself. Its work counts each byte once.
    """
    s, rng = setting, np.random.default_rng(0)
    token_bytes = 2 * s.kv_heads * s.head_dim * jnp.dtype(s.dtype).itemsize
    work = float(shared + rows * own) * token_bytes
    copies = min(64, max(1, -(-L2_BYTES // int(work))))
    shared_blocks, own_blocks = shared // s.block_size, -(-own // s.block_size)
    blocks = rng.permutation(copies * (shared_blocks + rows * own_blocks)).astype(np.int32) + 1
    tables = []
    for ids in np.split(blocks, copies):
        prefix = np.broadcast_to(ids[:shared_blocks], (rows, shared_blocks))
        table = np.concatenate([prefix, ids[shared_blocks:].reshape(rows, own_blocks)], axis=1)
        tables.append(jnp.asarray(np.pad(table, ((0, 0), (0, max(0, s.max_len // s.block_size - table.shape[1]))))))
    pool = normal(1, (len(blocks) + 1, 2, s.kv_heads, s.block_size, s.head_dim), s.dtype)
    q = normal(2, (rows, s.heads, s.head_dim), s.dtype)
    lens = jnp.full((rows,), shared + own, jnp.int32)
    sharing = (jnp.int32(rows), jnp.int32(shared)) if once else ()
    op: Callable[..., Any] = ops.shared_prefix_attention if once else ops.decode_attention
    calls = max(32, copies)

    @jax.jit
    def program(q: jax.Array, pool: jax.Array, tables: list[jax.Array], lens: jax.Array, *sharing: Any) -> jax.Array:
        for i in range(calls):
            q = op(q, pool, tables[i % copies], lens, *sharing, backend=backend)
        return q

    return program, (q, pool, tables, lens, *sharing), calls, work


def _cudnn_case(batch: int, length: int, s: Setting) -> Built:
    q = normal(0, (batch, length, s.heads, s.head_dim), s.dtype)
    k = normal(1, (batch, length, s.kv_heads, s.head_dim), s.dtype)

    @jax.jit
    def program(q: jax.Array, k: jax.Array) -> jax.Array:
        for _ in range(4):
            q = jax.nn.dot_product_attention(q, k, k, is_causal=True, implementation="cudnn")
        return q

    return program, (q, k), 4, 2.0 * batch * length * (length + 1) * s.heads * s.head_dim


def cases(backend: str | None) -> Iterator[Case]:
    def same(batch: int, length: int) -> np.ndarray:
        return np.full(batch, length, np.int64)

    def decode(name: str, unit: str, aim: float | None, lens: np.ndarray, setting: Setting | None = None) -> Case:
        build = partial(attention_case, lens, None, setting or Setting(), backend)
        return Case("decode " + name, unit, aim, build)

    ragged = np.random.default_rng(5).integers(2048, 4097, 64)
    yield decode("64 x 4,096", "GB/s", 4300, same(64, 4096))
    # As in an engine's decode steps: many conversations of any age, in block tables for the longest allowed.
    inputs, outputs = TRACES["sharegpt-like"]
    for rows in (1024, 256, 50):
        rng = np.random.default_rng(rows)
        lens = inputs.draw(rng, rows) + (rng.random(rows) * outputs.draw(rng, rows)).astype(np.int64)
        yield decode(f"{rows:,} ShareGPT-like rows (16/8)", "GB/s", None, lens, Setting(16, max_len=17_000))
    yield decode("1 x 560 (16/8), table for 17,000", "us", None, same(1, 560), Setting(16, max_len=17_000))
    yield decode("64 x 4,096, block 64", "GB/s", 4300, same(64, 4096), Setting(block_size=64))
    fp8 = Setting(kv_dtype=jnp.float8_e4m3fn)
    yield decode("64 x 4,096, pool in FP8", "GB/s", 3900, same(64, 4096), fp8)
    yield decode("256 x 1,024, pool in FP8", "GB/s", None, same(256, 1024), fp8)
    yield decode("8 x 16,384, pool in FP8", "GB/s", None, same(8, 16384), fp8)
    yield decode("256 x 1,024", "GB/s", 4000, same(256, 1024))
    yield decode("8 x 16,384", "GB/s", 4150, same(8, 16384))
    yield decode("64 ragged in 2,048..4,096", "GB/s", 4200, ragged)
    yield decode("32 x 1,024", "GB/s", 3300, same(32, 1024))
    yield decode("1 x 16,384", "us", 25, same(1, 16384))
    yield decode("1 x 512", "us", 8, same(1, 512))
    yield decode("16 x 4,096 MHA 32/32", "GB/s", 4300, same(16, 4096), Setting(kv_heads=32))
    yield decode("64 x 4,096 MQA 32/1", "GB/s", 3300, same(64, 4096), Setting(kv_heads=1))
    yield decode("64 x 4,096 D 64", "GB/s", 3900, same(64, 4096), Setting(head_dim=64))
    yield decode("64 x 4,096 D 256 (16/4)", "GB/s", 4240, same(64, 4096), Setting(16, 4, 256))
    for heads in (16, 128):
        for rows, length in ((64, 4096), (256, 1024), (1, 16384)):
            name = f"{rows} x {length:,} latents of {heads} heads"
            unit = "us" if rows == 1 else "GB/s"
            yield decode(name, unit, None, same(rows, length), replace(DEEPSEEK_V2_LITE, heads=heads))

    for rows, shared, own, setting in (
        *((rows, 2048, 96, Setting(heads, max_len=17_000)) for heads in (32, 16) for rows in (16, 64, 128, 256, 512)),
        *((64, shared, 96, Setting(max_len=17_000)) for shared in (256, 512, 1024, 16_384)),
    ):
        for how, once in (("once", True), ("by each", False)):
            name = f"{rows} x ({shared:,} shared + {own}) {setting.heads}/8, {how}"
            yield Case(name, "us", None, partial(shared_prefix_case, rows, shared, own, setting, backend, once=once))

    def prefill(name: str, aim: float | None, lens: np.ndarray, queries: np.ndarray, s: Setting | None = None) -> Case:
        return Case(name, "TFLOP/s", aim, partial(attention_case, lens, queries, s or Setting(), backend))

    for batch, length, aim in ((1, 16384, 600), (4, 4096, 520), (16, 1024, 390)):
        name = f"prefill {batch} x {length:,}"
        yield prefill(name, aim, same(batch, length), same(batch, length))
        yield Case(f"cuDNN {name}", "TFLOP/s", None, partial(_cudnn_case, batch, length, Setting()))
    yield prefill("chunk of 2,048 on a 14,336 prefix", 600, same(1, 16384), same(1, 2048))
    yield prefill("prefill 1 x 16,384, pool in FP8", None, same(1, 16384), same(1, 16384), fp8)
    yield prefill("prefill 1 x 8,192 D 64", 450, same(1, 8192), same(1, 8192), Setting(head_dim=64))
    yield prefill("prefill 1 x 8,192 D 256 (16/4)", 620, same(1, 8192), same(1, 8192), Setting(16, 4, 256))

    yield prefill("prefill 1 x 8,192 latents of 16 heads", None, same(1, 8192), same(1, 8192), DEEPSEEK_V2_LITE)

    chunk, decodes = np.array([2048]), same(128, 2048)
    for name, lens, queries in (
        ("mixed: 128 decode rows at 2,048", decodes, np.ones(128, np.int64)),
        ("mixed: one chunk of 2,048", chunk, chunk),
        ("mixed: both", np.concatenate([decodes, chunk]), np.concatenate([np.ones(128, np.int64), chunk])),
    ):
        yield Case(name, "us", None, partial(attention_case, lens, queries, Setting(), backend))

    for rows, length, chunks, chunk_len in (
        (1024, 40, 16, 18),
        (1024, 300, 4, 145),
        (32, 300, 4, 145),
        (8, 16_384, 1, 2048),
    ):
        lens = np.concatenate([same(rows, length), same(chunks, chunk_len)])
        queries = np.concatenate([same(rows, 1), same(chunks, chunk_len)])
        for how, num_decodes in (("together", None), ("apart", rows)):
            name = f"mixed: {rows:,} decode rows at {length:,}, {chunks} chunks of {chunk_len:,}, {how}"
            yield Case(name, "us", None, partial(attention_case, lens, queries, Setting(), backend, num_decodes))
