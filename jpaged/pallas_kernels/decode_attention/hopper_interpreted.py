"""`hopper_primitives.py` in words that Pallas' GPU interpreter knows."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jpaged.pallas_kernels.common.hopper_interpreted import *  # noqa: F403  (kernels call them through this module)
from jpaged.pallas_kernels.decode_attention.hopper_primitives import WARPGROUP


def is_last_to_arrive(counters_ref: Any, index: jax.Array, expected: jax.Array) -> jax.Array:
    """Counts an arrival: whether it is the last of `expected`.

    There is no atomic operation that returns a value, so one CTA has to do all of a sequence.
    """
    count = counters_ref[index] + 1
    counters_ref[index] = count
    return count == expected


def load_entries(tables_ref: Any, row: jax.Array, first: jax.Array) -> jax.Array:
    """128 entries of a row of tables int32 [rows, entries] from the `first` on; past the row's end, its last."""
    entries = jnp.minimum(first + jnp.arange(WARPGROUP, dtype=jnp.int32), tables_ref.shape[1] - 1)
    return tables_ref[row][entries]


def store_heads(
    out_ref: Any, lse_ref: Any, out: jax.Array, lse: jax.Array, first: jax.Array, column: jax.Array, heads: int
) -> None:
    """Stores columns of out [head_dim, columns] and lse [columns] from `column` on, as heads from `first` on."""
    for at in range(out.shape[1] - heads + 1):

        @pl.when(column == at)
        def _store_columns(at: int = at) -> None:
            for j in range(heads):
                out_ref[first + j] = out[:, at + j]
                lse_ref[first + j] = lse[at + j]
