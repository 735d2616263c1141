"""Decode attention over the paged pool as one Mosaic GPU kernel (Hopper).

One query token a sequence: every key and value is read once, so the kernel is a bandwidth machine. Flash-Decoding
(split KV) over a persistent grid, in a single launch. Sequences are cut at *fixed positions*, on two levels:

    kv_lens        [ 2500                       , 700      ]
    chunks, 2,048  |0..2047          |2048..2499|0..699    |
    leaves, 256    |0|1|2|3|4|5|6|7  |0|1       |0|1|2     |

A unit of work is a chunk or, where whole chunks would leave multiprocessors idle (small batches, the end of large
ones), a leaf of one; times the groups of query heads that share a KV head. A chunk's result is the fold of its leaves'
results in order, whether one CTA computes them all or the CTA that finishes the chunk's last leaf collects them from
memory, and a sequence's is the fold of its chunks': so its bits depend neither on the batch nor on who came last.
`plan` makes the list of units on the device, by plain XLA operations on the lengths alone; in a program of many layers
the compiler keeps one copy.

A CTA is three warpgroups:

    producer    one TMA copy a block (K and V apart) into two rings of tiles, one mbarrier a tile each
    consumers   take tiles in turn, each from a ring of its own; all products have the keys or head_dim as their rows
                and the group's query heads as their 8 (to 64) columns, so nothing is computed for padding:
                S^T = K Q^T, online softmax over the rows in base 2, O^T += V^T P^T

Consumer 0 joins the two results of a unit and writes the output, or leaves it for who comes last.

Sources: Flash-Decoding (pytorch.org/blog/flash-decoding), FlashAttention-2 and -3 (arXiv:2307.08691, 2407.08608),
PagedAttention (arXiv:2309.06180).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jpaged.pallas_kernels import decode_attention_rows_mosaic as heads_as_rows

_LOG2E = math.log2(math.e)
_NO_KEYS = -1e30  # running maxima start here, so that no inf - inf is ever formed
_SMEM_BYTES = 227 * 1024 - 2048
_MAX_COLUMNS = 32
_FOLD_ELEMENTS = 128 * 63  # of partial results whose loads are in flight together: less than 64 registers a thread
_WARPGROUP = 128
# Of a thread: when the kernel starts, and then the producer's, the finisher's and a consumer's; by consumers.
_LAUNCH_REGISTERS = {1: 168, 2: 128}
_REGISTERS = {1: (72, 200, 232), 2: (40, 0, 168)}
HEAD_DIMS = (64, 128, 256)  # rows of a wgmma are 64; others go to the kernel that has the heads as rows
BLOCK_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class Config:
    """Shape of the kernel.

    tile: tokens a stage holds, a multiple of 64.
    stages: depth of the K and V rings of each consumer.
    leaf: tokens of the smallest unit of work, a multiple of two tiles.
    chunk: tokens of the largest unit of work, a multiple of the leaf.
    ctas: size of the persistent grid.
    consumers: warpgroups that compute, 1 or 2.
    q_stages: units whose queries are held at once.
    handovers: units whose results wait for the finisher at once.
    split_waves: how many turns of the grid, from the last, full one on backwards, are cut into leaves; what does not
        fill a turn always is.
    overlap_launch: let the grid start while the kernel before it ends (programmatic dependent launch).
    """

    tile: int
    stages: int
    leaf: int
    chunk: int
    ctas: int
    consumers: int = 2
    q_stages: int = 2
    handovers: int = 2
    split_waves: int = 1
    overlap_launch: bool = True


def default_config(head_dim: int, columns: int, consumers: int = 1) -> Config:
    device = jax.devices()[0]
    ctas = getattr(device, "core_count", 132) if device.platform == "gpu" else 132
    tile = 128 if head_dim == 64 else 64
    state = columns * (head_dim + 2) * 4
    handovers = 2 if state <= 16 * 1024 else 1
    # Queries, P, states, then the scratch of reductions, the table and the barriers.
    other = columns * 2 * (2 * head_dim + consumers * tile) + handovers * consumers * state + 1024 * consumers + 4096
    stages = min(8, (_SMEM_BYTES - other) // (tile * head_dim * 4)) // consumers
    return Config(tile, stages, 256, 2048, ctas, consumers, handovers=handovers)


def unsupported(q: jax.Array, kv_pool: jax.Array) -> str | None:
    """Why the kernel cannot take these (already checked) arguments; None if it can."""
    _, _, _, block_size, head_dim = kv_pool.shape
    if kv_pool.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {kv_pool.dtype} is not bfloat16 or float16"
    if head_dim not in (*HEAD_DIMS, *heads_as_rows.HEAD_DIMS):
        return f"head_dim {head_dim} is not one of {sorted((*HEAD_DIMS, *heads_as_rows.HEAD_DIMS))}"
    if block_size not in BLOCK_SIZES:
        return f"block size {block_size} is not one of {BLOCK_SIZES}"
    return None


# --- the list of units -----------------------------------------------------------------------------------------------

# Columns of the list, one row a unit.
_ROW, _CHUNK, _CHUNKS, _BEGIN, _END, _LENGTH, _LEAF, _LEAVES, _SPLIT = range(9)


class Plan(NamedTuple):
    """Work of one call, made on the device.

    units: int32 [capacity, 9]; sequence, chunk of it (from the first that the window lets see) and how many it has,
        first position, end position, length of the sequence; and of a unit that is a leaf: its number, how many the
        chunk has (1 for a unit that is a whole chunk), number of the chunk among those that are cut into leaves.
    num_units: int32 [1].
    """

    units: jax.Array
    num_units: jax.Array


def max_chunks(max_len: int, chunk: int, sliding_window: int | None) -> int:
    """The most chunks that a sequence can touch."""
    chunks = -(-max_len // chunk)
    return chunks if sliding_window is None else min(chunks, (sliding_window - 2) // chunk + 2)


def max_split_chunks(batch: int, groups: int, slots: int, config: Config) -> int:
    """The most chunks that `plan` cuts into leaves: less than two for every CTA."""
    return min(batch * slots, -(-(1 + config.split_waves) * config.ctas // groups))


def plan(kv_lens: jax.Array, max_len: int, groups: int, sliding_window: int | None, config: Config) -> Plan:
    """Lists chunks, longest first, save that the last of them, for one or two units a CTA, are cut into leaves."""
    batch = kv_lens.shape[0]
    chunk, leaf, tile = config.chunk, config.leaf, config.tile
    slots = max_chunks(max_len, chunk, sliding_window)
    ends = jnp.clip(kv_lens, 0, max_len)
    if sliding_window is None:
        begins = jnp.zeros_like(ends)
    else:
        begins = jnp.maximum(ends - sliding_window, 0) // tile * tile
    first = begins // chunk
    chunks = jnp.maximum((ends + chunk - 1) // chunk - first, 1)  # an empty sequence has its zeros written

    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    slot = jnp.arange(slots, dtype=jnp.int32)[None]
    begin = jnp.maximum((first[:, None] + slot) * chunk, begins[:, None])
    end = jnp.maximum(jnp.minimum((first[:, None] + slot + 1) * chunk, ends[:, None]), begin)
    exists = slot < chunks[:, None]
    zero = jnp.zeros_like(begin)
    columns = [rows, slot, chunks[:, None], begin, end, ends[:, None], zero, zero + 1, zero]
    whole = jnp.stack([jnp.broadcast_to(x, begin.shape) for x in columns], axis=-1).reshape(batch * slots, -1)
    if batch * slots > 1:
        whole = whole[jnp.argsort(jnp.where(exists, begin - end, 1).reshape(-1), stable=True)]
    total = jnp.sum(chunks, dtype=jnp.int32)
    most = max_split_chunks(batch, groups, slots, config)
    kept = jnp.maximum(total * groups // config.ctas - config.split_waves, 0) * config.ctas // groups
    kept = jnp.maximum(kept, total - most)

    leaves_each = chunk // leaf
    split = jnp.arange(most, dtype=jnp.int32)[:, None]
    number = jnp.arange(leaves_each, dtype=jnp.int32)[None]
    source = whole[jnp.minimum(kept + split, batch * slots - 1)]
    leaf_begin = source[..., _BEGIN] + number * leaf
    leaves = jnp.maximum((source[..., _END] - source[..., _BEGIN] + leaf - 1) // leaf, 1)
    pieces = jnp.broadcast_to(source, (most, leaves_each, source.shape[-1]))
    pieces = pieces.at[..., _BEGIN].set(leaf_begin)
    pieces = pieces.at[..., _END].set(jnp.minimum(leaf_begin + leaf, source[..., _END]))
    pieces = pieces.at[..., _LEAF].set(number).at[..., _LEAVES].set(leaves).at[..., _SPLIT].set(split)
    live = ((number < leaves) & (kept + split < total)).reshape(-1)
    count = jnp.cumsum(live, dtype=jnp.int32)
    capacity = batch * slots + most * leaves_each
    units = jnp.concatenate([whole, jnp.zeros((capacity - batch * slots, whole.shape[1]), jnp.int32)])
    at = jnp.where(live, kept + count - 1, capacity)
    units = units.at[at].set(pieces.reshape(most * leaves_each, -1), mode="drop", unique_indices=True)
    return Plan(units, (kept + count[-1])[None])


# --- what Pallas has no word for -------------------------------------------------------------------------------------

_KEYS_BY_HEADS = plgpu.Layout.WGMMA  # of every product here: [rows, columns of query heads]
_BY_HEAD = plgpu.Layout.WGMMA.reduce(0)


def _i32(x: object) -> ir.Value:
    """The MLIR value of a scalar that `inline_mgpu` passes."""
    return x.registers.item() if isinstance(x, mgpu.FragmentedArray) else x


def _const(value: int, bits: int = 32) -> ir.Value:
    kind = ir.IntegerType.get_signless(bits)
    return arith.constant(kind, ir.IntegerAttr.get(kind, value))


def _over_rows(op: str, x: jax.Array, scratch_ref: Any, interpret: bool) -> jax.Array:
    """Maximum or sum ("max", "add") over the rows of [rows, columns], which the four warps share.

    Pallas' own reductions would have both consumers use the same scratch memory.
    """
    if interpret:
        return x.max(axis=0) if op == "max" else x.sum(axis=0)

    @plgpu.inline_mgpu(
        arg_types=(_KEYS_BY_HEADS, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((x.shape[1],), jnp.float32, _BY_HEAD),
    )
    def reduce(ctx, x, scratch):
        del ctx
        return x.reduce(op, 0, scratch)

    return reduce(x, scratch_ref)


def _arrive(counters_ref: Any, index: jax.Array, expected: jax.Array, interpret: bool) -> jax.Array:
    """Counts this warpgroup's arrival, after all its stores to memory: whether it is the last of `expected`.

    What the others stored before they arrived may be read by the last.
    """
    if interpret:  # with one CTA: the interpreter has no atomic operation that returns a value
        count = counters_ref[index] + 1
        counters_ref[index] = count
        return count == expected

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT, plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT),
    )
    def arrive(ctx, counters, index, expected):
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        at = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(counters), [_i32(index)], i32)
        thread = mgpu.utils.thread_idx()
        lane = arith.remui(thread, _const(_WARPGROUP))
        mgpu.utils.warpgroup_barrier()
        # Thread 0 counts, and its fences cover what barriers show it and the others; a barrier's reduction tells all
        # 128 what it found. Barriers below 8 are Mosaic's own.
        barrier = arith.addi(arith.divui(thread, _const(_WARPGROUP)), _const(8))
        last = llvm.inline_asm(
            i32,
            [at, lane, _i32(expected), barrier],
            """{
            .reg .pred first, mine, all;
            .reg .b32 old;
            setp.eq.u32 first, $2, 0;
            mov.b32 old, -1;
            @first fence.acq_rel.gpu;
            @first atom.add.relaxed.gpu.global.u32 old, [$1], 1;
            @first fence.acq_rel.gpu;
            add.u32 old, old, 1;
            setp.eq.and.u32 mine, old, $3, first;
            barrier.cta.red.or.pred all, $4, 128, mine;
            selp.b32 $0, 1, 0, all;
            }""",
            "=r,l,r,r,r,~{memory}",
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(last, (), is_signed=True)

    return arrive(counters_ref, index, expected) != 0


def _load_table(tables_ref: Any, row: jax.Array, first: jax.Array, entries: int, interpret: bool) -> jax.Array:
    """A row's `entries` entries from the `first` on, one a thread of the warpgroup; past the row's end, its last."""
    width = tables_ref.shape[1]
    if interpret:
        return jnp.stack([tables_ref[row, jnp.minimum(first + j, width - 1)] for j in range(entries)])

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT, plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct((_WARPGROUP,), jnp.int32, plgpu.Layout.WG_STRIDED((_WARPGROUP,), 1)),
    )
    def fetch(ctx, tables, row, first):
        del ctx
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        lane = arith.remui(mgpu.utils.thread_idx(), _const(_WARPGROUP))
        entry = arith.minsi(arith.addi(_i32(first), lane), _const(width - 1))
        at = arith.addi(arith.muli(arith.extsi(i64, _i32(row)), _const(width, 64)), arith.extsi(i64, entry))
        one = ir.VectorType.get((1,), i32)
        value = llvm.load(one, mgpu.utils.getelementptr(mgpu.utils.memref_ptr(tables), [at], i32))
        layout = mgpu.WGStridedFragLayout((_WARPGROUP,), 1)
        registers = np.array([value], dtype=object)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    return fetch(tables_ref, row, first)


def _store_heads(
    out_ref: Any, lse_ref: Any, out: jax.Array, lse: jax.Array, first: jax.Array, column: jax.Array, rows: int
) -> None:
    """Stores `rows` columns of out [head_dim, columns] and lse [columns], from `column` on, as heads from `first` on.

    out_ref: [all heads, head_dim]; lse_ref: [all heads]. TMA cannot: it moves heads by eights.
    """
    head_dim, columns = out.shape

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), _KEYS_BY_HEADS, _BY_HEAD, *[plgpu.Layout.WG_SPLAT] * 2)
    )
    def store(ctx, out_gmem, lse_gmem, out, lse, first, column):
        del ctx
        i64, f32 = ir.IntegerType.get_signless(64), ir.F32Type.get()
        element = ir.MemRefType(out_gmem.type).element_type
        out_base, lse_base = mgpu.utils.memref_ptr(out_gmem), mgpu.utils.memref_ptr(lse_gmem)
        thread = arith.remui(mgpu.utils.thread_idx(), _const(_WARPGROUP))
        warp, lane = arith.divui(thread, _const(32)), arith.remui(thread, _const(32))
        dim = arith.addi(arith.muli(warp, _const(16)), arith.divui(lane, _const(4)))
        pair = arith.muli(arith.remui(lane, _const(4)), _const(2))
        # A thread holds, of every 64 rows and 8 columns, two columns of two rows that are 8 apart.
        registers = out.registers.reshape(head_dim // 64, columns // 8, 2)
        lse_registers = list(lse.registers.flat)
        for eight in range(columns // 8):
            for k in range(2):
                mine = arith.subi(arith.addi(pair, _const(8 * eight + k)), _i32(column))
                inside = arith.andi(
                    arith.cmpi(arith.CmpIPredicate.sge, mine, _const(0)),
                    arith.cmpi(arith.CmpIPredicate.slt, mine, _const(rows)),
                )
                with mgpu.utils.when(inside):
                    head = arith.extsi(i64, arith.addi(_i32(first), mine))
                    start = arith.addi(arith.muli(head, _const(head_dim, 64)), arith.extsi(i64, dim))
                    for part in range(head_dim // 64):
                        for half in range(2):
                            at = arith.addi(start, _const(64 * part + 8 * half, 64))
                            value = llvm.extractelement(registers[part, eight, half], _const(k))
                            llvm.store(value, mgpu.utils.getelementptr(out_base, [at], element))
                    with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, dim, _const(0))):
                        value = llvm.extractelement(lse_registers[eight], _const(k))
                        llvm.store(value, mgpu.utils.getelementptr(lse_base, [head], f32))

    store(out_ref, lse_ref, out, lse, first, column)


def _swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the layout that wgmma and TMA agree on; rows are multiples of 128 bytes here."""
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


