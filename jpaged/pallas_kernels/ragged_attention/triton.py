"""Ragged attention for GPUs from Ampere on: prefill chunks and decode rows over the paged pool, in one Triton kernel.

    work list (`work_list.py`): tiles of (row, window of tokens), longest first, x units of query heads that share a KV
        head. A CTA each: the hardware gives the next one to whichever multiprocessor is free, all tiles of a unit
        before the next unit's, so that CTAs that run at the same time find each other's keys in the L2 cache

    a CTA: for each step of block_kv keys      S = Q K^T, mask, online softmax in base 2, O = O shrunk + P V
    rows of a tile: token by token, the unit's heads of each

    steps of its loop, block_kv keys each:   lo .. lo_full | lo_full .. hi_full | hi_full .. hi
                                             masked        | no mask            | masked

Source: FlashAttention-2 (arXiv:2307.08691).
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jpaged.pallas_kernels.common import triton_attention as attention
from jpaged.pallas_kernels.common.attention_arguments import Features, Operands, output_shape
from jpaged.pallas_kernels.common.numerics import as_bits
from jpaged.pallas_kernels.common.triton_attention import unsupported
from jpaged.pallas_kernels.common.triton_call import Launch, call
from jpaged.pallas_kernels.common.triton_targets import by_shared_memory, for_family
from jpaged.pallas_kernels.ragged_attention.work_list import (
    COLUMNS,
    END,
    FIRST,
    HI,
    HI_FULL,
    KV_LEN,
    LO,
    LO_FULL,
    ROW,
    SHIFT,
    TOKEN,
    plan_tiles,
)

__all__ = ["ragged_attention", "unsupported"]

_ROW, _TOKEN, _FIRST, _END, _SHIFT, _KV_LEN, _LO, _LO_FULL, _HI_FULL, _HI, _COLUMNS = (
    tl.constexpr(x) for x in (ROW, TOKEN, FIRST, END, SHIFT, KV_LEN, LO, LO_FULL, HI_FULL, HI, COLUMNS)
)

_MOST_HEADS = 16  # of a KV group in one tile


@dataclass(frozen=True)
class Config:
    """How the kernel is cut and compiled.

    rows: of a tile, query heads times tokens. block_kv: keys of a step. warps: of a CTA. stages: steps whose keys and
    values are in flight or in use. registers: the most of a thread, None leaves it to the compiler.
    """

    rows: int
    block_kv: int
    warps: int
    stages: int
    registers: int | None = None


_AMPERE = {
    (64, 2): Config(rows=128, block_kv=64, warps=4, stages=3),
    (128, 2): Config(rows=128, block_kv=64, warps=8, stages=3),
    (256, 2): Config(rows=64, block_kv=32, warps=8, stages=3),
    (512, 2): Config(rows=32, block_kv=16, warps=8, stages=2),
    (64, 4): Config(rows=32, block_kv=32, warps=8, stages=3),
    (128, 4): Config(rows=32, block_kv=16, warps=8, stages=3),
    (256, 4): Config(rows=32, block_kv=16, warps=8, stages=2),
}
_HOPPER = _AMPERE | {
    (64, 2): Config(rows=128, block_kv=64, warps=8, stages=3, registers=128),
    (128, 2): Config(rows=128, block_kv=64, warps=4, stages=3),
}
_EIGHT_WARPS = Config(rows=128, block_kv=64, warps=8, stages=3, registers=128)
"""On Hopper in place of four warps where a tile has more than 8 heads, which would spill inside their loop, and over
pools in e4m3: there these spill a few registers, and are still a fifth to a third faster than what does not."""
_CONFIGS = {80: _AMPERE, 86: _AMPERE, 90: _HOPPER, 100: _AMPERE, 120: _AMPERE}
"""By family of GPUs; padded head_dim, and bytes of a number. Hopper's of head_dim 128 in 16 bits is
the best of a sweep on an H200 (`benchmarks/triton_tiles.py`)."""


_LARGE_LATENTS = {2: Config(rows=64, block_kv=32, warps=8, stages=2), 4: _AMPERE[256, 4]}
_SMALL_LATENTS = {2: _AMPERE[512, 2], 4: _AMPERE[256, 4]}
_OF_LATENTS = by_shared_memory(_LARGE_LATENTS, _SMALL_LATENTS)
"""By family of GPUs, and bytes of a number: for the 512 + 64 columns of DeepSeek's latents. Not measured."""

_LARGE_EXPANDED = Config(rows=128, block_kv=64, warps=8, stages=2)
_SMALL_EXPANDED = Config(rows=128, block_kv=32, warps=8, stages=2)
_OF_EXPANDED = by_shared_memory(_LARGE_EXPANDED, _SMALL_EXPANDED)
"""By family of GPUs: for keys of 128 + 64 columns and values of 128, in 16 bits. Not measured."""


