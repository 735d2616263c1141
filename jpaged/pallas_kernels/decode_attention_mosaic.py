"""Decode attention over the paged pool as one Mosaic GPU kernel (Hopper).

One query token a sequence: every key and value is read once, so the kernel is a bandwidth machine. Flash-Decoding
(split KV) over a persistent grid, in a single launch. Sequences are cut at *fixed positions*, on two levels:

    kv_lens        [ 2500                       , 700      ]
    chunks, 2,048  |0..2047          |2048..2499|0..699    |
    leaves         |0   |1   |2   |3 |0         |0|1|..|5  |

A unit of work is a chunk or, in batches too small to occupy half of the multiprocessors, a leaf of one (128 tokens in
sequences of up to 1,024, 256 up to 2,048, 512 in longer ones); times the groups of query heads that share a KV head. A
chunk's result is the fold of its leaves' results in order, whether one CTA computes them all or the CTA that finishes
the chunk's last leaf collects them from memory, and a sequence's is the fold of its chunks': so its bits depend neither
on the batch nor on who came last. `plan` makes the list of units on the device, by plain XLA operations on the lengths
alone; in a program of many layers the compiler keeps one copy.

A CTA is three warpgroups:

    producer    one TMA copy a block (K and V apart) into rings of tiles, one mbarrier a tile each
    consumer    all products have keys or head_dim as their rows and the group's query heads as their 8 (to 32) columns,
                so that little is computed for padding: S^T = K Q^T, online softmax over the rows in base 2,
                O^T += V^T P^T
    finisher    takes a unit's result from shared memory and writes the output, or leaves it for who comes last: the
                consumer never waits for memory

Sources: Flash-Decoding (pytorch.org/blog/flash-decoding), FlashAttention-2 and -3 (arXiv:2307.08691, 2407.08608),
PagedAttention (arXiv:2309.06180).
"""

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
from jpaged.pallas_kernels import decode_plan
from jpaged.pallas_kernels.decode_plan import Cuts, max_chunks, plan

_LOG2E = math.log2(math.e)
_NO_KEYS = -1e30  # running maxima start here, so that no inf - inf is ever formed
_SMEM_BYTES = 227 * 1024 - 2048
_MAX_COLUMNS = 32
_FOLD_ELEMENTS = 128 * 63  # of partial results whose loads are in flight together: less than 64 registers a thread
_WARPGROUP = 128
_REDUCTION_BYTES = _WARPGROUP * 2 * 4  # two columns a thread; of one warpgroup, since others would use the same
_REGISTERS = {"producer": 72, "finisher": 200, "consumer": 232}  # of a thread; each starts with 168
HEAD_DIMS = (64, 128, 256)  # rows of a wgmma are 64; others go to the kernel that has the heads as rows
BLOCK_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class Config(Cuts):
    """Shape of the kernel, beside where it cuts.

    chunk: besides, of no more than 128 blocks.
    stages: depth of the rings of K and V tiles.
    q_stages: units whose queries are held at once.
    handovers: units whose results wait for the finisher at once.
    """

    stages: int
    q_stages: int = 2
    handovers: int = 2


