"""Decode attention in plain XLA."""

from functools import partial

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common.attention_arguments import Features, Operands
from jpaged.pallas_kernels.common.paged_scan import Items, scan_items


@partial(jax.jit, static_argnames="features")
def decode_attention(operands: Operands, features: Features) -> tuple[jax.Array, jax.Array]:
    """`decode_attention` of the package, checked; always with its log-sum-exp, float32 [B, H]."""
    batch, kv_lens = operands.q.shape[0], operands.kv_lens
    every = jnp.arange(batch, dtype=jnp.int32)
    items = Items(every, every, (kv_lens > 0).astype(jnp.int32), kv_lens - 1, jnp.int32(batch))
    return scan_items(operands, items, 1, features, causal=True)
