"""A CTA of the gated, the grouped and the invariant products: a producer warpgroup that fills a ring of stages in
shared memory, and consumers that add up the products of what is there."""

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.gated_product.hopper_primitives import LINES
from jpaged.pallas_kernels.gated_product.hopper_tiling import DEPTH, ROWS

RANK = "rank"
"""The axis of a CTA in its cluster."""


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


class DenseCta(Cta):
    """Of a product of all rows with one w, whose tiles it takes in turn."""

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
