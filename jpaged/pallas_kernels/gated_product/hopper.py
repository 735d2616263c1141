"""The gated product for Hopper: both products of an MLP's gate and up, and the activation, in one Pallas kernel.

    out[m, i] = activation(x[m] . w[:, 0, i] + b[0, i]) * (x[m] . w[:, 1, i] + b[1, i])

A persistent CTA of one producer warpgroup and two or three consumers takes output tiles in turn, each 64 rows a
consumer and up to 128 columns. The 2 x 64 x columns sums of a consumer stay in registers from the first product to the
activation.

    producer (a warp)                                    consumers, 64 rows each
    free --> TMA --> x [rows, 64] of 64 elements k       gate += x w[0]     wgmma, both from shared memory
                     w [2, n, 64, 64]: k by columns      up   += x w[1]
                     --> full                            activation(gate) * up --> out, stores of 16 bytes

    stages of a ring, filled ahead also while consumers finish a tile:    | x, w | x, w | x, w | x, w |

    tiles of one group of rows (x of a group fits the L2 cache)         a cluster of two CTAs: tiles below one another
           strips of columns ->                                         share w, tiles side by side x; each loads half
      rows  0  4  8  ..                                                 of that for both, the rest for itself
       |    1  5  9
       v    2  6  10
            3  7  11

A row's sums are added in one order whatever the tiling, so its bits do not depend on the rows beside it.
`docs/kernels_products.md` says how tiles are chosen.
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
from jpaged.pallas_kernels.gated_product import hopper_interpreted, hopper_primitives
from jpaged.pallas_kernels.gated_product.hopper_cta import RANK, DenseCta, Stages
from jpaged.pallas_kernels.gated_product.hopper_primitives import STORED
from jpaged.pallas_kernels.gated_product.hopper_tiling import DEPTH, LEAST_ROWS, ROWS, Tiling, pick_tiling

_GROUP_BYTES = 16 << 20  # of x, to stay in the L2 cache while all of w passes by


def unsupported(x: jax.Array, w: jax.Array) -> str | None:
    """Why the kernel cannot take these (checked) arguments; None if it can."""
    if x.dtype not in (jnp.bfloat16.dtype, jnp.float16.dtype):
        return f"it takes bfloat16 and float16, not {x.dtype}"
    depth, _, columns = w.shape
    if depth % 8 or columns % 8:
        return f"w must have multiples of 8 for K and I, as TMA needs, got {depth} and {columns}"
    return "w must have K > 0" if depth == 0 else None


def worthwhile(x: jax.Array, w: jax.Array) -> bool:
    """Whether the kernel is faster than XLA's product and activation."""
    del w
    return x.shape[0] >= LEAST_ROWS