def default_config(head_dim: int, columns: int) -> Config:
    device = jax.devices()[0]
    ctas = getattr(device, "core_count", 132) if device.platform == "gpu" else 132
    tile = 128 if head_dim == 64 else 64
    state = columns * (head_dim + 2) * 4
    handovers = 2 if state <= 16 * 1024 else 1
    # Queries, P, states, then the scratch of reductions, the table and the barriers.
    other = columns * 2 * (2 * head_dim + tile) + handovers * state + 5 * 1024
    most = {64: 6, 256: 2}.get(head_dim, 3)  # deeper rings measured slower: loads queue up behind each other
    stages = min(most, (_SMEM_BYTES - other) // (tile * head_dim * 4))
    return Config(tile=tile, leaf=128, chunk=2048, ctas=ctas, stages=stages, handovers=handovers)


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


# --- what Pallas has no word for -------------------------------------------------------------------------------------

_KEYS_BY_HEADS = plgpu.Layout.WGMMA  # of every product here: [rows, columns of query heads]
_BY_HEAD = plgpu.Layout.WGMMA.reduce(0)


def _i32(x: object) -> ir.Value:
    """The MLIR value of a scalar that `inline_mgpu` passes."""
    return x.registers.item() if isinstance(x, mgpu.FragmentedArray) else x


def _const(value: int, bits: int = 32) -> ir.Value:
    kind = ir.IntegerType.get_signless(bits)
    return arith.constant(kind, ir.IntegerAttr.get(kind, value))


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
    cuts: int  # the most chunks that are cut into leaves
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
    tile, stages, q_stages, handovers = config.tile, config.stages, config.q_stages, config.handovers
    groups, columns, head_dim, block_size = s.groups, s.columns, s.head_dim, s.block_size
    groups_a_kv_head = groups // s.kv_heads
    q_tiles = columns // 8
    box = pool_ref.shape[1]
    boxes, boxes_a_block = tile // box, block_size // box
    if not s.interpret:
        plgpu.griddepcontrol_wait()  # the grid starts while the kernel before it ends
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
        return lax.rem(index, jnp.int32(groups)), *(units_ref[w, field] for field in range(decode_plan.FIELDS))

    def tiles_of(fields: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        """First tile and number of tiles of a unit."""
        begin, end = fields[1 + decode_plan.BEGIN], fields[1 + decode_plan.END]
        first = lax.div(begin, jnp.int32(tile))
        return first, pl.cdiv(end, jnp.int32(tile)) - first

    def first_head(fields: tuple[jax.Array, ...]) -> jax.Array:
        return fields[1 + decode_plan.ROW] * s.heads + fields[0] * s.rows

    def table_of(fields: tuple[jax.Array, ...]) -> jax.Array:
        first = lax.div(fields[1 + decode_plan.BEGIN], jnp.int32(block_size))
        return _load_table(tables_ref, fields[1 + decode_plan.ROW], first, table_s.shape[0], s.interpret)

    def produce() -> None:
        def run_unit(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            # Under load a read takes as long as a short unit does: the table is fetched a unit ahead, and what says
            # where it is, two.
            step, table, fields, ahead = (
                carry[0],
                carry[1],
                carry[2 : 3 + decode_plan.FIELDS],
                carry[3 + decode_plan.FIELDS :],
            )
            group, end = fields[0], fields[1 + decode_plan.END]
            head = lax.div(group, jnp.int32(groups_a_kv_head))
            first, tiles = tiles_of(fields)
            first_entry = lax.div(fields[1 + decode_plan.BEGIN], jnp.int32(block_size))
            table_s[...] = table
            plgpu.commit_smem()
            next_table = table_of(ahead)
            next_ahead = unit(i + 2)

            q_slot = lax.rem(i, jnp.int32(q_stages))

            @pl.when(i >= q_stages)
            def _wait_q() -> None:
                plgpu.barrier_wait(q_free.at[q_slot])

            q_tile = lax.div(first_head(fields), jnp.int32(8))
            for j in range(q_tiles):
                source = q_ref.at[jnp.minimum(q_tile + j, q_ref.shape[0] - 1)]
                plgpu.copy_gmem_to_smem(source, q_s.at[q_slot, pl.ds(8 * j, 8)], q_full.at[q_slot])

            def load_tile(nth: jax.Array, step: jax.Array) -> jax.Array:
                stage = lax.rem(step, jnp.int32(stages))
                start = (first + nth) * tile
                copies = []
                for j in range(boxes):
                    position = start + j * box
                    entry = jnp.minimum(lax.div(position, jnp.int32(block_size)) - first_entry, table_s.shape[0] - 1)
                    part = lax.rem(lax.div(position, jnp.int32(box)), jnp.int32(boxes_a_block))
                    copies.append((table_s[entry] * (2 * s.kv_heads) + head) * boxes_a_block + part)
                for kv, ring, full, free in ((0, k_s, k_full, k_free), (1, v_s, v_full, v_free)):

                    @pl.when(step >= stages)
                    def _wait(free: Any = free) -> None:
                        plgpu.barrier_wait(free.at[stage])

                    for j, index in enumerate(copies):
                        source = pool_ref.at[index + kv * (s.kv_heads * boxes_a_block)]
                        target = ring.at[stage, pl.ds(j * box, box)]
                        copy = partial(plgpu.copy_gmem_to_smem, source, target, full.at[stage])
                        if j == 0:  # every tile begins with a token
                            copy()
                        else:  # what is behind the last token is left as it is: its entries may be anything
                            lax.cond(start + j * box < end, copy, partial(plgpu.barrier_arrive, full.at[stage]))
                return step + 1

            step = lax.fori_loop(0, tiles, load_tile, step)
            return step, next_table, *ahead, *next_ahead

        fields, ahead = unit(jnp.int32(0)), unit(jnp.int32(1))
        step, *_ = lax.fori_loop(0, mine, run_unit, (jnp.int32(0), table_of(fields), *fields, *ahead))
        # No barrier may have an arrival outstanding when the CTA ends.
        for stage in range(stages):

            @pl.when(stage < step)
            def _drain(stage: int = stage) -> None:
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
            group, end, length = fields[0], fields[1 + decode_plan.END], fields[1 + decode_plan.LENGTH]
            first, tiles = tiles_of(fields)
            ahead = unit(i + 1)
            column = lax.rem(first_head(fields), jnp.int32(8))
            q_slot = lax.rem(i, jnp.int32(q_stages))
            if s.alibi:
                own_slopes = slopes_ref.at[pl.ds(8 + group * s.rows - column, columns)]
                slopes = plgpu.load(own_slopes, layout=_BY_HEAD, optimized=False) * _LOG2E
            plgpu.barrier_wait(q_full.at[q_slot])

            def attend(n: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
                acc, top, totals = carry
                start = (first + n) * tile
                stage = lax.rem(step + n, jnp.int32(stages))
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
                new_top = jnp.maximum(top, scores.max(axis=0))
                shrink = jnp.exp2(top - new_top)
                p = jnp.exp2(scores - _across(new_top, tile))
                totals = totals * _across(shrink, tile) + p
                acc = acc * _across(shrink, head_dim)
                p_s.T[...] = p.astype(s.dtype)
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
                    plgpu.wgmma(o_ref, v_s.at[stage].T, p_s.T)
                    return o_ref[...] if s.interpret else None

                if s.interpret:  # it has no accumulators that start from registers
                    acc = acc + pl.run_scoped(product, plgpu.ACC((head_dim, columns), jnp.float32))
                else:
                    acc = pl.run_state(product)(plgpu.ACC.init(acc))
                plgpu.barrier_arrive(v_free.at[stage])
                return acc, new_top, totals

            leaf_tiles = fields[1 + decode_plan.LEAF_TILES]

            def attend_leaf(k: jax.Array, state: _State) -> _State:
                totals = plgpu.layout_cast(jnp.zeros((tile, columns), jnp.float32), _KEYS_BY_HEADS)
                acc, top, _ = nothing()
                until = jnp.minimum((k + 1) * leaf_tiles, tiles)
                acc, top, totals = lax.fori_loop(k * leaf_tiles, until, attend, (acc, top, totals))
                return _fold(state, _State(acc, top, totals.sum(axis=0)))

            state = lax.fori_loop(0, pl.cdiv(tiles, leaf_tiles), attend_leaf, nothing())
            plgpu.barrier_arrive(q_free.at[q_slot])

            slot = lax.rem(i, jnp.int32(handovers))

            @pl.when(i >= handovers)
            def _wait_taken() -> None:
                plgpu.barrier_wait(taken.at[slot])

            write(handover_s, slot, state)
            plgpu.barrier_arrive(handed.at[slot])
            return step + tiles, *ahead

        lax.fori_loop(0, mine, run_unit, (jnp.int32(0), *unit(jnp.int32(0))))
        for slot in range(handovers):

            @pl.when(slot < mine)
            def _drain_taken(slot: int = slot) -> None:
                plgpu.barrier_wait(taken.at[slot])

    def finish() -> None:
        def run_unit(i: jax.Array, fields: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            group, row, chunk, chunks, _, _, _, _, leaf, leaves, cut = fields
            ahead = unit(i + 1)
            head = first_head(fields)
            column = lax.rem(head, jnp.int32(8))
            slot = lax.rem(i, jnp.int32(handovers))
            plgpu.barrier_wait(handed.at[slot])
            state = read(handover_s, slot)
            plgpu.barrier_arrive(taken.at[slot])

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

                    @pl.when(_arrive(counters_ref, (s.cuts + row) * groups + group, chunks, s.interpret))
                    def _last() -> None:
                        store(fold_stored(chunk_parts, at, chunks, s.slots))

            if s.cuts == 0 or config.most_leaves == 1:
                finish_chunk(state)
                return ahead

            @pl.when(leaves == 1)
            def _whole() -> None:
                finish_chunk(state)

            @pl.when(leaves > 1)
            def _leaf() -> None:
                place = cut * groups + group

                def at(n: jax.Array) -> jax.Array:
                    return place * config.most_leaves + n

                # As a whole chunk does, which folds its leaves into nothing.
                write(leaf_parts, at(leaf), state)

                @pl.when(_arrive(counters_ref, place, leaves, s.interpret))
                def _last() -> None:
                    finish_chunk(fold_stored(leaf_parts, at, leaves, config.most_leaves))

            return ahead

        lax.fori_loop(0, mine, run_unit, unit(jnp.int32(0)))

    def play(role: str, run: Callable[[], None]) -> Callable[[], None]:
        def body() -> None:
            if not s.interpret:
                registers = _REGISTERS[role]
                plgpu.set_max_registers(registers, action="decrease" if role == "producer" else "increase")
            run()

        return body

    pl.when(warpgroup == 0)(play("consumer", consume))
    pl.when(warpgroup == 1)(play("producer", produce))
    pl.when(warpgroup == 2)(play("finisher", finish))


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
        cuts=decode_plan.max_cut_chunks(batch, groups, slots, config),
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

    entries = max(1, config.chunk // block_size)
    entries = entries if interpret is not None else max(entries, _WARPGROUP)
    counters = jax.new_ref(jnp.zeros(((shape.cuts + batch) * groups,), jnp.int32))
    tile, stages, q_stages, handovers = config.tile, config.stages, config.q_stages, config.handovers
    per_head = plgpu.SMEM((handovers, columns), jnp.float32)
    handover = (plgpu.SMEM((handovers, head_dim, columns), jnp.float32), per_head, per_head)
    ring = _swizzled((stages, tile, head_dim), q.dtype)
    out, lse, *_ = plgpu.kernel(
        partial(_kernel, shape, config),
        out_type=[
            jax.ShapeDtypeStruct((batch * heads, head_dim), q.dtype),
            jax.ShapeDtypeStruct((batch * heads,), jnp.float32),
            states(max(1, shape.cuts * groups * config.most_leaves)),
            states(batch * slots * groups if slots > 1 else 1),
        ],
        scratch_types=[
            _swizzled((q_stages, columns, head_dim), q.dtype),
            ring,
            ring,
            _swizzled((columns, tile), q.dtype),
            plgpu.SMEM((entries,), jnp.int32),
            handover,
            plgpu.Barrier(num_barriers=q_stages, num_arrivals=columns // 8),
            plgpu.Barrier(num_barriers=q_stages),
            plgpu.Barrier(num_barriers=stages, num_arrivals=tile // box),
            plgpu.Barrier(num_barriers=stages, num_arrivals=tile // box),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=handovers),
            plgpu.Barrier(num_barriers=handovers),
        ],
        grid=(config.ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=_REDUCTION_BYTES,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        kernel_name="paged_decode",
        **({} if interpret is None else {"interpret": interpret}),
    )(tiles, kv_pool.reshape(-1, box, head_dim), block_tables, work.units, work.num_units, slopes, counters)
    return out.reshape(batch, heads, head_dim), lse.reshape(batch, heads)
