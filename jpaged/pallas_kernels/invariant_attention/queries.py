"""Queries of rows, each by itself."""

import jax
import jax.numpy as jnp


def rows_of(token: jax.Array, kv_lens: jax.Array, query_starts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The row of each query, and how many of its keys the query sees: int32, like `token`, 0 where there is no query.

    token: indices of queries. kv_lens: int32 [R], R > 0. query_starts: int32 [R + 1].
    """
    row = jnp.searchsorted(query_starts[1:], token, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, kv_lens.shape[0] - 1)
    seen = kv_lens[row] - (query_starts[row + 1] - token) + 1
    return row, jnp.where(token < query_starts[-1], jnp.maximum(seen, 0), 0)
