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
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.devices import num_multiprocessors
from jpaged.pallas_kernels.gated_product.hopper_cta import DenseCta, DenseShape, Stages, cta_kernel
from jpaged.pallas_kernels.gated_product.hopper_primitives import STORED
from jpaged.pallas_kernels.gated_product.hopper_tiling import DEPTH, ROWS
from jpaged.pallas_kernels.invariant_product import hopper_interpreted, hopper_primitives
from jpaged.pallas_kernels.invariant_product.hopper_tiling import Tiling, pick_tiling


def unsupported(x: jax.Array, w: jax.Array) -> str | None:
    """Why the kernel cannot take these (checked) arguments; None if it can."""
    if x.dtype not in (jnp.bfloat16.dtype, jnp.float16.dtype):
        return f"it takes bfloat16 and float16, not {x.dtype}"
    if any(size % 8 for size in w.shape):
        return f"w must have multiples of 8 for K and N, as TMA needs, got {list(w.shape)}"
    return None


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

    tiling, ctas, interpret: as of the gated product's kernel.
    """
    rows, depth = x.shape
    columns = w.shape[0 if outputs_first else 1]
    ctas = ctas or num_multiprocessors()
    t = tiling or pick_tiling(rows, depth, columns, ctas)
    row_tiles, strips = t.clusters(rows, columns)
    clusters = min(ctas // math.prod(t.cluster), row_tiles * strips)
    s = _Shape(t, rows, depth, columns, row_tiles, strips, clusters, x.dtype, outputs_first)
    gpu = hopper_primitives if interpret is None else hopper_interpreted
    kernel = cta_kernel(
        functools.partial(_kernel, s, gpu),
        jax.ShapeDtypeStruct((rows, columns), dtype),
        t,
        name="invariant_product",
        dtype=x.dtype,
        pieces=(t.blocks,),
        clusters=clusters,
        cluster_size=math.prod(t.cluster),
        interpret=interpret,
    )
    return kernel(x, w)


@dataclasses.dataclass(frozen=True)
class _Shape(DenseShape):
    """What the kernel is specialised for."""

    outputs_first: bool


class _Arguments(NamedTuple):
    """The call's arrays in global memory."""

    x: Any  # [M, K]
    w: Any  # [K, N] or [N, K]
    out: Any  # [M, N]


def _kernel(s: _Shape, gpu: ModuleType, *refs: Any) -> None:
    gmem, smem = _Arguments(*refs[: len(_Arguments._fields)]), Stages(*refs[len(_Arguments._fields) :])
    DenseCta.here(s, gmem, smem, gpu).work(_load, _consume)


def _load(c: DenseCta) -> None:
    """Brings the operands of all tiles into shared memory."""
    s, w = c.shape, c.gmem.w

    def parts_of_w(depth: Any, column: jax.Array) -> Iterator[tuple[tuple[int], Any]]:
        for block in range(s.tiling.blocks):
            columns = pl.ds(column + block * DEPTH, DEPTH)
            yield (block,), w.at[columns, depth] if s.outputs_first else w.at[depth, columns]

    c.load_tiles(parts_of_w)


def _consume(c: DenseCta) -> None:
    """A consumer warpgroup."""
    s, smem, out = c.shape, c.smem, c.gmem.out
    store_part = c.gpu.store_wide if out.dtype == jnp.float32 else c.gpu.store_tile

    def add(step: jax.Array, sums: jax.Array) -> jax.Array:
        plgpu.barrier_wait(smem.full.at[c.slot(step)])
        x, w = smem.x.at[c.slot(step), pl.ds(c.wg * ROWS, ROWS)], smem.w.at[c.slot(step)]
        return c.gpu.add_product(sums, x, w, s.outputs_first)

    def store(sums: jax.Array, row: jax.Array, column: jax.Array) -> None:
        for first in range(0, s.tiling.columns, STORED):
            part = sums[:, first : first + STORED]
            store_part(out, part, row + c.wg * ROWS, s.rows, column + first, s.columns)

    c.consume_tiles(add, c.gpu.await_product, store)
