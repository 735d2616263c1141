"""The invariant product for Hopper: a persistent kernel of a producer warpgroup and one or two consumers.

    producer (a warp)                                    consumers, 64 rows each
    free --> TMA --> x [rows, 64] of 64 elements k       sums += x w     wgmma, both from shared memory
                     w [n, 64, 64]: n x 64 columns       sums --> out
                     --> full

    stages of a ring, filled ahead also while consumers finish a tile:    | x, w | x, w | x, w | x, w |

An element of the result is one float32 accumulator, to which wgmmas of 16 elements k are added from the first to the
last, whichever tile it is in. How many columns an instruction has, and which of its 64 rows a row is, changes neither
that order nor what is added at once. So tiles are chosen by the number of rows (`hopper_tiling.py`), and bits do not
depend on it. Past the ends of rows, columns and K, TMA gives zeros.
"""

import dataclasses
import functools
import math
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.devices import num_multiprocessors
from jpaged.pallas_kernels.gated_product.hopper_cta import RANK, DenseCta, Stages
from jpaged.pallas_kernels.gated_product.hopper_primitives import STORED
from jpaged.pallas_kernels.gated_product.hopper_tiling import DEPTH, ROWS
from jpaged.pallas_kernels.invariant_product import hopper_interpreted, hopper_primitives
from jpaged.pallas_kernels.invariant_product.hopper_tiling import Tiling, pick_tiling

_GROUP_BYTES = 16 << 20  # of x, to stay in the L2 cache while all of w passes by


def unsupported(x: jax.Array, w: jax.Array) -> str | None:
    """Why the kernel cannot take these (checked) arguments; None if it can."""
    if x.dtype not in (jnp.bfloat16.dtype, jnp.float16.dtype):
        return f"it takes bfloat16 and float16, not {x.dtype}"
    if any(size % 8 for size in w.shape):
        return f"w must have multiples of 8 for K and N, as TMA needs, got {list(w.shape)}"
    return None


def worthwhile(x: jax.Array, w: jax.Array) -> bool:
    """Not before it has been measured: unless it is forced, Hopper GPUs take Triton's kernel, too."""
    return False


