"""Attention over the paged pool in plain XLA, for any device, head_dim, block size and float type.

It scans the KV blocks with an online softmax (FlashAttention-2, arXiv:2307.08691), so its memory does not
grow with the context. Queries are cut into *items*, up to `ITEM_QUERIES` consecutive queries of one row, and
`GROUP_ITEMS` items are attended to at a time:

    row 0: 1 query    row 1: 70 queries, 32 an item       row 2: 1 query
    [item 0]          [item 1    ][item 2    ][item 3]    [item 4]          -> one group of 5 items

    for each group:                          while loop, ends at the last real item
        for each tile of KV positions:       while loop over the positions that the group can see
            gather the items' blocks through their block tables, score, mask, accumulate in float32

Slots that no live token owns may hold anything, NaN included: scores are masked before the softmax, and V is
zeroed where no query of the item sees it, since 0 * NaN is NaN.

Of a pool of latents, V is the first columns of K.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.pallas_kernels.common.attention_arguments import Features, Operands, output_shape
from jpaged.pallas_kernels.common.numerics import as_bits, from_bits

ITEM_QUERIES = 32
GROUP_ITEMS = 32
TILE_TOKENS = 128
_MASKED = -1e30


class Items(NamedTuple):
    """Work of the scan. Query i of item w is token `starts[w] + i` of the flat queries, for i < `counts[w]`.

    rows, starts, counts: int32 [items].
    first_positions: int32 [items]; the position, in its sequence, of the item's first query.
    total: int32 []; items past it are padding.
    """

    rows: jax.Array
    starts: jax.Array
    counts: jax.Array
    first_positions: jax.Array
    total: jax.Array


def _pad_to(x: jax.Array, length: int) -> jax.Array:
    return jnp.pad(x, [(0, length - x.shape[0])] + [(0, 0)] * (x.ndim - 1))


def _group_attention(
    operands: Operands, counts: jax.Array, first_positions: jax.Array, features: Features, causal: bool
) -> tuple[jax.Array, jax.Array]:
    """Attention of one group of items.

    operands: the items', with queries [G, Q, H, D], tables int32 [G, M] and lengths int32 [G]. counts, first_positions:
    int32 [G]. Unless causal, all of an item's queries stand at its first position.
    Returns the output, [G, Q, H, D or value_dim] float32 or wider, and its log-sum-exp [G, Q, H].
    """
    q, kv_pool, tables, kv_lens, alibi_slopes = operands
    sliding_window, logit_softcap = features.sliding_window, features.logit_softcap
    group, queries, heads, head_dim = q.shape
    _, arrays, kv_heads, block_size, _ = kv_pool.shape
    share, value_dim = heads // kv_heads, features.value_dim or head_dim
    wide = jnp.promote_types(q.dtype, jnp.float32)
    blocks = max(1, min(TILE_TOKENS // block_size, tables.shape[1]))
    tile = blocks * block_size
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % blocks)))

    q_rows = q.astype(wide).reshape(group, queries, kv_heads, share, head_dim).transpose(0, 2, 1, 3, 4)
    q_rows = q_rows.reshape(group, kv_heads, queries * share, head_dim) * jnp.asarray(features.scale, wide)
    query = jnp.arange(queries, dtype=jnp.int32)
    positions = first_positions[:, None] + (query if causal else jnp.zeros_like(query))
    real = query < counts[:, None]
    # Keys that some query of the item sees: lowest..highest-1.
    highest = jnp.where(counts > 0, first_positions + (counts if causal else 1), 0)
    highest = jnp.minimum(highest, kv_lens)
    lowest = jnp.zeros_like(highest) if sliding_window is None else jnp.maximum(first_positions - sliding_window + 1, 0)
    first_tile = jnp.min(jnp.where(highest > 0, lowest, jnp.iinfo(jnp.int32).max)) // tile
    end_tile = jnp.minimum((jnp.max(highest) + tile - 1) // tile, tables.shape[1] // blocks)
    slopes = None
    if alibi_slopes is not None:
        slopes = alibi_slopes.astype(wide).reshape(1, kv_heads, 1, share, 1)

    def body(carry: tuple) -> tuple:
        t, acc, top, total = carry
        ids = lax.dynamic_slice_in_dim(tables, t * blocks, blocks, axis=1)
        kv = from_bits(as_bits(kv_pool).at[ids].get(mode="clip"), kv_pool.dtype)  # [G, blocks, 2 or 1, KVH, BS, D]
        kv = kv.transpose(2, 0, 3, 1, 4, 5).reshape(arrays, group, kv_heads, tile, head_dim).astype(wide)
        keys = t * tile + jnp.arange(tile, dtype=jnp.int32)
        owned = (keys >= lowest[:, None]) & (keys < highest[:, None])
        s = jnp.einsum("gkqd,gktd->gkqt", q_rows, kv[0], precision=lax.Precision.HIGHEST)
        if logit_softcap is not None:
            s = jnp.tanh(s / logit_softcap) * logit_softcap
        s = s.reshape(group, kv_heads, queries, share, tile)
        if slopes is not None:
            s = s + slopes * (keys - positions[..., None])[:, None, :, None, :]
        seen = owned[:, None, :] & (keys <= positions[..., None]) & real[..., None]
        if sliding_window is not None:
            seen &= keys > positions[..., None] - sliding_window
        seen = seen[:, None, :, None, :]
        s = jnp.where(seen, s, _MASKED)
        new_top = jnp.maximum(top, s.max(axis=-1))
        p = jnp.where(seen, jnp.exp(s - new_top[..., None]), 0)
        shrink = jnp.exp(top - new_top)
        v = jnp.where(owned[:, None, :, None], kv[-1, ..., :value_dim], 0)
        pv = jnp.einsum(
            "gkqt,gktd->gkqd", p.reshape(group, kv_heads, -1, tile), v, precision=lax.Precision.HIGHEST
        ).reshape(acc.shape)
        return t + 1, acc * shrink[..., None] + pv, new_top, total * shrink + p.sum(axis=-1)

    rows = (group, kv_heads, queries, share)
    start = (
        first_tile,
        jnp.zeros((*rows, value_dim), wide),
        jnp.full(rows, _MASKED, wide),
        jnp.zeros(rows, wide),
    )
    _, acc, top, total = lax.while_loop(lambda carry: carry[0] < end_tile, body, start)
    out = acc / jnp.where(total > 0, total, 1)[..., None]
    lse = jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1)), -jnp.inf)
    out = out.transpose(0, 2, 1, 3, 4).reshape(group, queries, heads, value_dim)
    return out, lse.transpose(0, 2, 1, 3).reshape(group, queries, heads)


def scan_items(
    operands: Operands, items: Items, queries: int, features: Features, *, causal: bool
) -> tuple[jax.Array, jax.Array]:
    """Attention of all items, of at most so many queries each: that of an attention op, and its log-sum-exp."""
    q, kv_pool, block_tables, kv_lens, alibi_slopes = operands
    tokens, heads, _ = q.shape
    group = min(items.rows.shape[0], GROUP_ITEMS)
    padded = -(-items.rows.shape[0] // group) * group
    rows, starts, counts, first_positions = (_pad_to(x, padded) for x in items[:4])

    def body(carry: tuple) -> tuple:
        g, out, lse = carry
        row, start, count, position = (
            lax.dynamic_slice_in_dim(x, g * group, group) for x in (rows, starts, counts, first_positions)
        )
        count = jnp.where(g * group + jnp.arange(group, dtype=jnp.int32) < items.total, count, 0)
        query = jnp.arange(queries, dtype=jnp.int32)
        token = jnp.where(query < count[:, None], start[:, None] + query, tokens)  # `tokens` is out of bounds
        of_items = Operands(q.at[token].get(mode="clip"), kv_pool, block_tables[row], kv_lens[row], alibi_slopes)
        o, part_lse = _group_attention(of_items, count, position, features, causal)
        out = out.at[token].set(o.astype(out.dtype), mode="drop")
        lse = lse.at[token].set(part_lse.astype(lse.dtype), mode="drop")
        return g + 1, out, lse

    empty = jnp.zeros(output_shape(q, features), q.dtype)
    start = (jnp.int32(0), empty, jnp.full((tokens, heads), -jnp.inf, jnp.float32))
    _, out, lse = lax.while_loop(lambda carry: carry[0] * group < items.total, body, start)
    return out, lse