# --- the kernel ------------------------------------------------------------------------------------------------------


class _State(NamedTuple):
    """Attention to some keys, not normalised: acc [head_dim, columns] sums 2^(score - top) of the values, total
    [columns] of 1; top [columns] is the greatest score, all in base 2."""

    acc: jax.Array
    top: jax.Array
    total: jax.Array


def _across(x: jax.Array, rows: int) -> jax.Array:
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), [1])


def _fold(a: _State, b: _State) -> _State:
    """Attention to the keys of both."""
    top = jnp.maximum(a.top, b.top)
    by_a, by_b = jnp.exp2(a.top - top), jnp.exp2(b.top - top)
    rows = a.acc.shape[0]
    acc = a.acc * _across(by_a, rows) + b.acc * _across(by_b, rows)
    return _State(acc, top, a.total * by_a + b.total * by_b)


@dataclass(frozen=True)
class _Shape:
    """What the kernel is specialised for; `rows` query heads of one KV head make a group."""

    batch: int
    heads: int
    kv_heads: int
    rows: int
    columns: int
    slots: int  # the most chunks that a sequence can touch
    splits: int  # the most chunks that are cut into leaves
    block_size: int
    head_dim: int
    dtype: Any
    scale: float
    sliding_window: int | None
    logit_softcap: float | None
    alibi: bool
    interpret: bool

    @property
    def groups(self) -> int:
        return self.heads // self.rows


