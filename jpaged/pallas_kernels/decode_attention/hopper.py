"""Decode attention over the paged pool as one Mosaic GPU kernel (Hopper).

One query token a sequence: every key and value is read once, so the kernel is a bandwidth machine. Flash-Decoding
(split KV) over a persistent grid, in a single launch:

    list of units (`plan.py`): chunks of sequences or, of small batches, leaves of chunks; x the groups of query
        heads that share a KV head. A CTA's i-th: (unit, group) number i * ctas + its seat in turn i

A CTA is three warpgroups:

    producer, a warp each for                           consumer
        keys     k_free --> TMA --> k_s --> k_full          S^T = K Q^T             wgmma, both from shared memory
        values   v_free --> TMA --> v_s --> v_full          mask, online softmax    base 2, in registers; P^T --> p_s
        queries  q_free --> TMA --> q_s --> q_full          O^T = O^T shrunk + V^T P^T    wgmma, O^T in registers
        (a copy a block; of keys and values a ring          taken --> O^T, maxima, sums --> handover_s --> handed
        of `stages` tiles; the table is read by all
        of them, a unit ahead)                          finisher
                                                            handed --> handover_s --> registers --> taken
                                                            of a whole sequence   O / sum --> output, log-sum-exp
                                                            of a part             --> memory, and it counts itself in;
                                                                                  the last comer folds all parts

The consumer never waits for memory: that is what the finisher is for. All products have keys or head_dim as their rows,
64 of which wgmma insists on, and the group's query heads as their 8 (to 32) columns: little is computed for padding.

Of latents (MLA, arXiv:2405.04434), values are the first columns of keys: there is one ring, and a tile is free when its
values have been multiplied.

A chunk's result is the fold of its leaves' results in order, whether one CTA computes them all or the CTA that finishes
the chunk's last leaf collects them from memory, and a sequence's is the fold of its chunks': so its bits depend neither
on the batch nor on who came last.

Sources: Flash-Decoding (pytorch.org/blog/flash-decoding), FlashAttention-2 and -3 (arXiv:2307.08691, 2407.08608),
PagedAttention (arXiv:2309.06180).
"""

import math
from collections.abc import Callable, Sequence
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
from jpaged.pallas_kernels.decode_attention import hopper_rows as heads_as_rows
from jpaged.pallas_kernels.decode_attention import plan as decode_plan
from jpaged.pallas_kernels.decode_attention.hopper_primitives import WARPGROUP
from jpaged.pallas_kernels.decode_attention.hopper_shape import LOG2E, DecodeShape, Loads
from jpaged.pallas_kernels.decode_attention.plan import Cuts, Plan, max_chunks, plan
from jpaged.pallas_kernels.devices import num_multiprocessors

HEAD_DIMS = (64, 128, 256)  # rows of a wgmma are 64; others go to the kernel that has the heads as rows
_MOST_OF_LATENTS = (576, 512)  # columns of a latent, and of its value
BLOCK_SIZES = (16, 32, 64, 128)

_NO_KEYS = -1e30  # running maxima start here, so that no inf - inf is ever formed
_SMEM_BYTES = 227 * 1024 - 2048  # of a CTA, less a margin
_Q_TILE = 8  # query heads: columns of the narrowest wgmma, and what one TMA copy moves
_MAX_COLUMNS = 32  # at head_dim 256 the consumer's state and its leaf's take 64 registers of a thread each then
_MAX_COLUMNS_OF_LATENTS = 16  # as many registers at 512 columns of values
_FOLD_ELEMENTS = 128 * 63  # of partial results whose loads are in flight together: less than 64 registers a thread
_REDUCTION_BYTES = WARPGROUP * 2 * 4  # two columns a thread; of the consumer alone, since others would use the same
_CONSUMER, _PRODUCER, _FINISHER = range(3)  # warpgroups
# Registers of a thread: together what the three start with, 168 each.
_REGISTERS = {_CONSUMER: 232, _PRODUCER: 72, _FINISHER: 200}
_REGISTERS_OF_LATENTS = {_CONSUMER: 224, _PRODUCER: 40, _FINISHER: 240}


@dataclass(frozen=True)
class Config(Cuts):
    """Shape of the kernel, beside where it cuts.

    stages: depth of the rings of K and V tiles.
    q_stages: units whose queries are held at once.
    handovers: units whose results wait for the finisher at once.
    """

    stages: int
    q_stages: int = 2
    handovers: int = 2


