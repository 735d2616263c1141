"""Decode attention for head_dim 80 and 96 as Mosaic GPU kernels (Hopper), with query heads as the rows of all products.

`decode_attention_mosaic.py` is faster, but has head_dim as wgmma's rows, a multiple of 64. Flash-Decoding
(split KV) over a persistent grid, with the splits at *fixed positions*, multiples of `chunk` tokens:

    kv_lens      [ 2500          , 700   , 1024     ]          chunk 1,024
    work units   (0,0) (0,1) (0,2)  (1,0)   (2,0)              x every group of query heads that share a KV head
    CTA i runs   units i, i + ctas, i + 2 ctas, ...            full chunks first, then the rest, longest first

so a sequence's result does not depend on what shares the batch. The list of units is made on the device by plain XLA
operations (`plan`) that depend on the lengths alone; in a program of many layers the compiler keeps one copy.

A CTA is two warpgroups:

    producer   one TMA copy a block (K and V apart) into a ring of `stages` tiles, one mbarrier a tile each
    consumer   S = Q K^T (wgmma; the group's query heads are the first rows of 64), online softmax in base 2,
               O += P V (wgmma, P from registers), 64 x head_dim float32 accumulators

A unit writes its normalised output and log-sum-exp; a second, small kernel merges the chunks of a sequence in
float32. Where the table is no wider than a chunk, units are whole sequences and the first kernel writes the result.

Sources: Flash-Decoding (pytorch.org/blog/flash-decoding), FlashAttention-2 and -3 (arXiv:2307.08691, 2407.08608),
PagedAttention (arXiv:2309.06180).
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_LOG2E = math.log2(math.e)
_NO_KEYS = -1e30
_ROWS = 64  # of a wgmma tile; a group's query heads take the first of them
_LSE_COLUMNS = 8  # a log-sum-exp is stored this many times over: the narrowest tile of the wgmma layout, 32 bytes
_SMEM_BYTES = 227 * 1024 - 512
_MERGE_COLUMNS = 16
_MERGE_UNROLL = 8  # at most; more chunks at once cost registers, and so resident CTAs
HEAD_DIMS = (80, 96)


@dataclass(frozen=True)
class Config:
    """Shape of the kernel.

    tile: tokens a stage holds.
    stages: depth of the K and V rings of each consumer.
    chunk: tokens between split boundaries, a multiple of the tile.
    ctas: size of the persistent grid.
    consumers: warpgroups that compute, 1 or 2. Two share a unit, one tile each in turn, and merge at its end; each
        has a ring of its own, since a warpgroup must see every phase of the barriers that it waits on.
    q_stages: units whose queries are held at once.
    overlap_merge: start the merge kernel's CTAs while the last units still run (programmatic dependent launch).
    """

    tile: int
    stages: int
    chunk: int
    ctas: int
    consumers: int = 2
    q_stages: int = 2
    overlap_merge: bool = True


def default_config(head_dim: int) -> Config:
    device = jax.devices()[0]
    ctas = getattr(device, "core_count", 132) if device.platform == "gpu" else 132
    tile, q_stages, consumers = 64, 2, 2
    queries = q_stages * _ROWS * head_dim * 2
    results = _ROWS * (head_dim * 6 + _LSE_COLUMNS * 4 + 8)
    stages = min(8, (_SMEM_BYTES - queries - results) // (tile * head_dim * 4)) // consumers
    return Config(tile, stages, 1024, ctas, consumers, q_stages)


class Plan(NamedTuple):
    """Work of one call, made on the device.

    units: int32 [batch * max_chunks, 5]; (sequence, slot of its result, first position, end position, length of the
        sequence).
    num_units: int32 [1].
    num_chunks: int32 [batch]; at least 1, so that an empty sequence has its zeros written.
    """

    units: jax.Array
    num_units: jax.Array
    num_chunks: jax.Array


def max_chunks(max_len: int, chunk: int, sliding_window: int | None) -> int:
    """The most chunks that a sequence can touch."""
    chunks = -(-max_len // chunk)
    return chunks if sliding_window is None else min(chunks, (sliding_window - 2) // chunk + 2)


def plan(kv_lens: jax.Array, max_len: int, chunk: int, tile: int, sliding_window: int | None) -> Plan:
    """Cuts every sequence at multiples of `chunk` and lists the pieces, full ones first, then the longest first."""
    batch, slots = kv_lens.shape[0], max_chunks(max_len, chunk, sliding_window)
    rows = jnp.arange(batch, dtype=jnp.int32)
    ends = jnp.clip(kv_lens, 0, max_len)
    if sliding_window is None:
        begins = jnp.zeros_like(ends)
    else:
        begins = jnp.maximum(ends - sliding_window, 0) // tile * tile
    first = begins // chunk
    num_chunks = jnp.maximum((ends + chunk - 1) // chunk - first, 1)

    row = jnp.repeat(rows, slots)
    slot = jnp.tile(jnp.arange(slots, dtype=jnp.int32), batch)
    position = (first[row] + slot) * chunk
    begin = jnp.maximum(position, begins[row])
    end = jnp.maximum(jnp.minimum(position + chunk, ends[row]), begin)
    order = jnp.argsort(jnp.where(slot < num_chunks[row], begin - end, 1), stable=True)
    units = jnp.stack([row, row * slots + slot, begin, end, ends[row]], axis=1)[order]
    return Plan(units, jnp.sum(num_chunks, dtype=jnp.int32)[None], num_chunks)


def load(ref: Any, layout: Any) -> jax.Array:
    """Reads a reference into registers of the given layout, by whatever loads it takes."""
    return plgpu.load(ref, layout=layout, optimized=False)


def _swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the layout that wgmma and TMA agree on."""
    swizzle = plgpu.find_swizzle(shape[-1] * 16)
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
    )


