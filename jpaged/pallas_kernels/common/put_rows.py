"""Rows put into a pool in place, in plain XLA."""

from functools import partial

import jax
from jax import lax

from jpaged.pallas_kernels.common.numerics import FP8, as_bits, from_bits


def put_rows(pool: jax.Array, index: jax.Array, update: jax.Array) -> jax.Array:
    """`pool` with `update` at `index` of its first axis, in place; what is out of bounds is dropped.

    XLA's CPU compiler scatters into a 16-bit float array by widening all of it to float32, so there the rows are put
    one by one.
    """

    def scatter(pool: jax.Array, index: jax.Array, update: jax.Array) -> jax.Array:
        return pool.at[index].set(update, mode="drop")

    def one_by_one(pool: jax.Array, index: jax.Array, update: jax.Array) -> jax.Array:
        def put(i: jax.Array, pool: jax.Array) -> jax.Array:
            inside = (index[i] >= 0) & (index[i] < pool.shape[0])
            update_row = partial(lax.dynamic_update_index_in_dim, update=update[i], index=index[i], axis=0)
            return lax.cond(inside, update_row, lambda pool: pool, pool)

        return lax.fori_loop(0, index.shape[0], put, pool)

    if pool.dtype == FP8:
        return from_bits(put_rows(as_bits(pool), index, as_bits(update)), pool.dtype)
    if pool.dtype.itemsize != 2:
        return scatter(pool, index, update)
    return lax.platform_dependent(pool, index, update, cpu=one_by_one, default=scatter)
