"""Attention of one query token a sequence over its paged keys and values: the contract."""

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.common import attention_arguments as attention
from jpaged.pallas_kernels.common.sinks import count_sinks
from jpaged.pallas_kernels.registry import Op

OP = Op("decode_attention", __package__, also={"triton": attention.triton_on_hopper})


def decode_attention(
    q: jax.Array,
    kv_pool: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
    value_dim: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of one query token a sequence over the sequence's paged keys and values.

    Args:
        q: [B, heads, head_dim], of the pool's dtype; any floats for a pool in e4m3.
        kv_pool: [num_blocks, 2, kv_heads, block_size, head_dim]; heads is a multiple of kv_heads, and query head h
            reads KV head h // (heads / kv_heads).
        block_tables: int32 [B, M].
        kv_lens: int32 [B]; tokens to attend to, the query's own included, at most M * block_size. A row of 0 tokens
            gives 0 (and a log-sum-exp of -inf).
        scale: multiplies the scores; 1 / sqrt(head_dim) by default.
        sliding_window: the query at position p sees keys p - sliding_window + 1 .. p only.
        logit_softcap: scores become cap * tanh(score / cap), before ALiBi and the mask.
        alibi_slopes: float [heads]; adds slope * (key position - query position) to the scores.
        sinks: float [heads]; logits without values, which join the softmax of every query.
        value_dim: of a pool of latents [num_blocks, 1, kv_heads, block_size, head_dim], whose values are the first so
            many columns of their keys (MLA, arXiv:2405.04434); None for a pool with values apart.
        return_lse: also return the log-sum-exp, by which partial results are merged. It counts the sinks: give them to
            none of the parts, or to one alone.
        backend: None (by device), "hopper", "triton" or "xla".
    Returns:
        [B, heads, head_dim] of q's dtype, or [B, heads, value_dim]; with return_lse also float32 [B, heads], natural
        logarithm.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_pool("kv_pool", kv_pool, latents=True)
    attention.check_queries(q, kv_pool)
    check.check_int32("block_tables", block_tables, "B, M", (q.shape[0], None))
    check.check_int32("kv_lens", kv_lens, "B", (q.shape[0],))
    features = attention.check_features(q, kv_pool, block_tables, scale, sliding_window, logit_softcap, value_dim)
    slopes = attention.check_alibi(alibi_slopes, q.shape[1])
    sinks = attention.check_per_head("sinks", sinks, q.shape[1])
    kernel = OP.pick(backend, *attention.to_pick_by(q, kv_pool, features.value_dim)).run
    if q.shape[0] == 0:
        out, lse = jnp.zeros(attention.output_shape(q, features), q.dtype), jnp.zeros(q.shape[:2], jnp.float32)
    else:
        out, lse = kernel(attention.Operands(q, kv_pool, block_tables, kv_lens, slopes), features)
    out, lse = count_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out
