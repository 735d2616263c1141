"""The grouped products for Hopper, in one Pallas kernel with two endings.

    gated       out[m, i] = activation(x[m] . w[e, :, 0, i]) * (x[m] . w[e, :, 1, i])
    weighted    out[m, h] = weights[m] * (x[m] . w[e, :, h]); w [E, I, H] is taken as [E, I, 2, H / 2]

The list of tiles (`tiles.py`) says which rows belong to which expert e. A persistent CTA of one producer warpgroup and
one or two consumers takes pairs of (tile, strip of columns) in turn. Both halves of a strip are summed at once, as in
`gated_product`, whose products and layouts these are:

    producer (a warp)                                        consumers, 64 rows each
    free --> TMA --> x [rows, 64] of 64 elements k           first  += x w[0]     wgmma, both from shared memory
                     w [2, n, 64, 64]: k by columns          second += x w[1]
                     --> full                                activation or weights --> out, rows of the tile alone

While a group has few rows, its time is that of reading its matrix, once, and its products are computed for 64 rows:
wgmma knows no fewer, and has the time. With many rows a group has several tiles, whose strips are computed at the same
time and find the matrix in the L2 cache; a cluster of two CTAs then loads x for two strips.

A row's sums are added in one order whatever the tiling, so its bits do not depend on the rows beside it.
"""

import dataclasses
import functools
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.devices import num_multiprocessors
from jpaged.pallas_kernels.gated_product.hopper import activated
from jpaged.pallas_kernels.gated_product.hopper_cta import RANK, Cta, Stages, cta_kernel
from jpaged.pallas_kernels.gated_product.hopper_primitives import STORED
from jpaged.pallas_kernels.gated_product.hopper_tiling import DEPTH, ROWS
from jpaged.pallas_kernels.grouped_product import hopper_interpreted, hopper_primitives, tiles
from jpaged.pallas_kernels.grouped_product.hopper_tiling import FEW_ROWS, Tiling, pick_tiling


def unsupported(x: jax.Array, w: jax.Array) -> str | None:
    """Why the kernel cannot take these (checked) arguments; None if it can."""
    if x.dtype not in (jnp.bfloat16.dtype, jnp.float16.dtype):
        return f"it takes bfloat16 and float16, not {x.dtype}"
    depth, columns = w.shape[1], w.shape[-1] if w.ndim == 4 else w.shape[-1] // 2
    if depth % 8 or columns % 8 or w.shape[-1] % 8:
        return f"TMA needs multiples of 8 for the axes of w's matrices (of 16 for H), got {w.shape[1:]}"
    return None


@functools.partial(jax.jit, static_argnames=("activation", "tiling", "ctas", "interpret"))
def gated_grouped_product(
    x: jax.Array,
    w: jax.Array,
    groups: tiles.RowGroups,
    *,
    activation: str,
    tiling: Tiling | None = None,
    ctas: int | None = None,
    interpret: object = None,
) -> jax.Array:
    """`gated_grouped_product` of the package, for arguments that are checked and that `unsupported` lets pass.

    tiling, ctas, interpret: as of `gated_product.hopper.gated_product`.
    """
    # Nobody reads weights there; ones would be a kernel of their own.
    return _product(x, w, groups, x, activation, tiling, ctas, interpret)


