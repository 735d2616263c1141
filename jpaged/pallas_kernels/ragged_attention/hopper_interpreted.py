"""`hopper_primitives.py` in words that Pallas' GPU interpreter knows.

It can neither write an accumulator nor take a product's operand from registers, so sums are values that a loop carries.
It has none of the hardware's own barriers, so consumers take no turns.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.common.hopper_interpreted import *  # noqa: F403  (kernels call them through this module)
from jpaged.pallas_kernels.common.hopper_interpreted import add_product
from jpaged.pallas_kernels.ragged_attention.hopper_primitives import Place


def no_sum(rows: int, columns: int) -> jax.Array:
    """A sum [rows, columns] that begins with nothing."""
    return jnp.zeros((rows, columns), jnp.float32)


def issue_product(acc_ref: Any, acc: jax.Array, lhs: jax.Array, rhs: Any) -> jax.Array:
    """acc + lhs @ rhs, at once."""
    del acc_ref
    return add_product(acc, lhs, rhs)


def await_product(acc_ref: Any, acc: jax.Array) -> jax.Array:
    """The sum."""
    del acc_ref
    return acc


def put_back(acc_ref: Any, acc: jax.Array) -> jax.Array:
    """The sum, which a loop carries."""
    del acc_ref
    return acc


def store_rows(out_ref: Any, lse_ref: Any, out: jax.Array, lse: jax.Array, place: Place) -> None:
    """Stores the rows of a consumer's tile whose token is to be stored, one at a time."""
    token, first, end, head, tokens, heads = place
    for g in range(heads):
        for i in range(tokens):

            @pl.when((token + i >= first) & (token + i < end))
            def _(g: int = g, i: int = i) -> None:
                out_ref[token + i, head + g] = out[g * tokens + i]
                lse_ref[token + i, head + g] = lse[g * tokens + i]


def turn_barrier(operation: str, wg: jax.Array) -> None:
    """Nothing."""
    del operation, wg


def zero_rows(tile_ref: Any, begin: jax.Array, swizzle: int, transforms: tuple) -> None:
    """Zeroes rows `begin` and up of a [rows, D] tile."""
    del swizzle, transforms  # how memory lies, which the interpreter does not model
    row = lax.broadcasted_iota(jnp.int32, tile_ref.shape, 0)
    tile_ref[...] = jnp.where(row < begin, tile_ref[...], 0).astype(tile_ref.dtype)
    plgpu.commit_smem()
