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
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jpaged.pallas_kernels.devices import num_multiprocessors
from jpaged.pallas_kernels.gated_product import hopper_interpreted, hopper_primitives
from jpaged.pallas_kernels.gated_product.hopper_cta import DenseCta, DenseShape, Stages, cta_kernel
from jpaged.pallas_kernels.gated_product.hopper_primitives import STORED
from jpaged.pallas_kernels.gated_product.hopper_tiling import DEPTH, LEAST_ROWS, ROWS, Tiling, pick_tiling


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
    kernel = cta_kernel(
        functools.partial(_kernel, s, gpu),
        jax.ShapeDtypeStruct(gpu.stored_shape((rows, columns), s.padded), x.dtype),
        tiling,
        name="gated_product",
        dtype=x.dtype,
        pieces=(2, tiling.blocks),
        clusters=s.clusters,
        cluster_size=math.prod(tiling.cluster),
        interpret=interpret,
    )
    return kernel(x, w, bias)[:rows, :columns]


@dataclasses.dataclass(frozen=True)
class _Shape(DenseShape):
    """What the kernel is specialised for."""

    activation: str
    biased: bool

    @property
    def padded(self) -> tuple[int, int]:
        """Rows and columns of all tiles."""
        down, across = self.tiling.cluster
        return self.row_tiles * down * self.tiling.rows, self.strips * across * self.tiling.columns


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
    DenseCta.here(s, gmem, smem, gpu).work(_load, _consume)


def _load(c: DenseCta) -> None:
    """Brings the operands of all tiles into shared memory."""
    blocks = range(c.shape.tiling.blocks)

    def parts_of_w(depth: Any, column: jax.Array) -> Iterator[tuple[tuple[int, int], Any]]:
        for half in range(2):
            for block in blocks:
                yield (half, block), c.gmem.w.at[depth, half, pl.ds(column + block * DEPTH, DEPTH)]

    c.load_tiles(parts_of_w)


def _consume(c: DenseCta) -> None:
    """A consumer warpgroup."""
    columns = c.shape.tiling.columns

    def store(sums: tuple[jax.Array, jax.Array], row: jax.Array, column: jax.Array) -> None:
        gate, up = sums
        for first in range(0, columns, STORED):
            part = slice(first, min(first + STORED, columns))
            _finish(c, gate[:, part], up[:, part], row + c.wg * ROWS, column + first)

    c.consume_tiles(c.add, lambda sums: c.gpu.await_products(*sums), store)


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
