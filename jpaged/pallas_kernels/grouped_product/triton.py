"""The grouped products for GPUs from Ampere on, in one Triton kernel with two endings.

    list of tiles (`tiles.py`): rows of one group each, x strips of columns; a CTA a pair, all strips of a tile first

    a CTA:  sums += x[rows, k] @ w[group, k, columns]     of gate and of up, or one sum of twice as many columns
            activation or weights --> out, rows of the tile alone

The grid is as large as the list can be; a CTA behind the list's end leaves. While groups have few rows, each has one
tile, whose matrix is read once; the tiles of a larger group run at the same time and find it in the L2 cache.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import triton
import triton.language as tl

from jpaged.pallas_kernels.common.triton_call import Launch, call
from jpaged.pallas_kernels.common.triton_targets import for_family
from jpaged.pallas_kernels.gated_product.reference import ACTIVATIONS
from jpaged.pallas_kernels.grouped_product.tiles import END, FIRST, GROUP, RowGroups, plan

_GROUP, _FIRST, _END = (tl.constexpr(x) for x in (GROUP, FIRST, END))
_NAMES = tuple(ACTIVATIONS)
_SILU, _RELU, _GELU, _GELU_TANH = (tl.constexpr(_NAMES.index(name)) for name in ("silu", "relu", "gelu", "gelu_tanh"))
_WEIGHTED = tl.constexpr(-1)


@dataclass(frozen=True)
class Config:
    """How the kernel is cut and compiled.

    rows: of a tile, at most. columns: of a strip, of gate and of up each; twice as many without them. depth: of a step.
    warps: of a CTA. stages: steps whose operands are in flight or in use.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


_SMALL = (Config(16, 64, 64, 4, 4), Config(32, 64, 64, 4, 4), Config(64, 64, 64, 4, 3), Config(128, 64, 32, 8, 4))
_LARGE = (Config(16, 64, 64, 4, 5), Config(32, 64, 64, 4, 5), Config(64, 64, 64, 4, 4), Config(128, 64, 64, 8, 4))
_CONFIGS = {80: _LARGE, 86: _SMALL, 90: _LARGE, 100: _LARGE, 120: _SMALL}
"""By family of GPUs, from few rows a tile to many."""


def default_config(rows: int, groups: int, itemsize: int) -> Config:
    """For so many rows in so many groups: tiles as high as a group is, if rows are spread evenly."""
    found = next((one for one in for_family(_CONFIGS) if one.rows * groups >= rows), for_family(_CONFIGS)[-1])
    if itemsize == 4:  # products in float32 are not tensor cores', and need the registers
        return Config(min(found.rows, 32), 32, 32, 4, 2)
    return found


def unsupported(x: jax.Array, w: jax.Array) -> str | None:
    """Why the kernel cannot take these (checked) arguments; None if it can."""
    del w
    return f"dtype {x.dtype} is wider than 32 bits" if x.dtype.itemsize > 4 else None


@partial(jax.jit, static_argnames=("activation", "config"))
def gated_grouped_product(
    x: jax.Array, w: jax.Array, groups: RowGroups, *, activation: str, config: Config | None = None
) -> jax.Array:
    """`gated_grouped_product` of the package, checked. config: to try others than the table's."""
    # Nobody reads weights there; ones would be a kernel of their own.
    return _product(x, w, groups, x, w.shape[3], _NAMES.index(activation), config)


@partial(jax.jit, static_argnames="config")
def weighted_grouped_product(
    x: jax.Array, w: jax.Array, groups: RowGroups, weights: jax.Array, *, config: Config | None = None
) -> jax.Array:
    """`weighted_grouped_product` of the package, checked. config: likewise."""
    return _product(x, w, groups, weights, w.shape[2], _WEIGHTED.value, config)


def _product(
    x: jax.Array,
    w: jax.Array,
    groups: RowGroups,
    weights: jax.Array,
    columns: int,
    ending: int,
    config: Config | None,
) -> jax.Array:
    rows, depth = x.shape
    experts = w.shape[0]
    config = config or default_config(rows, experts, x.dtype.itemsize)
    width = config.columns if ending != _WEIGHTED.value else 2 * config.columns
    strips = triton.cdiv(columns, width)
    listed, ends = plan(groups, experts, rows=rows, height=config.rows)
    launch = Launch((listed.shape[0] * strips,), config.warps, config.stages)
    constants: dict[str, Any] = {
        "LAST": ends.shape[0] - 1,
        "DEPTH": depth,
        "COLUMNS": columns,
        "ENDING": ending,
        "STRIPS": strips,
    }
    constants |= {"ROWS": config.rows, "WIDTH": width, "STEP": config.depth}
    out = jax.ShapeDtypeStruct((rows, columns), x.dtype)
    (product,) = call(_grouped_product, launch, x, w, weights, listed, ends, out=[out], **constants)
    return product


@triton.jit
def _grouped_product(
    x,
    w,
    weights,
    tiles,
    ends,
    out,
    LAST: tl.constexpr,  # of ends
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ENDING: tl.constexpr,  # a number of an activation, or `_WEIGHTED`
    STRIPS: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile
    WIDTH: tl.constexpr,  # columns of a strip
    STEP: tl.constexpr,  # of the products' shared axis
):
    """x: [A, DEPTH]. w: [E, DEPTH, 2 if gated, COLUMNS]. weights: float32 [A]. tiles: int32 [tiles, 3].
    ends: int32 [LAST + 1]. out: [A, COLUMNS]."""
    tile = tl.program_id(0) // STRIPS
    if tile >= tl.load(ends + LAST):
        return
    group = tl.load(tiles + tile * 3 + _GROUP).to(tl.int64)
    begin, end = tl.load(tiles + tile * 3 + _FIRST), tl.load(tiles + tile * 3 + _END)
    if begin >= end:
        return
    row = begin + tl.arange(0, ROWS)
    is_row = row < end
    row = row.to(tl.int64)
    column = (tl.program_id(0) % STRIPS) * WIDTH + tl.arange(0, WIDTH)
    is_column = column < COLUMNS
    halves: tl.constexpr = 1 if ENDING == _WEIGHTED else 2
    matrix = w + group * (DEPTH * halves * COLUMNS)
    first = tl.zeros((ROWS, WIDTH), tl.float32)
    second = tl.zeros((ROWS, WIDTH if halves == 2 else 16), tl.float32)
    for start in range(0, DEPTH, STEP):
        k = start + tl.arange(0, STEP)
        operand = tl.load(x + row[:, None] * DEPTH + k[None, :], mask=is_row[:, None] & (k < DEPTH)[None, :], other=0.0)
        factors = matrix + k[:, None] * (halves * COLUMNS) + column[None, :]
        here = (k < DEPTH)[:, None] & is_column[None, :]
        first = tl.dot(operand, tl.load(factors, mask=here, other=0.0), first, input_precision="ieee")
        if halves == 2:
            more = tl.load(factors + COLUMNS, mask=here, other=0.0)
            second = tl.dot(operand, more, second, input_precision="ieee")
    if ENDING == _WEIGHTED:
        result = first * tl.load(weights + row, mask=is_row, other=0.0)[:, None]
    else:
        result = activated(first, ENDING) * second
    target = out + row[:, None] * COLUMNS + column[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """x float32 behind an activation, by its number."""
    if ACTIVATION == _SILU:
        return x * tl.sigmoid(x)
    elif ACTIVATION == _RELU:
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == _GELU:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:  # (1 + tanh(y)) / 2 is the sigmoid of 2 y
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
