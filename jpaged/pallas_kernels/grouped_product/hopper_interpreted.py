"""`hopper_primitives.py` in words that Pallas' GPU interpreter knows. Products are computed at once."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jpaged.pallas_kernels.gated_product.hopper_interpreted import *  # noqa: F403  (kernels call them through this module)


def load_for_all_columns(rows_ref: Any, columns: int) -> jax.Array:
    """Numbers [rows] in global memory as an array [rows, columns], the same in each column."""
    column = rows_ref[...]
    return lax.broadcast_in_dim(column, (*column.shape, columns), [0])


def store_tile(out_ref: Any, tile: jax.Array, row: jax.Array, end: jax.Array, column: jax.Array, last: int) -> None:
    """Stores float32 tile [64, columns] from (row, column) of out_ref on, in its 16-bit type, up to row `end` and
    column `last`: eight columns at a time, of which outputs have whole ones."""

    def store(i: jax.Array, at: int, width: int) -> None:
        part = lax.dynamic_slice(tile, (i, jnp.int32(at)), (1, width))
        out_ref[pl.ds(row + i, 1), pl.ds(column + at, width)] = part.astype(out_ref.dtype)

    def store_row(i: jax.Array, _: None) -> None:
        width = tile.shape[1]
        whole = column + width <= last
        pl.when(whole)(lambda: store(i, 0, width))
        for at in range(0, width - 8, 8):
            pl.when(jnp.logical_not(whole) & (column + at < last))(lambda at=at: store(i, at, 8))

    lax.fori_loop(0, jnp.clip(end - row, 0, tile.shape[0]), store_row, None)
