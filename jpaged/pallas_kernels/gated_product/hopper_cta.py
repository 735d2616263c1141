"""A CTA of the gated, the grouped and the invariant products: a producer warpgroup that fills a ring of stages in
shared memory, and consumers that add up the products of what is there."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.gated_product.hopper_primitives import LINES
from jpaged.pallas_kernels.gated_product.hopper_tiling import DEPTH, ROWS

RANK = "rank"
"""The axis of a CTA in its cluster."""

_GROUP_BYTES = 16 << 20  # of x, to stay in the L2 cache while all of w passes by

_Sums = TypeVar("_Sums")


class Stages(NamedTuple):
    """Shared memory, and its barriers.

    full: by every copy into the stage. free: by each consumer of all CTAs that get what is copied there.
    """

    x: Any  # [stages, rows, 64]
    w: Any  # [stages, *pieces, 64, 64]
    full: Any
    free: Any

    @classmethod
    def of(cls, tiling: Any, dtype: jnp.dtype, pieces: tuple[int, ...]) -> Self:
        """Those of a kernel's `Tiling`, for plgpu.kernel's scratch_types. pieces: how many loads bring a step's w."""
        stages = tiling.stages
        return cls(
            x=plgpu.SMEM((stages, tiling.rows, DEPTH), dtype, transforms=LINES),
            w=plgpu.SMEM((stages, *pieces, DEPTH, DEPTH), dtype, transforms=LINES),
            full=plgpu.Barrier(num_barriers=stages, num_arrivals=1 + math.prod(pieces)),
            free=plgpu.ClusterBarrier(collective_axes=(RANK,), num_barriers=stages, num_arrivals=tiling.consumers),
        )