def default_config(head_dim: int, columns: int, value_dim: int | None = None) -> Config:
    """The measured best for a head_dim and so many columns of query heads. Of latents, which have a value_dim, no other
    was tried."""
    ctas = num_multiprocessors()
    tile = 128 if head_dim == 64 else 64
    state = columns * ((value_dim or head_dim) + 2) * 4
    handovers = 2 if state <= 16 * 1024 else 1
    # Queries, P, states; then the scratch of reductions, the table, maxima, sums and the barriers, for each of which
    # Mosaic takes 1 KiB at least.
    other = columns * 2 * (2 * head_dim + tile) + handovers * state + 5 * 1024
    most = {64: 6, 256: 2}.get(head_dim, 3)  # deeper rings measured slower: loads queue up behind each other
    rings = 2 if value_dim is None else 1
    stages = min(most, (_SMEM_BYTES - other) // (tile * head_dim * 2 * rings))
    return Config(tile=tile, leaf=128, chunk=2048, ctas=ctas, stages=stages, handovers=handovers)


def unsupported(q: jax.Array, kv_pool: jax.Array, value_dim: int | None = None) -> str | None:
    """Why the kernel cannot take these (already checked) arguments; None if it can."""
    _, _, _, block_size, head_dim = kv_pool.shape
    if kv_pool.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {kv_pool.dtype} is not bfloat16 or float16"
    if value_dim is not None:
        most = _MOST_OF_LATENTS
        if head_dim % 64 or value_dim % 64 or head_dim > most[0] or value_dim > most[1]:
            return f"head_dim {head_dim} and value_dim {value_dim} of latents are not multiples of 64 up to {most}"
    elif head_dim not in (*HEAD_DIMS, *heads_as_rows.HEAD_DIMS):
        return f"head_dim {head_dim} is not one of {sorted((*HEAD_DIMS, *heads_as_rows.HEAD_DIMS))}"
    if block_size not in BLOCK_SIZES:
        return f"block size {block_size} is not one of {BLOCK_SIZES}"
    return None


@partial(jax.jit, static_argnames=("features", "config", "interpret"))
def decode_attention(
    operands: Operands, features: Features, *, config: Config | None = None, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """`decode_attention` of the package, checked; always with its log-sum-exp, float32 [B, H].

    config: to try others than the measured best; of chunks of at most 128 blocks.
    interpret: a `plgpu.InterpretGPUParams` runs the kernel on a CPU; with one CTA where sequences are split.
    """
    q, kv_pool, block_tables, kv_lens, alibi_slopes = operands
    batch, heads, head_dim = q.shape
    value_dim = features.value_dim
    if value_dim is None and head_dim not in HEAD_DIMS:
        return heads_as_rows.decode_attention(operands, features)
    _, _, kv_heads, block_size, _ = kv_pool.shape
    rows, columns = group_rows(heads // kv_heads, _MAX_COLUMNS if value_dim is None else _MAX_COLUMNS_OF_LATENTS)
    groups = heads // rows
    if config is None:
        config = default_config(head_dim, columns, value_dim)
    max_len = block_tables.shape[1] * block_size
    slots = max_chunks(max_len, config.chunk, features.sliding_window)
    s = _Shape.of(
        operands,
        features,
        rows=rows,
        columns=columns,
        slots=slots,
        cuts=decode_plan.max_cut_chunks(batch, groups, slots, config),
        config=config,
        gpu=hopper_primitives if interpret is None else hopper_interpreted,
    )
    work = plan(kv_lens, max_len, groups, features.sliding_window, config)
    if alibi_slopes is None:
        slopes = jnp.zeros((8,), jnp.float32)
    else:  # a group's columns may begin before the first head and end behind the last
        slopes = jnp.pad(alibi_slopes, (_Q_TILE, _MAX_COLUMNS))
    flat = q.reshape(batch * heads, head_dim)
    tiles = jnp.pad(flat, ((0, -(batch * heads) % _Q_TILE), (0, 0))).reshape(-1, _Q_TILE, head_dim)
    pool = kv_pool.reshape(-1, s.box, head_dim)
    out, lse = _launch(s, tiles, pool, block_tables, work, slopes, interpret)
    return out.reshape(batch, heads, s.value_dim), lse.reshape(batch, heads)


def bytes_of_parts(q: jax.Array, kv_pool: jax.Array, blocks: int, features: Features) -> int:
    """Of the results of a sequence's chunks, which wait in memory until they are folded. blocks: of its table."""
    _, heads, head_dim = q.shape
    rows, columns = group_rows(heads // kv_pool.shape[2])
    chunk = default_config(head_dim, columns).chunk
    slots = max_chunks(blocks * kv_pool.shape[3], chunk, features.sliding_window)
    return slots * heads // rows * columns * (head_dim + 2) * 4 if slots > 1 else 0


def group_rows(share: int, most: int = _MAX_COLUMNS) -> tuple[int, int]:
    """(query heads of a group, columns of a tile that holds them, at most so many), for `share` query heads a KV head.

    The heads of all sequences stand one after another and tiles of queries start at multiples of 8: a group that does
    not needs columns for the heads before it, which are computed in vain.
    """

    def columns(rows: int) -> int:
        most_before = _Q_TILE - math.gcd(rows, _Q_TILE)
        return -(-(most_before + rows) // _Q_TILE) * _Q_TILE

    rows = max(r for r in range(1, share + 1) if share % r == 0 and columns(r) <= most)
    return rows, columns(rows)


@dataclass(frozen=True)
class _Shape(DecodeShape):
    """columns: of a tile of scores, heads padded. cuts: the most chunks that are cut into leaves."""

    config: Config
    columns: int
    cuts: int

    @property
    def has_leaves(self) -> bool:
        """Whether a unit may be a part of a chunk."""
        return self.cuts > 0 and self.config.most_leaves > 1

    @property
    def boxes(self) -> int:
        """Copies of a tile."""
        return self.config.tile // self.box

    @property
    def boxes_a_block(self) -> int:
        return self.block_size // self.box


def _launch(
    s: _Shape, q: jax.Array, pool: jax.Array, tables: jax.Array, work: Plan, slopes: jax.Array, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """The kernel: [batch * heads, value_dim] and log-sum-exps, float32 [batch * heads]; arrays as in `_Arguments`."""
    # Arrivals are counted from zero at each call; the compiler zeroes the counters of all calls of a program at once.
    counters = jax.new_ref(jnp.zeros(((s.cuts + s.batch) * s.groups,), jnp.int32))
    out, lse, *_ = plgpu.kernel(
        partial(_kernel, s),
        out_type=[
            jax.ShapeDtypeStruct((s.batch * s.heads, s.value_dim), s.dtype),
            jax.ShapeDtypeStruct((s.batch * s.heads,), jnp.float32),
            _states(s, jax.ShapeDtypeStruct, max(1, s.cuts * s.groups * s.config.most_leaves)),
            _states(s, jax.ShapeDtypeStruct, s.batch * s.slots * s.groups if s.slots > 1 else 1),
        ],
        scratch_types=_scratch(s),
        grid=(s.config.ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=_REDUCTION_BYTES,
            lowering_semantics=plgpu.LoweringSemantics.Lane,  # layouts as stated here; the other infers them
        ),
        kernel_name="paged_decode",
        interpret=interpret,
    )(q, pool, tables, work.units, work.num_units, slopes, counters)
    return out, lse


class _State(NamedTuple):
    """Attention to some keys, not normalised: acc [value_dim, columns] sums 2^(score - top) of the values, total
    [columns] of 1; top [columns] is the greatest score, all in base 2."""

    acc: Any
    top: Any
    total: Any


def _states(s: _Shape, kind: Callable[..., Any], count: int) -> _State:
    """So many states, float32, in memory of a kind."""
    per_head = kind((count, s.columns), jnp.float32)
    return _State(kind((count, s.value_dim, s.columns), jnp.float32), per_head, per_head)


class _Arguments(NamedTuple):
    """The call's arrays in global memory."""

    q: Any  # [tiles, 8, head_dim]: the heads of all sequences, one after another
    pool: Any  # [num_blocks * arrays * kv_heads * boxes of a block, box, head_dim]
    tables: Any  # int32 [batch, blocks of a sequence]
    units: Any  # as in `Plan`
    num_units: Any
    slopes: Any  # float32 [8 + heads + 32]: those of the heads from 8 on
    counters: Any  # int32 [(cuts + batch) * groups]: leaves of a cut chunk that are done; chunks of a sequence
    out: Any  # [batch * heads, value_dim]
    lse: Any  # float32 [batch * heads]
    leaf_parts: _State  # [cuts * groups * most_leaves, ..]: a chunk's leaves one behind the other
    chunk_parts: _State  # [batch * slots * groups, ..]


class _Scratch(NamedTuple):
    """Shared memory, and its barriers.

    All threads of a warpgroup arrive, each after its own reads and stores, so that who waits needs no fence.
    """

    q_s: Any  # [q_stages, columns, head_dim]
    k_s: Any  # [stages, tile, head_dim], as v_s
    v_s: Any  # nothing of latents, as its barriers
    p_s: Any  # [columns, tile]: P, as wgmma takes its second operand from shared memory only; the consumer's own
    table_s: Any  # int32 [128]: the producer's own
    handover_s: _State  # [handovers, ..]
    loads: Loads
    handed: Any  # by the consumer to the finisher
    taken: Any  # by the finisher


def _scratch(s: _Shape) -> _Scratch:
    tile, stages, q_stages, handovers = s.config.tile, s.config.stages, s.config.q_stages, s.config.handovers
    ring = swizzled((stages, tile, s.head_dim), s.dtype)
    full, free = plgpu.Barrier(num_barriers=stages, num_arrivals=s.boxes), plgpu.Barrier(num_barriers=stages)
    return _Scratch(
        q_s=swizzled((q_stages, s.columns, s.head_dim), s.dtype),
        k_s=ring,
        v_s=() if s.latent else ring,
        p_s=swizzled((s.columns, tile), s.dtype),
        table_s=plgpu.SMEM((WARPGROUP,), jnp.int32),
        handover_s=_states(s, plgpu.SMEM, handovers),
        loads=Loads(
            q_full=plgpu.Barrier(num_barriers=q_stages, num_arrivals=s.columns // _Q_TILE),
            q_free=plgpu.Barrier(num_barriers=q_stages),
            k_full=full,
            v_full=() if s.latent else full,
            k_free=free,
            v_free=() if s.latent else free,
        ),
        handed=plgpu.Barrier(num_barriers=handovers),
        taken=plgpu.Barrier(num_barriers=handovers),
    )


class _Unit(NamedTuple):
    """A unit of work for a group of heads: the group, then the columns of the list in order (see `Plan`)."""

    group: jax.Array
    row: jax.Array
    chunk: jax.Array
    chunks: jax.Array
    begin: jax.Array
    end: jax.Array
    length: jax.Array
    leaf_tiles: jax.Array
    leaf: jax.Array
    leaves: jax.Array
    cut: jax.Array


class _Heads(NamedTuple):
    """Where a unit's group is."""

    first: jax.Array  # among the heads of all sequences
    column: jax.Array  # of the first, in the columns of every product


class _Cta(NamedTuple):
    """A CTA at work, as each of its warpgroups sees it."""

    shape: _Shape
    gmem: _Arguments
    smem: _Scratch
    cta: jax.Array
    mine: jax.Array  # units of this CTA

    def unit(self, i: jax.Array) -> _Unit:
        """The CTA's i-th; past its last, any."""
        s, gmem = self.shape, self.gmem
        # lax.div and lax.rem, here and below: `//` and `%` would see to negative numbers, of which there are none.
        index = _seat(s, self.cta, i) + i * s.config.ctas
        w = jnp.minimum(lax.div(index, s.groups), gmem.units.shape[0] - 1)
        group = lax.rem(index, s.groups)
        return _Unit(group, *(gmem.units[w, field] for field in range(decode_plan.FIELDS)))

    def tiles(self, u: _Unit) -> tuple[jax.Array, jax.Array]:
        """First tile and number of tiles of a unit."""
        tile = self.shape.config.tile
        first = lax.div(u.begin, tile)
        return first, pl.cdiv(u.end, tile) - first

    def heads(self, u: _Unit) -> _Heads:
        first = u.row * self.shape.heads + u.group * self.shape.rows
        return _Heads(first, lax.rem(first, _Q_TILE))


def _seat(s: _Shape, cta: jax.Array, turn: jax.Array) -> jax.Array:
    """Units are dealt out in a snake: they come longest first, and who gets the longest of one turn gets the shortest
    of the next."""
    return jnp.where(lax.rem(turn, 2) == 0, cta, s.config.ctas - 1 - cta)


def _kernel(s: _Shape, *refs: Any) -> None:
    gmem, smem = _Arguments(*refs[: len(_Arguments._fields)]), _Scratch(*refs[len(_Arguments._fields) :])
    s.gpu.await_kernel_before()
    cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
    total = gmem.num_units[0] * s.groups
    full_turns = lax.div(total, s.config.ctas)
    one_more = _seat(s, cta, full_turns) < total - full_turns * s.config.ctas
    mine = full_turns + one_more.astype(jnp.int32)
    c = _Cta(s, gmem, smem, cta, mine)
    for role, run in ((_CONSUMER, _consume), (_PRODUCER, _produce), (_FINISHER, _finish)):
        pl.when(warpgroup == role)(partial(_play, c, role, run))


def _play(c: _Cta, role: int, run: Callable[[_Cta], None]) -> None:
    registers = _REGISTERS_OF_LATENTS if c.shape.latent else _REGISTERS
    c.shape.gpu.set_registers(registers[role], "decrease" if role == _PRODUCER else "increase")
    run(c)


def _produce(c: _Cta) -> None:
    """The producer warpgroup: brings queries, keys and values.

    Under load a read takes as long as a short unit does: a unit's part of the table is fetched a unit ahead, and what
    says where it is, two.
    """
    s, smem = c.shape, c.smem
    loaded = ("keys", "queries") if s.latent else ("keys", "values", "queries")

    def load_unit(i: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        step, table, u, ahead = carry
        source = _source(c, u)
        # Every thread reads entries that others store: Pallas puts a barrier of the warpgroup before the store, and
        # the commit ends with one.
        smem.table_s[...] = table
        plgpu.commit_smem()
        next_table = _fetch_table(c, ahead)
        next_ahead = c.unit(i + 2)
        s.gpu.in_warps(partial(_load_unit, c, u, i, source, step), *loaded)
        return step + source.tiles, next_table, ahead, next_ahead

    u, ahead = c.unit(jnp.int32(0)), c.unit(jnp.int32(1))
    # `step` counts the tiles of all units.
    step, *_ = lax.fori_loop(0, c.mine, load_unit, (jnp.int32(0), _fetch_table(c, u), u, ahead))
    # No barrier may have an arrival outstanding when the CTA ends. Each thread counts the phases of a barrier that it
    # has waited for itself, so every warp waits for its own.
    s.gpu.in_warps(partial(_drain, c, step), *loaded)


def _drain(c: _Cta, steps: jax.Array, what: Sequence[str]) -> None:
    """Waits until the last that was brought to each slot has been read."""
    smem, config = c.smem, c.shape.config
    free = {
        "keys": (smem.loads.k_free, config.stages, steps),
        "values": (smem.loads.v_free, config.stages, steps),
        "queries": (smem.loads.q_free, config.q_stages, c.mine),
    }
    for barriers, slots, used in (free[name] for name in what):
        for slot in range(slots):

            @pl.when(slot < used)
            def _wait(barriers: Any = barriers, slot: int = slot) -> None:
                plgpu.barrier_wait(barriers.at[slot])


def _fetch_table(c: _Cta, u: _Unit) -> jax.Array:
    """The unit's entries of its sequence's table, and what follows them; past the table's end, its last."""
    return c.shape.gpu.load_entries(c.gmem.tables, u.row, lax.div(u.begin, c.shape.block_size))


def _load_unit(c: _Cta, u: _Unit, i: jax.Array, source: "_Source", step: jax.Array, what: Sequence[str]) -> None:
    """Brings the i-th unit's queries, keys or values, or several of these: then keys and values by turns, since the
    consumer waits for values before it takes the next keys. The unit's first tile is the producer's `step`-th."""
    if "queries" in what:
        _load_queries(c, u, i)
    smem = c.smem
    rings = {
        "keys": _Ring(0, smem.k_s, smem.loads.k_full, smem.loads.k_free),
        "values": _Ring(1, smem.v_s, smem.loads.v_full, smem.loads.v_free),
    }
    if into := [ring for name, ring in rings.items() if name in what]:

        @pl.loop(0, source.tiles)
        def _(nth: jax.Array) -> None:
            _load_tile(c, source, nth, step + nth, into)


def _load_queries(c: _Cta, u: _Unit, i: jax.Array) -> None:
    """The tiles of 8 heads that the i-th unit's group meets."""
    s, smem, q = c.shape, c.smem, c.gmem.q
    q_slot = lax.rem(i, s.config.q_stages)

    @pl.when(i >= s.config.q_stages)
    def _wait_q() -> None:
        plgpu.barrier_wait(smem.loads.q_free.at[q_slot])

    first = lax.div(c.heads(u).first, _Q_TILE)
    for j in range(s.columns // _Q_TILE):
        tile = q.at[jnp.minimum(first + j, q.shape[0] - 1)]  # a group may need fewer than others, and be the last
        plgpu.copy_gmem_to_smem(tile, smem.q_s.at[q_slot, pl.ds(_Q_TILE * j, _Q_TILE)], smem.loads.q_full.at[q_slot])


class _Source(NamedTuple):
    """Where a unit's keys and values are."""

    kv_head: jax.Array
    end: jax.Array  # position
    first: jax.Array  # tile
    tiles: jax.Array  # how many
    first_entry: jax.Array  # of the table


def _source(c: _Cta, u: _Unit) -> _Source:
    s = c.shape
    kv_head = lax.div(u.group, s.groups_a_kv_head)
    return _Source(kv_head, u.end, *c.tiles(u), lax.div(u.begin, s.block_size))


class _Ring(NamedTuple):
    """Where tiles of keys or of values go."""

    kv: int  # 0: keys; 1: values
    tiles: Any
    full: Any
    free: Any


def _load_tile(c: _Cta, source: _Source, nth: jax.Array, step: jax.Array, rings: Sequence[_Ring]) -> None:
    """The unit's nth tile, as the producer's `step`-th, into each of the rings."""
    s = c.shape
    stage = lax.rem(step, s.config.stages)
    start = (source.first + nth) * s.config.tile
    boxes = []
    for j in range(s.boxes):
        position = start + j * s.box
        entry = lax.div(position, s.block_size) - source.first_entry
        entry = jnp.minimum(entry, WARPGROUP - 1)
        part = lax.rem(lax.div(position, s.box), s.boxes_a_block)
        arrays = 1 if s.latent else 2
        boxes.append((c.smem.table_s[entry] * (arrays * s.kv_heads) + source.kv_head) * s.boxes_a_block + part)
    for ring in rings:

        @pl.when(step >= s.config.stages)
        def _wait(ring: _Ring = ring) -> None:
            plgpu.barrier_wait(ring.free.at[stage])

        for j, index in enumerate(boxes):
            box = c.gmem.pool.at[index + ring.kv * (s.kv_heads * s.boxes_a_block)]
            target = ring.tiles.at[stage, pl.ds(j * s.box, s.box)]
            copy = partial(plgpu.copy_gmem_to_smem, box, target, ring.full.at[stage])
            if j == 0:  # every tile begins with a token
                copy()
            else:  # what is behind the last token is left as it is: its entries may be anything
                lax.cond(start + j * s.box < source.end, copy, partial(plgpu.barrier_arrive, ring.full.at[stage]))


_ROWS_BY_HEADS = plgpu.Layout.WGMMA  # of every product: [keys or value_dim, columns]
_BY_HEAD = _ROWS_BY_HEADS.reduce(0)


def _by_head(s: _Shape, value: float) -> jax.Array:
    return plgpu.layout_cast(jnp.full((s.columns,), value, jnp.float32), _BY_HEAD)


def _across(x: jax.Array, rows: int) -> jax.Array:
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), [1])


def _nothing_seen(s: _Shape) -> _State:
    """Attention to no keys."""
    acc = plgpu.layout_cast(jnp.zeros((s.value_dim, s.columns), jnp.float32), _ROWS_BY_HEADS)
    return _State(acc, _by_head(s, _NO_KEYS), _by_head(s, 0.0))


def _fold(a: _State, b: _State) -> _State:
    """Attention to the keys of both."""
    top = jnp.maximum(a.top, b.top)
    by_a, by_b = jnp.exp2(a.top - top), jnp.exp2(b.top - top)
    rows = a.acc.shape[0]
    acc = a.acc * _across(by_a, rows) + b.acc * _across(by_b, rows)
    return _State(acc, top, a.total * by_a + b.total * by_b)


def _load_state(parts: _State, at: Any) -> _State:
    layouts = _State(_ROWS_BY_HEADS, _BY_HEAD, _BY_HEAD)
    return _State(*(load(ref.at[at], layout) for ref, layout in zip(parts, layouts, strict=True)))


def _store_state(parts: _State, at: Any, state: _State) -> None:
    for ref, value in zip(parts, state, strict=True):
        ref.at[at][...] = value


def _consume(c: _Cta) -> None:
    """The consumer warpgroup: attention to a unit's keys, leaf by leaf, as if other CTAs computed the other leaves."""
    s, smem, config = c.shape, c.smem, c.shape.config

    def consume_unit(i: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        step, u = carry
        first, tiles = c.tiles(u)
        ahead = c.unit(i + 1)
        own, q_slot = c.heads(u), lax.rem(i, config.q_stages)
        slopes = _slopes(c, u, own) if s.alibi else None
        plgpu.barrier_wait(smem.loads.q_full.at[q_slot])

        def attend_tile(n: jax.Array, running: _Running) -> _Running:
            start, stage = (first + n) * config.tile, lax.rem(step + n, config.stages)
            return _attend_tile(c, u, running, start, q_slot, stage, slopes)

        slot = lax.rem(i, config.handovers)

        def attend_leaf(k: jax.Array) -> _State:
            totals = plgpu.layout_cast(jnp.zeros((config.tile, s.columns), jnp.float32), _ROWS_BY_HEADS)
            acc, top, _ = _nothing_seen(s)
            until = jnp.minimum((k + 1) * u.leaf_tiles, tiles)
            leaf = lax.fori_loop(k * u.leaf_tiles, until, attend_tile, _Running(acc, top, totals))
            return _State(leaf.acc, leaf.top, leaf.totals.sum(axis=0))

        def await_taken() -> None:
            pl.when(i >= config.handovers)(lambda: plgpu.barrier_wait(smem.taken.at[slot]))

        leaves = pl.cdiv(tiles, u.leaf_tiles)
        if s.latent:  # registers hold a leaf's state and no other: the unit's is where it is handed over

            @pl.loop(0, jnp.maximum(leaves, 1))
            def _fold_leaf(k: jax.Array) -> None:
                leaf = attend_leaf(k)

                @pl.when(k == 0)
                def _first() -> None:
                    await_taken()
                    _store_state(smem.handover_s, slot, _fold(_nothing_seen(s), leaf))

                @pl.when(k > 0)
                def _others() -> None:
                    _store_state(smem.handover_s, slot, _fold(_load_state(smem.handover_s, slot), leaf))
        else:
            state = lax.fori_loop(0, leaves, lambda k, state: _fold(state, attend_leaf(k)), _nothing_seen(s))
        plgpu.barrier_arrive(smem.loads.q_free.at[q_slot])
        if not s.latent:
            await_taken()
            _store_state(smem.handover_s, slot, state)
        plgpu.barrier_arrive(smem.handed.at[slot])
        return step + tiles, ahead

    lax.fori_loop(0, c.mine, consume_unit, (jnp.int32(0), c.unit(jnp.int32(0))))
    for slot in range(config.handovers):

        @pl.when(slot < c.mine)
        def _drain_taken(slot: int = slot) -> None:
            plgpu.barrier_wait(smem.taken.at[slot])


class _Running(NamedTuple):
    """A `_State` in the making: totals [tile, columns] are summed over the rows at the end of a leaf, since that goes
    through shared memory."""

    acc: jax.Array
    top: jax.Array
    totals: jax.Array


def _slopes(c: _Cta, u: _Unit, own: _Heads) -> jax.Array:
    """The slope of each column, for scores in base 2."""
    s = c.shape
    first = _Q_TILE + u.group * s.rows - own.column
    return load(c.gmem.slopes.at[pl.ds(first, s.columns)], _BY_HEAD) * LOG2E


def _attend_tile(
    c: _Cta, u: _Unit, running: _Running, start: jax.Array, q_slot: jax.Array, stage: jax.Array, slopes: Any
) -> _Running:
    """The state, and attention to the tile of position `start`, which is in `stage` of the rings."""
    s, smem, tile = c.shape, c.smem, c.shape.config.tile
    acc, top, totals = running
    plgpu.barrier_wait(smem.loads.k_full.at[stage])

    def product(scores_ref: Any) -> jax.Array:
        plgpu.wgmma(scores_ref, smem.k_s.at[stage], smem.q_s.at[q_slot].T)
        return scores_ref[...]

    scores = pl.run_scoped(product, plgpu.ACC((tile, s.columns), jnp.float32))
    if s.latent:  # the same tile has the values
        values, full, free = smem.k_s, None, smem.loads.k_free
    else:
        values, full, free = smem.v_s, smem.loads.v_full, smem.loads.v_free
        plgpu.barrier_arrive(smem.loads.k_free.at[stage])
    scores = _mask(s, u, scores, start, slopes)
    new_top = jnp.maximum(top, scores.max(axis=0))
    shrink = jnp.exp2(top - new_top)
    p = jnp.exp2(scores - _across(new_top, tile))
    totals = totals * _across(shrink, tile) + p
    acc = acc * _across(shrink, s.value_dim)
    smem.p_s.T[...] = p.astype(s.dtype)
    plgpu.commit_smem()  # the tensor cores read shared memory through another proxy: a fence, and a barrier
    if full is not None:
        plgpu.barrier_wait(full.at[stage])
    _zero_unowned(c, u, start, values, stage)
    tile_of_values = values.at[stage, :, pl.ds(0, s.value_dim)] if s.latent else values.at[stage]
    acc = s.gpu.add_product(acc, tile_of_values.T, smem.p_s.T)
    plgpu.barrier_arrive(free.at[stage])
    return _Running(acc, new_top, totals)


def _mask(s: _Shape, u: _Unit, scores: jax.Array, start: jax.Array, slopes: jax.Array | None) -> jax.Array:
    """Scores of the keys from position `start` on, from their products, in base 2; those not seen are -1e30."""
    tile = s.config.tile
    scores = s.in_base_2(scores)
    keys = plgpu.broadcasted_iota(jnp.int32, (tile, s.columns), 0, layout=_ROWS_BY_HEADS) + start
    if slopes is not None:
        scores = scores + _across(slopes, tile) * (keys - (u.length - 1)).astype(jnp.float32)
    seen = keys < u.end
    if s.features.sliding_window is not None:
        seen = seen & (keys >= u.length - s.features.sliding_window)
    return jnp.where(seen, scores, jnp.full_like(scores, _NO_KEYS))


def _zero_unowned(c: _Cta, u: _Unit, start: jax.Array, ring: Any, stage: jax.Array) -> None:
    """Zeroes values of the first and last tiles that the sequence does not own: they may be NaN, and 0 * NaN is NaN."""
    s, tile = c.shape, c.shape.config.tile
    first_seen = jnp.int32(0) if s.features.sliding_window is None else u.length - s.features.sliding_window

    @pl.when((start + tile > u.end) | (start < first_seen))
    def _zero() -> None:
        for r in range(0, tile, 64):
            for d in range(0, s.value_dim, 64):  # in pieces, which need few registers
                at = ring.at[stage, pl.ds(r, 64), pl.ds(d, 64)]
                key = plgpu.broadcasted_iota(jnp.int32, (64, 64), 0, layout=_ROWS_BY_HEADS) + (start + r)
                v = load(at, _ROWS_BY_HEADS)
                at[...] = jnp.where((key < u.end) & (key >= first_seen), v, jnp.zeros_like(v))
        plgpu.commit_smem()


def _finish(c: _Cta) -> None:
    """The finisher warpgroup: takes a unit's state and stores what it makes whole, or the state for who does."""
    s, smem, handovers = c.shape, c.smem, c.shape.config.handovers

    def finish_unit(i: jax.Array, u: _Unit) -> _Unit:
        ahead, to = c.unit(i + 1), c.heads(u)
        slot = lax.rem(i, handovers)
        plgpu.barrier_wait(smem.handed.at[slot])
        state = _load_state(smem.handover_s, slot)
        plgpu.barrier_arrive(smem.taken.at[slot])
        if s.has_leaves:
            pl.when(u.leaves == 1)(lambda: _finish_chunk(c, u, to, state))
            pl.when(u.leaves > 1)(lambda: _finish_leaf(c, u, to, state))
        else:
            _finish_chunk(c, u, to, state)
        return ahead

    lax.fori_loop(0, c.mine, finish_unit, c.unit(jnp.int32(0)))


def _finish_leaf(c: _Cta, u: _Unit, to: _Heads, state: _State) -> None:
    """A leaf alone is a part of its chunk."""
    s, most = c.shape, c.shape.config.most_leaves

    def place(n: jax.Array) -> jax.Array:
        return (u.cut * s.groups + u.group) * most + n

    leaves = _Parts(c.gmem.leaf_parts, place, u.leaves, most, 0, u.cut)
    _join(c, u, leaves, u.leaf, state, lambda chunk: _finish_chunk(c, u, to, chunk))


def _finish_chunk(c: _Cta, u: _Unit, to: _Heads, state: _State) -> None:
    """A chunk is all of its sequence, or a part of it."""
    s = c.shape
    if s.slots == 1:
        _store(c, to, state)
        return
    pl.when(u.chunks == 1)(lambda: _store(c, to, state))

    def place(n: jax.Array) -> jax.Array:
        return (u.row * s.slots + n) * s.groups + u.group

    @pl.when(u.chunks > 1)
    def _together() -> None:
        chunks = _Parts(c.gmem.chunk_parts, place, u.chunks, s.slots, s.cuts, u.row)
        _join(c, u, chunks, u.chunk, state, lambda sequence: _store(c, to, sequence))


@dataclass(frozen=True)
class _Parts:
    """The states that make a whole: those of a chunk's leaves or a sequence's chunks."""

    states: _State
    place: Callable[[jax.Array], jax.Array]  # of the nth
    count: jax.Array
    most: int
    counted_from: int  # behind so many other wholes' counters: the cut chunks' come first, then the sequences'
    number: jax.Array  # of the whole


def _join(c: _Cta, u: _Unit, parts: _Parts, n: jax.Array, state: _State, finish: Callable[[_State], None]) -> None:
    """Leaves the state of the nth part with the others; if it is the last to come, finishes the whole."""
    _store_state(parts.states, parts.place(n), state)
    pl.when(_is_last(c, u, parts))(lambda: finish(_fold_parts(c.shape, parts)))


def _is_last(c: _Cta, u: _Unit, parts: _Parts) -> jax.Array:
    """Counts a part in, after its state is stored: whether all are there now."""
    counter = (parts.counted_from + parts.number) * c.shape.groups + u.group
    return c.shape.gpu.is_last_to_arrive(c.gmem.counters, counter, parts.count)


def _fold_parts(s: _Shape, parts: _Parts) -> _State:
    """The fold of all parts in order, into nothing as the consumer folds leaves; several are loaded together."""
    unroll = max(1, min(parts.most, 8, _FOLD_ELEMENTS // (s.value_dim * s.columns)))

    def some(i: jax.Array, state: _State) -> _State:
        loaded = []
        for j in range(unroll):
            n = i * unroll + j
            part = _load_state(parts.states, parts.place(jnp.minimum(n, parts.count - 1)))
            if unroll > 1:  # behind the last part stands its copy, which must weigh nothing
                part = part._replace(top=jnp.where(n < parts.count, part.top, jnp.full_like(part.top, _NO_KEYS)))
            loaded.append(part)
        for part in loaded:
            state = _fold(state, part)
        return state

    return lax.fori_loop(0, pl.cdiv(parts.count, unroll), some, _nothing_seen(s))


def _store(c: _Cta, to: _Heads, state: _State) -> None:
    """Normalises a sequence's state and stores the group's columns of it as output and log-sum-exp."""
    s, gmem = c.shape, c.gmem
    seen = state.total > 0
    total = jnp.where(seen, state.total, jnp.full_like(state.total, 1.0))
    out = (state.acc / _across(total, s.value_dim)).astype(s.dtype)
    lse = (state.top + jnp.log2(total)) * (1 / LOG2E)
    lse = jnp.where(seen, lse, jnp.full_like(lse, -jnp.inf))
    s.gpu.store_heads(gmem.out, gmem.lse, out, lse, to.first, to.column, s.rows)
