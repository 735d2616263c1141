"""Attention over latents of a step that computes prompts, with keys and values of each head for the step's own tokens.

    a chunk's query x    tokens cached before      absorbed: `mixed_attention` with cached_only, then the heads' values
                         its chunk's own tokens    expanded: keys and values of each head, `ragged_attention`, causal
                                                   merged by log-sum-exp in float32
    a decode row         all of its tokens         absorbed, in the same call as the chunks' cached tokens

Operations of a head for a query and a key, in DeepSeek's sizes (rank 512, 64 rotated columns, 128 plain ones, values of
128): 2 (576 + 512) = 2,176 absorbed, 2 (192 + 128) = 640 expanded. `docs/kernels_attention.md` says when which pays.

The expanded keys and values are laid out as a pool of their own, of as many blocks as the step's tokens can need:

    chunks      | row 3, 20 tokens  | row 4, 7 |          latents [T, rank + rotated_dim]
    workspace   | block 0 | block 1 | block 2  | ..       [blocks, 2, heads, 16, plain_dim + rotated_dim]
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.common.attention_arguments import check_scale
from jpaged.pallas_kernels.common.numerics import precision_of
from jpaged.pallas_kernels.common.workspace import lay_out
from jpaged.pallas_kernels.mixed_attention.api import mixed_attention
from jpaged.pallas_kernels.ragged_attention.api import ragged_attention
from jpaged.pallas_kernels.shared_prefix_attention.merge import merge_attention

BLOCK_SIZE = 16
"""Tokens of a block of the workspace. A chunk begins a block, so it leaves up to 15 places empty."""


class Expansion(NamedTuple):
    """What makes queries, keys and values of heads for a step's own tokens.

    q: [T, heads, plain_dim + rotated_dim]. to_keys: [heads, plain_dim, rank]. to_values: [heads, head_values, rank].
    """

    q: jax.Array
    to_keys: jax.Array
    to_values: jax.Array


def expanded_attention(
    q: jax.Array,
    latents: jax.Array,
    expansion: Expansion,
    kv_pool: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    query_starts: jax.Array,
    num_decodes: jax.Array,
    *,
    scale: float | None = None,
    backend: str | None = None,
) -> jax.Array:
    """`mixed_attention` over latents, then each head's values; chunks attend among their own tokens in expanded form.

    It equals `mixed_attention(q, ..., value_dim=rank)` times `expansion.to_values`, up to rounding.

    Args:
        q: [T, heads, rank + rotated_dim]; the queries that meet latents: those of `expansion` times its keys, and
            their last rotated_dim columns.
        latents: [T, rank + rotated_dim], of the step's own tokens, as the pool has them.
        expansion: see there; all of q's dtype.
        kv_pool, block_tables, kv_lens, query_starts, num_decodes: as in `mixed_attention`, over a pool of latents.
        scale: multiplies the scores; 1 / sqrt(rank + rotated_dim) by default, as in `mixed_attention`.
        backend: None (by device), "hopper", "triton" or "xla".
    Returns:
        [T, heads, head_values] of q's dtype.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    rank = _check(q, latents, expansion, query_starts, kv_pool)
    scale = check_scale(scale, q.shape[2])
    if not q.shape[0] or not kv_lens.shape[0]:
        return jnp.zeros((*q.shape[:2], expansion.to_values.shape[1]), q.dtype)
    shared: dict[str, Any] = {"scale": scale, "backend": backend, "return_lse": True}
    paged = kv_pool, block_tables, kv_lens, query_starts, num_decodes
    cached, cached_lse = mixed_attention(q, *paged, value_dim=rank, cached_only=True, **shared)
    cached = jnp.einsum("thr,hvr->thv", cached, expansion.to_values, precision=precision_of(q.dtype))
    own, own_lse = _own_tokens(latents, expansion, query_starts, num_decodes, scale, backend)
    out, _ = merge_attention([cached, own], [cached_lse, own_lse])
    return out