class Cta(NamedTuple):
    """A CTA at work, as each of its warpgroups sees it."""

    shape: Any  # what the kernel is specialised for, its `tiling` among it
    gmem: Any  # the call's arrays
    smem: Stages
    gpu: ModuleType  # `hopper_primitives`, or `hopper_interpreted` on a CPU
    cluster: jax.Array
    rank: jax.Array
    wg: jax.Array  # 0 .. consumers - 1, then the producer
    turns: jax.Array  # tiles of this CTA

    def slot(self, step: jax.Array) -> jax.Array:
        """Where the operands of a step, counted over all tiles, are."""
        return lax.rem(step, self.shape.tiling.stages)

    def work(self, load: Callable[[Self], None], consume: Callable[[Self], None]) -> None:
        """Has the producer load the operands of all tiles, and the consumers consume them.

        load: of one warp, which does all. consume: of a consumer warpgroup.
        """
        tiling, gpu = self.shape.tiling, self.gpu

        def produce() -> None:
            gpu.set_registers(tiling.registers[1], "decrease")
            gpu.in_warps(lambda _: load(self), "operands")

        pl.when(self.wg == tiling.consumers)(produce)
        pl.when(self.wg < tiling.consumers)(functools.partial(consume, self))

    def await_releases(self, steps: jax.Array) -> None:
        """Waits for every release of so many steps: a CTA's shared memory, where the other of its cluster arrives, ends
        with it."""
        for slot in range(self.shape.tiling.stages):
            pl.when(slot < steps)(lambda slot=slot: plgpu.barrier_wait(self.smem.free.at[slot]))

    def add(self, step: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Waits for the operands of a step, and issues the products of this warpgroup's rows with both halves."""
        smem, slot = self.smem, self.slot(step)
        plgpu.barrier_wait(smem.full.at[slot])
        return self.gpu.add_products(*sums, smem.x.at[slot, pl.ds(self.wg * ROWS, ROWS)], smem.w.at[slot])


@dataclasses.dataclass(frozen=True)
class DenseShape:
    """What the kernel of a product of all rows with one w is specialised for."""

    tiling: Any
    rows: int
    depth: int
    columns: int
    row_tiles: int  # those of a cluster counted as one, and so of strips of columns
    strips: int
    clusters: int
    dtype: jnp.dtype

    @property
    def steps(self) -> int:
        return -(-self.depth // DEPTH)

    @property
    def group(self) -> int:
        """Row tiles, as they are counted here, whose x stays in the L2 cache."""
        return max(1, _GROUP_BYTES // (self.tiling.rows * self.tiling.cluster[0] * self.depth * 2))


class DenseCta(Cta):
    """Of a product of all rows with one w, whose tiles it takes in turn. Its shape is a `DenseShape`."""

    @classmethod
    def here(cls, s: DenseShape, gmem: Any, smem: Stages, gpu: ModuleType) -> Self:
        """The one that runs."""
        cluster, rank, wg = lax.axis_index("cta"), lax.axis_index(RANK), lax.axis_index("wg")
        turns = lax.div(s.row_tiles * s.strips - 1 - cluster, s.clusters) + 1
        return cls(s, gmem, smem, gpu, cluster, rank, wg, turns)

    def tile(self, turn: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First row and first column of this CTA's tile: strip by strip within a group of rows."""
        s, t = self.shape, self.shape.tiling
        number = turn * s.clusters + self.cluster
        group = lax.div(number, s.group * s.strips)
        within = lax.rem(number, s.group * s.strips)
        tall = jnp.minimum(s.row_tiles - group * s.group, s.group)
        down, across = t.cluster  # one of them is 1
        row_tile = (group * s.group + lax.rem(within, tall)) * down + (self.rank if down > 1 else 0)
        strip = lax.div(within, tall) * across + (self.rank if across > 1 else 0)
        return row_tile * t.rows, strip * t.columns

    def load_tiles(self, parts_of_w: Callable[[Any, jax.Array], Iterable[tuple[tuple[int, ...], Any]]]) -> None:
        """Brings the operands of all tiles into shared memory.

        parts_of_w: of elements k and a tile's first column: each piece of a stage's w, and its place in global memory.
        """
        s, t, gmem, smem = self.shape, self.shape.tiling, self.gmem, self.smem

        def load(what: str, source: Any, target: Any, full: Any) -> None:
            # A copy that both CTAs of a cluster ask for is made by halves, each of which goes to both.
            plgpu.copy_gmem_to_smem(source, target, full, collective_axes=RANK if t.shared == what else None)

        def load_tile(turn: jax.Array, step: jax.Array) -> jax.Array:
            row, column = self.tile(turn)

            def load_step(k: jax.Array, step: jax.Array) -> jax.Array:
                slot = self.slot(step)
                pl.when(step >= t.stages)(lambda: plgpu.barrier_wait(smem.free.at[slot]))
                depth, full = pl.ds(k * DEPTH, DEPTH), smem.full.at[slot]
                load("x", gmem.x.at[pl.ds(row, t.rows), depth], smem.x.at[slot], full)
                for piece, part in parts_of_w(depth, column):
                    load("w", part, smem.w.at[(slot, *piece)], full)
                return step + 1

            return lax.fori_loop(0, s.steps, load_step, step)

        self.await_releases(lax.fori_loop(0, self.turns, load_tile, jnp.int32(0)))

    def consume_tiles(
        self,
        add: Callable[[jax.Array, _Sums], _Sums],
        completed: Callable[[_Sums], _Sums],
        store: Callable[[_Sums, jax.Array, jax.Array], None],
    ) -> None:
        """Adds up the products of all tiles, as one of the consumers.

        add: waits for the operands of a step, and issues their products. completed: waits for all products issued.
        store: the sums of a tile, given its first row and column.
        """
        s, t, smem = self.shape, self.shape.tiling, self.smem
        self.gpu.set_registers(t.registers[0], "increase")

        def consume_tile(turn: jax.Array, step: jax.Array) -> jax.Array:
            row, column = self.tile(turn)

            def next_step(_: jax.Array, carry: tuple[jax.Array, _Sums]) -> tuple[jax.Array, _Sums]:
                step, sums = carry
                sums = add(step, sums)
                self.gpu.await_products_before()
                plgpu.barrier_arrive(smem.free.at[self.slot(step - 1)])
                return step + 1, sums

            step, sums = lax.fori_loop(1, s.steps, next_step, (step + 1, add(step, self.gpu.zeros(t.columns))))
            sums = completed(sums)
            plgpu.barrier_arrive(smem.free.at[self.slot(step - 1)])
            store(sums, row, column)
            return step

        lax.fori_loop(0, self.turns, consume_tile, jnp.int32(0))


def cta_kernel(
    body: Callable[..., None],
    out_type: jax.ShapeDtypeStruct,
    tiling: Any,
    *,
    name: str,
    dtype: jnp.dtype,
    pieces: tuple[int, ...],
    clusters: int,
    cluster_size: int,
    interpret: Any,
) -> Callable[..., jax.Array]:
    """The kernel of a persistent CTA a multiprocessor, each of `tiling.consumers` and a producer.

    dtype: of x and w. pieces: as of `Stages.of`. interpret: parameters of the Mosaic interpreter, or None.
    """
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=Stages.of(tiling, dtype, pieces),
        grid=(clusters,),
        grid_names=("cta",),
        cluster=(cluster_size,),
        cluster_names=(RANK,),
        num_threads=tiling.consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name=name,
        interpret=interpret,
    )
