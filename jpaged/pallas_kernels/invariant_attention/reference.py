"""Invariant attention in plain XLA: each query an item of its own of the scan over the pool."""

from functools import partial

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common.attention_arguments import Features, Operands
from jpaged.pallas_kernels.common.paged_scan import GROUP_ITEMS, TILE_TOKENS, Items, scan_items
from jpaged.pallas_kernels.invariant_attention.queries import rows_of


@partial(jax.jit, static_argnames="features")
def invariant_attention(operands: Operands, query_starts: jax.Array, features: Features) -> tuple[jax.Array, jax.Array]:
    """`invariant_attention` of the package, checked; with its log-sum-exp, float32 [T, H].

    The scan's products have the shape of `GROUP_ITEMS` queries and `TILE_TOKENS` keys, however many there are of
    either, and its loop an end that the compiler does not know (`models.row_tiles` says what for).
    """
    q, kv_pool, block_tables, kv_lens, slopes = operands
    tokens = q.shape[0]
    token = jnp.arange(-(-tokens // GROUP_ITEMS) * GROUP_ITEMS, dtype=jnp.int32)
    row, seen = rows_of(token, kv_lens, query_starts)
    is_query = seen > 0
    total = jnp.max(jnp.where(is_query, token + 1, 0))
    items = Items(row, token, is_query.astype(jnp.int32), seen - 1, total)
    columns = max(1, TILE_TOKENS // kv_pool.shape[3])
    missing = max(0, columns - block_tables.shape[1])
    tables = jnp.pad(block_tables, ((0, 0), (0, missing)))
    return scan_items(Operands(q, kv_pool, tables, kv_lens, slopes), items, 1, features, causal=True)