def _own_tokens(
    latents: jax.Array,
    expansion: Expansion,
    query_starts: jax.Array,
    num_decodes: jax.Array,
    scale: float,
    backend: str | None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of chunks among their own tokens: [T, heads, head_values] and its log-sum-exp, float32 [T, heads].
    Queries of no chunk have 0 and -inf."""
    q, head_values = expansion.q, expansion.to_values.shape[1]
    rows, tokens = query_starts.shape[0] - 1, q.shape[0]
    starts = jnp.maximum(query_starts, num_decodes)  # rows that decode, which are the first, have no queries here
    lengths = starts[1:] - starts[:-1]
    num_blocks = max(1, (tokens + (BLOCK_SIZE - 1) * min(rows, tokens)) // BLOCK_SIZE)
    laid_out = lay_out((lengths + BLOCK_SIZE - 1) // BLOCK_SIZE, num_blocks, -(-tokens // BLOCK_SIZE))
    first = starts[laid_out.row] + laid_out.nth * BLOCK_SIZE
    # Places behind a row's last token hold some other token: kernels mind neither what is there nor NaN.
    token = jnp.clip(first[:, None] + jnp.arange(BLOCK_SIZE, dtype=jnp.int32), 0, tokens - 1)
    pool = _heads_of(latents, expansion)[token].transpose(0, 2, 3, 1, 4)  # [blocks, 2, heads, 16, head_dim]
    features: dict[str, Any] = {"scale": scale, "backend": backend, "return_lse": True, "value_dim": head_values}
    out, lse = ragged_attention(q, pool, laid_out.table, lengths, starts, **features)
    # Behind a barrier for the reason that `mixed_attention` gives.
    out, lse = lax.optimization_barrier((out, lse))
    in_chunk = (jnp.arange(tokens) >= starts[0])[:, None]
    return jnp.where(in_chunk[..., None], out, 0), jnp.where(in_chunk, lse, -jnp.inf)


def _heads_of(latents: jax.Array, expansion: Expansion) -> jax.Array:
    """Keys and values of all heads, [T, 2, heads, plain_dim + rotated_dim], values with zeros behind them."""
    _, to_keys, to_values = expansion
    rank, head_dim = to_keys.shape[2], expansion.q.shape[2]
    product = partial(jnp.einsum, "tr,hnr->thn", precision=precision_of(latents.dtype))
    plain, values = product(latents[:, :rank], to_keys), product(latents[:, :rank], to_values)
    rotated = jnp.broadcast_to(latents[:, None, rank:], (*plain.shape[:2], latents.shape[1] - rank))
    values = jnp.pad(values, ((0, 0), (0, 0), (0, head_dim - values.shape[2])))
    return jnp.stack([jnp.concatenate([plain, rotated], axis=-1), values], axis=1)


def _check(q: jax.Array, latents: jax.Array, expansion: Expansion, query_starts: jax.Array, kv_pool: jax.Array) -> int:
    """Raises ValueError unless these go together; the latents' rank. What `mixed_attention` checks is left to it."""
    check.check_rank("q", q, "T, heads, rank + rotated_dim")
    check.check_int32("query_starts", query_starts, "R + 1", (None,))
    tokens, heads, columns = q.shape
    check.check_pool("kv_pool", kv_pool, latents=True)
    if not check.holds_latents(kv_pool):
        raise ValueError(f"kv_pool must hold latents, [num_blocks, 1, ..], got shape {tuple(kv_pool.shape)}")
    check.check_like("latents", latents, "T, rank + rotated_dim", (tokens, columns), "q", q.dtype)
    own_q, to_keys, to_values = expansion
    check.check_array("to_keys", to_keys, q.dtype, "heads, plain_dim, rank", (heads, None, None))
    plain, rank = to_keys.shape[1:]
    if rank > columns:
        raise ValueError(f"to_keys must have at most the {columns} columns of q as its rank, got {rank}")
    head_dim = plain + columns - rank
    check.check_like("expansion.q", own_q, "T, heads, head_dim", (tokens, heads, head_dim), "q and to_keys", q.dtype)
    check.check_array("to_values", to_values, q.dtype, "heads, head_values, rank", (heads, None, rank))
    if to_values.shape[1] > head_dim:
        raise ValueError(f"to_values must make at most {head_dim} columns, as keys have, got {to_values.shape[1]}")
    return rank
