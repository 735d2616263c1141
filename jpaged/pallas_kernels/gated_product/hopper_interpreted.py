"""`hopper_primitives.py` in words that Pallas' GPU interpreter knows. Products are computed at once."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.common.hopper_interpreted import *  # noqa: F403  (kernels call them through this module)
from jpaged.pallas_kernels.gated_product.hopper_tiling import DEPTH, ROWS


def zeros(columns: int) -> tuple[jax.Array, jax.Array]:
    """Two arrays [64, columns] that products may be added to."""
    return (jnp.zeros((ROWS, columns), jnp.float32),) * 2


def await_warpgroup() -> None:
    """Nothing: a warpgroup is one thread."""


def add_products(first: jax.Array, second: jax.Array, x_ref: Any, w_ref: Any) -> tuple[jax.Array, jax.Array]:
    """first + x @ w[0] and second + x @ w[1]. x_ref [64, 64], w_ref [2, n, 64, 64] in shared memory."""

    def product(half: int, block: int) -> jax.Array:
        def multiply(acc_ref: Any) -> jax.Array:
            plgpu.wgmma(acc_ref, x_ref, w_ref.at[half, block])
            return acc_ref[...]

        return pl.run_scoped(multiply, plgpu.ACC((ROWS, DEPTH), jnp.float32))

    columns, blocks = first.shape[1], range(-(-first.shape[1] // DEPTH))
    products = [jnp.concatenate([product(half, i) for i in blocks], axis=1)[:, :columns] for half in range(2)]
    return first + products[0], second + products[1]


def await_products_before() -> None:
    """Nothing."""


def await_products(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums."""
    return first, second


def reciprocal(x: jax.Array) -> jax.Array:
    """1 / x."""
    return 1.0 / x


def load_for_all_rows(columns_ref: Any, rows: int) -> jax.Array:
    """Numbers [columns] in global memory as an array [rows, columns], the same in each row."""
    row = columns_ref[...]
    return lax.broadcast_in_dim(row, (rows, *row.shape), [1])


def stored_shape(shape: tuple[int, int], padded: tuple[int, int]) -> tuple[int, int]:
    """The shape of an output that `store_rows` stores: that of whole tiles, since no store leaves out a part of one."""
    del shape
    return padded


def store_rows(out_ref: Any, tile: jax.Array, row: jax.Array, column: jax.Array) -> None:
    """Stores float32 tile [64, columns] from (row, column) of out_ref on, in its 16-bit type."""
    out_ref[pl.ds(row, ROWS), pl.ds(column, tile.shape[1])] = tile.astype(out_ref.dtype)
