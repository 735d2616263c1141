"""`jpaged bench kernels`: attention, block moves, experts and sampling against the card's own limits.

Every case is one jitted program of many calls, each of which needs the one before it. Several programs are enqueued at
once, so dispatch does not count. Calls rotate among block tables that together point at more memory than the L2 cache
holds. Bytes and operations follow from the lengths: each key and value once, four operations for each score that the
causal mask leaves. The card's read and copy bandwidth, its matrix rate and cuDNN's dense attention come from the same
run.
"""

import argparse
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpaged import pallas_kernels as ops
from jpaged.bench.arguments import HelpFormatter
from jpaged.bench.report import write_report
from jpaged.bench.workloads import TRACES
from jpaged.models.experts import Routing, mix, route
from jpaged.pallas_kernels import registry

_L2_BYTES = 256 << 20  # rotate over at least this much; the largest L2 cache is 60 MB
_PROGRAM_S = 4e-3  # length of one program, far above its dispatch
_LAYERS = 32  # least decode calls in a program: a step plans once, so a call bears a layer's share of that
_BATCH_S = 0.1  # length of programs enqueued together, far above the round trip that ends them


@dataclass(frozen=True)
class Case:
    """One row of the table. `work` is bytes or floating-point operations a call, as `unit` says. `aim` follows from
    FlashAttention 3 on an H200, or from the card's limits."""

    name: str
    unit: str  # GB/s, TFLOP/s or us
    aim: float | None
    build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...], int, float]]
    """Makes (a jitted program, its arguments, calls in it, bytes or operations of one call)."""

    @property
    def of_the_card(self) -> bool:
        """Whether it measures the card or cuDNN, whatever the backend."""
        return self.name.startswith(("card:", "cuDNN"))


@dataclass(frozen=True)
class Setting:
    """Shape of an attention case. max_len: tokens that a row of the table has room for; the longest sequence's if 0.
    value_dim: of latents, whose values are the first so many columns of keys; None for keys and values apart."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: Any = jnp.bfloat16
    max_len: int = 0
    value_dim: int | None = None

    @property
    def columns(self) -> int:
        """Of a token's key and value, as they are kept for a head."""
        return 2 * self.head_dim if self.value_dim is None else self.head_dim

    @property
    def block(self) -> tuple[int, int, int, int]:
        """The shape of a block of the pool."""
        return self.columns // self.head_dim, self.kv_heads, self.block_size, self.head_dim

    def next_queries(self, q: jax.Array, out: jax.Array) -> jax.Array:
        """Queries that need the output of others."""
        return out if self.value_dim is None else jnp.concatenate([out, q[..., self.value_dim :]], axis=-1)


DEEPSEEK_V2_LITE = Setting(heads=16, kv_heads=1, head_dim=576, value_dim=512)


