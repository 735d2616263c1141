"""Decode attention in plain XLA."""

from functools import partial

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common.paged_scan import Items, scan_items


@partial(jax.jit, static_argnames=("scale", "sliding_window", "logit_softcap"))
def decode_attention(
    q: jax.Array,
    kv_pool: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    alibi_slopes: jax.Array | None,
    *,
    scale: float,
    sliding_window: int | None,
    logit_softcap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """`decode_attention` of the package, checked; always with its log-sum-exp, float32 [B, H]."""
    batch = q.shape[0]
    every = jnp.arange(batch, dtype=jnp.int32)
    items = Items(every, every, (kv_lens > 0).astype(jnp.int32), kv_lens - 1, jnp.int32(batch))
    features = {
        "scale": scale,
        "sliding_window": sliding_window,
        "logit_softcap": logit_softcap,
        "alibi_slopes": alibi_slopes,
        "causal": True,
    }
    return scan_items(q, kv_pool, block_tables, kv_lens, items, 1, features)
