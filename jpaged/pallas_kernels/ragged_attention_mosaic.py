"""Ragged attention for Hopper: prefill chunks and decode rows over the paged pool, in one Pallas Mosaic GPU kernel.

The structure is FlashAttention-3's (arXiv:2407.08608): a persistent block of one producer warpgroup, which brings
keys and values through the block table by TMA, and consumer warpgroups of 64 rows each, whose softmax overlaps the
matrix products of the others and, where registers allow, of themselves.

    tokens of the step (query_starts)      | row 0        |1| row 2                     | padding |
    windows of `window` tokens, aligned    |      |      |      |      |      |      |      |     |
    tiles: (row, window) pairs that meet   |t0    |t1   t2|t3 .. the work list, longest first

    rows of a consumer's 64 x D query tile: head g of the KV group has rows g * n .. g * n + n - 1, one for each of
    the consumer's n tokens (n a multiple of 8), so that a window of one head is one TMA box.

A window may hold tokens of several rows: each row's tile computes the window whole and stores its own tokens alone.
`docs/kernels.md` says what the tiles cost in registers and shared memory, and what was measured.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

_LOG2E = math.log2(math.e)
_FLOOR = -1e30  # running maxima start here, so that a row that sees no key of a tile never forms inf - inf
_ROWS = 64  # of a consumer warpgroup: the M of a wgmma
_MAX_HEADS = 8  # of a KV group in one tile: 64 rows / 8 tokens
_DEFAULT_SMS = 132


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the kernel is cut.

    Attributes:
        block_kv: keys of a step.
        stages: steps whose keys and values fit in shared memory.
        consumers: warpgroups that compute, each on 64 rows.
        turns: whether consumers take turns at issuing products, so that their softmaxes do not coincide.
        registers: of a consumer and of the producer, a thread.
        q_stages: tiles of queries that a consumer has room for.
    """

    block_kv: int = 128
    stages: int = 2
    consumers: int = 2
    turns: bool = False
    registers: tuple[int, int] = (232, 40)
    q_stages: int = 2


def pick_tiling(head_dim: int) -> Tiling:
    """The measured best for a head_dim."""
    if head_dim > 128:
        return Tiling(block_kv=64, turns=True, q_stages=1)
    if head_dim <= 64:
        return Tiling(stages=4, consumers=3, registers=(160, 32))
    return Tiling()


def unsupported(q: jax.Array, kv_pool: jax.Array) -> str | None:
    """Why the kernel cannot take these (checked) arguments; None if it can."""
    _, _, _, block_size, head_dim = kv_pool.shape
    if kv_pool.dtype not in (jnp.bfloat16.dtype, jnp.float16.dtype):
        return f"it takes bfloat16 and float16, not {kv_pool.dtype}"
    if head_dim % 16 or not 16 <= head_dim <= 256:
        return f"head_dim must be a multiple of 16 up to 256, got {head_dim}"
    block_kv = pick_tiling(head_dim).block_kv
    if block_size % 8 or (block_kv % block_size and block_size % block_kv):
        return f"block size must be a multiple of 8 that divides {block_kv} or is divided by it, got {block_size}"
    return None


# --- the work list ---------------------------------------------------------------------------------------------------

# Columns of the work list, one row a tile.
_ROW, _TOKEN, _FIRST, _END, _SHIFT, _KV_LEN, _LO, _LO_FULL, _HI_FULL, _HI = range(10)
_COLUMNS = 32  # the least that one TMA copy brings: 128 bytes


