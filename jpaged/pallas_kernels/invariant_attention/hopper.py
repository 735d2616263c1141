"""Invariant attention on Hopper: each query a row of decode attention, whose bits depend on that row alone.

It cuts keys at fixed positions and folds the parts in order, so a query has the same bits whether it is decoded or in
a chunk. A decoded query costs what decode attention costs. One of a chunk costs the same, where `ragged_attention`
reads keys once for 64 and more: a chunk's keys come from the L2 cache, if they fit it.
"""

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common.attention_arguments import Features, Operands
from jpaged.pallas_kernels.decode_attention import hopper
from jpaged.pallas_kernels.invariant_attention.queries import rows_of


def unsupported(q: jax.Array, kv_pool: jax.Array) -> str | None:
    """Why the kernel cannot take these (checked) arguments; None if it can."""
    if kv_pool.shape[4] not in hopper.HEAD_DIMS:  # the kernel of others adds up chunks by the width of the table
        return f"head_dim {kv_pool.shape[4]} is not one of {hopper.HEAD_DIMS}"
    return hopper.unsupported(q, kv_pool)


def invariant_attention(operands: Operands, query_starts: jax.Array, features: Features) -> tuple[jax.Array, jax.Array]:
    """`invariant_attention` of the package, checked; with its log-sum-exp, float32 [T, H]."""
    row, seen = rows_of(jnp.arange(operands.q.shape[0], dtype=jnp.int32), operands.kv_lens, query_starts)
    each = operands._replace(block_tables=operands.block_tables[row], kv_lens=seen)
    return hopper.decode_attention(each, features)