def default_config(head_dim: int, itemsize: int, plain: bool, places: int, *, widens: bool = False) -> Config:
    """For a head_dim, bytes of a query's number, whether the scores are those of a causal mask alone, and the places of
    a tile's heads (`heads_of_a_tile`). widens: keys and values have fewer bytes."""
    padded = max(64, triton.next_power_of_2(head_dim))
    config = for_family(_CONFIGS)[padded, itemsize]
    if plain and config is _HOPPER[128, 2] and (places > 8 or widens):
        return _EIGHT_WARPS
    if plain and not widens:
        return config
    # Wider numbers need registers, and so do slopes, caps and edges.
    block_kv = config.block_kv if plain else min(config.block_kv, 32)
    warps = 8 if widens or padded > 64 else config.warps
    return replace(config, block_kv=block_kv, warps=warps, registers=None)


def heads_of_a_tile(share: int) -> tuple[int, int]:
    """(query heads of a tile, the places they take, a power of two), of `share` heads that share a KV head.

    A whole group if no more than one place in eight stays empty, else the largest power of two that divides it.
    """
    places = triton.next_power_of_2(share)
    if places <= _MOST_HEADS and 8 * (places - share) <= places:
        return share, places
    heads = min(share & -share, _MOST_HEADS)
    return heads, heads


