"""Decode attention for head_dim 80 and 96 as Mosaic GPU kernels (Hopper), with query heads as the rows of all products.

`hopper.py` is faster, but has head_dim as wgmma's rows, a multiple of 64. Flash-Decoding
(split KV) over a persistent grid, with the splits at *fixed positions*, multiples of `chunk` tokens:

    kv_lens      [ 2500          , 700   , 1024     ]          chunk 1,024
    work units   (0,0) (0,1) (0,2)  (1,0)   (2,0)              x every group of query heads that share a KV head
    CTA i runs   units i, i + ctas, i + 2 ctas, ...            full chunks first, then the rest, longest first

so a sequence's result does not depend on what shares the batch. The list of units is made on the device by plain XLA
operations (`plan`) that depend on the lengths alone; in a program of many layers the compiler keeps one copy.

A CTA is a producer warpgroup and one or two consumers, which take a unit's tiles in turn:

    producer                                        consumers
        queries  q_free --> TMA --> q_s --> q_full      S = Q K^T             wgmma; a group's heads are the first rows
        keys     k_free --> TMA --> k_s --> k_full      mask, online softmax  base 2, in registers
        values   v_free --> TMA --> v_s --> v_full      O = O shrunk + P V    wgmma, P from registers
        (a copy a block; of keys and values a ring      consumer 1            O, maxima, sums --> o_s .. --> handed
        of `stages` tiles for each consumer)            consumer 0            adds its own --> TMA --> output; taken

A unit writes its normalised output and log-sum-exp; a second, small kernel merges the chunks of a sequence in
float32. Where the table is no wider than a chunk, units are whole sequences and the first kernel writes the result.

Sources: Flash-Decoding (pytorch.org/blog/flash-decoding), FlashAttention-2 and -3 (arXiv:2307.08691, 2407.08608),
PagedAttention (arXiv:2309.06180).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.common.attention_arguments import Features, Operands
from jpaged.pallas_kernels.common.hopper_memory import load, swizzled
from jpaged.pallas_kernels.decode_attention import hopper_interpreted, hopper_primitives
from jpaged.pallas_kernels.decode_attention.hopper_shape import LOG2E, DecodeShape, Loads
from jpaged.pallas_kernels.decode_attention.plan import chunks_of, max_chunks
from jpaged.pallas_kernels.devices import num_multiprocessors

_NO_KEYS = -1e30
_ROWS = 64  # of a wgmma tile; a group's query heads take the first of them
_LSE_COLUMNS = 8  # a log-sum-exp is stored this many times over: the narrowest tile of the wgmma layout, 32 bytes
_SMEM_BYTES = 227 * 1024 - 512
_REGISTERS = {"producer": 40, "consumer": 232}  # of a thread, where there are two consumers
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
    ctas = num_multiprocessors()
    tile, q_stages, consumers = 64, 2, 2
    queries = q_stages * _ROWS * head_dim * 2
    results = _ROWS * (head_dim * 6 + _LSE_COLUMNS * 4 + 8)
    stages = min(8, (_SMEM_BYTES - queries - results) // (tile * head_dim * 4)) // consumers
    return Config(tile, stages, 1024, ctas, consumers, q_stages)


@partial(jax.jit, static_argnames=("features", "config", "interpret"))
def decode_attention(
    operands: Operands, features: Features, *, config: Config | None = None, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """`decode_attention` of `hopper.py`, for the head_dims here.

    interpret: a `plgpu.InterpretGPUParams` runs the kernels on a CPU.
    """
    q, kv_pool, block_tables, kv_lens, alibi_slopes = operands
    batch, heads, head_dim = q.shape
    _, _, kv_heads, block_size, _ = kv_pool.shape
    if config is None:
        config = default_config(head_dim)
    max_len = block_tables.shape[1] * block_size
    share = heads // kv_heads
    s = _Shape.of(
        operands,
        features,
        rows=max(r for r in range(1, min(share, _ROWS) + 1) if share % r == 0),
        slots=max_chunks(max_len, config.chunk, features.sliding_window),
        config=config,
        gpu=hopper_primitives if interpret is None else hopper_interpreted,
    )
    work = plan(kv_lens, max_len, config.chunk, config.tile, features.sliding_window)
    slopes = jnp.zeros((8,), jnp.float32) if alibi_slopes is None else jnp.pad(alibi_slopes, (8, _ROWS))
    pool = kv_pool.reshape(-1, s.box, head_dim)
    parts, lse = _attend_units(s, _tile_queries(s, q), pool, block_tables, work, slopes, interpret)
    if s.slots > 1:
        parts, lse = _merge_chunks(s, parts, lse, work.num_chunks, interpret)
    lse = lse[:, 0].reshape(batch, heads)
    return parts.reshape(batch, heads, head_dim), jnp.where(lse > _NO_KEYS / 2, lse / LOG2E, -jnp.inf)


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


def plan(kv_lens: jax.Array, max_len: int, chunk: int, tile: int, sliding_window: int | None) -> Plan:
    """Cuts every sequence at multiples of `chunk` and lists the pieces, full ones first, then the longest first."""
    batch, slots = kv_lens.shape[0], max_chunks(max_len, chunk, sliding_window)
    rows = jnp.arange(batch, dtype=jnp.int32)
    begins, ends, first, num_chunks = chunks_of(kv_lens, max_len, chunk, tile, sliding_window)

    row = jnp.repeat(rows, slots)
    slot = jnp.tile(jnp.arange(slots, dtype=jnp.int32), batch)
    position = (first[row] + slot) * chunk
    begin = jnp.maximum(position, begins[row])
    end = jnp.maximum(jnp.minimum(position + chunk, ends[row]), begin)
    order = jnp.argsort(jnp.where(slot < num_chunks[row], begin - end, 1), stable=True)
    units = jnp.stack([row, row * slots + slot, begin, end, ends[row]], axis=1)[order]
    return Plan(units, jnp.sum(num_chunks, dtype=jnp.int32)[None], num_chunks)


@dataclass(frozen=True)
class _Shape(DecodeShape):
    """The shape of both kernels here."""

    config: Config

    @property
    def q_rows(self) -> int:
        """Rows of a tile of queries: TMA moves 8 or a multiple."""
        return -(-self.rows // 8) * 8

    @property
    def tile_each(self) -> bool:
        """Whether each group has a tile of queries of its own; see `_tile_queries`."""
        return self.rows != 4 or self.batch * self.groups == 1

    @property
    def o_dtype(self) -> Any:
        """The dtype of a unit's output, which is the result itself where there is nothing to merge."""
        return self.dtype if self.slots == 1 else jnp.float32