def plan_tiles(
    query_starts: jax.Array,
    kv_lens: jax.Array,
    *,
    tokens: int,
    window: int,
    block_kv: int,
    sliding_window: int | None,
    causal: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """The (row, window) pairs to compute, longest first; plain int32 operations on the device.

    Every layer of a model plans alike, so inside one jit the compiler plans once.

    Args:
        query_starts: int32 [R + 1]; kv_lens: int32 [R].
        tokens: T, the static number of tokens. window: tokens of a tile. block_kv: keys of a step.
        causal: whether tokens stand one after another, the last at kv_lens[r] - 1, or all of them there.
    Returns:
        int32 [tiles, 32] and its number of live rows, int32 [1]. Columns: row of the block table, first token of the
        window, first and end token of the row in it, position of a token minus its index, the row's kv_len, and the
        steps: begin, begin and end of those that need no mask, end.
    """
    rows = kv_lens.shape[0]
    starts = jnp.clip(query_starts, 0, tokens)
    # The padding behind the last row is one more row, without keys: its tiles store zeros.
    starts = jnp.concatenate([starts, jnp.full((1,), tokens, jnp.int32)])
    kv_lens = jnp.concatenate([kv_lens, jnp.zeros((1,), jnp.int32)])
    begin, end = starts[:-1], starts[1:]
    windows = jnp.where(end > begin, (end - 1) // window - begin // window + 1, 0)
    ends = jnp.cumsum(windows, dtype=jnp.int32)
    capacity = min(tokens, -(-tokens // window) + rows + 1)

    tile = jnp.arange(capacity, dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(ends[None, :] <= tile[:, None], axis=1, dtype=jnp.int32), rows)
    token = (begin[row] // window + tile - (ends - windows)[row]) * window
    first = jnp.maximum(token, begin[row])
    last = jnp.minimum(token + window, end[row])
    shift = kv_lens[row] - end[row]
    # Where the tile's first and last token stand: each sees the keys before it and itself.
    first_position, last_position = first + shift, last - 1 + shift
    if not causal:
        first_position = last_position = kv_lens[row] - 1
    hi = (jnp.maximum(last_position + 1, 0) + block_kv - 1) // block_kv
    hi_full = jnp.maximum(first_position + 1, 0) // block_kv
    lo = lo_full = jnp.zeros_like(hi)
    if sliding_window is not None:
        lo = jnp.maximum(first_position - sliding_window + 1, 0) // block_kv
        lo_full = (jnp.maximum(last_position - sliding_window + 1, 0) + block_kv - 1) // block_kv
    lo = jnp.minimum(lo, hi)
    lo_full = jnp.clip(lo_full, lo, hi)
    hi_full = jnp.clip(hi_full, lo_full, hi)
    live = tile < ends[-1]
    steps = jnp.where(live, hi - lo, -1)
    # A stable rank by comparing all pairs: one small fused kernel where a sort would be several.
    before = (steps[None, :] > steps[:, None]) | ((steps[None, :] == steps[:, None]) & (tile[None, :] < tile[:, None]))
    rank = jnp.sum(before, axis=1, dtype=jnp.int32)
    columns = [jnp.minimum(row, rows - 1), token, first, last, shift, kv_lens[row], lo, lo_full, hi_full, hi]
    columns += [jnp.zeros_like(row)] * (_COLUMNS - len(columns))
    work = jnp.zeros((capacity, _COLUMNS), jnp.int32).at[rank].set(jnp.stack(columns, axis=1), unique_indices=True)
    return work, ends[-1:]


# --- what Pallas has no word for -------------------------------------------------------------------------------------


def _i32(x: object) -> ir.Value:
    """The MLIR value of a scalar that `inline_mgpu` passes."""
    return x.registers.item() if isinstance(x, mgpu.FragmentedArray) else x


def _const(value: int, bits: int = 32) -> ir.Value:
    kind = ir.IntegerType.get_signless(bits)
    return arith.constant(kind, ir.IntegerAttr.get(kind, value))


def _lane_ids() -> tuple[ir.Value, ir.Value]:
    """(warp of the warpgroup, lane)."""
    thread = arith.remui(mgpu.utils.thread_idx(), _const(128))
    return arith.divui(thread, _const(32)), arith.remui(thread, _const(32))


def _offset(base: ir.Value, elements: ir.Value, dtype: ir.Type) -> ir.Value:
    return mgpu.utils.getelementptr(base, [elements], dtype)


def _store_rows(out_ref, lse_ref, out, lse, token, first, end, head, tokens: int, heads: int) -> None:
    """Stores the rows of a consumer's tile whose token is in [first, end).

    out [64, D] goes to out_ref [T, H, D], lse [64] to lse_ref [T, H]. Row g * tokens + i is token `token` + i of head
    `head` + g. TMA cannot do this: a box has no end of its own inside the array.
    """
    _, total_heads, head_dim = out_ref.shape

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            plgpu.RefType(),
            plgpu.Layout.WGMMA,
            plgpu.Layout.WGMMA.reduce(1),
            *[plgpu.Layout.WG_SPLAT] * 4,
        )
    )
    def store(ctx, out_gmem, lse_gmem, out, lse, token, first, end, head):
        del ctx
        i64 = ir.IntegerType.get_signless(64)
        f32 = ir.F32Type.get()
        element = ir.MemRefType(out_gmem.type).element_type
        out_base, lse_base = mgpu.utils.memref_ptr(out_gmem), mgpu.utils.memref_ptr(lse_gmem)
        warp, lane = _lane_ids()
        quad_row = arith.addi(arith.muli(warp, _const(16)), arith.divui(lane, _const(4)))
        quad_lane = arith.remui(lane, _const(4))
        lse_regs = list(lse.registers.flat)
        # A thread holds rows quad_row and quad_row + 8; of each, two columns of every eight.
        registers = out.registers.reshape(head_dim // 8, 2)
        for half in range(2):
            row = arith.addi(quad_row, _const(8 * half))
            group = arith.divui(row, _const(tokens))
            where = arith.addi(_i32(token), arith.remui(row, _const(tokens)))
            mine = arith.andi(
                arith.cmpi(arith.CmpIPredicate.sge, where, _i32(first)),
                arith.cmpi(arith.CmpIPredicate.slt, where, _i32(end)),
            )
            mine = arith.andi(mine, arith.cmpi(arith.CmpIPredicate.slt, group, _const(heads)))
            with mgpu.utils.when(mine):
                pair = arith.addi(
                    arith.muli(arith.extsi(i64, where), _const(total_heads, 64)),
                    arith.extsi(i64, arith.addi(_i32(head), group)),
                )
                column = arith.extsi(i64, arith.muli(quad_lane, _const(2)))
                start = arith.addi(arith.muli(pair, _const(head_dim, 64)), column)
                for i in range(head_dim // 8):
                    at = arith.addi(start, _const(8 * i, 64))
                    llvm.store(registers[i, half], _offset(out_base, at, element))
                with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, quad_lane, _const(0))):
                    llvm.store(lse_regs[half], _offset(lse_base, pair, f32))

    store(out_ref, lse_ref, out, lse, token, first, end, head)


def _named_barrier(operation: str, index) -> None:
    """Syncs on, or arrives at, hardware barrier 8 + index, for the 256 threads of two warpgroups.

    Pallas' own barriers live in shared memory; as turns they cost 1.6 % of prefill_1x16384's time.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def barrier(ctx, index):
        del ctx
        number = arith.addi(_i32(index), _const(8))
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [number], f"bar.{operation} $0, 256;", "r", has_side_effects=True)

    barrier(index)


def _zero_rows(tile_ref, begin, swizzle: int, transforms: tuple) -> None:
    """Zeroes rows `begin` and up of a [rows, D] tile of 16-bit values in swizzled shared memory; for one warp.

    The swizzle moves 16-byte pieces within a row of a tile only, so a whole row can be zeroed without knowing it.
    """
    rows, head_dim = tile_ref.shape
    pieces = head_dim * 2 // 16  # of 16 bytes, a row
    per_tile = swizzle // 16

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), plgpu.Layout.WG_SPLAT))
    def zero(ctx, tile, begin):
        del ctx
        i8, i32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
        base = mgpu.utils.memref_ptr(tile)
        _, lane = _lane_ids()
        quad = ir.VectorType.get((4,), i32)
        nothing = arith.constant(quad, ir.DenseElementsAttr.get_splat(quad, ir.IntegerAttr.get(i32, 0)))
        first = arith.addi(arith.muli(_i32(begin), _const(pieces)), lane)
        loop = scf.ForOp(first, _const(rows * pieces), _const(32), [])
        with ir.InsertionPoint(loop.body):
            row = arith.divui(loop.induction_variable, _const(pieces))
            piece = arith.remui(loop.induction_variable, _const(pieces))
            tile_index = arith.addi(
                arith.muli(arith.divui(row, _const(8)), _const(pieces // per_tile)),
                arith.divui(piece, _const(per_tile)),
            )
            in_tile = arith.addi(
                arith.muli(arith.remui(row, _const(8)), _const(swizzle)),
                arith.muli(arith.remui(piece, _const(per_tile)), _const(16)),
            )
            at = arith.addi(arith.muli(tile_index, _const(8 * swizzle)), in_tile)
            llvm.store(nothing, _offset(base, at, i8), alignment=16)
            scf.yield_([])
        # What the tensor cores read next goes through another proxy.
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [], "fence.proxy.async.shared::cta;", "", has_side_effects=True)

    zero(tile_ref, begin)


# --- the kernel ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Shape:
    """What the kernel is specialised for."""

    heads: int  # of a tile: query heads of one KV group
    units: int  # tiles of one window: query heads / `heads`
    units_per_kv_head: int
    tokens: int  # of a consumer's tile
    block_size: int
    head_dim: int
    table_width: int
    dtype: jnp.dtype
    tiling: Tiling
    scale: float
    sliding_window: int | None
    logit_softcap: float | None
    alibi: bool
    causal: bool
    ctas: int
    interpret: bool

    @property
    def window(self) -> int:
        return self.tokens * self.tiling.consumers

    @property
    def copy_rows(self) -> int:
        """Tokens of one TMA copy of keys or values."""
        return min(self.block_size, self.tiling.block_kv)

    @property
    def copies(self) -> int:
        return self.tiling.block_kv // self.copy_rows


def _kernel(s: _Shape, q_ref, pool_ref, table_ref, work_ref, count_ref, slopes_ref, out_ref, lse_ref, *scratch) -> None:
    q_smem, k_smem, v_smem, info_smem, *p_smem, q_full, q_free, k_full, k_free, v_full, v_free, v_landed = scratch
    tiling = s.tiling
    block_kv, stages, consumers = tiling.block_kv, tiling.stages, tiling.consumers
    cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
    swizzle, transforms = _transforms(s.head_dim)
    total = count_ref[0] * s.units
    rounds = lax.div(total + (s.ctas - 1), s.ctas)

    def work(r):
        """(exists, tile, unit) of this block's r-th item: the list is dealt out in a snake."""
        seat = jnp.where(lax.rem(r, 2) == 0, cta, s.ctas - 1 - cta)
        item = r * s.ctas + seat
        exists = item < total
        item = jnp.minimum(item, total - 1)
        return exists, lax.div(item, s.units), lax.rem(item, s.units)

    def load(queries: bool, keys: bool, values: bool) -> None:
        """Brings all items' queries, keys or values into shared memory."""

        def item(r, carry):
            step, items = carry
            exists, tile, unit = work(r)
            kv_head = lax.div(unit, s.units_per_kv_head)
            row, token, kv_len = work_ref[tile, _ROW], work_ref[tile, _TOKEN], work_ref[tile, _KV_LEN]
            lo = work_ref[tile, _LO]
            hi = jnp.where(exists, work_ref[tile, _HI], lo)

            def blocks(t):
                """Blocks of step t's copies; the null block where no live token is."""
                ids = []
                for j in range(s.copies):
                    at = t * block_kv + j * s.copy_rows
                    index = jnp.minimum(lax.div(at, s.block_size), s.table_width - 1)
                    ids.append(jnp.where(at < kv_len, table_ref[row, index], 0))
                return ids

            def copy(part, t, ids, target, barrier):
                for j, block in enumerate(ids):
                    source = pool_ref.at[block, part, kv_head]
                    if s.copy_rows < s.block_size:
                        source = source.at[pl.ds(lax.rem(t * block_kv + j * s.copy_rows, s.block_size), s.copy_rows)]
                    plgpu.copy_gmem_to_smem(source, target.at[pl.ds(j * s.copy_rows, s.copy_rows)], barrier)

            def copy_queries():
                for w in range(consumers):
                    buffer = lax.rem(items, tiling.q_stages) * consumers + w

                    @pl.when(items >= tiling.q_stages)
                    def _(buffer=buffer):
                        plgpu.barrier_wait(q_free.at[buffer])

                    # The item's row of the work list travels with its queries: a consumer reads it sooner there.
                    plgpu.copy_gmem_to_smem(work_ref.at[tile], info_smem.at[w, lax.rem(items, 4)], q_full.at[buffer])
                    for g in range(s.heads):
                        plgpu.copy_gmem_to_smem(
                            q_ref.at[pl.ds(token + w * s.tokens, s.tokens), unit * s.heads + g],
                            q_smem.at[buffer, pl.ds(g * s.tokens, s.tokens)],
                            q_full.at[buffer],
                        )

            def copy_keys(t, ids, slot, reused):
                @pl.when(reused)
                def _():
                    plgpu.barrier_wait(k_free.at[slot])

                copy(0, t, ids, k_smem.at[slot], k_full.at[slot])

            def copy_values(t, ids, slot, reused):
                @pl.when(reused)
                def _():
                    plgpu.barrier_wait(v_free.at[slot])

                tail = (t + 1) * block_kv > kv_len

                @pl.when(jnp.logical_not(tail))
                def _():
                    copy(1, t, ids, v_smem.at[slot], v_full.at[slot])

                @pl.when(tail)
                def _():
                    # Slots past the last token may hold NaN, and 0 * NaN is NaN: they are zeroed before anyone looks.
                    copy(1, t, ids, v_smem.at[slot], v_landed)
                    plgpu.barrier_wait(v_landed)
                    if s.interpret:
                        position = t * block_kv + lax.broadcasted_iota(jnp.int32, (block_kv, s.head_dim), 0)
                        v_smem[slot] = jnp.where(position < kv_len, v_smem[slot], 0).astype(s.dtype)
                        plgpu.commit_smem()
                    else:
                        _zero_rows(v_smem.at[slot], kv_len - t * block_kv, swizzle, transforms)
                    for _ in range(s.copies):
                        plgpu.barrier_arrive(v_full.at[slot])

            def one_step(j, carry):
                step, *ids = carry
                # The next step's blocks are read ahead of the waits, so that the table's latency is hidden.
                ahead = blocks(lo + j)
                t = jnp.where(j == 0, hi - 1, lo + j - 1)
                slot, reused = lax.rem(step, stages), step >= stages
                if keys:
                    copy_keys(t, ids, slot, reused)
                if values:
                    copy_values(t, ids, slot, reused)
                return (step + 1, *ahead)

            if queries:
                pl.when(exists)(copy_queries)
            if keys or values:
                # An item without steps has no last step; its table is read all the same.
                first_blocks = blocks(jnp.maximum(hi - 1, 0))
                step, *_ = lax.fori_loop(0, hi - lo, one_step, (step, *first_blocks))
            return step, items + exists.astype(jnp.int32)

        steps, items = lax.fori_loop(0, rounds, item, (jnp.int32(0), jnp.int32(0)))
        # Every release is waited for, so that barriers end as they began; the interpreter insists.
        for slot in range(stages):

            @pl.when(slot < steps)
            def _(slot=slot):
                if keys:
                    plgpu.barrier_wait(k_free.at[slot])
                if values:
                    plgpu.barrier_wait(v_free.at[slot])

        for buffer in range(tiling.q_stages) if queries else ():

            @pl.when(items > buffer)
            def _(buffer=buffer):
                for w in range(consumers):
                    plgpu.barrier_wait(q_free.at[buffer * consumers + w])

    @pl.when(wg == consumers)
    def producer():
        if s.interpret:
            load(queries=True, keys=True, values=True)
            return
        plgpu.set_max_registers(tiling.registers[1], action="decrease")

        # A warp each for queries, keys and values, so that none waits for the others' buffers.
        @plgpu.warp_map
        def _(warp):
            pl.when(warp == 0)(lambda: load(queries=False, keys=True, values=False))
            pl.when(warp == 1)(lambda: load(queries=False, keys=False, values=True))
            pl.when(warp == 2)(lambda: load(queries=True, keys=False, values=False))

    @pl.when(wg < consumers)
    def consumer():
        if not s.interpret:
            plgpu.set_max_registers(tiling.registers[0], action="increase")
        layout = plgpu.Layout.WGMMA
        by_row = layout.reduce(1)

        def iota(shape, axis):
            return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)

        def full(value):
            return plgpu.layout_cast(jnp.full((_ROWS,), value, jnp.float32), by_row)

        def spread(x, columns):
            return lax.broadcast_in_dim(x, (_ROWS, columns), [0])

        turns = tiling.turns and not s.interpret

        def take_turn():
            if turns:
                _named_barrier("sync", wg)

        def pass_turn():
            if turns:
                _named_barrier("arrive", jnp.where(wg == consumers - 1, 0, wg + 1))

        if turns:
            pl.when(wg == consumers - 1)(pass_turn)

        def by_eights(op, x):
            """[64, n] to [64, 8], each lane's part of a reduction: chains a quarter as long, and no shuffles."""
            return functools.reduce(op, [x[:, i : i + 8] for i in range(0, x.shape[1], 8)])

        def softmax(scores, top, total, t, position, slopes, masked):
            """Probabilities of one step, and the running maximum (in powers of 2) and sum."""
            factor = s.scale * _LOG2E
            if s.logit_softcap is not None:
                scores = jnp.tanh(scores * (s.scale / s.logit_softcap)) * (s.logit_softcap * _LOG2E)
                factor = 1.0
            elif s.alibi or s.scale <= 0:
                scores = scores * factor
                factor = 1.0
            if s.alibi or masked:
                # How far each row's query is ahead of each lane's columns of the first eight keys. Later columns are a
                # multiple of 8 further, a constant: compared so, the mask keeps no registers.
                room = -iota((_ROWS, 8), 1)
                if s.causal:
                    room = (iota((_ROWS, 8), 0) & (s.tokens - 1)) - iota((_ROWS, 8), 1)
                room = room + (position - t * block_kv)
                pieces = []
                for column in range(0, block_kv, 8):
                    piece = scores[:, column : column + 8]
                    if s.alibi:
                        piece = piece + spread(slopes, 8) * (column - room).astype(jnp.float32)
                    if masked:
                        seen = room >= column
                        if s.sliding_window is not None:
                            seen = seen & (room < column + s.sliding_window)
                        piece = jnp.where(seen, piece, -jnp.inf)
                    pieces.append(piece)
                scores = jnp.concatenate(pieces, axis=1)
            new_top = jnp.maximum(top, by_eights(jnp.maximum, scores).max(axis=1) * factor)
            shrink = jnp.exp2(top - new_top)
            p = jnp.exp2(scores * factor - spread(new_top, block_kv))
            return p, new_top, total * spread(shrink, 8) + by_eights(jnp.add, p), shrink

        def item(r, step):
            exists, _, unit = work(r)
            buffer = lax.rem(r, tiling.q_stages) * consumers + wg

            pl.when(exists)(lambda: plgpu.barrier_wait(q_full.at[buffer]))

            info = info_smem.at[wg, lax.rem(r, 4)]
            token = info[_TOKEN] + wg * s.tokens
            first, end = info[_FIRST], info[_END]
            lo, lo_full, hi_full, hi = info[_LO], info[_LO_FULL], info[_HI_FULL], info[_HI]
            position = token + info[_SHIFT] if s.causal else info[_KV_LEN] - 1  # of the consumer's first token
            head = unit * s.heads
            # Steps in the order they are taken: the last keys, which need the mask of the diagonal, come first.
            count = hi - lo

            def slot_of(j):
                return lax.rem(step + j, stages)

            def store(out, lse):
                out = out.astype(s.dtype)
                if not s.interpret:
                    _store_rows(out_ref, lse_ref, out, lse, token, first, end, head, s.tokens, s.heads)
                    return
                for g in range(s.heads):
                    for i in range(s.tokens):

                        @pl.when((token + i >= first) & (token + i < end))
                        def _(g=g, i=i):
                            out_ref[token + i, head + g] = out[g * s.tokens + i]
                            lse_ref[token + i, head + g] = lse[g * s.tokens + i]

            @pl.when(exists & (hi <= lo))
            def nothing_to_see():
                plgpu.barrier_arrive(q_free.at[buffer])
                zeros = plgpu.layout_cast(jnp.zeros((_ROWS, s.head_dim), jnp.float32), layout)
                store(zeros, full(-jnp.inf))

            def attend(acc_ref):
                slopes = None
                if s.alibi:
                    slopes = plgpu.load(slopes_ref.at[unit], layout=by_row, optimized=False)

                def await_keys(j):
                    @pl.when(j < count)
                    def _():
                        plgpu.barrier_wait(k_full.at[slot_of(j)])

                def score(scores_ref, j, and_then, wait_n):
                    """Issues the product of queries and keys of step j, then `and_then`, and waits for the product."""
                    plgpu.wgmma(scores_ref, q_smem.at[buffer], k_smem.at[slot_of(j)].T)
                    and_then()
                    scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=wait_n)
                    plgpu.barrier_arrive(k_free.at[slot_of(j)])
                    return scores

                # The accumulator lives in acc_ref, in flight while the softmax runs. The interpreter can neither write
                # such a reference nor take p from registers: there `acc` is a value, otherwise None.
                def add_values(acc, p, j):
                    slot = slot_of(j)
                    plgpu.barrier_wait(v_full.at[slot])
                    if not s.interpret:
                        plgpu.wgmma(acc_ref, p, v_smem.at[slot])
                        return acc
                    p_smem[0][wg] = p
                    plgpu.commit_smem()

                    def product(product_ref):
                        plgpu.wgmma(product_ref, p_smem[0].at[wg], v_smem.at[slot])
                        return product_ref[...]

                    return acc + pl.run_scoped(product, plgpu.ACC((_ROWS, s.head_dim), jnp.float32))

                def await_values(acc, j):
                    if not s.interpret:
                        acc = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
                    plgpu.barrier_arrive(v_free.at[slot_of(j)])
                    return acc

                nothing = plgpu.layout_cast(jnp.zeros((_ROWS, 8), jnp.float32), layout)

                def first_step(scores_ref):
                    scores = score(scores_ref, 0, pass_turn, wait_n=0)
                    return softmax(scores, full(_FLOOR), nothing, hi - 1, position, slopes, True)

                def next_step(t, carry, masked):
                    acc, old_p, top, total_p = carry
                    j = t - lo + 1
                    take_turn()

                    def products(scores_ref):
                        def values_of_last_step():
                            nonlocal acc
                            acc = add_values(acc, old_p, j - 1)
                            pass_turn()

                        scores = score(scores_ref, j, values_of_last_step, wait_n=1)
                        # These keep the compiler and then the assembler, which moves nothing over a branch, from
                        # computing the softmax after the wait for the values' product. p is rounded after that wait:
                        # the assembler serialises all products if it finds the next ones' operands written while
                        # some are in flight.
                        results = lax.optimization_barrier(softmax(scores, top, total_p, t, position, slopes, masked))
                        await_keys(j + 1)
                        return acc, *results

                    acc, p, top, total_p, shrink = pl.run_scoped(products, plgpu.ACC((_ROWS, block_kv), jnp.float32))
                    acc = await_values(acc, j - 1) * spread(shrink, s.head_dim)
                    if not s.interpret:
                        acc_ref[...] = acc
                        acc = None
                    return acc, p.astype(s.dtype), top, total_p

                await_keys(0)
                take_turn()
                p, top, total_p, _ = pl.run_scoped(first_step, plgpu.ACC((_ROWS, block_kv), jnp.float32))
                await_keys(1)
                acc = jnp.zeros((_ROWS, s.head_dim), jnp.float32) if s.interpret else None
                carry = (acc, p.astype(s.dtype), top, total_p)
                begin = lo
                for until, masked in ((lo_full, True), (hi_full, False), (hi, True)):
                    if until is lo_full and s.sliding_window is None:
                        continue
                    until = jnp.maximum(jnp.minimum(until, hi - 1), begin)
                    carry = lax.fori_loop(begin, until, functools.partial(next_step, masked=masked), carry)
                    begin = until
                acc, p, top, total_p = carry
                plgpu.barrier_arrive(q_free.at[buffer])
                acc = await_values(add_values(acc, p, count - 1), count - 1)

                total_p = total_p.sum(axis=1)
                seen = total_p > 0
                safe = jnp.where(seen, total_p, 1.0)
                lse = jnp.where(seen, (top + jnp.log2(safe)) * (1 / _LOG2E), -jnp.inf)
                store(acc * spread(1.0 / safe, s.head_dim), lse)

            def stand_by():
                """Lets the steps pass by: none of the tile's tokens are this consumer's."""
                plgpu.barrier_arrive(q_free.at[buffer])

                def one_step(j, carry):
                    plgpu.barrier_wait(k_full.at[slot_of(j)])
                    plgpu.barrier_arrive(k_free.at[slot_of(j)])
                    take_turn()
                    pass_turn()
                    plgpu.barrier_wait(v_full.at[slot_of(j)])
                    plgpu.barrier_arrive(v_free.at[slot_of(j)])
                    return carry

                lax.fori_loop(0, count, one_step, jnp.int32(0))

            works = exists & (hi > lo)
            mine = (token < end) & (token + s.tokens > first)
            pl.when(works & jnp.logical_not(mine))(stand_by)

            accumulator = plgpu.ACC((_ROWS, s.head_dim), jnp.float32)
            pl.when(works & mine)(lambda: pl.run_scoped(attend, accumulator))

            return step + jnp.where(exists, count, 0)

        lax.fori_loop(0, rounds, item, jnp.int32(0))
        if turns:
            pl.when(wg == 0)(take_turn)


def _transforms(head_dim: int) -> tuple[int, tuple]:
    """(bytes, transforms) of the widest swizzle whose lines a row of head_dim 16-bit values fills."""
    swizzle = next(size for size in (128, 64, 32) if head_dim * 2 % size == 0)
    return swizzle, (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))


