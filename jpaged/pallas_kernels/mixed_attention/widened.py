"""Attention of chunks over a pool in FP8, most of it in 16 bits: the blocks that rows see are widened before.

    rows of a step     r0  r1  r2 | r3  r4         together, r0 to r2 see no more blocks than the workspace holds
    workspace          the blocks of r0, those of r1, ..        [blocks, 2, kv_heads, block_size, head_dim]
    r0 to r2           the kernel for pools in 16 bits, over the workspace
    r3, r4             the kernel for pools in FP8, over the pool

On an H200 the former multiplies at 613 TFLOP/s over a long prompt, and the latter, which widens each tile for each tile
of queries, at 373. Numbers are widened exactly; NaN stays NaN, which the latter takes for 480.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.pallas_kernels.common.attention_arguments import Operands
from jpaged.pallas_kernels.common.numerics import FP8
from jpaged.pallas_kernels.common.workspace import lay_out
from jpaged.pallas_kernels.ragged_attention.api import OP, ragged_attention
from jpaged.pallas_kernels.registry import canonical

_HOPPER = "hopper"
_TOKENS_EACH = 4
"""Tokens that the workspace holds, for each of the step's: widening takes as long as that, whatever rows see. With 8 KV
heads of 128 columns, it takes 134 MB in a step of 8,192 tokens."""


def worthwhile(q: jax.Array, kv_pool: jax.Array, sliding_window: int | None, backend: str | None) -> bool:
    """Whether to widen: the pool is in FP8, Hopper's kernel would be picked if it were in 16 bits, and there is no
    window, with which little is read.

    backend: as of `mixed_attention`; a single one that is forced computes everything itself.
    """
    forced = [] if backend is None else [canonical(one) for one in backend.split(",")]
    if kv_pool.dtype != FP8 or sliding_window is not None or len(forced) == 1 or (forced and _HOPPER not in forced):
        return False
    return OP.pick(backend, q, jax.ShapeDtypeStruct(kv_pool.shape, q.dtype)).backend == _HOPPER


def widened_attention(
    operands: Operands, query_starts: jax.Array, *, workspace: int | None = None, **features: Any
) -> tuple[jax.Array, jax.Array]:
    """`ragged_attention` and its log-sum-exp, of checked operands.

    workspace: blocks; None for as many as pay. features: as of `ragged_attention`.
    """
    q, kv_pool, block_tables, kv_lens, alibi_slopes = operands
    tokens, block_size, width = q.shape[0], kv_pool.shape[3], block_tables.shape[1]
    capacity = max(1, _TOKENS_EACH * tokens // block_size) if workspace is None else workspace
    lengths = query_starts[1:] - query_starts[:-1]
    blocks = jnp.where(lengths > 0, (kv_lens + block_size - 1) // block_size, 0)
    ends, row, nth, table = lay_out(blocks, capacity, width)
    boundary = query_starts[jnp.sum(ends <= capacity, dtype=jnp.int32)]  # the first token of a row that does not fit
    block = jnp.clip(block_tables[row, jnp.minimum(nth, width - 1)], 0, kv_pool.shape[0] - 1)
    # Places behind the last row's blocks hold the null block, which is in the cache.
    wide = kv_pool[jnp.where(jnp.arange(capacity) < ends[-1], block, 0)].astype(q.dtype)

    features |= {"alibi_slopes": alibi_slopes, "return_lse": True}
    first, first_lse = ragged_attention(q, wide, table, kv_lens, jnp.minimum(query_starts, boundary), **features)
    starts = jnp.maximum(query_starts, boundary)
    others, others_lse = ragged_attention(q, kv_pool, block_tables, kv_lens, starts, **features)
    # Behind a barrier for the reason that `attend_apart` gives.
    first, first_lse, others, others_lse = lax.optimization_barrier((first, first_lse, others, others_lse))
    fits = (jnp.arange(tokens) < boundary)[:, None]
    return jnp.where(fits[..., None], first, others), jnp.where(fits, first_lse, others_lse)