@functools.partial(jax.jit, static_argnames=("activation", "tiling", "ctas", "interpret"))
def gated_product(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    *,
    activation: str,
    tiling: Tiling | None = None,
    ctas: int | None = None,
    interpret: object = None,
) -> jax.Array:
    """`gated_product` of the package, for arguments that are checked and that `unsupported` lets pass.

    Args:
        tiling, ctas: to try others than `pick_tiling`'s; a block a multiprocessor.
        interpret: parameters of the Mosaic interpreter, to run on a CPU.
    """
    rows, depth = x.shape
    columns = w.shape[2]
    ctas = ctas or num_multiprocessors()
    tiling = tiling or pick_tiling(rows, depth, columns, ctas)
    s = _shape(tiling, ctas, rows, depth, columns, x.dtype, activation, bias is not None)
    if bias is None:
        bias = x  # which nobody reads there; zeros would be a kernel of their own
    else:  # a strip's end may lie past it
        bias = jnp.pad(bias.astype(jnp.float32), ((0, 0), (0, s.padded[1] - columns)))
    gpu = hopper_primitives if interpret is None else hopper_interpreted
    kernel = plgpu.kernel(
        functools.partial(_kernel, s, gpu),
        out_type=jax.ShapeDtypeStruct(gpu.stored_shape((rows, columns), s.padded), x.dtype),
        scratch_types=Stages.of(tiling, x.dtype, (2, tiling.blocks)),
        grid=(s.clusters,),
        grid_names=("cta",),
        cluster=(math.prod(tiling.cluster),),
        cluster_names=(RANK,),
        num_threads=tiling.consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="gated_product",
        interpret=interpret,
    )
    return kernel(x, w, bias)[:rows, :columns]


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
    activation: str
    biased: bool

    @property
    def padded(self) -> tuple[int, int]:
        """Rows and columns of all tiles."""
        down, across = self.tiling.cluster
        return self.row_tiles * down * self.tiling.rows, self.strips * across * self.tiling.columns

    @property
    def steps(self) -> int:
        return -(-self.depth // DEPTH)

    @property
    def group(self) -> int:
        """Row tiles, as they are counted here, whose x stays in the L2 cache."""
        return max(1, _GROUP_BYTES // (self.tiling.rows * self.tiling.cluster[0] * self.depth * 2))


def _shape(
    tiling: Tiling, ctas: int, rows: int, depth: int, columns: int, dtype: Any, activation: str, biased: bool
) -> _Shape:
    """With the tiles counted, and those who do them."""
    row_tiles, strips = tiling.clusters(rows, columns)
    clusters = min(ctas // math.prod(tiling.cluster), row_tiles * strips)
    return _Shape(tiling, rows, depth, columns, row_tiles, strips, clusters, dtype, activation, biased)


class _Arguments(NamedTuple):
    """The call's arrays in global memory."""

    x: Any  # [M, K]
    w: Any  # [K, 2, I]
    bias: Any  # float32 [2, columns of all tiles]; where there is none, anything
    out: Any  # [M, I]


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
            depth = pl.ds(k * DEPTH, DEPTH)
            full = smem.full.at[slot]
            load("x", gmem.x.at[pl.ds(row, t.rows), depth], smem.x.at[slot], full)
            for half in range(2):
                for block in range(t.blocks):
                    part = gmem.w.at[depth, half, pl.ds(column + block * DEPTH, DEPTH)]
                    load("w", part, smem.w.at[slot, half, block], full)
            return step + 1

        return lax.fori_loop(0, s.steps, load_step, step)

    c.await_releases(lax.fori_loop(0, c.turns, load_tile, jnp.int32(0)))


def _consume(c: DenseCta) -> None:
    """A consumer warpgroup."""
    s, t, smem = c.shape, c.shape.tiling, c.smem
    c.gpu.set_registers(t.registers[0], "increase")

    def consume_tile(turn: jax.Array, step: jax.Array) -> jax.Array:
        row, column = c.tile(turn)

        def next_step(_: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            step, sums = carry
            sums = c.add(step, sums)
            c.gpu.await_products_before()
            plgpu.barrier_arrive(smem.free.at[c.slot(step - 1)])
            return step + 1, sums

        step, sums = lax.fori_loop(1, s.steps, next_step, (step + 1, c.add(step, c.gpu.zeros(t.columns))))
        gate, up = c.gpu.await_products(*sums)
        plgpu.barrier_arrive(smem.free.at[c.slot(step - 1)])
        for first in range(0, t.columns, STORED):
            part = slice(first, min(first + STORED, t.columns))
            _finish(c, gate[:, part], up[:, part], row + c.wg * ROWS, column + first)
        return step

    lax.fori_loop(0, c.turns, consume_tile, jnp.int32(0))


def _finish(c: DenseCta, gate: jax.Array, up: jax.Array, row: jax.Array, column: jax.Array) -> None:
    """From sums [64, up to 32] to the output, as far as that reaches."""
    if c.shape.biased:
        gate, up = gate + _bias(c, 0, column, gate.shape), up + _bias(c, 1, column, up.shape)
    tile = activated(c.gpu, c.shape.activation, gate) * up
    c.gpu.store_rows(c.gmem.out, tile, row, column)


def _bias(c: DenseCta, half: int, column: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The same for every row."""
    return c.gpu.load_for_all_rows(c.gmem.bias.at[half, pl.ds(column, shape[1])], shape[0])


def activated(gpu: ModuleType, activation: str, x: jax.Array) -> jax.Array:
    """The activation of float32 sums [64, columns]. gpu: `hopper_primitives`, or `hopper_interpreted` on a CPU."""
    match activation:
        case "silu":
            return x * _sigmoid(gpu, x)
        case "relu":
            return jnp.maximum(x, 0.0)
        case "gelu":
            return 0.5 * x * (1.0 + lax.erf(x * math.sqrt(0.5)))
        case _:  # (1 + tanh(y)) / 2 is the sigmoid of 2 y, which loses nothing where tanh is close to -1
            return x * _sigmoid(gpu, math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x))


def _sigmoid(gpu: ModuleType, x: jax.Array) -> jax.Array:
    return gpu.reciprocal(1.0 + jnp.exp(-x))
