"""Invariant attention on Hopper: each query a row of decode attention, whose bits depend on that row alone.

It cuts keys at fixed positions and folds the parts in order, so a query has the same bits whether it is decoded or in
a chunk. A decoded query costs what decode attention costs. One of a chunk costs the same, where `ragged_attention`
reads keys once for 64 and more: a chunk's keys come from the L2 cache, if they fit it.

Results of parts take memory for every query and for as many parts as the block table is wide. Many queries of long
tables are therefore attended to in slabs, one after another.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.pallas_kernels.common.attention_arguments import Features, Operands
from jpaged.pallas_kernels.decode_attention import hopper as decode
from jpaged.pallas_kernels.invariant_attention.queries import rows_of

_MOST_BYTES = 5 << 28
"""Of results of parts at once: 512 queries of 32 heads of 128 in tables for 131,072 tokens."""
_LEAST_SLAB = 64  # queries


def unsupported(q: jax.Array, kv_pool: jax.Array) -> str | None:
    """Why the kernel cannot take these (checked) arguments; None if it can."""
    if kv_pool.shape[4] not in decode.HEAD_DIMS:  # the kernel of others adds up chunks by the width of the table
        return f"head_dim {kv_pool.shape[4]} is not one of {decode.HEAD_DIMS}"
    return decode.unsupported(q, kv_pool)


def invariant_attention(operands: Operands, query_starts: jax.Array, features: Features) -> tuple[jax.Array, jax.Array]:
    """`invariant_attention` of the package, checked; with its log-sum-exp, float32 [T, H]."""
    q, kv_pool, tables, kv_lens, slopes = operands
    tokens = q.shape[0]

    def attend(q: jax.Array, row: jax.Array, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
        return decode.decode_attention(Operands(q, kv_pool, tables[row], seen, slopes), features)

    slab = _slab(decode.bytes_of_parts(q, kv_pool, tables.shape[1], features) + 4 * tables.shape[1])
    if tokens <= slab:
        return attend(q, *rows_of(jnp.arange(tokens, dtype=jnp.int32), kv_lens, query_starts))
    count = -(-tokens // slab)
    row, seen = rows_of(jnp.arange(count * slab, dtype=jnp.int32), kv_lens, query_starts)
    padded = jnp.pad(q, ((0, count * slab - tokens), (0, 0), (0, 0)))

    def body(number: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        begin = number * slab
        made = attend(*(lax.dynamic_slice_in_dim(x, begin, slab) for x in (padded, row, seen)))
        out, lse = (lax.dynamic_update_slice_in_dim(x, part, begin, 0) for x, part in zip(found, made, strict=True))
        return out, lse

    out, lse = lax.fori_loop(0, count, body, (jnp.zeros_like(padded), jnp.zeros(padded.shape[:2], jnp.float32)))
    return out[:tokens], lse[:tokens]


def _slab(bytes_of_query: int) -> int:
    """How many queries are attended to at once: a power of two."""
    return max(_LEAST_SLAB, 1 << (_MOST_BYTES // max(bytes_of_query, 1)).bit_length() - 1)