def _random(key: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Normal numbers, drawn a part at a time: float32 temporaries of a whole pool would not fit beside it."""
    rows = max(1, min(shape[0], (1 << 27) // max(1, int(np.prod(shape[1:])))))
    part = jax.random.normal(jax.random.key(key), (rows, *shape[1:]), dtype)
    return jnp.tile(part, (-(-shape[0] // rows), *[1] * (len(shape) - 1)))[: shape[0]]


def _tables(
    rng: np.random.Generator, copies: int, lens: np.ndarray, block_size: int, max_len: int = 0
) -> tuple[int, list[jax.Array]]:
    """Block tables of `copies` disjoint sets of sequences, shuffled; and the size of the pool they need."""
    need = -(-lens // block_size)
    width, total = max(int(need.max()), -(-max_len // block_size)), int(need.sum())
    ids = rng.permutation(copies * total).astype(np.int32) + 1
    tables = []
    for c in range(copies):
        table = np.zeros((len(lens), width), np.int32)
        at = c * total
        for row, n in enumerate(need):
            table[row, :n] = ids[at : at + n]
            at += n
        tables.append(jnp.asarray(table))
    return copies * total + 1, tables


def attention_case(
    lens: np.ndarray,
    queries: np.ndarray | None,
    setting: Setting,
    backend: str | None,
    num_decodes: int | None = None,
) -> tuple[Callable[..., Any], tuple[Any, ...], int, float]:
    """Decode (queries None; work in bytes) or ragged attention (queries a row; work in operations), with the first
    `num_decodes` rows, if given, left to `mixed_attention`."""
    rng = np.random.default_rng(0)
    s = setting
    itemsize = jnp.dtype(s.dtype).itemsize
    kv_bytes = float(lens.sum()) * s.kv_heads * s.columns * itemsize
    copies = max(1, -(-_L2_BYTES // int(kv_bytes)))
    num_blocks, tables = _tables(rng, min(copies, 64), lens, s.block_size, s.max_len)
    pool = _random(1, (num_blocks, *s.block), s.dtype)
    kv_lens = jnp.asarray(lens, jnp.int32)
    if queries is None:
        q = _random(2, (len(lens), s.heads, s.head_dim), s.dtype)
        work, rate = kv_bytes, 3.5e12
        call: Callable[..., Any] = partial(ops.decode_attention, backend=backend)
        extra: tuple[Any, ...] = ()
    else:
        q = _random(2, (int(queries.sum()), s.heads, s.head_dim), s.dtype)
        scores = float((queries * (lens - queries) + queries * (queries + 1) / 2).sum())
        work, rate = 2 * scores * s.heads * (s.head_dim + (s.value_dim or s.head_dim)), 4e14
        call = partial(ops.ragged_attention, backend=backend)
        extra = (jnp.asarray(np.concatenate([[0], np.cumsum(queries)]), jnp.int32),)
        if num_decodes is not None:
            call, extra = partial(ops.mixed_attention, backend=backend), (*extra, jnp.int32(num_decodes))
    if s.value_dim is not None:
        call = partial(call, value_dim=s.value_dim)
    least = len(tables) if queries is not None else -(-_LAYERS // len(tables)) * len(tables)
    calls = int(np.clip(_PROGRAM_S / (work / rate + 5e-6), least, 256)) // len(tables) * len(tables)

    @jax.jit
    def program(q: jax.Array, pool: jax.Array, tables: list[jax.Array], lens: jax.Array, *extra: Any) -> jax.Array:
        for i in range(calls):
            q = s.next_queries(q, call(q, pool, tables[i % len(tables)], lens, *extra))
        return q

    return program, (q, pool, tables, kv_lens, *extra), calls, work


def shared_prefix_case(
    rows: int, shared: int, own: int, setting: Setting, backend: str | None, *, once: bool
) -> tuple[Callable[..., Any], tuple[Any, ...], int, float]:
    """A decode step of `rows` sequences that share their first tokens and have `own` of their own; the shared ones read
    once for all, or by each for itself. Its work counts each byte once.
    """
    s, rng = setting, np.random.default_rng(0)
    token_bytes = 2 * s.kv_heads * s.head_dim * jnp.dtype(s.dtype).itemsize
    work = float(shared + rows * own) * token_bytes
    copies = min(64, max(1, -(-_L2_BYTES // int(work))))
    shared_blocks, own_blocks = shared // s.block_size, -(-own // s.block_size)
    blocks = rng.permutation(copies * (shared_blocks + rows * own_blocks)).astype(np.int32) + 1
    tables = []
    for ids in np.split(blocks, copies):
        prefix = np.broadcast_to(ids[:shared_blocks], (rows, shared_blocks))
        table = np.concatenate([prefix, ids[shared_blocks:].reshape(rows, own_blocks)], axis=1)
        tables.append(jnp.asarray(np.pad(table, ((0, 0), (0, max(0, s.max_len // s.block_size - table.shape[1]))))))
    pool = _random(1, (len(blocks) + 1, 2, s.kv_heads, s.block_size, s.head_dim), s.dtype)
    q = _random(2, (rows, s.heads, s.head_dim), s.dtype)
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


def write_case(tokens: int, backend: str | None) -> tuple[Callable[..., Any], tuple[Any, ...], int, float]:
    s = Setting()
    blocks = 20_000
    pool = _random(1, (blocks, 2, s.kv_heads, s.block_size, s.head_dim), s.dtype)
    copies = max(1, -(-_L2_BYTES // (tokens * s.kv_heads * s.head_dim * 4)))
    copies = min(copies, 64)
    rng = np.random.default_rng(0)
    slots = [jnp.asarray(rng.permutation(blocks * s.block_size - 16)[:tokens] + 16, jnp.int32) for _ in range(copies)]
    new = [_random(i, (tokens, s.kv_heads, s.head_dim), s.dtype) for i in range(min(copies + 1, 8))]
    calls = max(copies, 64)

    @partial(jax.jit, donate_argnums=0)
    def program(pool: jax.Array, new: list[jax.Array], slots: list[jax.Array]) -> jax.Array:
        for i in range(calls):
            k, v = new[i % len(new)], new[(i + 1) % len(new)]
            pool = ops.write_kv(pool, k, v, slots[i % len(slots)], backend=backend)
        return pool

    return program, (pool, new, slots), calls, 4.0 * tokens * s.kv_heads * s.head_dim * jnp.dtype(s.dtype).itemsize


def rope_case(
    tokens: int, kv_heads: int, group: int, normed: bool, backend: str | None
) -> tuple[Callable[..., Any], tuple[Any, ...], int, float]:
    """`rope_and_write`; its work is the heads read and written, without the tables of cos and sin."""
    s = Setting()
    blocks = 20_000
    pool = _random(1, (blocks, 2, kv_heads, s.block_size, s.head_dim), s.dtype)
    shape = (tokens, kv_heads, group + 2, s.head_dim)
    work = 2.0 * float(np.prod(shape)) * jnp.dtype(s.dtype).itemsize
    copies = min(max(1, -(-_L2_BYTES // int(work))), 64)
    rng = np.random.default_rng(0)
    slots = [jnp.asarray(rng.permutation(blocks * s.block_size - 16)[:tokens] + 16, jnp.int32) for _ in range(copies)]
    projected = [_random(i, shape, s.dtype) for i in range(copies)]
    angles = _random(2, (tokens, s.head_dim // 2), jnp.float32)
    rotation = (jnp.cos(angles), jnp.sin(angles))
    norms = (_random(3, (s.head_dim,), s.dtype), _random(4, (s.head_dim,), s.dtype)) if normed else None
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


def copy_case(pairs: int, layers: int, backend: str | None) -> tuple[Callable[..., Any], tuple[Any, ...], int, float]:
    s = Setting()
    shape = (2 * pairs + 1, 2, s.kv_heads, s.block_size, s.head_dim)
    pools = tuple(_random(i, shape, s.dtype) for i in range(layers))
    ids = np.random.default_rng(0).permutation(2 * pairs) + 1
    src, dst = (jnp.asarray(x, jnp.int32) for x in (ids[:pairs], ids[pairs:]))
    calls = 8

    @partial(jax.jit, donate_argnums=0)
    def program(pools: tuple[jax.Array, ...], src: jax.Array, dst: jax.Array) -> tuple[jax.Array, ...]:
        for i in range(calls):
            pools = ops.copy_blocks(pools, *((src, dst) if i % 2 else (dst, src)), backend=backend)
        return pools

    return program, (pools, src, dst), calls, 2.0 * pairs * layers * pools[0][0].nbytes


def sample_case(
    rows: int, top_k: int, top_p: float, backend: str | None, vocab: int = 151_936
) -> tuple[Callable[..., Any], tuple[Any, ...], int, float]:
    """Draws from normal logits of deviation 2: flatter than a model's, so that more tokens have a chance to win."""
    copies = min(64, max(1, -(-_L2_BYTES // (rows * vocab * 4))))
    logits = [jax.random.normal(jax.random.key(i), (rows, vocab)) * 2 for i in range(copies)]
    seeds = jax.random.bits(jax.random.key(copies), (rows, 2), jnp.uint32)
    ones = jnp.ones(rows)
    calls = max(copies, 4)
    draw: Callable[..., jax.Array] = partial(ops.sample_tokens, backend=backend)

    @jax.jit
    def program(positions: jax.Array, logits: list[jax.Array], arguments: Any) -> jax.Array:
        for i in range(calls):
            tokens = draw(logits[i % copies], *arguments, positions)
            positions = positions + (tokens & 1) + 1
        return positions

    arguments = (ones, jnp.full(rows, top_k, jnp.int32), ones * top_p, ones * 0, seeds)
    return program, (jnp.arange(rows, dtype=jnp.int32), logits, arguments), calls, 4.0 * rows * vocab


@dataclass(frozen=True)
class Experts:
    """Shape of a sparse layer: Qwen3-30B-A3B's. zipf: of an expert's popularity, rank ** -zipf; 0 for equal ones."""

    experts: int = 128
    per_token: int = 8
    hidden: int = 2048
    inner: int = 768
    zipf: float = 0.0

    def draw(self, seed: int, tokens: int) -> np.ndarray:
        """int32 [tokens, per_token], different ones for each token (Gumbel's top-k)."""
        rng = np.random.default_rng(seed)
        popularity = -self.zipf * np.log(np.arange(1, self.experts + 1)) + rng.gumbel(size=(tokens, self.experts))
        return np.argsort(-popularity, axis=1)[:, : self.per_token].astype(np.int32)

    def floors_us(self, tokens: int) -> tuple[float, float]:
        """What reading the experts of so many tokens takes at least, and what their operations take, microseconds."""
        rows, weights = tokens * self.per_token, 3 * self.hidden * self.inner
        touched = float(np.mean([len(np.unique(self.draw(seed, tokens))) for seed in range(_DRAWS)]))
        moved = touched * weights + rows * (2 * self.hidden + 2 * self.inner)
        return 2 * moved / _CARD_BYTES_S * 1e6, 2 * rows * weights / _CARD_FLOPS * 1e6


_DRAWS = 8  # of the experts of a case's tokens, which its calls take in turn
_CARD_BYTES_S, _CARD_FLOPS = 4.42e12, 780e12  # what an H200 was measured to read and to multiply at most


def experts_case(
    tokens: int, e: Experts, backend: str | None
) -> tuple[Callable[..., Any], tuple[Any, ...], int, float]:
    """Both grouped products, of rows that are sorted; its work are the operations."""
    gate_up = _random(0, (e.experts, e.hidden, 2, e.inner), jnp.bfloat16) * e.hidden**-0.5
    down = _random(1, (e.experts, e.inner, e.hidden), jnp.bfloat16) * e.inner**-0.5
    drawn = [e.draw(seed, tokens).ravel() for seed in range(_DRAWS)]
    if tokens == 1:  # as `jpaged.models.experts.mix` does
        grouped: list[tuple] = [(None, jnp.asarray(one)) for one in drawn]
    else:
        grouped = [(jnp.asarray(np.bincount(one, minlength=e.experts), jnp.int32), None) for one in drawn]
    rows = tokens * e.per_token
    x = _random(2, (rows, e.hidden), jnp.bfloat16)

    @jax.jit
    def program(x: jax.Array, gate_up: jax.Array, down: jax.Array, grouped: list[tuple], twos: jax.Array) -> jax.Array:
        for sizes, groups in grouped:
            inner = ops.gated_grouped_product(x, gate_up, sizes, groups=groups, backend=backend)
            x = ops.weighted_grouped_product(inner, down, sizes, twos, groups=groups, backend=backend)
        return x

    work = 6.0 * rows * e.hidden * e.inner
    return program, (x, gate_up, down, grouped, jnp.full(rows, 2.0, jnp.float32)), _DRAWS, work


def sparse_case(tokens: int, e: Experts, backend: str | None) -> tuple[Callable[..., Any], tuple[Any, ...], int, float]:
    """A whole sparse layer behind the norm: router, sorting, both products, and the sums of each token's rows."""
    gate_up = _random(0, (e.experts, e.hidden, 2, e.inner), jnp.bfloat16) * e.hidden**-0.5
    down = _random(1, (e.experts, e.inner, e.hidden), jnp.bfloat16) * e.inner**-0.5
    router = [_random(3 + i, (e.hidden, e.experts), jnp.bfloat16) for i in range(_DRAWS)]
    x = _random(2, (tokens, e.hidden), jnp.bfloat16)
    routing = Routing(per_token=e.per_token, zipf=e.zipf)

    @jax.jit
    def program(x: jax.Array, gate_up: jax.Array, down: jax.Array, router: list[jax.Array]) -> jax.Array:
        tokens = x
        for gate in router:
            # Of the tokens that it began with: without norms in between, those of later calls are nearly zero, and
            # would all pick the same experts. The barrier keeps the order.
            read, x = lax.optimization_barrier((tokens, x))
            logits = jnp.einsum("th,he->te", read, gate, preferred_element_type=jnp.float32) * e.hidden**-0.5
            if e.zipf:
                logits = routing.skewed(logits)
            x = mix(x, gate_up, down, *route(logits, routing), activation="silu", backend=backend) * 2
        return x

    return program, (x, gate_up, down, router), _DRAWS, 6.0 * tokens * e.per_token * e.hidden * e.inner


_PRODUCTS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate, up": (28_672, 4096), "down": (4096, 14_336)}
"""Outputs and inputs of an 8B model's products."""

_BITS = {"bf16": 16, "FP8": 8, "FP8 blocks": 8, "FP8 weights": 8, "4 bits": 4}
"""Of a weight, by the name of a form that products are measured in."""


def product_floor_us(form: str, rows: int, outputs: int, inputs: int) -> float:
    """What a product takes at least: reading its weights, or its operations in the type that it multiplies in."""
    flops = _CARD_FLOPS * (2 if form in ("FP8", "FP8 blocks") else 1)
    moved = outputs * inputs * _BITS[form] / 8 + 2 * rows * (outputs + inputs)
    return max(moved / _CARD_BYTES_S, 2 * rows * outputs * inputs / flops) * 1e6


def product_case(
    form: str, rows: int, outputs: int, inputs: int, backend: str | None
) -> tuple[Callable[..., Any], tuple[Any, ...], int, float]:
    """x @ weights.T, with weights in a form of `_BITS`, many pairs of them in turn; its work are the operations."""
    copies = max(2, min(64, -(-_L2_BYTES // (outputs * inputs * _BITS[form] // 8))))
    values = [_random(i, (outputs, inputs), jnp.bfloat16) for i in range(copies)]
    groups = inputs // 128 if form in ("FP8 blocks", "4 bits") else 1
    scale = jnp.full((outputs, groups), 0.01, jnp.float32)
    product: Callable[..., jax.Array]
    if form == "bf16":
        weights, product = values, lambda x, w, _: lax.dot_general(x, w, (((1,), (1,)), ((), ())))
    elif form == "4 bits":
        weights = [lax.bitcast_convert_type(x, jnp.uint8)[..., 0][:, : inputs // 2] for x in values]
        product = partial(ops.int4_product, group=128, backend=backend)
    else:
        weights = [(x * 64).astype(jnp.float8_e4m3fn) for x in values]
        options: dict[str, Any] = {"group": 128 if groups > 1 else None, "backend": backend}
        product = partial(ops.fp8_product, activations="none" if form == "FP8 weights" else "dynamic", **options)
    del values
    x = [_random(100 + i, (rows, inputs), jnp.bfloat16) for i in range(copies)]  # products of one x would be joined

    @jax.jit
    def program(x: list[jax.Array], weights: list[jax.Array], scale: jax.Array) -> list[jax.Array]:
        return [product(one, w, scale) for one, w in zip(x, weights, strict=True)]

    return program, (x, weights, scale), copies, 2.0 * rows * outputs * inputs


def _read_case() -> tuple[Callable[..., Any], tuple[Any, ...], int, float]:
    x = _random(0, (1 << 14, 1 << 17), jnp.bfloat16)  # 4 GiB
    return jax.jit(lambda x: jnp.max(x)), (x,), 1, float(x.nbytes)


def _card_copy_case() -> tuple[Callable[..., Any], tuple[Any, ...], int, float]:
    x = _random(0, (1 << 13, 1 << 17), jnp.bfloat16)
    return jax.jit(lambda x: -x, donate_argnums=()), (x,), 1, 2.0 * x.nbytes


def _launch_case() -> tuple[Callable[..., Any], tuple[Any, ...], int, float]:
    """Nearly empty kernels in a row: the least that a small kernel costs."""

    @jax.jit
    def program(x: jax.Array) -> jax.Array:
        for _ in range(128):
            x = lax.optimization_barrier(-x)
        return x

    return program, (_random(0, (128,), jnp.float32),), 128, 0.0


def _matmul_case() -> tuple[Callable[..., Any], tuple[Any, ...], int, float]:
    n = 8192
    x, y = (_random(i, (n, n), jnp.bfloat16) * 0.01 for i in range(2))

    @jax.jit
    def program(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 8, lambda _, x: x @ y, x)

    return program, (x, y), 8, 2.0 * n**3


def _cudnn_case(batch: int, length: int, s: Setting) -> tuple[Callable[..., Any], tuple[Any, ...], int, float]:
    q = _random(0, (batch, length, s.heads, s.head_dim), s.dtype)
    k = _random(1, (batch, length, s.kv_heads, s.head_dim), s.dtype)

    @jax.jit
    def program(q: jax.Array, k: jax.Array) -> jax.Array:
        for _ in range(4):
            q = jax.nn.dot_product_attention(q, k, k, is_causal=True, implementation="cudnn")
        return q

    return program, (q, k), 4, 2.0 * batch * length * (length + 1) * s.heads * s.head_dim


def cases(backend: str | None, zipf: float = 1.0) -> Iterator[Case]:
    """Every case; those of the card itself have no aim. zipf: of the experts of the skewed cases."""
    yield Case("card: read", "GB/s", None, _read_case)
    yield Case("card: copy", "GB/s", None, _card_copy_case)
    yield Case("card: kernel of 128 numbers", "us", None, _launch_case)
    yield Case("card: 8192^3 bf16 product", "TFLOP/s", None, _matmul_case)

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

    yield Case("KV write, 256 tokens", "us", 6, partial(write_case, 256, backend))
    yield Case("KV write, 16,384 tokens", "GB/s", None, partial(write_case, 16384, backend))
    for model, shape in (("Llama-3.1-8B", (8, 4, False)), ("Qwen3-0.6B", (8, 2, True))):
        for tokens in (1, 32, 256, 1024, 8192):
            unit = "us" if tokens <= 1024 else "GB/s"
            name = f"RoPE and KV write, {model}, {tokens:,} tokens"
            yield Case(name, unit, None, partial(rope_case, tokens, *shape, backend))
    yield Case("block copy, 256 blocks x 32 layers", "GB/s", None, partial(copy_case, 256, 32, backend))

    for skew in (0.0, zipf):
        experts, skewed = Experts(zipf=skew), f", Zipf {skew:g}" if skew else ""
        for tokens in (1, 8, 32, 256, 1024, 8192):
            floors = experts.floors_us(tokens)
            name = f"experts, {tokens:,} tokens{skewed} (bytes {floors[0]:.0f} us, products {floors[1]:.0f} us)"
            yield Case(name, "us", round(max(floors) / 0.85, 1), partial(experts_case, tokens, experts, backend))
        for tokens in (1, 32, 256, 8192):
            name = f"sparse layer, {tokens:,} tokens{skewed}"
            yield Case(name, "us", None, partial(sparse_case, tokens, experts, backend))
    for layer, (width, depth) in _PRODUCTS.items():
        for rows in (1, 8, 32, 256, 8192):
            for form in _BITS:
                floor = product_floor_us(form, rows, width, depth)
                name = f"product {form}, {layer}, {rows:,} rows (floor {floor:.1f} us)"
                yield Case(name, "us", None, partial(product_case, form, rows, width, depth, backend))

    for batch, aim in ((1000, 600), (256, 160), (32, 40), (1, 25)):
        for name, top_k, top_p in (
            ("temperature", 0, 1.0),
            ("top_p 0.95", 0, 0.95),
            ("top_k 50", 50, 1.0),
            ("top_k 20, top_p 0.95", 20, 0.95),
            ("top_p 0.1", 0, 0.1),
        ):
            yield Case(f"sample {batch:,} rows, {name}", "us", aim, partial(sample_case, batch, top_k, top_p, backend))


def measure(
    build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...], int, float]], repeats: int = 7
) -> tuple[list[float], float]:
    """Seconds a call, one figure for each of `repeats` batches of programs; and the work of a call."""
    program, arguments, calls, work = build()
    donates = False

    def run(times: int) -> float:
        nonlocal arguments, donates
        start = time.perf_counter()
        out = None
        for _ in range(times):
            out = program(*arguments)
            if donates:
                arguments = (out, *arguments[1:])
        jax.block_until_ready(out)
        return time.perf_counter() - start

    first = program(*arguments)
    jax.block_until_ready(first)
    if any(x.is_deleted() for x in jax.tree.leaves(arguments[0])):
        donates, arguments = True, (first, *arguments[1:])
    once = run(2) / 2
    times = int(np.clip(_BATCH_S / once, 2, 100))
    return [run(times) / times / calls for _ in range(repeats)], work


def main(argv: list[str] | None = None) -> int:
    """Runs every case, prints a table and writes the figures as JSON; if it is stopped, the figures so far."""
    parser = argparse.ArgumentParser(
        prog="jpaged bench kernels", description=main.__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument(
        "--only",
        metavar="TEXT",
        action="append",
        help="run only the cases whose name contains this; may be repeated (default: all)",
    )
    parser.add_argument(
        "--backend",
        metavar="NAME",
        action="append",
        help=f"force one backend of {', '.join(registry.backends())}; may be repeated: a column each (default: by "
        "device)",
    )
    parser.add_argument(
        "--expert-skew",
        type=float,
        default=1.0,
        metavar="Z",
        help="of the experts' skewed cases: an expert is as popular as its rank to the power of -Z (default: 1)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="where to write JSON (default: benchmarks/results/kernels.json)",
    )
    parser.add_argument("--repeats", type=int, default=7, help="batches of programs that the median is taken of")
    options = parser.parse_args(argv)
    try:
        backends = [registry.canonical(name) for name in options.backend] if options.backend else [None]
    except ValueError as error:
        parser.error(f"--{error}")
    if len(set(backends)) < len(backends):
        parser.error(f"--backend {' --backend '.join(options.backend)}: one of them is named twice")
    if not options.expert_skew > 0:
        parser.error(f"--expert-skew must be above 0, got {options.expert_skew:g}")
    device = jax.devices()[0]
    if device.platform != "gpu":
        print(f"jpaged bench kernels needs a GPU; JAX sees only {device.platform}", file=sys.stderr)
        return 1
    only = options.only
    chosen = [
        [case for case in cases(backend, options.expert_skew) if not only or any(text in case.name for text in only)]
        for backend in backends
    ]
    if not chosen[0]:
        parser.error(f"--only {' --only '.join(only)}: no case has that in its name")
    print(f"{device.device_kind}, JAX {jax.__version__}, {', '.join(map(str, options.backend or ['default']))} backend")
    rows: list[dict[str, Any]] = []
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # still writes the report
    try:
        if len(backends) == 1:
            _measure_all(chosen[0], options.repeats, rows)
        else:
            _compare_all(dict(zip(backends, chosen, strict=True)), options.repeats, rows)
    finally:
        signal.signal(signal.SIGTERM, before)
        if rows:
            path = options.json or Path("benchmarks/results/kernels.json")
            backend: Any = backends[0] if len(backends) == 1 else backends
            settings = {
                "backend": backend,
                "only": only,
                "expert_skew": options.expert_skew,
                "complete": len(rows) == len(chosen[0]),
            }
            write_report(path, "kernels", settings, rows)
    return 0


def _compare_all(chosen: dict[Any, list[Case]], repeats: int, rows: list[dict[str, Any]]) -> None:
    """Adds each case's figures to `rows` as it prints them, a column a backend, measured one after the other."""
    print(f"{'case':44s} {'unit':8s}" + "".join(f" {name:>10s}" for name in chosen))
    for of_backends in zip(*chosen.values(), strict=True):
        row: dict[str, Any] = {"case": of_backends[0].name, "unit": of_backends[0].unit}
        if of_backends[0].of_the_card:  # the same whichever kernels run
            of_backends = of_backends[:1]
        print(f"{row['case']:44s} {row['unit']:8s}", end="", flush=True)
        for name, case in zip(chosen, of_backends, strict=False):
            figures = _figures(case, repeats)
            row["card" if case.of_the_card else name] = figures
            print(f" {figures['value']:10,.1f}" if "value" in figures else f" {'-':>10s}", end="", flush=True)
        print()
        rows.append(row)


def _measure_all(chosen: list[Case], repeats: int, rows: list[dict[str, Any]]) -> None:
    """Adds each case's figures to `rows` as it prints them."""
    print(f"{'case':44s} {'median':>10s} {'spread':>7s} {'unit':8s} {'us':>9s}  aim")
    for case in chosen:
        figures = _figures(case, repeats)
        rows.append({"case": case.name} | figures)
        if "error" in figures:
            print(f"{case.name:44s} failed: {figures['error'][:200]}")
            continue
        aim = "" if case.aim is None else f"{case.aim:g}"
        value, spread, median_us = (figures[name] for name in ("value", "spread", "median_us"))
        print(f"{case.name:44s} {value:10,.1f} {spread:6.1%} {case.unit:8s} {median_us:9.2f}  {aim}", flush=True)


def _figures(case: Case, repeats: int) -> dict[str, Any]:
    """What one case gives, or its error: one case that fails must not cost the others."""
    try:
        seconds, work = measure(case.build, repeats)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    median = statistics.median(seconds)
    return {
        "value": {"us": median * 1e6, "GB/s": work / median / 1e9, "TFLOP/s": work / median / 1e12}[case.unit],
        "unit": case.unit,
        "aim": case.aim,
        "median_us": median * 1e6,
        "spread": (max(seconds) - min(seconds)) / median,
        "all_us": [s * 1e6 for s in seconds],
    }


if __name__ == "__main__":
    raise SystemExit(main())
