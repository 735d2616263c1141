"""Ragged attention for Hopper: prefill chunks and decode rows over the paged pool, in one Pallas Mosaic GPU kernel.

The structure is FlashAttention-3's (arXiv:2407.08608): a persistent CTA of one producer warpgroup, which brings keys
and values through the block table by TMA, and consumer warpgroups of 64 rows each, whose softmax overlaps the matrix
products of the others and, where registers allow, of themselves.

    work list (`work_list.py`): tiles of (row, window of tokens), x units of query heads that share a KV head
        item r of a CTA: (tile, unit) number r * ctas + its seat in turn r

    producer, a warp each for                               consumers, 64 rows of the item each
        queries  q_free --> TMA --> queries --> q_full          S = Q K^T             wgmma, both from shared memory
        keys     k_free --> TMA --> keys    --> k_full          mask, online softmax  base 2, in registers
        values   v_free --> TMA --> values  --> v_full          O = O shrunk + P V    wgmma, P from registers
                 (rows past the end are zeroed first)           output, log-sum-exp   predicated stores

    rows of a consumer's 64 x D query tile: head g of the KV group has rows g * n .. g * n + n - 1, one for each of
    the consumer's n tokens (n a multiple of 8), so that a window of one head is one TMA box.

    steps of an item, block_kv keys each, in the order they are taken:   hi - 1 | lo .. | lo_full .. | hi_full .. hi - 2
                                                                        masked | masked | no mask    | masked

`docs/kernels_attention.md` says what the tiles cost in registers and shared memory, and what was measured.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.common.attention_arguments import Features, Operands
from jpaged.pallas_kernels.common.hopper_memory import swizzle, swizzled
from jpaged.pallas_kernels.devices import num_multiprocessors
from jpaged.pallas_kernels.ragged_attention import hopper_interpreted, hopper_primitives, work_list
from jpaged.pallas_kernels.ragged_attention.work_list import plan_tiles

_LOG2E = math.log2(math.e)
_FLOOR = -1e30  # running maxima start here, so that a row that sees no key of a tile never forms inf - inf
_ROWS = 64  # of a consumer warpgroup: the M of a wgmma
_MAX_HEADS = 8  # of a KV group in one tile: 64 rows / 8 tokens
_ITEMS_HELD = 4  # rows of the work list: one is read until its tile is stored, when the producer is q_stages further


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


def unsupported(q: jax.Array, kv_pool: jax.Array, value_dim: int | None = None) -> str | None:
    """Why the kernel cannot take these (checked) arguments; None if it can."""
    _, arrays, _, block_size, head_dim = kv_pool.shape
    if arrays == 1:
        return "it takes keys and values apart, not latents"
    if kv_pool.dtype not in (jnp.bfloat16.dtype, jnp.float16.dtype):
        return f"it takes bfloat16 and float16, not {kv_pool.dtype}"
    if head_dim % 16 or not 16 <= head_dim <= 256:
        return f"head_dim must be a multiple of 16 up to 256, got {head_dim}"
    block_kv = pick_tiling(head_dim).block_kv
    if block_size % 8 or (block_kv % block_size and block_size % block_kv):
        return f"block size must be a multiple of 8 that divides {block_kv} or is divided by it, got {block_size}"
    return None


@functools.partial(jax.jit, static_argnames=("features", "causal", "tiling", "ctas", "interpret"))
def ragged_attention(
    operands: Operands,
    query_starts: jax.Array,
    features: Features,
    *,
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
    q, kv_pool, block_tables, kv_lens, alibi_slopes = operands
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
        features=features,
        alibi=alibi_slopes is not None,
        causal=causal,
        ctas=ctas or num_multiprocessors(),
        gpu=hopper_primitives if interpret is None else hopper_interpreted,
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
        sliding_window=features.sliding_window,
        causal=causal,
    )
    kernel = plgpu.kernel(
        functools.partial(_kernel, s),
        out_type=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)],
        scratch_types=_scratch(s),
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
        interpret=interpret,
    )
    out, lse = kernel(q, kv_pool, block_tables, work, count, _slopes_by_row(s, alibi_slopes))
    return out[:tokens, :, : features.value_dim], lse[:tokens]  # values are computed whole, whatever counts of them


def _heads_per_tile(group: int) -> int:
    """Query heads of a KV group that share a tile: the most that divide the group and fit."""
    return next(n for n in range(min(group, _MAX_HEADS), 0, -1) if group % n == 0)


def _slopes_by_row(s: "_Shape", alibi_slopes: jax.Array | None) -> jax.Array:
    """float32 [units, 64]: the slope of each row of a unit's query tiles, for scores in powers of 2."""
    if alibi_slopes is None:
        return jnp.zeros((1, _ROWS), jnp.float32)
    slopes = jnp.repeat(alibi_slopes.reshape(s.units, s.heads) * _LOG2E, s.tokens, axis=1)
    return jnp.pad(slopes, ((0, 0), (0, _ROWS - slopes.shape[1])))


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
    features: Features
    alibi: bool
    causal: bool
    ctas: int
    gpu: ModuleType  # `hopper_primitives`, or `hopper_interpreted` on a CPU

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


