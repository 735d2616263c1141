"""Ragged attention in plain XLA."""

from functools import partial

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common.attention_arguments import Features, Operands
from jpaged.pallas_kernels.common.paged_scan import ITEM_QUERIES, Items, scan_items


@partial(jax.jit, static_argnames=("features", "causal"))
def ragged_attention(
    operands: Operands, query_starts: jax.Array, features: Features, *, causal: bool = True
) -> tuple[jax.Array, jax.Array]:
    """`ragged_attention` of the package, checked; always with its log-sum-exp, float32 [T, H]."""
    kv_lens = operands.kv_lens
    tokens, rows = operands.q.shape[0], kv_lens.shape[0]
    queries = min(ITEM_QUERIES, tokens)
    query_lens = query_starts[1:] - query_starts[:-1]
    ends = jnp.cumsum((query_lens + queries - 1) // queries, dtype=jnp.int32)
    item = jnp.arange(min(tokens, rows + tokens // queries), dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, item, side="right").astype(jnp.int32), rows - 1)
    nth = item - jnp.where(row > 0, ends[row - 1], 0)  # of its row's items
    start = query_starts[row] + nth * queries
    items = Items(
        rows=row,
        starts=start,
        counts=jnp.clip(query_starts[row + 1] - start, 0, queries),
        first_positions=kv_lens[row] - (query_lens[row] - nth * queries if causal else 1),
        total=ends[-1],
    )
    return scan_items(operands, items, queries, features, causal=causal)