@partial(jax.jit, static_argnames=("features", "causal", "config"))
def ragged_attention(
    operands: Operands,
    query_starts: jax.Array,
    features: Features,
    *,
    causal: bool = True,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`ragged_attention` of the package, checked; always with its log-sum-exp, float32 [T, H].

    config: to try others than the table's.
    """
    q, kv_pool, block_tables, kv_lens, alibi_slopes = operands
    tokens, heads, head_dim = q.shape
    _, _, kv_heads, block_size, _ = kv_pool.shape
    latent = kv_pool.shape[1] == 1
    tile_heads, places = heads_of_a_tile(heads // kv_heads)
    if config is None and latent:
        config = for_family(_OF_LATENTS)[q.dtype.itemsize]
    elif config is None and (head_dim, features.value_dim) == (192, 128) and q.dtype.itemsize == 2:
        config = for_family(_OF_EXPANDED)
    elif config is None:
        plain = alibi_slopes is None and features.sliding_window is None and features.logit_softcap is None
        config = default_config(head_dim, q.dtype.itemsize, plain, places, widens=kv_pool.dtype != q.dtype)
    work, num_tiles = plan_tiles(
        query_starts,
        kv_lens,
        tokens=tokens,
        window=config.rows // places,
        block_kv=config.block_kv,
        sliding_window=features.sliding_window,
        causal=causal,
    )
    units = heads // tile_heads
    out, lse = call(
        _attend,
        Launch((work.shape[0], units), config.warps, config.stages, config.registers),
        q,
        as_bits(kv_pool),
        block_tables,
        work,
        num_tiles,
        jnp.zeros((1,), jnp.float32) if alibi_slopes is None else alibi_slopes,
        out=[jax.ShapeDtypeStruct(output_shape(q, features), q.dtype), jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)],
        HEADS=heads,
        KV_HEADS=kv_heads,
        TILE_HEADS=tile_heads,
        PLACES=places,
        ROWS=config.rows,
        KEYS=config.block_kv,
        BLOCK=block_size,
        TABLE=block_tables.shape[1],
        CAUSAL=causal,
        **attention.column_constants(head_dim, features, kv_pool),
        **attention.score_constants(features, alibi_slopes),
    )
    return out, lse


@triton.jit
def _attend(
    q, pool, tables, work, num_tiles, slopes,
    out, lse,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, TILE_HEADS: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, BLOCK: tl.constexpr, TABLE: tl.constexpr, CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DIM: tl.constexpr, LATENT: tl.constexpr, TAIL: tl.constexpr,
    PAIRS: tl.constexpr, IN_REGISTERS: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, ALIBI: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    tile, unit = tl.program_id(0), tl.program_id(1)
    live = tile < tl.load(num_tiles)
    work += tile * _COLUMNS
    row, shift, kv_len = tl.load(work + _ROW), tl.load(work + _SHIFT), tl.load(work + _KV_LEN)
    start, first, end = tl.load(work + _TOKEN), tl.load(work + _FIRST), tl.load(work + _END)
    lo, lo_full = tl.load(work + _LO), tl.load(work + _LO_FULL)
    hi_full, hi = tl.load(work + _HI_FULL), tl.load(work + _HI)
    if not live:  # behind the loads, which it need not delay
        return
    r, d = tl.arange(0, ROWS), tl.arange(0, DIM)
    token, in_unit = start + r // PLACES, r % PLACES
    head = unit * TILE_HEADS + in_unit
    kv_head = unit * TILE_HEADS // (HEADS // KV_HEADS)
    is_query = (token >= first) & (token < end) & (in_unit < TILE_HEADS)
    at = q + (token.to(tl.int64) * HEADS + head) * HEAD_DIM
    queries, behind = attention.load_queries(at, is_query, HEAD_DIM, VALUE_DIM, DIM, TAIL, PAIRS)
    slope = tl.load(slopes + head, mask=is_query, other=0.0) * 1.4426950408889634 if ALIBI else 0.0
    position = token + shift if CAUSAL else tl.zeros_like(token) + (kv_len - 1)
    # Below this no query of the tile sees a key.
    first_seen = 0 if WINDOW is None else (first + shift if CAUSAL else kv_len - 1) - WINDOW + 1

    if PAIRS:
        pool = pool.to(tl.pointer_type(tl.uint16), bitcast=True)
    keys = pool + kv_head * (BLOCK * (HEAD_DIM // 2 if PAIRS else HEAD_DIM))
    tables += row * TABLE
    acc, top, total = _attend_steps(
        lo, lo_full, hi_full, hi, queries, behind, keys, tables, position, slope, first_seen, kv_len,
        ROWS, KV_HEADS, KEYS, BLOCK, HEAD_DIM, VALUE_DIM, DIM, LATENT, TAIL, PAIRS, IN_REGISTERS,
        SCALE, CAP, ALIBI, WINDOW,
    )  # fmt: skip
    o, s = attention.result(acc, top, total)
    # Read again, so that the loops need not hold them in registers.
    token = tl.load(work + _TOKEN, volatile=True) + r // PLACES
    first, end = tl.load(work + _FIRST, volatile=True), tl.load(work + _END, volatile=True)
    is_query = (token >= first) & (token < end) & (in_unit < TILE_HEADS)
    at = (token.to(tl.int64) * HEADS + head)[:, None] * VALUE_DIM + d[None, :]
    tl.store(out + at, o.to(out.dtype.element_ty), mask=is_query[:, None] & (d < VALUE_DIM)[None, :])
    tl.store(lse + token * HEADS + head, s, mask=is_query)


@triton.jit
def _attend_steps(
    lo, lo_full, hi_full, hi, queries, behind, pool, tables, position, slope, first_seen, kv_len,
    ROWS: tl.constexpr, KV_HEADS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, DIM: tl.constexpr, LATENT: tl.constexpr, TAIL: tl.constexpr, PAIRS: tl.constexpr,
    IN_REGISTERS: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, ALIBI: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The state of a tile's softmax over steps `lo` to `hi` of keys, of which those from `lo_full` to `hi_full` need no
    mask. One loop for all: a loop each would fill its pipeline of loads anew."""
    ARRAYS: tl.constexpr = 1 if LATENT else 2
    KEY: tl.constexpr = HEAD_DIM // 2 if PAIRS else HEAD_DIM
    t = tl.arange(0, KEYS)
    acc, more_acc, top, total = attention.no_keys(ROWS, DIM, PAIRS)
    for step in range(lo, hi):
        # In place of keys that nobody sees, which may be NaN, one that somebody sees.
        key = tl.minimum(step * KEYS + t, kv_len - 1)
        if WINDOW is not None:
            key = tl.maximum(key, first_seen)
        block = tl.load(tables + key // BLOCK).to(tl.int64)
        at = block * (ARRAYS * KV_HEADS * BLOCK * KEY) + (key % BLOCK) * KEY
        products, v, more = attention.products_and_values(
            queries, behind, pool + at, KV_HEADS * BLOCK * KEY,
            HEAD_DIM, VALUE_DIM, DIM, LATENT, TAIL, PAIRS, IN_REGISTERS,
        )  # fmt: skip
        x, FACTOR = attention.scores(products, SCALE, CAP, ALIBI)
        if ALIBI:
            x -= slope[:, None] * _room(position, step, t, KEYS).to(tl.float32)
        if (step < lo_full) | (step >= hi_full):
            room = _room(position, step, t, KEYS)
            seen = room >= 0
            if WINDOW is not None:
                seen &= room < WINDOW
            x = tl.where(seen, x, float("-inf"))
        acc, more_acc, top, total = attention.add_keys(acc, more_acc, top, total, x, v, more, FACTOR, PAIRS)
    return attention.whole(acc, more_acc, PAIRS), top, total


@triton.jit
def _room(position, step, t, KEYS: tl.constexpr):
    """How far each query stands behind each key of a step: [ROWS, KEYS]."""
    return (position - step * KEYS)[:, None] - t[None, :]