class _Arguments(NamedTuple):
    """The call's arrays in global memory."""

    q: Any  # [T, H, D]
    pool: Any  # [num_blocks, 2, kv_heads, block_size, D]
    table: Any  # int32 [R, table_width]
    work: Any  # int32 [tiles, 32]
    count: Any  # int32 [1]
    slopes: Any  # float32 [units, 64]
    out: Any  # [T, H, D]
    lse: Any  # float32 [T, H]


class _Scratch(NamedTuple):
    """Shared memory, and its barriers: `full` by who filled it, `free` by each consumer that is done with it."""

    queries: Any  # [q_stages * consumers, 64, D]
    keys: Any  # [stages, block_kv, D]
    values: Any  # [stages, block_kv, D]
    items: Any  # int32 [consumers, 4, 32]: rows of the work list
    q_full: Any
    q_free: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any
    v_landed: Any  # values of an item's last step have arrived, but not been cleaned


def _scratch(s: _Shape) -> _Scratch:
    tiling = s.tiling
    tiles = tiling.q_stages * tiling.consumers
    full = plgpu.Barrier(num_barriers=tiling.stages, num_arrivals=s.copies)
    free = plgpu.Barrier(num_barriers=tiling.stages, num_arrivals=tiling.consumers)
    return _Scratch(
        queries=swizzled((tiles, _ROWS, s.head_dim), s.dtype),
        keys=swizzled((tiling.stages, tiling.block_kv, s.head_dim), s.dtype),
        values=swizzled((tiling.stages, tiling.block_kv, s.head_dim), s.dtype),
        items=plgpu.SMEM((tiling.consumers, _ITEMS_HELD, work_list.COLUMNS), jnp.int32),
        q_full=plgpu.Barrier(num_barriers=tiles, num_arrivals=s.heads + 1),
        q_free=plgpu.Barrier(num_barriers=tiles),
        k_full=full,
        k_free=free,
        v_full=full,
        v_free=free,
        v_landed=plgpu.Barrier(num_arrivals=s.copies),
    )