class _Shape(NamedTuple):
    """Sizes that both kernels are built for; `rows` query heads of one KV head make a group."""

    batch: int
    heads: int
    kv_heads: int
    rows: int
    slots: int  # result slots a sequence: the most chunks it can touch
    block_size: int
    head_dim: int
    dtype: Any


def _tile_queries(q: jax.Array, rows: int) -> jax.Array:
    """Cuts the queries into tiles of 8 rows or more, as TMA moves them, none of which cuts a group of `rows` heads.

    [batch, heads, head_dim] -> [tiles, q_rows, head_dim]. It is the same memory, seen otherwise, where `rows` is 4 (two
    groups a tile) or a multiple of 8; other groups are padded, one to a tile. (Results of 1 or 2 rows in the middle of
    a tile would not start at a multiple of 128 bytes, as TMA needs.)
    """
    batch, heads, head_dim = q.shape
    q_rows = -(-rows // 8) * 8
    if rows == 4 or rows % 8 == 0:
        flat = q.reshape(batch * heads, head_dim)
        return jnp.pad(flat, ((0, -(batch * heads) % q_rows), (0, 0))).reshape(-1, q_rows, head_dim)
    grouped = q.reshape(batch * heads // rows, rows, head_dim)
    return jnp.pad(grouped, ((0, 0), (0, q_rows - rows), (0, 0)))


def _units_kernel(
    q: jax.Array,
    pool: jax.Array,
    tables: jax.Array,
    work: Plan,
    slopes: jax.Array,
    *,
    shape: _Shape,
    scale: float,
    sliding_window: int | None,
    logit_softcap: float | None,
    alibi: bool,
    config: Config,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Attention of every work unit: [slots of all sequences * heads, head_dim], normalised, and its log-sum-exp in
    base 2, [slots of all sequences * heads, 8], the same in all columns.

    q: [tiles, q_rows, head_dim], see `_tile_queries`; pool: [num_blocks * 2 * kv_heads * boxes of a block, box,
    head_dim]; slopes: float32 [8 + heads + 64], those of the heads from 8 on.
    """
    batch, heads, kv_heads, rows, slots, block_size, head_dim, dtype = shape
    tile, stages, q_stages, consumers = config.tile, config.stages, config.q_stages, config.consumers
    box = pool.shape[1]
    boxes, boxes_a_block = tile // box, block_size // box
    groups = heads // rows
    groups_a_kv_head = groups // kv_heads
    q_rows = q.shape[1]
    padded_groups = q.shape[0] == batch * groups
    o_dtype = dtype if slots == 1 else jnp.float32
    row_layout = plgpu.Layout.WGMMA.reduce(1)
    # The interpreter has no accumulators that start from registers, nor operands in them.
    p_in_smem = interpret is not None

    def body(
        q_ref: Any,
        pool_ref: Any,
        tables_ref: Any,
        units_ref: Any,
        num_units_ref: Any,
        slopes_ref: Any,
        o_ref: Any,
        lse_ref: Any,
        q_s: Any,
        k_s: Any,
        v_s: Any,
        o_s: Any,
        lse_s: Any,
        q_full: Any,
        q_free: Any,
        k_full: Any,
        v_full: Any,
        k_free: Any,
        v_free: Any,
        handover: tuple[Any, ...],
        out_s: Any = None,
        p_s: Any = None,
    ) -> None:
        cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
        total = num_units_ref[0] * groups
        mine = lax.div(jnp.maximum(total - cta, 0) + (config.ctas - 1), jnp.int32(config.ctas))

        def unit(i: jax.Array) -> tuple[jax.Array, ...]:
            """Its group of heads, the five fields of its plan, its first tile and its number of tiles."""
            index = cta + i * config.ctas
            w, group = lax.div(index, jnp.int32(groups)), lax.rem(index, jnp.int32(groups))
            row, slot, begin, end, length = (units_ref[w, field] for field in range(5))
            first = lax.div(begin, jnp.int32(tile))
            return group, row, slot, end, length, first, pl.cdiv(end, jnp.int32(tile)) - first

        def query_tile(row: jax.Array, group: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Which tile of the queries holds the group, and from which row of it on."""
            if padded_groups:
                return row * groups + group, jnp.int32(0)
            first = row * heads + group * rows
            return lax.div(first, jnp.int32(q_rows)), lax.rem(first, jnp.int32(q_rows))

        @pl.when(warpgroup == consumers)
        def _producer() -> None:
            if consumers > 1:
                plgpu.set_max_registers(40, action="decrease")

            def run_unit(i: jax.Array, steps: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                group, row, _, end, _, first, tiles = unit(i)
                head = lax.div(group, jnp.int32(groups_a_kv_head))
                q_slot = lax.rem(i, jnp.int32(q_stages))

                @pl.when(i >= q_stages)
                def _wait_q() -> None:
                    plgpu.barrier_wait(q_free.at[q_slot])

                plgpu.copy_gmem_to_smem(
                    q_ref.at[query_tile(row, group)[0]], q_s.at[q_slot, pl.ds(0, q_rows)], q_full.at[q_slot]
                )

                def load_tile(nth: jax.Array, steps: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                    consumer = lax.rem(nth, jnp.int32(consumers))
                    step = steps[0] if consumers == 1 else jnp.where(consumer == 0, steps[0], steps[1])
                    stage = consumer * stages + lax.rem(step, jnp.int32(stages))
                    copies = []
                    for j in range(boxes):
                        position = (first + nth) * tile + j * box
                        # Entries past the last token may be anything; the null block is always there to read.
                        entry = jnp.minimum(lax.div(position, jnp.int32(block_size)), tables_ref.shape[1] - 1)
                        block = jnp.where(position < end, tables_ref[row, entry], 0)
                        part = lax.rem(lax.div(position, jnp.int32(box)), jnp.int32(boxes_a_block))
                        copies.append((block * (2 * kv_heads) + head) * boxes_a_block + part)
                    for kv, ring, full, free in ((0, k_s, k_full, k_free), (1, v_s, v_full, v_free)):

                        @pl.when(step >= stages)
                        def _wait(free: Any = free) -> None:
                            plgpu.barrier_wait(free.at[stage])

                        for j, index in enumerate(copies):
                            plgpu.copy_gmem_to_smem(
                                pool_ref.at[index + kv * (kv_heads * boxes_a_block)],
                                ring.at[stage, pl.ds(j * box, box)],
                                full.at[stage],
                            )
                    return tuple(n + (consumer == c).astype(jnp.int32) for c, n in enumerate(steps))

                return lax.fori_loop(0, tiles, load_tile, steps)

            steps = lax.fori_loop(0, mine, run_unit, (jnp.int32(0),) * consumers)
            # No barrier may have an arrival outstanding when the CTA ends.
            for consumer in range(consumers):
                for stage in range(stages):

                    @pl.when(stage < steps[consumer])
                    def _drain(stage: int = consumer * stages + stage) -> None:
                        plgpu.barrier_wait(k_free.at[stage])
                        plgpu.barrier_wait(v_free.at[stage])

            for q_slot in range(q_stages):

                @pl.when(q_slot < mine)
                def _drain_q(q_slot: int = q_slot) -> None:
                    plgpu.barrier_wait(q_free.at[q_slot])

        @pl.when(warpgroup < consumers)
        def _consumer() -> None:
            if consumers > 1:
                plgpu.set_max_registers(232, action="increase")

            def run_unit(i: jax.Array, step: jax.Array) -> jax.Array:
                group, row, slot, end, length, first, tiles = unit(i)
                q_at = query_tile(row, group)[1]
                q_slot = lax.rem(i, jnp.int32(q_stages))
                if alibi:
                    slope = load(slopes_ref.at[pl.ds(8 + group * rows - q_at, _ROWS)], row_layout) * _LOG2E
                plgpu.barrier_wait(q_full.at[q_slot])

                def attend(n: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                    acc, top, denominator = carry
                    nth = n * consumers + warpgroup
                    start = (first + nth) * tile
                    stage = warpgroup * stages + lax.rem(step + n, jnp.int32(stages))
                    plgpu.barrier_wait(k_full.at[stage])

                    def scores(s_ref: Any) -> jax.Array:
                        plgpu.wgmma(s_ref, q_s.at[q_slot], k_s.at[stage].T)
                        return s_ref[...]

                    s = pl.run_scoped(scores, plgpu.ACC((_ROWS, tile), jnp.float32))
                    plgpu.barrier_arrive(k_free.at[stage])
                    if logit_softcap is None:
                        s = s * (scale * _LOG2E)
                    else:  # tanh(x) = 1 - 2 / (1 + exp(2 x)); the hardware's tanh is too coarse
                        e = jnp.exp2(s * (2 * _LOG2E * scale / logit_softcap))
                        s = (logit_softcap * _LOG2E) - (2 * logit_softcap * _LOG2E) / (1.0 + e)
                    keys = plgpu.broadcasted_iota(jnp.int32, (_ROWS, tile), 1, layout=plgpu.Layout.WGMMA) + start
                    if alibi:
                        distance = (keys - (length - 1)).astype(jnp.float32)
                        s = s + lax.broadcast_in_dim(slope, s.shape, [0]) * distance
                    seen = keys < end
                    if sliding_window is not None:
                        seen = seen & (keys >= length - sliding_window)
                    s = jnp.where(seen, s, _NO_KEYS)
                    new_top = jnp.maximum(top, s.max(axis=1))
                    shrink = jnp.exp2(top - new_top)
                    p = jnp.exp2(s - lax.broadcast_in_dim(new_top, s.shape, [0]))
                    denominator = denominator * shrink + p.sum(axis=1)
                    acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
                    p = p.astype(dtype)
                    plgpu.barrier_wait(v_full.at[stage])

                    # Rows that the sequence does not own may hold NaN, and 0 * NaN is NaN.
                    first_seen = jnp.int32(0) if sliding_window is None else length - sliding_window

                    @pl.when((start + tile > end) | (start < first_seen))
                    def _zero_unowned() -> None:
                        for r in range(0, tile, _ROWS):
                            at = v_s.at[stage, pl.ds(r, _ROWS)]
                            key = plgpu.broadcasted_iota(jnp.int32, (_ROWS, head_dim), 0, layout=plgpu.Layout.WGMMA) + (
                                start + r
                            )
                            v = plgpu.layout_cast(at[...], plgpu.Layout.WGMMA)
                            at[...] = jnp.where((key < end) & (key >= first_seen), v, jnp.zeros_like(v))
                        plgpu.commit_smem()

                    if p_in_smem:
                        p_s.at[warpgroup][...] = p
                        plgpu.commit_smem()

                        def product(acc_ref: Any) -> jax.Array:
                            plgpu.wgmma(acc_ref, p_s.at[warpgroup], v_s.at[stage])
                            return acc_ref[...]

                        acc = acc + pl.run_scoped(product, plgpu.ACC((_ROWS, head_dim), jnp.float32))
                    else:

                        def accumulate(acc_ref: Any) -> None:
                            plgpu.wgmma(acc_ref, p, v_s.at[stage])

                        acc = pl.run_state(accumulate)(plgpu.ACC.init(acc))
                    plgpu.barrier_arrive(v_free.at[stage])
                    return acc, new_top, denominator

                zeros = plgpu.layout_cast(jnp.zeros((_ROWS,), jnp.float32), row_layout)
                own_tiles = lax.div(tiles - warpgroup + (consumers - 1), jnp.int32(consumers))
                acc, top, denominator = lax.fori_loop(
                    0,
                    own_tiles,
                    attend,
                    (
                        plgpu.layout_cast(jnp.zeros((_ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA),
                        zeros + _NO_KEYS,
                        zeros,
                    ),
                )
                plgpu.barrier_arrive(q_free.at[q_slot])

                def finish(acc: jax.Array, top: jax.Array, denominator: jax.Array) -> None:
                    denominator = jnp.where(denominator > 0, denominator, 1.0)
                    staging = o_s if out_s is None else out_s
                    staging[...] = (acc / lax.broadcast_in_dim(denominator, acc.shape, [0])).astype(o_dtype)
                    lse_s[...] = lax.broadcast_in_dim(top + jnp.log2(denominator), (_ROWS, _LSE_COLUMNS), [0])
                    plgpu.commit_smem()
                    to = pl.ds(slot * heads + group * rows, rows)
                    for at in range(0, q_rows - rows + 1, rows):

                        @pl.when(q_at == at)
                        def _store(at: int = at) -> None:
                            plgpu.copy_smem_to_gmem(staging.at[pl.ds(at, rows)], o_ref.at[to])
                            plgpu.copy_smem_to_gmem(lse_s.at[pl.ds(at, rows)], lse_ref.at[to])

                if consumers == 1:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the unit before this one has left the buffers
                    finish(acc, top, denominator)
                    return step + own_tiles

                top_s, denominator_s, handed, taken = handover

                @pl.when(warpgroup == 1)
                def _hand_over() -> None:
                    @pl.when(i > 0)
                    def _wait_taken() -> None:
                        plgpu.barrier_wait(taken)

                    o_s[...] = acc
                    top_s[...] = top
                    denominator_s[...] = denominator
                    plgpu.barrier_arrive(handed)

                @pl.when(warpgroup == 0)
                def _merge() -> None:
                    plgpu.barrier_wait(handed)
                    other_top = plgpu.layout_cast(top_s[...], row_layout)
                    new_top = jnp.maximum(top, other_top)
                    mine_by, other_by = jnp.exp2(top - new_top), jnp.exp2(other_top - new_top)
                    other = load(o_s, plgpu.Layout.WGMMA)
                    other_denominator = plgpu.layout_cast(denominator_s[...], row_layout)
                    merged = acc * lax.broadcast_in_dim(mine_by, acc.shape, [0])
                    merged = merged + other * lax.broadcast_in_dim(other_by, acc.shape, [0])
                    finish(merged, new_top, denominator * mine_by + other_denominator * other_by)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    plgpu.barrier_arrive(taken)

                return step + own_tiles

            lax.fori_loop(0, mine, run_unit, jnp.int32(0))
            if consumers > 1:

                @pl.when((warpgroup == 1) & (mine > 0))
                def _drain_taken() -> None:
                    plgpu.barrier_wait(handover[3])

            plgpu.wait_smem_to_gmem(0)

    scratch: dict[str, Any] = {
        "q_s": _swizzled((q_stages, _ROWS, head_dim), dtype),
        "k_s": _swizzled((consumers * stages, tile, head_dim), dtype),
        "v_s": _swizzled((consumers * stages, tile, head_dim), dtype),
        "o_s": plgpu.SMEM((_ROWS, head_dim), jnp.float32 if consumers > 1 else o_dtype),
        "lse_s": plgpu.SMEM((_ROWS, _LSE_COLUMNS), jnp.float32),
        "q_full": plgpu.Barrier(num_barriers=q_stages),
        "q_free": plgpu.Barrier(num_barriers=q_stages, num_arrivals=consumers),
        "k_full": plgpu.Barrier(num_barriers=consumers * stages, num_arrivals=boxes),
        "v_full": plgpu.Barrier(num_barriers=consumers * stages, num_arrivals=boxes),
        "k_free": plgpu.Barrier(num_barriers=consumers * stages),
        "v_free": plgpu.Barrier(num_barriers=consumers * stages),
        "handover": (),
    }
    if consumers > 1:
        row_of_floats = plgpu.SMEM((_ROWS,), jnp.float32)
        scratch["handover"] = (row_of_floats, row_of_floats, plgpu.Barrier(), plgpu.Barrier())
        if o_dtype != jnp.float32:
            scratch["out_s"] = plgpu.SMEM((_ROWS, head_dim), o_dtype)
    if p_in_smem:
        scratch["p_s"] = _swizzled((consumers, _ROWS, tile), dtype)
    results = batch * slots * heads + (0 if slots == 1 else _ROWS)  # the merge reads 64 rows at a time
    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((results, head_dim), o_dtype),
            jax.ShapeDtypeStruct((results, _LSE_COLUMNS), jnp.float32),
        ],
        scratch_types=scratch,
        grid=(config.ctas,),
        grid_names=("cta",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="paged_decode_units",
        **({} if interpret is None else {"interpret": interpret}),
    )(q, pool, tables, work.units, work.num_units, slopes)


def _merge_kernel(
    o_parts: jax.Array,
    lse_parts: jax.Array,
    num_chunks: jax.Array,
    *,
    shape: _Shape,
    config: Config,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Merges the chunks of each sequence: [batch * heads, head_dim], and the log-sum-exp in base 2 [..., 8].

    A CTA takes up to 64 heads of one sequence and 16 columns, so that even one sequence occupies many, and reads
    eight chunks at a time to have their loads in flight together.
    """
    batch, heads, slots, head_dim = shape.batch, shape.heads, shape.slots, shape.head_dim
    rows = max(r for r in range(1, min(heads, _ROWS) + 1) if heads % r == 0)
    layout = plgpu.Layout.WGMMA
    unroll = min(_MERGE_UNROLL, slots)

    def body(
        o_ref: Any, lse_ref: Any, num_chunks_ref: Any, out_ref: Any, out_lse_ref: Any, out_s: Any, lse_s: Any
    ) -> None:
        row, part, column = (lax.axis_index(name) for name in ("row", "part", "column"))
        if config.overlap_merge and interpret is None:
            plgpu.griddepcontrol_wait()
        chunks = num_chunks_ref[row]
        columns = pl.ds(column * _MERGE_COLUMNS, _MERGE_COLUMNS)

        def add(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, top, total = carry
            parts = []
            for j in range(unroll):
                chunk = i * unroll + j
                at = pl.ds((row * slots + jnp.minimum(chunk, chunks - 1)) * heads + part * rows, _ROWS)
                lse = load(lse_ref.at[at], layout).max(axis=1)
                o = load(o_ref.at[at, columns], layout)
                parts.append((lse + jnp.where(chunk < chunks, 0.0, 2 * _NO_KEYS), o))
            new_top = top
            for lse, _ in parts:
                new_top = jnp.maximum(new_top, lse)
            shrink = jnp.exp2(top - new_top)
            acc, total = acc * lax.broadcast_in_dim(shrink, acc.shape, [0]), total * shrink
            for lse, o in parts:
                weight = jnp.exp2(lse - new_top)
                acc, total = acc + o * lax.broadcast_in_dim(weight, acc.shape, [0]), total + weight
            return acc, new_top, total

        zeros = plgpu.layout_cast(jnp.zeros((_ROWS,), jnp.float32), layout.reduce(1))
        start = (
            plgpu.layout_cast(jnp.zeros((_ROWS, _MERGE_COLUMNS), jnp.float32), layout),
            zeros + _NO_KEYS,
            zeros,
        )
        acc, top, total = lax.fori_loop(0, pl.cdiv(chunks, jnp.int32(unroll)), add, start)
        out_s[...] = (acc / lax.broadcast_in_dim(total, acc.shape, [0])).astype(shape.dtype)
        lse_s[...] = lax.broadcast_in_dim(top + jnp.log2(total), (_ROWS, _LSE_COLUMNS), [0])
        plgpu.commit_smem()
        to = pl.ds(row * heads + part * rows, rows)
        plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, rows)], out_ref.at[to, columns])

        @pl.when(column == 0)
        def _store_lse() -> None:
            plgpu.copy_smem_to_gmem(lse_s.at[pl.ds(0, rows)], out_lse_ref.at[to])

        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((batch * heads, head_dim), shape.dtype),
            jax.ShapeDtypeStruct((batch * heads, _LSE_COLUMNS), jnp.float32),
        ],
        scratch_types=[
            plgpu.SMEM((_ROWS, _MERGE_COLUMNS), shape.dtype),
            plgpu.SMEM((_ROWS, _LSE_COLUMNS), jnp.float32),
        ],
        grid=(batch, heads // rows, head_dim // _MERGE_COLUMNS),
        grid_names=("row", "part", "column"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_decode_merge",
        **({} if interpret is None else {"interpret": interpret}),
    )(o_parts, lse_parts, num_chunks)


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

    interpret: a `plgpu.InterpretGPUParams` runs the kernels on a CPU.
    """
    batch, heads, head_dim = q.shape
    _, _, kv_heads, block_size, _ = kv_pool.shape
    if config is None:
        config = default_config(head_dim)
    max_len = block_tables.shape[1] * block_size
    share = heads // kv_heads
    shape = _Shape(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        rows=max(r for r in range(1, min(share, _ROWS) + 1) if share % r == 0),
        slots=max_chunks(max_len, config.chunk, sliding_window),
        block_size=block_size,
        head_dim=head_dim,
        dtype=q.dtype,
    )
    work = plan(kv_lens, max_len, config.chunk, config.tile, sliding_window)
    alibi = alibi_slopes is not None
    slopes = jnp.zeros((8,), jnp.float32) if alibi_slopes is None else jnp.pad(alibi_slopes, (8, _ROWS))
    box = min(block_size, config.tile)  # rows of one TMA copy
    parts, lse = _units_kernel(
        _tile_queries(q, shape.rows),
        kv_pool.reshape(-1, box, head_dim),
        block_tables,
        work,
        slopes,
        shape=shape,
        scale=scale,
        sliding_window=sliding_window,
        logit_softcap=logit_softcap,
        alibi=alibi,
        config=config,
        interpret=interpret,
    )
    if shape.slots > 1:
        parts, lse = _merge_kernel(parts, lse, work.num_chunks, shape=shape, config=config, interpret=interpret)
    lse = lse[:, 0].reshape(batch, heads)
    return parts.reshape(batch, heads, head_dim), jnp.where(lse > _NO_KEYS / 2, lse / _LOG2E, -jnp.inf)
