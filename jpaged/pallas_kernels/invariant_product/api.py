"""A product of rows with a weight whose bits depend on a row and on the weight, and on nothing else.

    x [M, K]    w [K, N] or [N, K]    out [M, N] = x @ w, summed in float32

The same for a row alone and among thousands, wherever it stands. An implementation keeps that promise if every element
of the result is one chain of sums over K, in one order, by one kind of instruction:

    "hopper"  wgmma: k16 after k16 from the first to the last, into one accumulator, whatever the tiles
    "triton"  one tiling for any number of rows, so that every element is computed by the same instructions
    "xla"     a loop over tiles of `TILE_ROWS` rows

The kernels read weights once for all rows, the loop once for each tile. Hopper GPUs take Triton's where their own
refuses the sizes.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.invariant_product.reference import TILE_ROWS
from jpaged.pallas_kernels.registry import REFERENCE, Op, is_hopper

__all__ = ["OP", "TILE_ROWS", "invariant_product", "invariant_product_backend"]

OP = Op("invariant_product", __package__, also={"triton": is_hopper})


def invariant_product(
    x: jax.Array,
    w: jax.Array,
    *,
    outputs_first: bool = False,
    dtype: Any = None,
    backend: str | None = None,
) -> jax.Array:
    """x @ w, each row's result independent of the rows around it.

    Args:
        x: floats [M, K].
        w: [K, N], or [N, K] with outputs_first; of x's dtype.
        dtype: of the result, x's or float32; None for x's.
        backend: "hopper", "triton" or "xla"; None picks by device. Equal bits need equal backends.
    Returns:
        [M, N] of `dtype`.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_floats("x", x, "M, K")
    axes = "N, K" if outputs_first else "K, N"
    check.check_rank("w", w, axes)
    rows, depth = x.shape
    columns = w.shape[0 if outputs_first else 1]
    check.check_like("w", w, axes, (columns, depth) if outputs_first else (depth, columns), "x", x.dtype)
    dtype = x.dtype if dtype is None else jnp.dtype(dtype)
    if dtype not in (x.dtype, jnp.float32):
        raise ValueError(f"dtype must be x's, {x.dtype}, or float32, got {dtype}")
    product = OP.pick(backend, x, w).run
    if 0 in (rows, columns, depth):
        return jnp.zeros((rows, columns), dtype)
    return product(x, w, outputs_first=outputs_first, dtype=dtype)


def invariant_product_backend(x: Any, w: Any, backend: str | None = None) -> str | None:
    """The backend whose kernel multiplies all rows at once; None where only the loop over tiles does it.

    x: [M, K], w: [K, N] or [N, K]: arrays or their shapes. M makes no difference. backend: as of `invariant_product`.
    """
    picked = OP.pick(backend, x, w).backend
    return None if picked == REFERENCE else picked