def group_rows(share: int) -> tuple[int, int]:
    """(query heads of a group, columns of a tile that holds them), for `share` query heads a KV head.

    The heads of all sequences stand one after another and tiles of queries start at multiples of 8: a group that does
    not needs columns for the heads before it, which are computed in vain.
    """

    def columns(rows: int) -> int:
        return -(-(8 - math.gcd(rows, 8) + rows) // 8) * 8

    rows = max(r for r in range(1, share + 1) if share % r == 0 and columns(r) <= _MAX_COLUMNS)
    return rows, columns(rows)


def _kernel(
    s: _Shape,
    config: Config,
    q_ref: Any,
    pool_ref: Any,
    tables_ref: Any,
    units_ref: Any,
    num_units_ref: Any,
    slopes_ref: Any,
    counters_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    leaf_parts: Any,
    chunk_parts: Any,
    q_s: Any,
    k_s: Any,
    v_s: Any,
    p_s: Any,
    table_s: Any,
    scratch_s: Any,
    handover_s: Any,
    q_full: Any,
    q_free: Any,
    k_full: Any,
    v_full: Any,
    k_free: Any,
    v_free: Any,
    handed: Any,
    taken: Any,
) -> None:
    tile, stages, consumers = config.tile, config.stages, config.consumers
    q_stages, handovers = config.q_stages, config.handovers
    groups, columns, head_dim, block_size = s.groups, s.columns, s.head_dim, s.block_size
    groups_a_kv_head = groups // s.kv_heads
    q_tiles = columns // 8
    box = pool_ref.shape[1]
    boxes, boxes_a_block = tile // box, block_size // box
    leaves_a_chunk = config.chunk // config.leaf
    if config.overlap_launch and not s.interpret:
        plgpu.griddepcontrol_wait()
    cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")

    def seat(turn: jax.Array) -> jax.Array:
        """Units are dealt out in a snake: they come longest first, and who gets the longest of one turn gets the
        shortest of the next."""
        return jnp.where(lax.rem(turn, jnp.int32(2)) == 0, cta, config.ctas - 1 - cta)

    total = num_units_ref[0] * groups
    full_turns = lax.div(total, jnp.int32(config.ctas))
    mine = full_turns + (seat(full_turns) < total - full_turns * config.ctas).astype(jnp.int32)

    def unit(i: jax.Array) -> tuple[jax.Array, ...]:
        """Its group of heads, and the columns of its row in the list."""
        index = seat(i) + i * config.ctas
        w = jnp.minimum(lax.div(index, jnp.int32(groups)), units_ref.shape[0] - 1)
        return lax.rem(index, jnp.int32(groups)), *(units_ref[w, column] for column in range(9))

    def tiles_of(fields: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        """First tile and number of tiles of a unit."""
        begin, end = fields[1 + _BEGIN], fields[1 + _END]
        first = lax.div(begin, jnp.int32(tile))
        return first, pl.cdiv(end, jnp.int32(tile)) - first

    def first_head(fields: tuple[jax.Array, ...]) -> jax.Array:
        return fields[1 + _ROW] * s.heads + fields[0] * s.rows

    def table_of(fields: tuple[jax.Array, ...]) -> jax.Array:
        first = lax.div(fields[1 + _BEGIN], jnp.int32(block_size))
        return _load_table(tables_ref, fields[1 + _ROW], first, table_s.shape[0], s.interpret)

    def produce() -> None:
        def run_unit(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            steps, table, fields = carry[:consumers], carry[consumers], carry[consumers + 1 :]
            group, end = fields[0], fields[1 + _END]
            head = lax.div(group, jnp.int32(groups_a_kv_head))
            first, tiles = tiles_of(fields)
            first_entry = lax.div(fields[1 + _BEGIN], jnp.int32(block_size))
            table_s[...] = table
            plgpu.commit_smem()
            ahead = unit(i + 1)
            next_table = table_of(ahead)

            q_slot = lax.rem(i, jnp.int32(q_stages))

            @pl.when(i >= q_stages)
            def _wait_q() -> None:
                plgpu.barrier_wait(q_free.at[q_slot])

            q_tile = lax.div(first_head(fields), jnp.int32(8))
            for j in range(q_tiles):
                source = q_ref.at[jnp.minimum(q_tile + j, q_ref.shape[0] - 1)]
                plgpu.copy_gmem_to_smem(source, q_s.at[q_slot, pl.ds(8 * j, 8)], q_full.at[q_slot])

            def load_tile(nth: jax.Array, steps: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                consumer = lax.rem(nth, jnp.int32(consumers))
                step = steps[0] if consumers == 1 else jnp.where(consumer == 0, steps[0], steps[1])
                stage = consumer * stages + lax.rem(step, jnp.int32(stages))
                start = (first + nth) * tile
                copies = []
                for j in range(boxes):
                    position = start + j * box
                    entry = jnp.minimum(lax.div(position, jnp.int32(block_size)) - first_entry, table_s.shape[0] - 1)
                    # An empty sequence has no tile; other tiles begin with a token, and no copy follows their last.
                    block = table_s[entry]
                    part = lax.rem(lax.div(position, jnp.int32(box)), jnp.int32(boxes_a_block))
                    copies.append((block * (2 * s.kv_heads) + head) * boxes_a_block + part)
                for kv, ring, full, free in ((0, k_s, k_full, k_free), (1, v_s, v_full, v_free)):

                    @pl.when(step >= stages)
                    def _wait(free: Any = free) -> None:
                        plgpu.barrier_wait(free.at[stage])

                    for j, index in enumerate(copies):
                        source = pool_ref.at[index + kv * (s.kv_heads * boxes_a_block)]
                        target = ring.at[stage, pl.ds(j * box, box)]
                        copy = partial(plgpu.copy_gmem_to_smem, source, target, full.at[stage])
                        if j == 0:
                            copy()
                        else:  # a tile's end that holds no token is left as it is
                            lax.cond(start + j * box < end, copy, partial(plgpu.barrier_arrive, full.at[stage]))
                return tuple(n + (consumer == c).astype(jnp.int32) for c, n in enumerate(steps))

            steps = lax.fori_loop(0, tiles, load_tile, steps)
            return *steps, next_table, *ahead

        head_start = unit(jnp.int32(0))
        start = ((jnp.int32(0),) * consumers, (table_of(head_start),), head_start)
        carry = lax.fori_loop(0, mine, run_unit, sum(start, ()))
        # No barrier may have an arrival outstanding when the CTA ends.
        for consumer in range(consumers):
            for stage in range(stages):

                @pl.when(stage < carry[consumer])
                def _drain(stage: int = consumer * stages + stage) -> None:
                    plgpu.barrier_wait(k_free.at[stage])
                    plgpu.barrier_wait(v_free.at[stage])

        for q_slot in range(q_stages):

            @pl.when(q_slot < mine)
            def _drain_q(q_slot: int = q_slot) -> None:
                plgpu.barrier_wait(q_free.at[q_slot])

    def by_head(value: float) -> jax.Array:
        return plgpu.layout_cast(jnp.full((columns,), value, jnp.float32), _BY_HEAD)

    def nothing() -> _State:
        acc = plgpu.layout_cast(jnp.zeros((head_dim, columns), jnp.float32), _KEYS_BY_HEADS)
        return _State(acc, by_head(_NO_KEYS), by_head(0.0))

    def read(refs: tuple[Any, ...], at: Any) -> _State:
        layouts = (_KEYS_BY_HEADS, _BY_HEAD, _BY_HEAD)
        pairs = zip(refs, layouts, strict=True)
        return _State(*(plgpu.load(ref.at[at], layout=layout, optimized=False) for ref, layout in pairs))

    def write(refs: tuple[Any, ...], at: Any, state: _State) -> None:
        for ref, value in zip(refs, state, strict=True):
            ref.at[at][...] = value

    def fold_stored(refs: tuple[Any, ...], at: Callable[[jax.Array], jax.Array], count: jax.Array, most: int) -> _State:
        """The fold of `count` stored states in order; several are loaded together."""
        unroll = max(1, min(most, 8, _FOLD_ELEMENTS // (head_dim * columns)))

        def some(i: jax.Array, state: _State) -> _State:
            parts = []
            for j in range(unroll):
                n = i * unroll + j
                part = read(refs, at(jnp.minimum(n, count - 1)))
                top = jnp.where(n < count, part.top, jnp.full_like(part.top, _NO_KEYS)) if unroll > 1 else part.top
                parts.append(_State(part.acc, top, part.total))
            for part in parts:
                state = _fold(state, part)
            return state

        return lax.fori_loop(0, pl.cdiv(count, jnp.int32(unroll)), some, nothing())

    def consume() -> None:
        def run_unit(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            step, fields = carry[0], carry[1:]
            group, end, length = fields[0], fields[1 + _END], fields[1 + _LENGTH]
            first, tiles = tiles_of(fields)
            ahead = unit(i + 1)
            column = lax.rem(first_head(fields), jnp.int32(8))
            q_slot = lax.rem(i, jnp.int32(q_stages))
            scratch = scratch_s.at[warpgroup]
            if s.alibi:
                own_slopes = slopes_ref.at[pl.ds(8 + group * s.rows - column, columns)]
                slopes = plgpu.load(own_slopes, layout=_BY_HEAD, optimized=False) * _LOG2E
            plgpu.barrier_wait(q_full.at[q_slot])

            def attend(n: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
                acc, top, totals = carry
                start = (first + n * consumers + warpgroup) * tile
                stage = warpgroup * stages + lax.rem(step + n, jnp.int32(stages))
                plgpu.barrier_wait(k_full.at[stage])

                def score(s_ref: Any) -> jax.Array:
                    plgpu.wgmma(s_ref, k_s.at[stage], q_s.at[q_slot].T)
                    return s_ref[...]

                scores = pl.run_scoped(score, plgpu.ACC((tile, columns), jnp.float32))
                plgpu.barrier_arrive(k_free.at[stage])
                if s.logit_softcap is None:
                    scores = scores * (s.scale * _LOG2E)
                else:  # tanh(x) = 1 - 2 / (1 + exp(2 x)); the hardware's tanh is too coarse
                    e = jnp.exp2(scores * (2 * _LOG2E * s.scale / s.logit_softcap))
                    scores = (s.logit_softcap * _LOG2E) - (2 * s.logit_softcap * _LOG2E) / (1.0 + e)
                keys = plgpu.broadcasted_iota(jnp.int32, (tile, columns), 0, layout=_KEYS_BY_HEADS) + start
                if s.alibi:
                    scores = scores + _across(slopes, tile) * (keys - (length - 1)).astype(jnp.float32)
                seen = keys < end
                if s.sliding_window is not None:
                    seen = seen & (keys >= length - s.sliding_window)
                scores = jnp.where(seen, scores, jnp.full_like(scores, _NO_KEYS))
                new_top = jnp.maximum(top, _over_rows("max", scores, scratch, s.interpret))
                shrink = jnp.exp2(top - new_top)
                p = jnp.exp2(scores - _across(new_top, tile))
                totals = totals * _across(shrink, tile) + p
                acc = acc * _across(shrink, head_dim)
                p_s.at[warpgroup].T[...] = p.astype(s.dtype)
                plgpu.commit_smem()
                plgpu.barrier_wait(v_full.at[stage])

                # Rows that the sequence does not own may hold NaN, and 0 * NaN is NaN.
                first_seen = jnp.int32(0) if s.sliding_window is None else length - s.sliding_window

                @pl.when((start + tile > end) | (start < first_seen))
                def _zero_unowned() -> None:
                    for r in range(0, tile, 64):
                        for c in range(0, head_dim, 64):
                            at = v_s.at[stage, pl.ds(r, 64), pl.ds(c, 64)]
                            key = plgpu.broadcasted_iota(jnp.int32, (64, 64), 0, layout=_KEYS_BY_HEADS) + (start + r)
                            v = plgpu.load(at, layout=_KEYS_BY_HEADS, optimized=False)
                            at[...] = jnp.where((key < end) & (key >= first_seen), v, jnp.zeros_like(v))
                    plgpu.commit_smem()

                def product(o_ref: Any) -> Any:
                    plgpu.wgmma(o_ref, v_s.at[stage].T, p_s.at[warpgroup].T)
                    return o_ref[...] if s.interpret else None

                if s.interpret:  # it has no accumulators that start from registers
                    acc = acc + pl.run_scoped(product, plgpu.ACC((head_dim, columns), jnp.float32))
                else:
                    acc = pl.run_state(product)(plgpu.ACC.init(acc))
                plgpu.barrier_arrive(v_free.at[stage])
                return acc, new_top, totals

            own_tiles = lax.div(tiles - warpgroup + (consumers - 1), jnp.int32(consumers))
            own_leaf = config.leaf // tile // consumers  # tiles of a leaf that are a consumer's

            def attend_leaf(k: jax.Array, state: _State) -> _State:
                totals = plgpu.layout_cast(jnp.zeros((tile, columns), jnp.float32), _KEYS_BY_HEADS)
                acc, top, _ = nothing()
                until = jnp.minimum((k + 1) * own_leaf, own_tiles)
                acc, top, totals = lax.fori_loop(k * own_leaf, until, attend, (acc, top, totals))
                return _fold(state, _State(acc, top, _over_rows("add", totals, scratch, s.interpret)))

            # As many leaves for both consumers, even if one of them has no tile of the last.
            own = lax.fori_loop(0, pl.cdiv(tiles, jnp.int32(config.leaf // tile)), attend_leaf, nothing())
            plgpu.barrier_arrive(q_free.at[q_slot])

            slot = lax.rem(i, jnp.int32(handovers))

            @pl.when(i >= handovers)
            def _wait_taken() -> None:
                plgpu.barrier_wait(taken.at[slot * consumers + warpgroup])

            write(handover_s, slot * consumers + warpgroup, own)
            plgpu.barrier_arrive(handed.at[slot])
            return step + own_tiles, *ahead

        lax.fori_loop(0, mine, run_unit, (jnp.int32(0), *unit(jnp.int32(0))))
        for slot in range(handovers):

            @pl.when(slot < mine)
            def _drain_taken(slot: int = slot) -> None:
                plgpu.barrier_wait(taken.at[slot * consumers + warpgroup])

    def finish() -> None:
        def run_unit(i: jax.Array, fields: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            group, row, chunk, chunks, _, _, _, leaf, leaves, split = fields
            ahead = unit(i + 1)
            head = first_head(fields)
            column = lax.rem(head, jnp.int32(8))
            slot = lax.rem(i, jnp.int32(handovers))
            plgpu.barrier_wait(handed.at[slot])
            states = tuple(read(handover_s, slot * consumers + c) for c in range(consumers))
            for c in range(consumers):
                plgpu.barrier_arrive(taken.at[slot * consumers + c])

            def store(state: _State) -> None:
                seen = state.total > 0
                total = jnp.where(seen, state.total, jnp.full_like(state.total, 1.0))
                out = (state.acc / _across(total, head_dim)).astype(s.dtype)
                lse = (state.top + jnp.log2(total)) * (1 / _LOG2E)
                lse = jnp.where(seen, lse, jnp.full_like(lse, -jnp.inf))
                if not s.interpret:
                    _store_heads(out_ref, lse_ref, out, lse, head, column, s.rows)
                    return
                for at in range(0, columns - s.rows + 1):

                    @pl.when(column == at)
                    def _store(at: int = at) -> None:
                        for j in range(s.rows):
                            out_ref[head + j] = out[:, at + j]
                            lse_ref[head + j] = lse[at + j]

            def finish_chunk(state: _State) -> None:
                if s.slots == 1:
                    store(state)
                    return

                @pl.when(chunks == 1)
                def _alone() -> None:
                    store(state)

                @pl.when(chunks > 1)
                def _together() -> None:
                    def at(n: jax.Array) -> jax.Array:
                        return (row * s.slots + n) * groups + group

                    write(chunk_parts, at(chunk), state)

                    @pl.when(_arrive(counters_ref, (s.splits + row) * groups + group, chunks, s.interpret))
                    def _last() -> None:
                        store(fold_stored(chunk_parts, at, chunks, s.slots))

            def finish_unit(states: tuple[_State, ...]) -> None:
                """Of the states that the consumers have of the unit."""
                if leaves_a_chunk == 1:
                    finish_chunk(functools.reduce(_fold, states))
                    return

                @pl.when(leaves == 1)
                def _whole() -> None:
                    finish_chunk(functools.reduce(_fold, states))

                @pl.when(leaves > 1)
                def _leaf() -> None:
                    place = (split * groups + group) * leaves_a_chunk

                    def at(n: jax.Array, consumer: int) -> jax.Array:
                        return (place + n) * consumers + consumer

                    for consumer, state in enumerate(states):
                        write(leaf_parts, at(leaf, consumer), state)

                    @pl.when(_arrive(counters_ref, split * groups + group, leaves, s.interpret))
                    def _last() -> None:
                        parts = [
                            fold_stored(leaf_parts, partial(at, consumer=c), leaves, leaves_a_chunk)
                            for c in range(consumers)
                        ]
                        finish_chunk(functools.reduce(_fold, parts))

            finish_unit(states)
            return ahead

        lax.fori_loop(0, mine, run_unit, unit(jnp.int32(0)))

    def role(registers: int, run: Callable[[], None]) -> Callable[[], None]:
        def body() -> None:
            if not s.interpret and registers:
                launched = _LAUNCH_REGISTERS[consumers]
                plgpu.set_max_registers(registers, action="increase" if registers > launched else "decrease")
            run()

        return body

    pl.when(warpgroup == consumers)(role(_REGISTERS[consumers][0], produce))
    pl.when(warpgroup == consumers + 1)(role(_REGISTERS[consumers][1], finish))
    pl.when(warpgroup < consumers)(role(_REGISTERS[consumers][2], consume))


@partial(jax.jit, static_argnames=("scale", "sliding_window", "logit_softcap", "config", "interpret"))
def decode_attention(
    q: jax.Array,
    kv_pool: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    alibi_slopes: jax.Array | None,
    *,
    scale: float,
    sliding_window: int | None,
    logit_softcap: float | None,
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`decode_attention` of the package, checked; always with its log-sum-exp, float32 [B, H].

    interpret: a `plgpu.InterpretGPUParams` runs the kernel on a CPU; with one CTA where sequences are split.
    """
    batch, heads, head_dim = q.shape
    if head_dim not in HEAD_DIMS:
        features = {"scale": scale, "sliding_window": sliding_window, "logit_softcap": logit_softcap}
        return heads_as_rows.decode_attention(q, kv_pool, block_tables, kv_lens, alibi_slopes, **features)
    _, _, kv_heads, block_size, _ = kv_pool.shape
    rows, columns = group_rows(heads // kv_heads)
    groups = heads // rows
    if config is None:
        config = default_config(head_dim, columns)
    max_len = block_tables.shape[1] * block_size
    slots = max_chunks(max_len, config.chunk, sliding_window)
    shape = _Shape(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        rows=rows,
        columns=columns,
        slots=slots,
        splits=max_split_chunks(batch, groups, slots, config),
        block_size=block_size,
        head_dim=head_dim,
        dtype=q.dtype,
        scale=scale,
        sliding_window=sliding_window,
        logit_softcap=logit_softcap,
        alibi=alibi_slopes is not None,
        interpret=interpret is not None,
    )
    work = plan(kv_lens, max_len, groups, sliding_window, config)
    slopes = jnp.zeros((8,), jnp.float32) if alibi_slopes is None else jnp.pad(alibi_slopes, (8, _MAX_COLUMNS))
    flat = q.reshape(batch * heads, head_dim)
    tiles = jnp.pad(flat, ((0, -(batch * heads) % 8), (0, 0))).reshape(-1, 8, head_dim)
    box = min(block_size, config.tile)  # rows of one TMA copy

    def states(count: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        per_head = jax.ShapeDtypeStruct((count, columns), jnp.float32)
        return jax.ShapeDtypeStruct((count, head_dim, columns), jnp.float32), per_head, per_head

    leaves = config.chunk // config.leaf
    entries = max(1, config.chunk // block_size)
    entries = entries if interpret is not None else max(entries, _WARPGROUP)
    counters = jax.new_ref(jnp.zeros(((shape.splits + batch) * groups,), jnp.int32))
    tile, q_stages, consumers = config.tile, config.q_stages, config.consumers
    num_tiles = consumers * config.stages
    per_head = plgpu.SMEM((config.handovers * consumers, columns), jnp.float32)
    handover = (plgpu.SMEM((config.handovers * consumers, head_dim, columns), jnp.float32), per_head, per_head)
    ring = _swizzled((num_tiles, tile, head_dim), q.dtype)
    out, lse, *_ = plgpu.kernel(
        partial(_kernel, shape, config),
        out_type=[
            jax.ShapeDtypeStruct((batch * heads, head_dim), q.dtype),
            jax.ShapeDtypeStruct((batch * heads,), jnp.float32),
            states(shape.splits * groups * leaves * consumers if leaves > 1 else 1),
            states(batch * slots * groups if slots > 1 else 1),
        ],
        scratch_types=[
            _swizzled((q_stages, columns, head_dim), q.dtype),
            ring,
            ring,
            _swizzled((consumers, columns, tile), q.dtype),
            plgpu.SMEM((entries,), jnp.int32),
            plgpu.SMEM((consumers, 4 * 32 * 2), jnp.float32),
            handover,
            plgpu.Barrier(num_barriers=q_stages, num_arrivals=columns // 8),
            plgpu.Barrier(num_barriers=q_stages, num_arrivals=consumers),
            plgpu.Barrier(num_barriers=num_tiles, num_arrivals=tile // box),
            plgpu.Barrier(num_barriers=num_tiles, num_arrivals=tile // box),
            plgpu.Barrier(num_barriers=num_tiles),
            plgpu.Barrier(num_barriers=num_tiles),
            plgpu.Barrier(num_barriers=config.handovers, num_arrivals=consumers),
            plgpu.Barrier(num_barriers=config.handovers * consumers),
        ],
        grid=(config.ctas,),
        grid_names=("cta",),
        num_threads=consumers + 2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="paged_decode",
        **({} if interpret is None else {"interpret": interpret}),
    )(tiles, kv_pool.reshape(-1, box, head_dim), block_tables, work.units, work.num_units, slopes, counters)
    return out.reshape(batch, heads, head_dim), lse.reshape(batch, heads)
