"""Attention of any mix of prefill chunks and decode rows over paged keys and values: the contract."""

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.common import attention_arguments as attention
from jpaged.pallas_kernels.common.sinks import count_sinks
from jpaged.pallas_kernels.registry import Op

OP = Op("ragged_attention", __package__, also={"triton": attention.triton_on_hopper})


def ragged_attention(
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
    value_dim: int | None = None,
    causal: bool = True,
    return_lse: bool = False,
    backend: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of any mix of prefill chunks and decode rows over paged keys and values.

    The queries of all rows stand one after another. Row r's are q[query_starts[r]:query_starts[r + 1]]; they are the
    last of its kv_lens[r] tokens, whose keys and values are in the pool already.

    Args:
        q: [T, heads, head_dim], of the pool's dtype; any floats for a pool in e4m3.
        kv_pool: [num_blocks, 2, kv_heads, block_size, head_dim].
        block_tables: int32 [R, M].
        kv_lens: int32 [R]; tokens of each row in all, at least its queries, at most M * block_size.
        query_starts: int32 [R + 1]; non-decreasing, at most T. A row may have no queries. Queries from
            query_starts[R] on are padding and come out as 0 (log-sum-exp -inf); those before query_starts[0] are
            nobody's, and what comes out for them is undefined.
        causal: False lets every query of a row stand at the row's last token, as if each were its one decode query:
            they all see its kv_lens[r] tokens, which may then be fewer than the queries, or none.
        value_dim: as in `decode_attention`; of a pool with values apart from keys, how many of their columns count,
            None for all.
        scale, sliding_window, logit_softcap, alibi_slopes, sinks, return_lse, backend: as in `decode_attention`.
    Returns:
        [T, heads, head_dim] of q's dtype, or [T, heads, value_dim]; with return_lse also float32 [T, heads], natural
        logarithm.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_pool("kv_pool", kv_pool, latents=True)
    attention.check_queries(q, kv_pool)
    check.check_int32("block_tables", block_tables, "R, M", (None, None))
    rows = block_tables.shape[0]
    check.check_int32("kv_lens", kv_lens, "R", (rows,))
    check.check_int32("query_starts", query_starts, "R + 1", (rows + 1,))
    features = attention.check_features(
        q, kv_pool, block_tables, scale, sliding_window, logit_softcap, value_dim, narrow_values=True
    )
    causal = check.check_flag("causal", causal)
    slopes = attention.check_alibi(alibi_slopes, q.shape[1])
    sinks = attention.check_per_head("sinks", sinks, q.shape[1])
    kernel = OP.pick(backend, *attention.to_pick_by(q, kv_pool, features.value_dim)).run
    if q.shape[0] == 0 or rows == 0:
        out = jnp.zeros(attention.output_shape(q, features), q.dtype)
        lse = jnp.full(q.shape[:2], -jnp.inf, jnp.float32)
    else:
        operands = attention.Operands(q, kv_pool, block_tables, kv_lens, slopes)
        out, lse = kernel(operands, query_starts, features, causal=causal)
    out, lse = count_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out