class _Cta(NamedTuple):
    """A CTA at work, as each of its warpgroups sees it."""

    shape: _Shape
    gmem: _Arguments
    smem: _Scratch
    cta: jax.Array
    wg: jax.Array  # 0 .. consumers - 1, then the producer
    total: jax.Array  # items of all CTAs
    rounds: jax.Array  # items of this one, the last of which may not exist

    def item(self, r: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(exists, tile, unit) of this CTA's r-th item: the list is dealt out in a snake, so that who gets the longest
        of one turn gets the shortest of the next."""
        s = self.shape
        seat = jnp.where(lax.rem(r, 2) == 0, self.cta, s.ctas - 1 - self.cta)
        item = r * s.ctas + seat
        exists = item < self.total
        item = jnp.minimum(item, self.total - 1)
        return exists, lax.div(item, s.units), lax.rem(item, s.units)

    def slot(self, x: "_Tile", j: Any) -> jax.Array:
        """Where the keys and values of a tile's j-th step are."""
        return lax.rem(x.before + j, self.shape.tiling.stages)


def _kernel(s: _Shape, *refs: Any) -> None:
    gmem, smem = _Arguments(*refs[: len(_Arguments._fields)]), _Scratch(*refs[len(_Arguments._fields) :])
    cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
    total = gmem.count[0] * s.units
    rounds = lax.div(total + (s.ctas - 1), s.ctas)
    c = _Cta(s, gmem, smem, cta, wg, total, rounds)
    pl.when(wg == s.tiling.consumers)(functools.partial(_produce, c))
    pl.when(wg < s.tiling.consumers)(functools.partial(_consume, c))


def _produce(c: _Cta) -> None:
    """The producer warpgroup: a warp each for queries, keys and values, so that none waits for the others' buffers."""
    s = c.shape
    s.gpu.set_registers(s.tiling.registers[1], "decrease")
    s.gpu.in_warps(functools.partial(_load, c), "keys", "values", "queries")


class _Source(NamedTuple):
    """Where an item's queries, keys and values are."""

    tile: jax.Array
    unit: jax.Array
    kv_head: jax.Array
    row: jax.Array  # of the block table
    token: jax.Array  # first of the window
    kv_len: jax.Array
    lo: jax.Array  # steps
    hi: jax.Array


def _load(c: _Cta, what: Sequence[str]) -> None:
    """Brings all items' queries, keys or values, or several of these, into shared memory."""
    s, smem = c.shape, c.smem
    stages, q_stages, consumers = s.tiling.stages, s.tiling.q_stages, s.tiling.consumers
    queries, keys, values = ("queries" in what), ("keys" in what), ("values" in what)

    def load_item(r: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        step, items = carry
        exists, tile, unit = c.item(r)
        kv_head = lax.div(unit, s.units_per_kv_head)
        row, token, kv_len = (c.gmem.work[tile, i] for i in (work_list.ROW, work_list.TOKEN, work_list.KV_LEN))
        lo = c.gmem.work[tile, work_list.LO]
        hi = jnp.where(exists, c.gmem.work[tile, work_list.HI], lo)
        source = _Source(tile, unit, kv_head, row, token, kv_len, lo, hi)

        def load_step(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            step, *blocks = carry
            # The next step's blocks are read ahead of the waits, so that the table's latency is hidden.
            ahead = _blocks(c, source, lo + j)
            t = jnp.where(j == 0, hi - 1, lo + j - 1)
            slot, reused = lax.rem(step, stages), step >= stages
            if keys:
                _load_keys(c, source, t, blocks, slot, reused)
            if values:
                _load_values(c, source, t, blocks, slot, reused)
            return (step + 1, *ahead)

        if queries:
            pl.when(exists)(lambda: _load_queries(c, source, items))
        if keys or values:
            # An item without steps has no last step; its table is read all the same.
            first_blocks = _blocks(c, source, jnp.maximum(hi - 1, 0))
            step, *_ = lax.fori_loop(0, hi - lo, load_step, (step, *first_blocks))
        return step, items + exists.astype(jnp.int32)

    steps, items = lax.fori_loop(0, c.rounds, load_item, (jnp.int32(0), jnp.int32(0)))
    # Every release is waited for, so that barriers end as they began; the interpreter insists.
    for slot in range(stages):

        @pl.when(slot < steps)
        def _(slot: int = slot) -> None:
            if keys:
                plgpu.barrier_wait(smem.k_free.at[slot])
            if values:
                plgpu.barrier_wait(smem.v_free.at[slot])

    for buffer in range(q_stages) if queries else ():

        @pl.when(items > buffer)
        def _(buffer: int = buffer) -> None:
            for w in range(consumers):
                plgpu.barrier_wait(smem.q_free.at[buffer * consumers + w])


def _load_queries(c: _Cta, source: _Source, items: jax.Array) -> None:
    """Each consumer's tile of queries, and with it the item's row of the work list, read sooner there."""
    s, smem = c.shape, c.smem
    for w in range(s.tiling.consumers):
        buffer = lax.rem(items, s.tiling.q_stages) * s.tiling.consumers + w

        @pl.when(items >= s.tiling.q_stages)
        def _(buffer: jax.Array = buffer) -> None:
            plgpu.barrier_wait(smem.q_free.at[buffer])

        held = smem.items.at[w, lax.rem(items, _ITEMS_HELD)]
        plgpu.copy_gmem_to_smem(c.gmem.work.at[source.tile], held, smem.q_full.at[buffer])
        for g in range(s.heads):
            plgpu.copy_gmem_to_smem(
                c.gmem.q.at[pl.ds(source.token + w * s.tokens, s.tokens), source.unit * s.heads + g],
                smem.queries.at[buffer, pl.ds(g * s.tokens, s.tokens)],
                smem.q_full.at[buffer],
            )


def _blocks(c: _Cta, source: _Source, t: jax.Array) -> list[jax.Array]:
    """Blocks of step t's copies; the null block where no live token is."""
    s = c.shape
    blocks = []
    for j in range(s.copies):
        at = t * s.tiling.block_kv + j * s.copy_rows
        index = jnp.minimum(lax.div(at, s.block_size), s.table_width - 1)
        blocks.append(jnp.where(at < source.kv_len, c.gmem.table[source.row, index], 0))
    return blocks


def _copy_step(c: _Cta, source: _Source, part: int, t: jax.Array, blocks: list, target: Any, barrier: Any) -> None:
    """Copies step t's keys (part 0) or values (1)."""
    s = c.shape
    for j, block in enumerate(blocks):
        tile = c.gmem.pool.at[block, part, source.kv_head]
        if s.copy_rows < s.block_size:
            tile = tile.at[pl.ds(lax.rem(t * s.tiling.block_kv + j * s.copy_rows, s.block_size), s.copy_rows)]
        plgpu.copy_gmem_to_smem(tile, target.at[pl.ds(j * s.copy_rows, s.copy_rows)], barrier)


def _load_keys(c: _Cta, source: _Source, t: jax.Array, blocks: list, slot: jax.Array, reused: jax.Array) -> None:
    smem = c.smem

    @pl.when(reused)
    def _() -> None:
        plgpu.barrier_wait(smem.k_free.at[slot])

    _copy_step(c, source, 0, t, blocks, smem.keys.at[slot], smem.k_full.at[slot])


def _load_values(c: _Cta, source: _Source, t: jax.Array, blocks: list, slot: jax.Array, reused: jax.Array) -> None:
    s, smem, block_kv = c.shape, c.smem, c.shape.tiling.block_kv

    @pl.when(reused)
    def _() -> None:
        plgpu.barrier_wait(smem.v_free.at[slot])

    tail = (t + 1) * block_kv > source.kv_len

    @pl.when(jnp.logical_not(tail))
    def _() -> None:
        _copy_step(c, source, 1, t, blocks, smem.values.at[slot], smem.v_full.at[slot])

    @pl.when(tail)
    def _() -> None:
        # Slots past the last token may hold NaN, and 0 * NaN is NaN: they are zeroed before anyone looks.
        _copy_step(c, source, 1, t, blocks, smem.values.at[slot], smem.v_landed)
        plgpu.barrier_wait(smem.v_landed)
        s.gpu.zero_rows(smem.values.at[slot], source.kv_len - t * block_kv, *swizzle(s.head_dim))
        for _ in range(s.copies):  # in place of the copies, which arrive there otherwise
            plgpu.barrier_arrive(smem.v_full.at[slot])


class _Tile(NamedTuple):
    """A consumer's part of an item."""

    buffer: jax.Array  # of its queries
    token: jax.Array  # its first
    first: jax.Array  # of the row's tokens in the window, which alone are stored
    end: jax.Array
    lo: jax.Array  # steps: begin, begin and end of those that need no mask, end
    lo_full: jax.Array
    hi_full: jax.Array
    hi: jax.Array
    position: jax.Array  # of its first token, in the row
    unit: jax.Array
    head: jax.Array  # its first
    steps: jax.Array  # how many
    before: jax.Array  # steps of all items before


def _consume(c: _Cta) -> None:
    """A consumer warpgroup."""
    s, smem, consumers = c.shape, c.smem, c.shape.tiling.consumers
    s.gpu.set_registers(s.tiling.registers[0], "increase")
    if s.tiling.turns:
        pl.when(c.wg == consumers - 1)(lambda: _pass_turn(c))  # to the first

    def consume_item(r: jax.Array, step: jax.Array) -> jax.Array:
        exists, _, unit = c.item(r)
        buffer = lax.rem(r, s.tiling.q_stages) * consumers + c.wg

        pl.when(exists)(lambda: plgpu.barrier_wait(smem.q_full.at[buffer]))

        held = smem.items.at[c.wg, lax.rem(r, _ITEMS_HELD)]
        token = held[work_list.TOKEN] + c.wg * s.tokens
        first, end = held[work_list.FIRST], held[work_list.END]
        lo, lo_full, hi_full, hi = (held[i] for i in work_list.STEPS)
        x = _Tile(
            buffer,
            token,
            first,
            end,
            lo,
            lo_full,
            hi_full,
            hi,
            position=token + held[work_list.SHIFT] if s.causal else held[work_list.KV_LEN] - 1,
            unit=unit,
            head=unit * s.heads,
            steps=hi - lo,
            before=step,
        )

        @pl.when(exists & (hi <= lo))
        def nothing_to_see() -> None:
            plgpu.barrier_arrive(smem.q_free.at[buffer])
            zeros = plgpu.layout_cast(jnp.zeros((_ROWS, s.head_dim), jnp.float32), _ROWS_BY_COLUMNS)
            _store(c, x, zeros, _by_row(-jnp.inf))

        works = exists & (hi > lo)
        mine = (token < end) & (token + s.tokens > first)
        pl.when(works & jnp.logical_not(mine))(lambda: _stand_by(c, x))

        accumulator = plgpu.ACC((_ROWS, s.head_dim), jnp.float32)
        pl.when(works & mine)(lambda: pl.run_scoped(functools.partial(_attend, c, x), accumulator))

        return step + jnp.where(exists, x.steps, 0)

    lax.fori_loop(0, c.rounds, consume_item, jnp.int32(0))
    if s.tiling.turns:
        pl.when(c.wg == 0)(lambda: _take_turn(c))  # the last one passed


def _take_turn(c: _Cta) -> None:
    """Waits until the consumer before this one has issued its products."""
    if c.shape.tiling.turns:
        c.shape.gpu.turn_barrier("sync", c.wg)


def _pass_turn(c: _Cta) -> None:
    if c.shape.tiling.turns:
        c.shape.gpu.turn_barrier("arrive", jnp.where(c.wg == c.shape.tiling.consumers - 1, 0, c.wg + 1))


def _stand_by(c: _Cta, x: _Tile) -> None:
    """Lets the steps pass by: none of the tile's tokens are this consumer's."""
    smem = c.smem
    plgpu.barrier_arrive(smem.q_free.at[x.buffer])

    def one_step(j: jax.Array, carry: jax.Array) -> jax.Array:
        plgpu.barrier_wait(smem.k_full.at[c.slot(x, j)])
        plgpu.barrier_arrive(smem.k_free.at[c.slot(x, j)])
        _take_turn(c)
        _pass_turn(c)
        plgpu.barrier_wait(smem.v_full.at[c.slot(x, j)])
        plgpu.barrier_arrive(smem.v_free.at[c.slot(x, j)])
        return carry

    lax.fori_loop(0, x.steps, one_step, jnp.int32(0))


class _Running(NamedTuple):
    """Attention to the steps so far.

    acc [64, D] sums 2^(score - top) of the values and is one step behind: the values of the last step are yet to be
    added, by its probabilities p [64, block_kv]. top [64] is the greatest score, in powers of 2. total [64, 8] sums
    2^(score - top), each lane its own columns.

    acc is None on a GPU: the sum lives in the accumulator, in flight while the softmax runs. In the interpreter it is
    here.
    """

    acc: jax.Array | None
    p: jax.Array
    top: jax.Array
    total: jax.Array


def _attend(c: _Cta, x: _Tile, acc_ref: Any) -> None:
    """All steps of a tile, and the store.

        tensor cores    S 0          S 1, P V 0          S 2, P V 1          ..
        softmax               0             1                   2

    The products of a step with its keys and of the step before with its values are issued together; the softmax begins
    when the former is done and runs beside the latter, after which O is shrunk.
    """
    s = c.shape
    scores_type = plgpu.ACC((_ROWS, s.tiling.block_kv), jnp.float32)
    slopes = None
    if s.alibi:
        slopes = plgpu.load(c.gmem.slopes.at[x.unit], layout=_ROWS_ALONE, optimized=False)

    def await_keys(j: Any) -> None:
        @pl.when(j < x.steps)
        def _() -> None:
            plgpu.barrier_wait(c.smem.k_full.at[c.slot(x, j)])

    def first_step(scores_ref: Any) -> tuple[jax.Array, ...]:
        scores = _score(c, x, scores_ref, 0, lambda: _pass_turn(c), wait_n=0)
        nothing = plgpu.layout_cast(jnp.zeros((_ROWS, 8), jnp.float32), _ROWS_BY_COLUMNS)
        return _softmax(s, scores, _by_row(_FLOOR), nothing, x.hi - 1, x.position, slopes, masked=True)

    def next_step(t: jax.Array, carry: _Running, masked: bool) -> _Running:
        acc, old_p, top, total = carry
        j = t - x.lo + 1
        _take_turn(c)

        def products(scores_ref: Any) -> tuple:
            def values_of_last_step() -> None:
                nonlocal acc
                acc = _add_values(c, x, acc_ref, acc, old_p, j - 1)
                _pass_turn(c)

            scores = _score(c, x, scores_ref, j, values_of_last_step, wait_n=1)
            results = _softmax(s, scores, top, total, t, x.position, slopes, masked)
            # The barrier keeps the compiler, and the branch in await_keys the assembler, which moves nothing over one,
            # from computing the softmax after the wait for the values' product. p is rounded only after that wait: the
            # assembler serialises all products if it finds the next ones' operands written while some are in flight.
            results = lax.optimization_barrier(results)
            await_keys(j + 1)
            return acc, *results

        acc, p, top, total, shrink = pl.run_scoped(products, scores_type)
        acc = _await_values(c, x, acc_ref, acc, j - 1) * _spread(shrink, s.head_dim)
        acc = s.gpu.put_back(acc_ref, acc)
        return _Running(acc, p.astype(s.dtype), top, total)

    await_keys(0)
    _take_turn(c)
    p, top, total, _ = pl.run_scoped(first_step, scores_type)
    await_keys(1)
    carry = _Running(s.gpu.no_sum(_ROWS, s.head_dim), p.astype(s.dtype), top, total)
    begin = x.lo
    for until, masked in ((x.lo_full, True), (x.hi_full, False), (x.hi, True)):
        if until is x.lo_full and s.features.sliding_window is None:
            continue
        until = jnp.maximum(jnp.minimum(until, x.hi - 1), begin)
        carry = lax.fori_loop(begin, until, functools.partial(next_step, masked=masked), carry)
        begin = until
    acc, p, top, total = carry
    plgpu.barrier_arrive(c.smem.q_free.at[x.buffer])
    acc = _await_values(c, x, acc_ref, _add_values(c, x, acc_ref, acc, p, x.steps - 1), x.steps - 1)

    total = total.sum(axis=1)
    seen = total > 0
    safe = jnp.where(seen, total, 1.0)
    lse = jnp.where(seen, (top + jnp.log2(safe)) * (1 / _LOG2E), -jnp.inf)
    _store(c, x, acc * _spread(1.0 / safe, s.head_dim), lse)


def _score(c: _Cta, x: _Tile, scores_ref: Any, j: Any, and_then: Callable[[], None], wait_n: int) -> jax.Array:
    """Issues the product of queries and keys of the j-th step, then `and_then`, and waits for the product; `wait_n`
    products issued after it may be in flight still."""
    plgpu.wgmma(scores_ref, c.smem.queries.at[x.buffer], c.smem.keys.at[c.slot(x, j)].T)
    and_then()
    scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=wait_n)
    plgpu.barrier_arrive(c.smem.k_free.at[c.slot(x, j)])
    return scores


def _add_values(c: _Cta, x: _Tile, acc_ref: Any, acc: Any, p: jax.Array, j: Any) -> Any:
    """Issues the product of p and the values of the j-th step, onto acc."""
    slot = c.slot(x, j)
    plgpu.barrier_wait(c.smem.v_full.at[slot])
    return c.shape.gpu.issue_product(acc_ref, acc, p, c.smem.values.at[slot])


def _await_values(c: _Cta, x: _Tile, acc_ref: Any, acc: Any, j: Any) -> jax.Array:
    """acc, when the product with the values of the j-th step is done."""
    acc = c.shape.gpu.await_product(acc_ref, acc)
    plgpu.barrier_arrive(c.smem.v_free.at[c.slot(x, j)])
    return acc


_ROWS_BY_COLUMNS = plgpu.Layout.WGMMA  # of every product
_ROWS_ALONE = _ROWS_BY_COLUMNS.reduce(1)


def _by_row(value: float) -> jax.Array:
    return plgpu.layout_cast(jnp.full((_ROWS,), value, jnp.float32), _ROWS_ALONE)


def _spread(x: jax.Array, columns: int) -> jax.Array:
    return lax.broadcast_in_dim(x, (_ROWS, columns), [0])


def _by_eights(op: Callable, x: jax.Array) -> jax.Array:
    """[64, n] to [64, 8], each lane's part of a reduction: chains a quarter as long, and no shuffles."""
    return functools.reduce(op, [x[:, i : i + 8] for i in range(0, x.shape[1], 8)])


def _softmax(
    s: _Shape,
    scores: jax.Array,
    top: jax.Array,
    total: jax.Array,
    t: jax.Array,
    position: jax.Array,
    slopes: jax.Array | None,
    masked: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Probabilities of step t, the new running maximum (in powers of 2) and sum, and what the old ones shrink by."""
    block_kv = s.tiling.block_kv
    scale, cap = s.features.scale, s.features.logit_softcap
    factor = scale * _LOG2E
    if cap is not None:
        scores = jnp.tanh(scores * (scale / cap)) * (cap * _LOG2E)
        factor = 1.0
    elif s.alibi or scale <= 0:  # a positive factor keeps the order, and costs nothing in the exponent's multiply-add
        scores = scores * factor
        factor = 1.0
    if s.alibi or masked:
        scores = _mask(s, scores, t, position, slopes, masked)
    new_top = jnp.maximum(top, _by_eights(jnp.maximum, scores).max(axis=1) * factor)
    shrink = jnp.exp2(top - new_top)
    p = jnp.exp2(scores * factor - _spread(new_top, block_kv))
    return p, new_top, total * _spread(shrink, 8) + _by_eights(jnp.add, p), shrink


def _mask(
    s: _Shape, scores: jax.Array, t: jax.Array, position: jax.Array, slopes: jax.Array | None, masked: bool
) -> jax.Array:
    """Adds ALiBi's slopes to the scores of step t and takes out what a query does not see."""

    def iota(axis: int) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, (_ROWS, 8), axis, layout=_ROWS_BY_COLUMNS)

    # How far each row's query is ahead of each lane's columns of the first eight keys. Later columns are a multiple of
    # 8 further, a constant: compared so, the mask keeps no registers.
    room = -iota(1)
    if s.causal:
        room = (iota(0) & (s.tokens - 1)) - iota(1)
    room = room + (position - t * s.tiling.block_kv)
    pieces = []
    for column in range(0, s.tiling.block_kv, 8):
        piece = scores[:, column : column + 8]
        if slopes is not None:
            piece = piece + _spread(slopes, 8) * (column - room).astype(jnp.float32)
        if masked:
            seen = room >= column
            if s.features.sliding_window is not None:
                seen = seen & (room < column + s.features.sliding_window)
            piece = jnp.where(seen, piece, -jnp.inf)
        pieces.append(piece)
    return jnp.concatenate(pieces, axis=1)


def _store(c: _Cta, x: _Tile, out: jax.Array, lse: jax.Array) -> None:
    """The rows of a consumer's tile whose token is in [first, end)."""
    s, gmem = c.shape, c.gmem
    place = hopper_primitives.Place(x.token, x.first, x.end, x.head, s.tokens, s.heads)
    s.gpu.store_rows(gmem.out, gmem.lse, out.astype(s.dtype), lse, place)