@functools.partial(jax.jit, static_argnames=("tiling", "ctas", "interpret"))
def weighted_grouped_product(
    x: jax.Array,
    w: jax.Array,
    groups: tiles.RowGroups,
    weights: jax.Array,
    *,
    tiling: Tiling | None = None,
    ctas: int | None = None,
    interpret: object = None,
) -> jax.Array:
    """`weighted_grouped_product` of the package; arguments likewise."""
    experts, depth, columns = w.shape
    halves = w.reshape(experts, depth, 2, columns // 2)
    behind = weights.shape[0] - x.shape[0]
    padded = jnp.pad(weights, (0, max(0, 2 * ROWS - behind)))  # the last tile reaches past the rows
    return _product(x, halves, groups, padded, None, tiling, ctas, interpret)


def _product(
    x: jax.Array,
    w: jax.Array,
    groups: tiles.RowGroups,
    weights: jax.Array,
    activation: str | None,
    tiling: Tiling | None,
    ctas: int | None,
    interpret: object,
) -> jax.Array:
    rows, depth = x.shape
    experts, _, _, columns = w.shape
    ctas = ctas or num_multiprocessors()
    tiling = tiling or pick_tiling(rows, experts, columns)
    listed, ends = tiles.plan(groups, experts, rows=rows, height=tiling.rows)
    s = _Shape(
        tiling=tiling,
        depth=depth,
        columns=columns,
        strips=tiling.strips(columns),
        clusters=min(ctas // tiling.cluster, listed.shape[0] * tiling.strips(columns)),
        dtype=x.dtype,
        activation=activation,
    )
    gpu = hopper_primitives if interpret is None else hopper_interpreted
    width = columns if activation is not None else 2 * columns
    kernel = cta_kernel(
        functools.partial(_kernel, s, gpu),
        jax.ShapeDtypeStruct((rows, width), x.dtype),
        tiling,
        name="weighted_grouped_product" if activation is None else "gated_grouped_product",
        dtype=x.dtype,
        pieces=(2, tiling.blocks),
        clusters=s.clusters,
        cluster_size=tiling.cluster,
        interpret=interpret,
    )
    return kernel(x, w, weights, listed, ends)


@dataclasses.dataclass(frozen=True)
class _Shape:
    """What the kernel is specialised for."""

    tiling: Tiling
    depth: int
    columns: int  # of a half
    strips: int  # those of a cluster counted as one
    clusters: int
    dtype: jnp.dtype
    activation: str | None  # None: weighted

    @property
    def steps(self) -> int:
        return -(-self.depth // DEPTH)


class _Arguments(NamedTuple):
    """The call's arrays in global memory."""

    x: Any  # [A, K]
    w: Any  # [E, K, 2, columns]
    weights: Any  # float32 [A + 128]; where there are none, anything
    tiles: Any  # int32 [tiles, 3]
    ends: Any  # int32 [..], the last of which is how many tiles there are
    out: Any  # [A, columns], or [A, 2 * columns] if weighted


class _Cta(Cta):
    """With the tiles that it takes."""

    def tile(self, turn: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """(group, first row, end row, first column) of this CTA's tile: all strips of a tile, then the next."""
        s, t = self.shape, self.shape.tiling
        number = turn * s.clusters + self.cluster
        tile, strip = lax.div(number, s.strips), lax.rem(number, s.strips)
        group, first, end = (self.gmem.tiles[tile, field] for field in (tiles.GROUP, tiles.FIRST, tiles.END))
        column = (strip * t.cluster + (self.rank if t.paired else 0)) * t.columns
        return group, first, end, column


def _kernel(s: _Shape, gpu: ModuleType, *refs: Any) -> None:
    gmem, smem = _Arguments(*refs[: len(_Arguments._fields)]), Stages(*refs[len(_Arguments._fields) :])
    cluster, rank, wg = lax.axis_index("cta"), lax.axis_index(RANK), lax.axis_index("wg")
    turns = lax.div(gmem.ends[gmem.ends.shape[0] - 1] * s.strips + (s.clusters - 1) - cluster, s.clusters)
    _Cta(s, gmem, smem, gpu, cluster, rank, wg, turns).work(_load, _consume)


def _load(c: _Cta) -> None:
    """Brings the operands of all tiles into shared memory."""
    s, t, gmem, smem = c.shape, c.shape.tiling, c.gmem, c.smem

    def load_x(rows: int, first: jax.Array, depth: Any, slot: jax.Array) -> None:
        # A copy that both CTAs of a cluster ask for is made by halves, each of which goes to both.
        plgpu.copy_gmem_to_smem(
            gmem.x.at[pl.ds(first, rows), depth],
            smem.x.at[slot, pl.ds(0, rows)],
            smem.full.at[slot],
            collective_axes=RANK if t.paired else None,
        )

    def load_tile(turn: jax.Array, step: jax.Array) -> jax.Array:
        group, first, end, column = c.tile(turn)
        few = end - first <= FEW_ROWS

        def load_step(k: jax.Array, step: jax.Array) -> jax.Array:
            slot = c.slot(step)
            pl.when(step >= t.stages)(lambda: plgpu.barrier_wait(smem.free.at[slot]))
            depth = pl.ds(k * DEPTH, DEPTH)
            if t.consumers == 1 and not t.paired:
                # What lies behind few rows are old rows, whose sums nobody stores.
                pl.when(few)(lambda: load_x(FEW_ROWS, first, depth, slot))
                pl.when(jnp.logical_not(few))(lambda: load_x(t.rows, first, depth, slot))
            else:
                load_x(t.rows, first, depth, slot)
            for half in range(2):
                for block in range(t.blocks):
                    part = gmem.w.at[group, depth, half, pl.ds(column + block * DEPTH, DEPTH)]
                    plgpu.copy_gmem_to_smem(part, smem.w.at[slot, half, block], smem.full.at[slot])
            return step + 1

        return lax.fori_loop(0, jnp.where(end > first, s.steps, 0), load_step, step)

    c.await_releases(lax.fori_loop(0, c.turns, load_tile, jnp.int32(0)))


def _consume(c: _Cta) -> None:
    """A consumer warpgroup."""
    s, t, smem = c.shape, c.shape.tiling, c.smem
    c.gpu.set_registers(t.registers[0], "increase")

    def consume_tile(turn: jax.Array, step: jax.Array) -> jax.Array:
        _, first, end, column = c.tile(turn)
        own = first + c.wg * ROWS  # the first row of this warpgroup's
        pl.when(end > own)(lambda: sum_tile(own, end, column, step))
        if t.consumers > 1:
            pl.when((end > first) & (end <= own))(lambda: pass_tile(step))
        return step + jnp.where(end > first, s.steps, 0)

    def pass_tile(step: jax.Array) -> None:
        """Releases the stages unread: this warpgroup has no rows in the tile."""

        def pass_step(i: jax.Array, _: jax.Array) -> jax.Array:
            plgpu.barrier_wait(smem.full.at[c.slot(step + i)])
            # A warp that lags behind would take the stage's next filling but one for this one, and wait for ever. Where
            # products are computed, these keep the warps together.
            c.gpu.await_warpgroup()
            plgpu.barrier_arrive(smem.free.at[c.slot(step + i)])
            return _

        lax.fori_loop(0, s.steps, pass_step, jnp.int32(0))

    def sum_tile(own: jax.Array, end: jax.Array, column: jax.Array, step: jax.Array) -> None:
        def next_step(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            sums = c.add(step + i, sums)
            c.gpu.await_products_before()
            plgpu.barrier_arrive(smem.free.at[c.slot(step + i - 1)])
            return sums

        sums = lax.fori_loop(1, s.steps, next_step, c.add(step, c.gpu.zeros(t.columns)))
        halves = c.gpu.await_products(*sums)
        plgpu.barrier_arrive(smem.free.at[c.slot(step + s.steps - 1)])
        _finish(c, halves, own, end, column)

    lax.fori_loop(0, c.turns, consume_tile, jnp.int32(0))


def _finish(c: _Cta, halves: tuple[jax.Array, jax.Array], row: jax.Array, end: jax.Array, column: jax.Array) -> None:
    """From sums [64, columns] of both halves to the output, as far as rows and columns reach."""
    s = c.shape
    parts = [slice(begin, begin + STORED) for begin in range(0, s.tiling.columns, STORED)]
    if s.activation is not None:
        for part in parts:
            tile = activated(c.gpu, s.activation, halves[0][:, part]) * halves[1][:, part]
            c.gpu.store_tile(c.gmem.out, tile, row, end, column + part.start, s.columns)
        return
    weights = c.gpu.load_for_all_columns(c.gmem.weights.at[pl.ds(row, ROWS)], STORED)
    for part in parts:
        for half, sums in enumerate(halves):
            # Columns behind a half's last are not its neighbour's.
            at, last = half * s.columns + column + part.start, (half + 1) * s.columns
            c.gpu.store_tile(c.gmem.out, sums[:, part] * weights, row, end, at, last)
