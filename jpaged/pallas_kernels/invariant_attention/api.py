"""Ragged attention whose bits depend on a query and on the keys and values that it sees, and on nothing else.

The same for a query of a chunk, wherever the prompt was cut, and for one that is decoded alone; whatever other rows
there are. A kernel keeps that promise if it takes each query's keys in one order, cut at fixed positions:

    "hopper"   `decode_attention`, every query a row of its own: parts of fixed size, folded in order
    "triton"   `ragged_attention`: steps of fixed size from the first key up
    "xla"      every query is an item of its own of the scan in `common/paged_scan.py`, always as many items at a time

Hopper's own `ragged_attention` does not: it begins with a tile's last keys, which depend on where the chunk ends.
"""

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.common import attention_arguments as attention
from jpaged.pallas_kernels.common.paged_scan import TILE_TOKENS
from jpaged.pallas_kernels.common.sinks import count_sinks
from jpaged.pallas_kernels.registry import Op, is_hopper

OP = Op("invariant_attention", __package__, also={"triton": is_hopper})


def invariant_attention(
    q: jax.Array,
    kv_pool: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    query_starts: jax.Array,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
    backend: str | None = None,
) -> jax.Array:
    """`ragged_attention`, each query's result independent of the batch around it.

    Args:
        q, kv_pool, block_tables, kv_lens, query_starts: as in `ragged_attention`; a block has at most 128 tokens.
        scale, sliding_window, logit_softcap, alibi_slopes, sinks: as in `ragged_attention`.
        backend: None (by device), "hopper", "triton" or "xla". Equal bits need equal backends.
    Returns:
        [T, heads, head_dim] of q's dtype.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_pool("kv_pool", kv_pool)
    if kv_pool.shape[3] > TILE_TOKENS:
        raise ValueError(f"kv_pool must have blocks of at most {TILE_TOKENS} tokens, got {kv_pool.shape[3]}")
    attention.check_queries(q, kv_pool)
    check.check_int32("block_tables", block_tables, "R, M", (None, None))
    rows = block_tables.shape[0]
    check.check_int32("kv_lens", kv_lens, "R", (rows,))
    check.check_int32("query_starts", query_starts, "R + 1", (rows + 1,))
    features = attention.check_features(q, kv_pool, block_tables, scale, sliding_window, logit_softcap, None)
    slopes = attention.check_alibi(alibi_slopes, q.shape[1])
    attend = OP.pick(backend, q, kv_pool).run
    if q.shape[0] == 0 or rows == 0:
        return jnp.zeros_like(q)
    out, lse = attend(attention.Operands(q, kv_pool, block_tables, kv_lens, slopes), query_starts, features)
    out, _ = count_sinks(out, lse, attention.check_per_head("sinks", sinks, q.shape[1]))
    return out
