"""Decode attention of sequences that begin alike: the shared prefix is read once for all of them.

    rows that share   q0 .. q(n-1)  x  the prefix's blocks    every query sees every key: `ragged_attention`, not causal
                      each q        x  its own blocks behind  `decode_attention`, block tables shifted
    other rows        each q        x  all of its blocks      the same call, tables as they are
                                                              merged by log-sum-exp in float32

Where every row reads the prefix by itself, bandwidth is all; read for n rows together it is 1 / n of the bytes, and
the tensor cores are what bounds large n. Where few rows would leave most multiprocessors idle, the prefix is cut into
parts, whose results are merged like the rest.

Sources: Hydragen (arXiv:2402.05099), cascade inference (https://flashinfer.ai/2024/02/02/cascade-inference.html).
"""

from typing import Any

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.common.attention_arguments import check_per_head, check_queries
from jpaged.pallas_kernels.common.sinks import count_sinks
from jpaged.pallas_kernels.decode_attention.api import decode_attention
from jpaged.pallas_kernels.devices import num_multiprocessors
from jpaged.pallas_kernels.ragged_attention.api import ragged_attention
from jpaged.pallas_kernels.shared_prefix_attention.merge import merge_attention

_TILE_ROWS = 128  # query heads times tokens in a tile of the dense part
_MOST_PARTS = 8
_LEAST_PART = 128  # tokens; one step of the dense part


def shared_prefix_attention(
    q: jax.Array,
    kv_pool: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    num_sharing: jax.Array,
    shared_len: jax.Array,
    *,
    scale: float | None = None,
    logit_softcap: float | None = None,
    alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
    value_dim: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`decode_attention` where the first rows begin with the same tokens, whose keys and values are read once for all.

    Args:
        q, kv_pool, block_tables, kv_lens: as in `decode_attention`.
        num_sharing: int32 []; rows 0 .. num_sharing - 1 share their beginning. With 0 the results are
            exactly `decode_attention`'s.
        shared_len: int32 []; how many of their first tokens are the same: a multiple of block_size, less than the
            kv_lens of each of them that is not empty. They are read through the table of row 0.
        scale, logit_softcap, alibi_slopes, sinks, value_dim, return_lse, backend: as in `decode_attention`.
    Returns:
        As `decode_attention`, up to rounding: partial results are rounded to q's dtype before they are merged.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_pool("kv_pool", kv_pool, latents=True)
    check_queries(q, kv_pool)
    rows, heads, _ = q.shape
    check.check_int32("block_tables", block_tables, "B, M", (rows, None))
    check.check_int32("kv_lens", kv_lens, "B", (rows,))
    check.check_scalar("num_sharing", num_sharing)
    check.check_scalar("shared_len", shared_len)
    sinks = check_per_head("sinks", sinks, heads)
    features: dict[str, Any] = {
        "scale": scale,
        "logit_softcap": logit_softcap,
        "alibi_slopes": alibi_slopes,
        "value_dim": value_dim,
        "backend": backend,
    }
    if rows == 0:
        return decode_attention(q, kv_pool, block_tables, kv_lens, return_lse=return_lse, **features)
    _, _, kv_heads, block_size, _ = kv_pool.shape
    width = block_tables.shape[1]

    # The prefix, a row of `ragged_attention` for each of its parts; the queries that do not share it are rows without
    # keys in between.
    parts = num_parts(rows, heads, kv_heads)
    grain = -(-_LEAST_PART // block_size)
    part_blocks = -(-(shared_len // block_size) // (parts * grain)) * grain
    part = jnp.arange(parts, dtype=jnp.int32)
    entry = jnp.minimum(part[:, None] * part_blocks + jnp.arange(width, dtype=jnp.int32), width - 1)
    part_lens = jnp.clip(shared_len - part * (part_blocks * block_size), 0, part_blocks * block_size)
    starts = jnp.stack([part * rows, part * rows + jnp.clip(num_sharing, 0, rows)], axis=1).reshape(-1)
    dense_out, dense_lse = ragged_attention(
        jnp.tile(q, (parts, 1, 1)),
        kv_pool,
        jnp.repeat(block_tables[0][entry], 2, axis=0),
        jnp.stack([part_lens, jnp.zeros_like(part_lens)], axis=1).reshape(-1),
        jnp.append(starts, jnp.int32(parts * rows)),
        causal=False,
        return_lse=True,
        **features,
    )
    dense_lse = dense_lse.reshape(parts, rows, heads)
    if alibi_slopes is not None:  # the dense part's queries stand at the last token of its row
        behind = part[:, None] * (part_blocks * block_size) + part_lens[:, None] - kv_lens
        dense_lse = dense_lse + jnp.asarray(alibi_slopes, jnp.float32) * behind[..., None]
    dense_lse = jnp.where((kv_lens > 0)[:, None], dense_lse, -jnp.inf)

    shares = jnp.arange(rows, dtype=jnp.int32) < num_sharing
    skipped = jnp.where(shares, shared_len // block_size, 0)
    entry = jnp.minimum(skipped[:, None] + jnp.arange(width, dtype=jnp.int32), width - 1)
    own_tables = jnp.take_along_axis(block_tables, entry, axis=1)
    own_lens = jnp.maximum(kv_lens - skipped * block_size, 0)
    own_out, own_lse = decode_attention(q, kv_pool, own_tables, own_lens, return_lse=True, **features)

    dense_outs = dense_out.reshape(parts, rows, heads, -1)
    # Once for all parts, which are computed without.
    out, lse = count_sinks(*merge_attention([*dense_outs, own_out], [*dense_lse, own_lse]), sinks)
    return (out, lse) if return_lse else out


def num_parts(rows: int, heads: int, kv_heads: int) -> int:
    """Parts that the prefix is cut into, so that the tiles of so many rows' queries occupy the multiprocessors."""
    tiles = kv_heads * -(-rows * heads // (kv_heads * _TILE_ROWS))
    return max(1, min(_MOST_PARTS, num_multiprocessors() // tiles))