@functools.partial(jax.jit, static_argnames=("outputs_first", "dtype", "tiling", "ctas", "interpret"))
def invariant_product(
    x: jax.Array,
    w: jax.Array,
    *,
    outputs_first: bool,
    dtype: Any,
    tiling: Tiling | None = None,
    ctas: int | None = None,
    interpret: object = None,
) -> jax.Array:
    """`invariant_product` of the package, for arguments that are checked and that `unsupported` lets pass.

    Args:
        tiling, ctas: to try others than `pick_tiling`'s; a block a multiprocessor.
        interpret: parameters of the Mosaic interpreter, to run on a CPU.
    """
    rows, depth = x.shape
    columns = w.shape[0 if outputs_first else 1]
    ctas = ctas or num_multiprocessors()
    t = tiling or pick_tiling(rows, depth, columns, ctas)
    row_tiles, strips = t.clusters(rows, columns)
    clusters = min(ctas // math.prod(t.cluster), row_tiles * strips)
    s = _Shape(t, rows, depth, columns, row_tiles, strips, clusters, x.dtype, outputs_first)
    gpu = hopper_primitives if interpret is None else hopper_interpreted
    kernel = plgpu.kernel(
        functools.partial(_kernel, s, gpu),
        out_type=jax.ShapeDtypeStruct((rows, columns), dtype),
        scratch_types=Stages.of(t, x.dtype, (t.blocks,)),
        grid=(clusters,),
        grid_names=("cta",),
        cluster=(math.prod(t.cluster),),
        cluster_names=(RANK,),
        num_threads=t.consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="invariant_product",
        interpret=interpret,
    )
    return kernel(x, w)


@dataclasses.dataclass(frozen=True)
class _Shape:
    """What the kernel is specialised for."""

    tiling: Tiling
    rows: int
    depth: int
    columns: int
    row_tiles: int  # those of a cluster counted as one, and so of strips of columns
    strips: int
    clusters: int
    dtype: jnp.dtype
    outputs_first: bool

    @property
    def steps(self) -> int:
        return -(-self.depth // DEPTH)

    @property
    def group(self) -> int:
        """Row tiles, as they are counted here, whose x stays in the L2 cache."""
        return max(1, _GROUP_BYTES // (self.tiling.rows * self.tiling.cluster[0] * self.depth * 2))


class _Arguments(NamedTuple):
    """The call's arrays in global memory."""

    x: Any  # [M, K]
    w: Any  # [K, N] or [N, K]
    out: Any  # [M, N]


def _kernel(s: _Shape, gpu: ModuleType, *refs: Any) -> None:
    gmem, smem = _Arguments(*refs[: len(_Arguments._fields)]), Stages(*refs[len(_Arguments._fields) :])
    cluster, rank, wg = lax.axis_index("cta"), lax.axis_index(RANK), lax.axis_index("wg")
    turns = lax.div(s.row_tiles * s.strips - 1 - cluster, s.clusters) + 1
    DenseCta(s, gmem, smem, gpu, cluster, rank, wg, turns).work(_load, _consume)


def _load(c: DenseCta) -> None:
    """Brings the operands of all tiles into shared memory."""
    s, t, gmem, smem = c.shape, c.shape.tiling, c.gmem, c.smem

    def load(what: str, source: Any, target: Any, full: Any) -> None:
        # A copy that both CTAs of a cluster ask for is made by halves, each of which goes to both.
        plgpu.copy_gmem_to_smem(source, target, full, collective_axes=RANK if t.shared == what else None)

    def load_tile(turn: jax.Array, step: jax.Array) -> jax.Array:
        row, column = c.tile(turn)

        def load_step(k: jax.Array, step: jax.Array) -> jax.Array:
            slot = c.slot(step)
            pl.when(step >= t.stages)(lambda: plgpu.barrier_wait(smem.free.at[slot]))
            depth, full = pl.ds(k * DEPTH, DEPTH), smem.full.at[slot]
            load("x", gmem.x.at[pl.ds(row, t.rows), depth], smem.x.at[slot], full)
            for block in range(t.blocks):
                columns = pl.ds(column + block * DEPTH, DEPTH)
                part = gmem.w.at[columns, depth] if s.outputs_first else gmem.w.at[depth, columns]
                load("w", part, smem.w.at[slot, block], full)
            return step + 1

        return lax.fori_loop(0, s.steps, load_step, step)

    c.await_releases(lax.fori_loop(0, c.turns, load_tile, jnp.int32(0)))


def _consume(c: DenseCta) -> None:
    """A consumer warpgroup."""
    s, t, smem, out = c.shape, c.shape.tiling, c.smem, c.gmem.out
    c.gpu.set_registers(t.registers[0], "increase")
    store = c.gpu.store_wide if out.dtype == jnp.float32 else c.gpu.store_tile

    def consume_tile(turn: jax.Array, step: jax.Array) -> jax.Array:
        row, column = c.tile(turn)

        def add(step: jax.Array, sums: jax.Array) -> jax.Array:
            plgpu.barrier_wait(smem.full.at[c.slot(step)])
            x, w = smem.x.at[c.slot(step), pl.ds(c.wg * ROWS, ROWS)], smem.w.at[c.slot(step)]
            return c.gpu.add_product(sums, x, w, s.outputs_first)

        def next_step(_: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            step, sums = carry
            sums = add(step, sums)
            c.gpu.await_products_before()
            plgpu.barrier_arrive(smem.free.at[c.slot(step - 1)])
            return step + 1, sums

        step, sums = lax.fori_loop(1, s.steps, next_step, (step + 1, add(step, c.gpu.zeros(t.columns))))
        sums = c.gpu.await_product(sums)
        plgpu.barrier_arrive(smem.free.at[c.slot(step - 1)])
        for first in range(0, t.columns, STORED):
            part = sums[:, first : first + STORED]
            store(out, part, row + c.wg * ROWS, s.rows, column + first, s.columns)
        return step

    lax.fori_loop(0, c.turns, consume_tile, jnp.int32(0))
