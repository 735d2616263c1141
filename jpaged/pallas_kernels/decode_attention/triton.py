"""Decode attention over the paged pool as one Triton kernel, for GPUs from Ampere on.

One query token a sequence: every key and value is read once, so the kernel is a bandwidth machine. Flash-Decoding
(split KV) over a persistent grid, in a single launch; several CTAs of a multiprocessor hide each other's latencies.

    list of units (`plan.py`): chunks of sequences or, of small batches, leaves of chunks; x the groups of query
        heads that share a KV head. A CTA's i-th: (unit, group) number i * ctas + its own

    a unit: for each tile of keys     S = Q K^T, online softmax in base 2, O = O shrunk + P V    16 or 32 rows: heads
            at the end of each leaf   its state (O, maxima, sums) is folded into the unit's
            a whole sequence          O / sum --> output, log-sum-exp
            a part                    state --> memory, counted in; who comes last folds all parts, in order

A chunk's state is the fold of its leaves' states in order, whether one CTA computes them all or the last collects them
from memory, and a sequence's is the fold of its chunks': so its bits depend neither on the batch nor on who came last.
(Over e4m3, small batches have other tiles than large ones, and other bits.)

Sources: Flash-Decoding (pytorch.org/blog/flash-decoding), FlashAttention-2 (arXiv:2307.08691).
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
from jpaged.pallas_kernels.common.triton_attention import MOST_HEAD_DIM, unsupported
from jpaged.pallas_kernels.common.triton_call import Launch, call
from jpaged.pallas_kernels.common.triton_targets import by_shared_memory, for_family
from jpaged.pallas_kernels.decode_attention.plan import (
    BEGIN,
    CHUNK,
    CHUNKS,
    CUT,
    END,
    FIELDS,
    LEAF,
    LEAF_TILES,
    LEAVES,
    LENGTH,
    ROW,
    Cuts,
    max_chunks,
    max_cut_chunks,
    plan,
)
from jpaged.pallas_kernels.devices import num_multiprocessors

__all__ = ["decode_attention", "unsupported"]

_LEAF_TOKENS = 128
_CHUNK_TOKENS = 2048
_REGISTERS = 65_536  # of a multiprocessor
_MOST_REGISTERS = 255  # of a thread
_CUT_FOR = 2  # CTAs of a multiprocessor: batches whose chunks keep half of these busy are not cut into leaves
_MOST_ROWS = 32  # query heads of a group that one tile holds
_MOST_BYTES = 512  # of a head, in such a tile: a thread cannot hold the sums of larger ones

_ROW, _CHUNK, _CHUNKS, _BEGIN, _END, _LENGTH, _LEAF_TILES, _LEAF_NUMBER, _LEAVES, _CUT, _FIELDS = (
    tl.constexpr(x) for x in (ROW, CHUNK, CHUNKS, BEGIN, END, LENGTH, LEAF_TILES, LEAF, LEAVES, CUT, FIELDS)
)


@dataclass(frozen=True)
class Config:
    """How the kernel is cut and compiled.

    tile: keys that are computed at once, a divisor of 128. warps: of a CTA. stages: tiles in flight or in use.
    ctas: of a multiprocessor.
    """

    tile: int
    warps: int
    stages: int
    ctas: int


def rows_of_a_tile(share: int, head_dim: int, itemsize: int) -> int:
    """Of `share` query heads that share a KV head, how many a tile holds, padded."""
    return 16 if share <= 16 or head_dim * itemsize > _MOST_BYTES else _MOST_ROWS


def default_config(
    head_dim: int, rows: int, itemsize: int, *, batch: int | None = None, latents: bool = False
) -> Config:
    """For a head_dim, so many query heads of a group, padded, and bytes of a query's number. batch: sequences that read
    keys and values in e4m3; None where these have as many bytes. latents: they are the same numbers, DeepSeek's."""
    if latents:
        return for_family(_OF_LATENTS)[itemsize]
    padded = max(64, triton.next_power_of_2(head_dim))
    config = for_family(_CONFIGS)[padded, itemsize]
    if batch is not None:
        config = replace(config, stages=_STAGES_IN_8_BITS)
        if batch <= _MOST_CUT and config == _OF_LARGE_BATCHES:
            config = _OF_SMALL_BATCHES
    if rows == _MOST_ROWS or (batch is not None and padded == MOST_HEAD_DIM):  # twice the registers
        return replace(config, warps=2 * config.warps, ctas=max(1, config.ctas // 2))
    return config


_LARGE = {
    (64, 2): Config(tile=128, warps=2, stages=3, ctas=4),
    (128, 2): Config(tile=64, warps=2, stages=3, ctas=4),
    (256, 2): Config(tile=32, warps=4, stages=3, ctas=2),
    (512, 2): Config(tile=16, warps=4, stages=3, ctas=2),
    (64, 4): Config(tile=16, warps=4, stages=3, ctas=3),
    (128, 4): Config(tile=16, warps=4, stages=3, ctas=3),
    (256, 4): Config(tile=16, warps=8, stages=2, ctas=1),
}
_SMALL = {size: replace(config, ctas=min(2, config.ctas)) for size, config in _LARGE.items()}  # less shared memory
_CONFIGS = by_shared_memory(_LARGE, _SMALL)
"""By family of GPUs; padded head_dim, and bytes of a number. Those of head_dim 128 in 16 bits are
the best of a sweep on an H200 (`benchmarks/triton_tiles.py`)."""

_STAGES_IN_8_BITS = 5
"""Of pools in e4m3, whose tiles have half the bytes; the best with head_dim 128 on an H200."""
_OF_LARGE_BATCHES = replace(_LARGE[128, 2], stages=_STAGES_IN_8_BITS)
_OF_SMALL_BATCHES = Config(tile=128, warps=4, stages=_STAGES_IN_8_BITS, ctas=2)
_MOST_CUT = 32
"""In e4m3 with head_dim 128, batches of so many sequences are mostly cut into leaves. A tile is a leaf then: on an H200
that reads 16 x 4,096 tokens at 1.6 times the rate, and 8 x 16,384 at 0.9 of it."""

_LARGE_LATENTS = {
    2: Config(tile=64, warps=8, stages=5, ctas=1),
    4: Config(tile=16, warps=8, stages=2, ctas=1),
}
_SMALL_LATENTS = _LARGE_LATENTS | {2: Config(tile=16, warps=8, stages=3, ctas=1)}
_AMPERE_LATENTS = _LARGE_LATENTS | {2: Config(tile=64, warps=8, stages=3, ctas=1)}  # 163 KB of shared memory
_OF_LATENTS = by_shared_memory(_LARGE_LATENTS, _SMALL_LATENTS) | {80: _AMPERE_LATENTS}
"""By family of GPUs, and bytes of a number: for tiles of 16 query heads that meet the 512 + 64 columns of DeepSeek's
latents. Each warp holds all queries of a tile, which leaves no registers for more of them. Large ones in 16 bits are
the best of a sweep on an H200; others are not measured."""

_LATENT_ROWS = 16


@partial(jax.jit, static_argnames=("features", "config"))
def decode_attention(
    operands: Operands, features: Features, *, config: Config | None = None
) -> tuple[jax.Array, jax.Array]:
    """`decode_attention` of the package, checked; always with its log-sum-exp, float32 [B, H].

    config: to try others than the table's.
    """
    q, kv_pool, block_tables, kv_lens, alibi_slopes = operands
    batch, heads, head_dim = q.shape
    _, _, kv_heads, block_size, _ = kv_pool.shape
    share = heads // kv_heads
    value_dim, latents = features.value_dim or head_dim, kv_pool.shape[1] == 1
    rows = _LATENT_ROWS if latents else rows_of_a_tile(share, head_dim, q.dtype.itemsize)
    if config is None:
        of_e4m3 = batch if kv_pool.dtype != q.dtype else None
        config = default_config(head_dim, rows, q.dtype.itemsize, batch=of_e4m3, latents=latents)
    groups = kv_heads * triton.cdiv(share, rows)
    cuts = Cuts(config.tile, _LEAF_TOKENS, _CHUNK_TOKENS, num_multiprocessors() * _CUT_FOR)
    ctas = num_multiprocessors() * config.ctas
    max_len = block_tables.shape[1] * block_size
    slots = max_chunks(max_len, cuts.chunk, features.sliding_window)
    most_cut = max_cut_chunks(batch, groups, slots, cuts)
    work = plan(kv_lens, max_len, groups, features.sliding_window, cuts)
    parts = most_cut * cuts.most_leaves, batch * slots
    state = [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for part in parts
        for shape in ((max(part, 1), groups, rows, value_dim), (max(part, 1), groups, 2, rows))
    ]
    results = [jax.ShapeDtypeStruct(output_shape(q, features), q.dtype), jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)]
    out, lse, *_ = call(
        _decode,
        Launch(
            (min(ctas, work.units.shape[0] * groups),),
            config.warps,
            config.stages,
            registers=min(_MOST_REGISTERS, _REGISTERS // (config.ctas * config.warps * 32) // 8 * 8),
            resident=config.ctas,
        ),
        q,
        as_bits(kv_pool),
        block_tables,
        *work,
        jnp.zeros((1,), jnp.float32) if alibi_slopes is None else alibi_slopes,
        updated=[jnp.zeros(((most_cut + batch) * groups,), jnp.int32)],
        out=[*results, *state],
        SHARE=share,
        KV_HEADS=kv_heads,
        ROWS=rows,
        BLOCK=block_size,
        TABLE=block_tables.shape[1],
        TILE=config.tile,
        SLOTS=slots,
        MOST_LEAVES=cuts.most_leaves,
        CUT_CHUNKS=most_cut,
        **attention.column_constants(head_dim, features, kv_pool),
        **attention.score_constants(features, alibi_slopes),
    )
    return out, lse


@triton.jit
def _decode(
    q, pool, tables, units, num_units, slopes, counters,
    out, lse, leaf_acc, leaf_sums, chunk_acc, chunk_sums,
    SHARE: tl.constexpr, KV_HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TABLE: tl.constexpr,
    TILE: tl.constexpr, SLOTS: tl.constexpr, MOST_LEAVES: tl.constexpr, CUT_CHUNKS: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DIM: tl.constexpr, LATENT: tl.constexpr, TAIL: tl.constexpr,
    PAIRS: tl.constexpr, IN_REGISTERS: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, ALIBI: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    SPLITS: tl.constexpr = (SHARE + ROWS - 1) // ROWS  # groups of a KV head
    GROUPS: tl.constexpr = KV_HEADS * SPLITS
    ARRAYS: tl.constexpr = 1 if LATENT else 2
    KEY: tl.constexpr = HEAD_DIM // 2 if PAIRS else HEAD_DIM
    if PAIRS:
        pool = pool.to(tl.pointer_type(tl.uint16), bitcast=True)
    t = tl.arange(0, TILE)
    for item in range(tl.program_id(0), tl.load(num_units) * GROUPS, tl.num_programs(0)):
        unit, group = units + (item // GROUPS) * _FIELDS, item % GROUPS
        row, begin, end = tl.load(unit + _ROW), tl.load(unit + _BEGIN), tl.load(unit + _END)
        length, leaf_tiles = tl.load(unit + _LENGTH), tl.load(unit + _LEAF_TILES)
        kv_head = group // SPLITS
        head, is_head = _heads(row, group, SHARE, KV_HEADS, SPLITS, ROWS)
        queries, behind = attention.load_queries(q + head * HEAD_DIM, is_head, HEAD_DIM, VALUE_DIM, DIM, TAIL, PAIRS)
        if ALIBI:
            slope = tl.load(slopes + head % (KV_HEADS * SHARE), mask=is_head, other=0.0) * 1.4426950408889634
        first_seen = 0 if WINDOW is None else tl.maximum(length - WINDOW, 0)

        acc, more_acc, top, total = attention.no_keys(ROWS, DIM, PAIRS)
        sum_acc, sum_top, sum_total = attention.no_state(ROWS, DIM)
        tiles = tl.cdiv(end - begin, TILE)
        for j in range(tiles):
            if j % leaf_tiles == 0:
                acc_of_leaf = attention.whole(acc, more_acc, PAIRS)
                sum_acc, sum_top, sum_total = attention.fold(sum_acc, sum_top, sum_total, acc_of_leaf, top, total)
                acc, more_acc, top, total = attention.no_keys(ROWS, DIM, PAIRS)
            position = begin + j * TILE + t
            seen = (position < end) & (position >= first_seen)
            # In place of keys that are not seen, which may be NaN, one that is.
            nearest = tl.maximum(tl.minimum(position, end - 1), first_seen)
            block = tl.load(tables + row * TABLE + nearest // BLOCK).to(tl.int64)
            key = (block * (ARRAYS * KV_HEADS) + kv_head) * (BLOCK * KEY) + (nearest % BLOCK) * KEY
            products, v, more = attention.products_and_values(
                queries, behind, pool + key, KV_HEADS * BLOCK * KEY,
                HEAD_DIM, VALUE_DIM, DIM, LATENT, TAIL, PAIRS, IN_REGISTERS,
            )  # fmt: skip
            x, FACTOR = attention.scores(products, SCALE, CAP, ALIBI)
            if ALIBI:
                x += slope[:, None] * (position - (length - 1)).to(tl.float32)[None, :]
            x = tl.where(seen[None, :], x, float("-inf"))
            acc, more_acc, top, total = attention.add_keys(acc, more_acc, top, total, x, v, more, FACTOR, PAIRS)
        acc_of_leaf = attention.whole(acc, more_acc, PAIRS)
        acc_of_unit, top, total = attention.fold(sum_acc, sum_top, sum_total, acc_of_leaf, top, total)

        # A unit that is a leaf hands its state to the one that finishes the chunk's last leaf.
        leaves = tl.load(unit + _LEAVES)
        if CUT_CHUNKS > 0 and MOST_LEAVES > 1 and leaves > 1:
            cut = tl.load(unit + _CUT)
            leaf = cut * MOST_LEAVES + tl.load(unit + _LEAF_NUMBER)
            _put(leaf_acc, leaf_sums, leaf, group, acc_of_unit, top, total, SHARE, GROUPS, ROWS, VALUE_DIM, DIM)
            if _count(counters + cut * GROUPS + group) == leaves - 1:
                all_acc, all_top, all_total = _collect(
                    leaf_acc, leaf_sums, cut * MOST_LEAVES, leaves, group, SHARE, GROUPS, ROWS, VALUE_DIM, DIM
                )
                _finish_chunk(
                    all_acc, all_top, all_total, unit, row, group, out, lse, chunk_acc, chunk_sums, counters,
                    SHARE, KV_HEADS, GROUPS, SPLITS, ROWS, VALUE_DIM, DIM, SLOTS, CUT_CHUNKS,
                )  # fmt: skip
        else:
            _finish_chunk(
                acc_of_unit, top, total, unit, row, group, out, lse, chunk_acc, chunk_sums, counters,
                SHARE, KV_HEADS, GROUPS, SPLITS, ROWS, VALUE_DIM, DIM, SLOTS, CUT_CHUNKS,
            )  # fmt: skip


@triton.jit
def _finish_chunk(
    acc, top, total, unit, row, group, out, lse, chunk_acc, chunk_sums, counters,
    SHARE: tl.constexpr, KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    VALUE_DIM: tl.constexpr, DIM: tl.constexpr, SLOTS: tl.constexpr, CUT_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Stores the result of a sequence that is one chunk; of others, the last chunk to be done stores it."""
    chunks = tl.load(unit + _CHUNKS)
    if SLOTS > 1 and chunks > 1:
        chunk = row * SLOTS + tl.load(unit + _CHUNK)
        _put(chunk_acc, chunk_sums, chunk, group, acc, top, total, SHARE, GROUPS, ROWS, VALUE_DIM, DIM)
        if _count(counters + (CUT_CHUNKS + row) * GROUPS + group) == chunks - 1:
            all_acc, all_top, all_total = _collect(
                chunk_acc, chunk_sums, row * SLOTS, chunks, group, SHARE, GROUPS, ROWS, VALUE_DIM, DIM
            )
            _store(all_acc, all_top, all_total, row, group, out, lse, SHARE, KV_HEADS, SPLITS, ROWS, VALUE_DIM, DIM)
    else:
        _store(acc, top, total, row, group, out, lse, SHARE, KV_HEADS, SPLITS, ROWS, VALUE_DIM, DIM)


@triton.jit
def _heads(row, group, SHARE: tl.constexpr, KV_HEADS: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr):
    """The query heads of a group, numbered over all sequences, and which of them exist."""
    in_share = (group % SPLITS) * ROWS + tl.arange(0, ROWS)
    return (row * KV_HEADS + group // SPLITS) * SHARE + in_share, in_share < SHARE


@triton.jit
def _store(
    acc, top, total, row, group, out, lse, SHARE: tl.constexpr, KV_HEADS: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, VALUE_DIM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, DIM)
    head, is_head = _heads(row, group, SHARE, KV_HEADS, SPLITS, ROWS)
    o, s = attention.result(acc, top, total)
    at = head[:, None] * VALUE_DIM + d[None, :]
    tl.store(out + at, o.to(out.dtype.element_ty), mask=is_head[:, None] & (d < VALUE_DIM)[None, :])
    tl.store(lse + head, s, mask=is_head)


@triton.jit
def _place(
    index, group, SHARE: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, VALUE_DIM: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Where the state of a part's group is in memory and which of it is kept: its sums of values [ROWS, DIM], and its
    maxima [ROWS], behind which are its sums."""
    r, d = tl.arange(0, ROWS), tl.arange(0, DIM)
    at, is_head = (index * GROUPS + group).to(tl.int64) * ROWS, r < SHARE
    return (at + r)[:, None] * VALUE_DIM + d[None, :], is_head[:, None] & (d < VALUE_DIM)[None, :], 2 * at + r, is_head


@triton.jit
def _put(
    accs, sums, index, group, acc, top, total, SHARE: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    VALUE_DIM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    at, is_kept, row, is_head = _place(index, group, SHARE, GROUPS, ROWS, VALUE_DIM, DIM)
    tl.store(accs + at, acc, mask=is_kept, cache_modifier=".cg")
    tl.store(sums + row, top, mask=is_head, cache_modifier=".cg")
    tl.store(sums + row + ROWS, total, mask=is_head, cache_modifier=".cg")


@triton.jit
def _count(counter):
    """Counts an arrival, behind all that the CTA has stored; gives how many came before."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


@triton.jit
def _collect(
    accs, sums, first, count, group, SHARE: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    VALUE_DIM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """The fold of `count` parts from the `first` on, in order; four at a time are on their way from memory, past the
    first-level cache, which may hold what was there before."""
    acc, top, total = attention.no_state(ROWS, DIM)
    for i in range(0, count, 4):
        acc_0, top_0, total_0 = _take(accs, sums, first, i, count, group, SHARE, GROUPS, ROWS, VALUE_DIM, DIM)
        acc_1, top_1, total_1 = _take(accs, sums, first, i + 1, count, group, SHARE, GROUPS, ROWS, VALUE_DIM, DIM)
        acc_2, top_2, total_2 = _take(accs, sums, first, i + 2, count, group, SHARE, GROUPS, ROWS, VALUE_DIM, DIM)
        acc_3, top_3, total_3 = _take(accs, sums, first, i + 3, count, group, SHARE, GROUPS, ROWS, VALUE_DIM, DIM)
        acc, top, total = attention.fold(acc, top, total, acc_0, top_0, total_0)
        acc, top, total = attention.fold(acc, top, total, acc_1, top_1, total_1)
        acc, top, total = attention.fold(acc, top, total, acc_2, top_2, total_2)
        acc, top, total = attention.fold(acc, top, total, acc_3, top_3, total_3)
    return acc, top, total


@triton.jit
def _take(
    accs, sums, first, number, count, group, SHARE: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    VALUE_DIM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """The state of a part, from memory; of one past the last, that of no keys, whose fold changes nothing."""
    at, is_kept, row, is_head = _place(first + number, group, SHARE, GROUPS, ROWS, VALUE_DIM, DIM)
    exists = tl.zeros([ROWS], tl.int32) + number < count
    acc = tl.load(accs + at, mask=is_kept & exists[:, None], other=0.0, cache_modifier=".cg")
    top = tl.load(sums + row, mask=is_head & exists, other=-1e30, cache_modifier=".cg")
    total = tl.load(sums + row + ROWS, mask=is_head & exists, other=0.0, cache_modifier=".cg")
    return acc, top, total