def _heads_per_tile(group: int) -> int:
    """Query heads of a KV group that share a tile: the most that divide the group and fit."""
    return next(n for n in range(min(group, _MAX_HEADS), 0, -1) if group % n == 0)


def _num_ctas() -> int:
    device = jax.devices()[0]
    return getattr(device, "core_count", None) or _DEFAULT_SMS if device.platform == "gpu" else _DEFAULT_SMS


_STATIC = ("scale", "sliding_window", "logit_softcap", "causal", "tiling", "ctas", "interpret")


@functools.partial(jax.jit, static_argnames=_STATIC)
def ragged_attention(
    q: jax.Array,
    kv_pool: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    query_starts: jax.Array,
    alibi_slopes: jax.Array | None,
    *,
    scale: float,
    sliding_window: int | None,
    logit_softcap: float | None,
    causal: bool = True,
    tiling: Tiling | None = None,
    ctas: int | None = None,
    interpret: object = None,
) -> tuple[jax.Array, jax.Array]:
    """`ragged_attention` of the package, for arguments that are checked and that `unsupported` lets pass.

    Args:
        tiling, ctas: to try others than the measured best; a block a multiprocessor.
        interpret: parameters of the Mosaic interpreter, to run on a CPU.
    Returns:
        The output [T, H, D] and its log-sum-exp, float32 [T, H].
    """
    tokens, total_heads, head_dim = q.shape
    _, _, kv_heads, block_size, _ = kv_pool.shape
    tiling = tiling or pick_tiling(head_dim)
    group = total_heads // kv_heads
    heads = _heads_per_tile(group)
    s = _Shape(
        heads=heads,
        units=total_heads // heads,
        units_per_kv_head=group // heads,
        tokens=_ROWS // (1 << (heads - 1).bit_length()),
        block_size=block_size,
        head_dim=head_dim,
        table_width=block_tables.shape[1],
        dtype=q.dtype,
        tiling=tiling,
        scale=scale,
        sliding_window=sliding_window,
        logit_softcap=logit_softcap,
        alibi=alibi_slopes is not None,
        causal=causal,
        ctas=ctas or _num_ctas(),
        interpret=interpret is not None,
    )
    # TMA boxes start at multiples of 8 tokens and reach past the end only by whole boxes of the array's tiles.
    padded = max(-(-tokens // 8) * 8, s.tokens)
    if padded != tokens:
        q = jnp.pad(q, ((0, padded - tokens), (0, 0), (0, 0)))
    work, count = plan_tiles(
        query_starts,
        kv_lens,
        tokens=padded,
        window=s.window,
        block_kv=tiling.block_kv,
        sliding_window=sliding_window,
        causal=causal,
    )
    if alibi_slopes is None:
        slopes = jnp.zeros((1, _ROWS), jnp.float32)
    else:
        slopes = jnp.repeat(alibi_slopes.reshape(s.units, heads) * _LOG2E, s.tokens, axis=1)
        slopes = jnp.pad(slopes, ((0, 0), (0, _ROWS - slopes.shape[1])))
    _, transforms = _transforms(head_dim)
    _, p_transforms = _transforms(tiling.block_kv)
    smem = functools.partial(plgpu.SMEM, dtype=q.dtype, transforms=transforms)
    barrier = functools.partial(plgpu.Barrier, num_barriers=tiling.stages)
    kwargs = {} if interpret is None else {"interpret": interpret}
    kernel = plgpu.kernel(
        functools.partial(_kernel, s),
        out_type=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)],
        scratch_types=[
            smem((tiling.q_stages * tiling.consumers, _ROWS, head_dim)),
            smem((tiling.stages, tiling.block_kv, head_dim)),
            smem((tiling.stages, tiling.block_kv, head_dim)),
            plgpu.SMEM((tiling.consumers, 4, _COLUMNS), jnp.int32),
            *([smem((tiling.consumers, _ROWS, tiling.block_kv), transforms=p_transforms)] if s.interpret else []),
            plgpu.Barrier(num_barriers=tiling.q_stages * tiling.consumers, num_arrivals=heads + 1),
            plgpu.Barrier(num_barriers=tiling.q_stages * tiling.consumers),
            barrier(num_arrivals=s.copies),
            barrier(num_arrivals=tiling.consumers),
            barrier(num_arrivals=s.copies),
            barrier(num_arrivals=tiling.consumers),
            plgpu.Barrier(num_arrivals=s.copies),
        ],
        grid=(s.ctas,),
        grid_names=("cta",),
        num_threads=tiling.consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=512,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        kernel_name="ragged_attention",
        **kwargs,
    )
    out, lse = kernel(q, kv_pool, block_tables, work, count, slopes)
    return out[:tokens], lse[:tokens]
