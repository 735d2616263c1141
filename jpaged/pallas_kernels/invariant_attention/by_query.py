"""`invariant_attention` in plain XLA: each query an item of its own of the scan over the pool."""

from functools import partial

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common.attention_arguments import Features, Operands
from jpaged.pallas_kernels.common.paged_scan import GROUP_ITEMS, TILE_TOKENS, Items, scan_items


@partial(jax.jit, static_argnames="features")
def attend(operands: Operands, query_starts: jax.Array, features: Features) -> tuple[jax.Array, jax.Array]:
    """`ragged_attention` of the package, checked; with its log-sum-exp, float32 [T, H].

    The scan's products have the shape of `GROUP_ITEMS` queries and `TILE_TOKENS` keys, however many there are of
    either, and its loop an end that the compiler does not know (`models.row_tiles` says what for).
    """
    q, kv_pool, block_tables, kv_lens, slopes = operands
    tokens, rows = q.shape[0], kv_lens.shape[0]
    if tokens == 0 or rows == 0:
        return jnp.zeros_like(q), jnp.full(q.shape[:2], -jnp.inf, jnp.float32)
    token = jnp.arange(-(-tokens // GROUP_ITEMS) * GROUP_ITEMS, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(query_starts[1:], token, side="right").astype(jnp.int32), rows - 1)
    position = kv_lens[row] - (query_starts[row + 1] - token)
    is_query = (token < query_starts[-1]) & (position >= 0)
    total = jnp.max(jnp.where(is_query, token + 1, 0))
    items = Items(row, token, is_query.astype(jnp.int32), position, total)
    columns = max(1, TILE_TOKENS // kv_pool.shape[3])
    missing = max(0, columns - block_tables.shape[1])
    tables = jnp.pad(block_tables, ((0, 0), (0, missing)))
    return scan_items(Operands(q, kv_pool, tables, kv_lens, slopes), items, 1, features, causal=True)