def _tile_queries(s: _Shape, q: jax.Array) -> jax.Array:
    """Cuts the queries into tiles of 8 rows or more, as TMA moves them, none of which cuts a group of `rows` heads.

    [batch, heads, head_dim] -> [tiles, q_rows, head_dim]. It is the same memory, seen otherwise, where `rows` is 4 (two
    groups a tile) or a multiple of 8; other groups are padded, one to a tile. (Results of 1 or 2 rows in the middle of
    a tile would not start at a multiple of 128 bytes, as TMA needs.)
    """
    if s.rows == 4 or s.rows % 8 == 0:
        flat = q.reshape(s.batch * s.heads, s.head_dim)
        return jnp.pad(flat, ((0, -(s.batch * s.heads) % s.q_rows), (0, 0))).reshape(-1, s.q_rows, s.head_dim)
    grouped = q.reshape(s.batch * s.groups, s.rows, s.head_dim)
    return jnp.pad(grouped, ((0, 0), (0, s.q_rows - s.rows), (0, 0)))


def _attend_units(
    s: _Shape, q: jax.Array, pool: jax.Array, tables: jax.Array, work: Plan, slopes: jax.Array, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """Attention of every work unit: [slots of all sequences * heads, head_dim], normalised, and its log-sum-exp in
    base 2, [slots of all sequences * heads, 8], the same in all columns.

    q: [tiles, q_rows, head_dim], see `_tile_queries`; pool: [num_blocks * 2 * kv_heads * boxes of a block, box,
    head_dim]; slopes: float32 [8 + heads + 64], those of the heads from 8 on.
    """
    results = s.batch * s.slots * s.heads + (0 if s.slots == 1 else _ROWS)  # the merge reads 64 rows at a time
    return plgpu.kernel(
        partial(_units_kernel, s),
        out_type=[
            jax.ShapeDtypeStruct((results, s.head_dim), s.o_dtype),
            jax.ShapeDtypeStruct((results, _LSE_COLUMNS), jnp.float32),
        ],
        scratch_types=_scratch(s),
        grid=(s.config.ctas,),
        grid_names=("cta",),
        num_threads=s.config.consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="paged_decode_units",
        interpret=interpret,
    )(q, pool, tables, work.units, work.num_units, slopes)


class _Arguments(NamedTuple):
    """What `_attend_units` describes, in global memory."""

    q: Any
    pool: Any
    tables: Any
    units: Any
    num_units: Any
    slopes: Any
    o: Any
    lse: Any


class _Handover(NamedTuple):
    """What consumer 1 leaves to consumer 0 beside its accumulators in `_Scratch.o_s`."""

    top_s: Any  # [64]
    total_s: Any  # [64]
    handed: Any  # barriers
    taken: Any


class _Scratch(NamedTuple):
    """Shared memory, and its barriers."""

    q_s: Any  # [q_stages, 64, head_dim]
    k_s: Any  # [consumers * stages, tile, head_dim], as v_s
    v_s: Any
    o_s: Any  # [64, head_dim]: of two consumers, consumer 1's accumulators; of one, the result
    lse_s: Any  # [64, 8]
    loads: Loads
    handover: _Handover | None = None  # of two consumers
    out_s: Any = None  # [64, head_dim]: of two consumers, the result, if it is not of o_s's type


def _scratch(s: _Shape) -> dict[str, Any]:
    tile, stages, q_stages, consumers = s.config.tile, s.config.stages, s.config.q_stages, s.config.consumers
    boxes = tile // s.box
    scratch: dict[str, Any] = {
        "q_s": swizzled((q_stages, _ROWS, s.head_dim), s.dtype),
        "k_s": swizzled((consumers * stages, tile, s.head_dim), s.dtype),
        "v_s": swizzled((consumers * stages, tile, s.head_dim), s.dtype),
        "o_s": plgpu.SMEM((_ROWS, s.head_dim), jnp.float32 if consumers > 1 else s.o_dtype),
        "lse_s": plgpu.SMEM((_ROWS, _LSE_COLUMNS), jnp.float32),
        "loads": {
            "q_full": plgpu.Barrier(num_barriers=q_stages),
            "q_free": plgpu.Barrier(num_barriers=q_stages, num_arrivals=consumers),
            "k_full": plgpu.Barrier(num_barriers=consumers * stages, num_arrivals=boxes),
            "v_full": plgpu.Barrier(num_barriers=consumers * stages, num_arrivals=boxes),
            "k_free": plgpu.Barrier(num_barriers=consumers * stages),
            "v_free": plgpu.Barrier(num_barriers=consumers * stages),
        },
    }
    if consumers > 1:
        row_of_floats = plgpu.SMEM((_ROWS,), jnp.float32)
        scratch["handover"] = _Handover(row_of_floats, row_of_floats, plgpu.Barrier(), plgpu.Barrier())
        if s.o_dtype != jnp.float32:
            scratch["out_s"] = plgpu.SMEM((_ROWS, s.head_dim), s.o_dtype)
    return scratch


class _Unit(NamedTuple):
    """A unit of work: a chunk of a sequence, for a group of heads."""

    group: jax.Array
    row: jax.Array  # the sequence
    slot: jax.Array  # of its result
    end: jax.Array  # position
    length: jax.Array  # of the sequence
    first: jax.Array  # tile
    tiles: jax.Array  # how many


class _Cta(NamedTuple):
    """A CTA at work, as each of its warpgroups sees it."""

    shape: _Shape
    gmem: _Arguments
    smem: _Scratch
    cta: jax.Array
    warpgroup: jax.Array  # the consumers, then the producer
    mine: jax.Array  # units of this CTA

    def unit(self, i: jax.Array) -> _Unit:
        """The CTA's i-th."""
        s, tile = self.shape, self.shape.config.tile
        index = self.cta + i * s.config.ctas
        w, group = lax.div(index, jnp.int32(s.groups)), lax.rem(index, jnp.int32(s.groups))
        row, slot, begin, end, length = (self.gmem.units[w, field] for field in range(5))
        first = lax.div(begin, jnp.int32(tile))
        return _Unit(group, row, slot, end, length, first, pl.cdiv(end, jnp.int32(tile)) - first)

    def query_tile(self, u: _Unit) -> tuple[jax.Array, jax.Array]:
        """Which tile of the queries holds the unit's group, and from which row of it on."""
        s = self.shape
        if s.tile_each:
            return u.row * s.groups + u.group, jnp.int32(0)
        first = u.row * s.heads + u.group * s.rows
        return lax.div(first, jnp.int32(s.q_rows)), lax.rem(first, jnp.int32(s.q_rows))


def _units_kernel(s: _Shape, *arguments: Any, loads: dict[str, Any], **scratch: Any) -> None:
    gmem, smem = _Arguments(*arguments), _Scratch(loads=Loads(**loads), **scratch)
    cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
    total = gmem.num_units[0] * s.groups
    mine = lax.div(jnp.maximum(total - cta, 0) + (s.config.ctas - 1), jnp.int32(s.config.ctas))
    c = _Cta(s, gmem, smem, cta, warpgroup, mine)
    pl.when(warpgroup == s.config.consumers)(partial(_produce, c))
    pl.when(warpgroup < s.config.consumers)(partial(_consume, c))


def _produce(c: _Cta) -> None:
    """The producer warpgroup: brings queries, keys and values."""
    s, smem, config = c.shape, c.smem, c.shape.config
    if config.consumers > 1:
        plgpu.set_max_registers(_REGISTERS["producer"], action="decrease")

    def load_unit(i: jax.Array, steps: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        u = c.unit(i)
        head = lax.div(u.group, jnp.int32(s.groups_a_kv_head))
        q_slot = lax.rem(i, jnp.int32(config.q_stages))

        @pl.when(i >= config.q_stages)
        def _wait_q() -> None:
            plgpu.barrier_wait(smem.loads.q_free.at[q_slot])

        plgpu.copy_gmem_to_smem(
            c.gmem.q.at[c.query_tile(u)[0]], smem.q_s.at[q_slot, pl.ds(0, s.q_rows)], smem.loads.q_full.at[q_slot]
        )
        return lax.fori_loop(0, u.tiles, partial(_load_tile, c, u, head), steps)

    # How many tiles each consumer has been given.
    steps = lax.fori_loop(0, c.mine, load_unit, (jnp.int32(0),) * config.consumers)
    # No barrier may have an arrival outstanding when the CTA ends.
    for consumer in range(config.consumers):
        for stage in range(config.stages):

            @pl.when(stage < steps[consumer])
            def _drain(stage: int = consumer * config.stages + stage) -> None:
                plgpu.barrier_wait(smem.loads.k_free.at[stage])
                plgpu.barrier_wait(smem.loads.v_free.at[stage])

    for q_slot in range(config.q_stages):

        @pl.when(q_slot < c.mine)
        def _drain_q(q_slot: int = q_slot) -> None:
            plgpu.barrier_wait(smem.loads.q_free.at[q_slot])


def _load_tile(
    c: _Cta, u: _Unit, head: jax.Array, nth: jax.Array, steps: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """The unit's nth tile of keys and values, into the ring of the consumer whose turn it is."""
    s, smem, config = c.shape, c.smem, c.shape.config
    boxes_a_block = s.block_size // s.box
    consumer = lax.rem(nth, jnp.int32(config.consumers))
    step = steps[0] if config.consumers == 1 else jnp.where(consumer == 0, steps[0], steps[1])
    stage = consumer * config.stages + lax.rem(step, jnp.int32(config.stages))
    copies = []
    for j in range(config.tile // s.box):
        position = (u.first + nth) * config.tile + j * s.box
        # Entries past the last token may be anything; the null block is always there to read.
        entry = jnp.minimum(lax.div(position, jnp.int32(s.block_size)), c.gmem.tables.shape[1] - 1)
        block = jnp.where(position < u.end, c.gmem.tables[u.row, entry], 0)
        part = lax.rem(lax.div(position, jnp.int32(s.box)), jnp.int32(boxes_a_block))
        copies.append((block * (2 * s.kv_heads) + head) * boxes_a_block + part)
    keys, values = (smem.k_s, smem.loads.k_full, smem.loads.k_free), (smem.v_s, smem.loads.v_full, smem.loads.v_free)
    for kv, (ring, full, free) in enumerate((keys, values)):

        @pl.when(step >= config.stages)
        def _wait(free: Any = free) -> None:
            plgpu.barrier_wait(free.at[stage])

        for j, index in enumerate(copies):
            plgpu.copy_gmem_to_smem(
                c.gmem.pool.at[index + kv * (s.kv_heads * boxes_a_block)],
                ring.at[stage, pl.ds(j * s.box, s.box)],
                full.at[stage],
            )
    return tuple(n + (consumer == i).astype(jnp.int32) for i, n in enumerate(steps))


_HEADS_BY_KEYS = plgpu.Layout.WGMMA  # of every product: [query heads, keys] and [query heads, head_dim]
_BY_HEAD = _HEADS_BY_KEYS.reduce(1)


def _across(x: jax.Array, columns: int) -> jax.Array:
    return lax.broadcast_in_dim(x, (_ROWS, columns), [0])


class _State(NamedTuple):
    """Attention to some keys, not normalised: acc [64, head_dim] sums 2^(score - top) of the values, total [64] of 1;
    top [64] is the greatest score, all in base 2."""

    acc: jax.Array
    top: jax.Array
    total: jax.Array


def _nothing_seen(columns: int) -> _State:
    """Attention to no keys."""
    zeros = plgpu.layout_cast(jnp.zeros((_ROWS,), jnp.float32), _BY_HEAD)
    acc = plgpu.layout_cast(jnp.zeros((_ROWS, columns), jnp.float32), _HEADS_BY_KEYS)
    return _State(acc, zeros + _NO_KEYS, zeros)


def _consume(c: _Cta) -> None:
    """A consumer warpgroup."""
    s, smem, config = c.shape, c.smem, c.shape.config
    if config.consumers > 1:
        plgpu.set_max_registers(_REGISTERS["consumer"], action="increase")

    def run_unit(i: jax.Array, step: jax.Array) -> jax.Array:
        u = c.unit(i)
        q_at = c.query_tile(u)[1]
        q_slot = lax.rem(i, jnp.int32(config.q_stages))
        slope = None
        if s.alibi:
            slope = load(c.gmem.slopes.at[pl.ds(8 + u.group * s.rows - q_at, _ROWS)], _BY_HEAD) * LOG2E
        plgpu.barrier_wait(smem.loads.q_full.at[q_slot])

        def attend(n: jax.Array, state: _State) -> _State:
            nth = n * config.consumers + c.warpgroup
            start = (u.first + nth) * config.tile
            stage = c.warpgroup * config.stages + lax.rem(step + n, jnp.int32(config.stages))
            return _attend_tile(c, u, state, start, q_slot, stage, slope)

        nothing = _nothing_seen(s.head_dim)
        own_tiles = lax.div(u.tiles - c.warpgroup + (config.consumers - 1), jnp.int32(config.consumers))
        state = lax.fori_loop(0, own_tiles, attend, nothing)
        plgpu.barrier_arrive(smem.loads.q_free.at[q_slot])
        if (handover := smem.handover) is None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the unit before this one has left the buffers
            _store(c, u, q_at, state)
        else:
            pl.when(c.warpgroup == 1)(lambda: _hand_over(c, handover, i, state))
            pl.when(c.warpgroup == 0)(lambda: _merge_and_store(c, handover, u, q_at, state))
        return step + own_tiles

    lax.fori_loop(0, c.mine, run_unit, jnp.int32(0))
    if (handover := smem.handover) is not None:

        @pl.when((c.warpgroup == 1) & (c.mine > 0))
        def _drain_taken() -> None:
            plgpu.barrier_wait(handover.taken)

    plgpu.wait_smem_to_gmem(0)


def _attend_tile(
    c: _Cta, u: _Unit, state: _State, start: jax.Array, q_slot: jax.Array, stage: jax.Array, slope: jax.Array | None
) -> _State:
    """The state, and attention to the unit's tile of position `start`, which is in `stage` of the rings."""
    s, smem = c.shape, c.smem
    acc, top, total = state
    plgpu.barrier_wait(smem.loads.k_full.at[stage])

    def product(scores_ref: Any) -> jax.Array:
        plgpu.wgmma(scores_ref, smem.q_s.at[q_slot], smem.k_s.at[stage].T)
        return scores_ref[...]

    scores = pl.run_scoped(product, plgpu.ACC((_ROWS, s.config.tile), jnp.float32))
    plgpu.barrier_arrive(smem.loads.k_free.at[stage])
    scores = _mask(s, u, scores, start, slope)
    new_top = jnp.maximum(top, scores.max(axis=1))
    shrink = jnp.exp2(top - new_top)
    p = jnp.exp2(scores - _across(new_top, s.config.tile))
    total = total * shrink + p.sum(axis=1)
    acc = acc * _across(shrink, s.head_dim)
    p = p.astype(s.dtype)
    plgpu.barrier_wait(smem.loads.v_full.at[stage])
    _zero_unowned(c, u, start, stage)
    acc = s.gpu.add_product(acc, p, smem.v_s.at[stage])
    plgpu.barrier_arrive(smem.loads.v_free.at[stage])
    return _State(acc, new_top, total)


def _mask(s: _Shape, u: _Unit, scores: jax.Array, start: jax.Array, slope: jax.Array | None) -> jax.Array:
    """Scores of the keys from position `start` on, from their products, in base 2; those not seen are -1e30."""
    scores = s.in_base_2(scores)
    keys = plgpu.broadcasted_iota(jnp.int32, (_ROWS, s.config.tile), 1, layout=_HEADS_BY_KEYS) + start
    if slope is not None:
        distance = (keys - (u.length - 1)).astype(jnp.float32)
        scores = scores + _across(slope, s.config.tile) * distance
    seen = keys < u.end
    if s.features.sliding_window is not None:
        seen = seen & (keys >= u.length - s.features.sliding_window)
    return jnp.where(seen, scores, _NO_KEYS)


def _zero_unowned(c: _Cta, u: _Unit, start: jax.Array, stage: jax.Array) -> None:
    """Zeroes values of the first and last tiles that the sequence does not own: they may be NaN, and 0 * NaN is NaN."""
    s = c.shape
    first_seen = jnp.int32(0) if s.features.sliding_window is None else u.length - s.features.sliding_window

    @pl.when((start + s.config.tile > u.end) | (start < first_seen))
    def _zero() -> None:
        for r in range(0, s.config.tile, _ROWS):
            at = c.smem.v_s.at[stage, pl.ds(r, _ROWS)]
            rows = plgpu.broadcasted_iota(jnp.int32, (_ROWS, s.head_dim), 0, layout=_HEADS_BY_KEYS)
            key = rows + (start + r)
            v = plgpu.layout_cast(at[...], _HEADS_BY_KEYS)
            at[...] = jnp.where((key < u.end) & (key >= first_seen), v, jnp.zeros_like(v))
        plgpu.commit_smem()


def _hand_over(c: _Cta, to: _Handover, i: jax.Array, state: _State) -> None:
    """Consumer 1 leaves its part of a unit to consumer 0, when that has taken the one before."""

    @pl.when(i > 0)
    def _wait_taken() -> None:
        plgpu.barrier_wait(to.taken)

    c.smem.o_s[...] = state.acc
    to.top_s[...] = state.top
    to.total_s[...] = state.total
    plgpu.barrier_arrive(to.handed)


def _merge_and_store(c: _Cta, handover: _Handover, u: _Unit, q_at: jax.Array, state: _State) -> None:
    """Consumer 0 adds consumer 1's part of a unit to its own."""
    acc, top, total = state
    plgpu.barrier_wait(handover.handed)
    other_top = plgpu.layout_cast(handover.top_s[...], _BY_HEAD)
    new_top = jnp.maximum(top, other_top)
    mine_by, other_by = jnp.exp2(top - new_top), jnp.exp2(other_top - new_top)
    other = load(c.smem.o_s, _HEADS_BY_KEYS)
    other_total = plgpu.layout_cast(handover.total_s[...], _BY_HEAD)
    merged = acc * _across(mine_by, c.shape.head_dim)
    merged = merged + other * _across(other_by, c.shape.head_dim)
    _store(c, u, q_at, _State(merged, new_top, total * mine_by + other_total * other_by))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # o_s may be what is being stored
    plgpu.barrier_arrive(handover.taken)


def _store(c: _Cta, u: _Unit, q_at: jax.Array, state: _State) -> None:
    """Writes a unit's output and log-sum-exp, by way of shared memory; not waited for."""
    s, smem = c.shape, c.smem
    total = jnp.where(state.total > 0, state.total, 1.0)
    staging = smem.o_s if smem.out_s is None else smem.out_s
    staging[...] = (state.acc / _across(total, s.head_dim)).astype(s.o_dtype)
    smem.lse_s[...] = _across(state.top + jnp.log2(total), _LSE_COLUMNS)
    plgpu.commit_smem()
    to = pl.ds(u.slot * s.heads + u.group * s.rows, s.rows)
    # The group's rows begin at one of a few places in its tile; a TMA copy needs to know which when it is compiled.
    for at in range(0, s.q_rows - s.rows + 1, s.rows):

        @pl.when(q_at == at)
        def _copy(at: int = at) -> None:
            plgpu.copy_smem_to_gmem(staging.at[pl.ds(at, s.rows)], c.gmem.o.at[to])
            plgpu.copy_smem_to_gmem(smem.lse_s.at[pl.ds(at, s.rows)], c.gmem.lse.at[to])


def _merge_chunks(
    s: _Shape, o_parts: jax.Array, lse_parts: jax.Array, num_chunks: jax.Array, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """Merges the chunks of each sequence: [batch * heads, head_dim], and the log-sum-exp in base 2 [..., 8].

    A CTA takes up to 64 heads of one sequence and 16 columns, so that even one sequence occupies many, and reads
    eight chunks at a time to have their loads in flight together.
    """
    rows = max(r for r in range(1, min(s.heads, _ROWS) + 1) if s.heads % r == 0)
    return plgpu.kernel(
        partial(_merge_kernel, s, rows),
        out_type=[
            jax.ShapeDtypeStruct((s.batch * s.heads, s.head_dim), s.dtype),
            jax.ShapeDtypeStruct((s.batch * s.heads, _LSE_COLUMNS), jnp.float32),
        ],
        scratch_types=[
            plgpu.SMEM((_ROWS, _MERGE_COLUMNS), s.dtype),
            plgpu.SMEM((_ROWS, _LSE_COLUMNS), jnp.float32),
        ],
        grid=(s.batch, s.heads // rows, s.head_dim // _MERGE_COLUMNS),
        grid_names=("row", "part", "column"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_decode_merge",
        interpret=interpret,
    )(o_parts, lse_parts, num_chunks)


def _merge_kernel(
    s: _Shape,
    rows: int,
    o_ref: Any,
    lse_ref: Any,
    num_chunks_ref: Any,
    out_ref: Any,
    out_lse_ref: Any,
    out_s: Any,
    lse_s: Any,
) -> None:
    row, part, column = (lax.axis_index(name) for name in ("row", "part", "column"))
    if s.config.overlap_merge:
        s.gpu.await_kernel_before()
    chunks = num_chunks_ref[row]
    columns = pl.ds(column * _MERGE_COLUMNS, _MERGE_COLUMNS)
    unroll = min(_MERGE_UNROLL, s.slots)

    def add(i: jax.Array, state: _State) -> _State:
        acc, top, total = state
        parts = []
        for j in range(unroll):
            chunk = i * unroll + j
            at = pl.ds((row * s.slots + jnp.minimum(chunk, chunks - 1)) * s.heads + part * rows, _ROWS)
            lse = load(lse_ref.at[at], _HEADS_BY_KEYS).max(axis=1)
            o = load(o_ref.at[at, columns], _HEADS_BY_KEYS)
            parts.append((lse + jnp.where(chunk < chunks, 0.0, 2 * _NO_KEYS), o))
        new_top = top
        for lse, _ in parts:
            new_top = jnp.maximum(new_top, lse)
        shrink = jnp.exp2(top - new_top)
        acc, total = acc * _across(shrink, _MERGE_COLUMNS), total * shrink
        for lse, o in parts:
            weight = jnp.exp2(lse - new_top)
            acc, total = acc + o * _across(weight, _MERGE_COLUMNS), total + weight
        return _State(acc, new_top, total)

    state = lax.fori_loop(0, pl.cdiv(chunks, jnp.int32(unroll)), add, _nothing_seen(_MERGE_COLUMNS))
    out_s[...] = (state.acc / _across(state.total, _MERGE_COLUMNS)).astype(s.dtype)
    lse_s[...] = _across(state.top + jnp.log2(state.total), _LSE_COLUMNS)
    plgpu.commit_smem()
    to = pl.ds(row * s.heads + part * rows, rows)
    plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, rows)], out_ref.at[to, columns])

    @pl.when(column == 0)
    def _store_lse() -> None:
        plgpu.copy_smem_to_gmem(lse_s.at[pl.ds(0, rows)], out_lse_ref.at[to])

    plgpu.wait_smem_to_gmem(0)
