"""Attention of a step that decodes some sequences and computes prompts of others: each part in the kernel made for it.

    rows     0 .. d-1           d .. R-1
    queries  one each           a chunk each          tokens q0 .. q(d-1) | chunks .. | padding
             decode_attention   ragged_attention, over a pool in FP8 `widened.py`

`ragged_attention` takes both kinds, but a query alone costs it a tile, whatever its context. Where a step has many
short sequences to decode, that is most of its attention; where it has few long ones, `decode_attention` cuts them over
all multiprocessors, and a tile of `ragged_attention` reads one alone.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.common.attention_arguments import Operands, check_queries, to_pick_by
from jpaged.pallas_kernels.decode_attention.api import OP as DECODE
from jpaged.pallas_kernels.decode_attention.api import decode_attention
from jpaged.pallas_kernels.mixed_attention import widened
from jpaged.pallas_kernels.ragged_attention.api import OP as RAGGED
from jpaged.pallas_kernels.ragged_attention.api import ragged_attention
from jpaged.pallas_kernels.registry import REFERENCE

LEAST_TOKENS = 1024
"""Tokens of q from which on the parts are computed apart. Two more launches and their merging take up to 18 us a layer;
with fewer tokens (32 short rows and 4 chunks, 612 tokens) little is won, and the step would be slower.
"""


def mixed_attention(
    q: jax.Array,
    kv_pool: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    query_starts: jax.Array,
    num_decodes: jax.Array,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
    value_dim: int | None = None,
    cached_only: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`ragged_attention` whose first rows have one query each.

    Args:
        q, kv_pool, block_tables, kv_lens, query_starts: as in `ragged_attention`.
        num_decodes: int32 []; rows 0 .. num_decodes - 1 have one query each, the last token's.
        scale, sliding_window, logit_softcap, alibi_slopes, sinks, value_dim: as in `ragged_attention`.
        cached_only: queries of the other rows see only the tokens before the step's own, kv_lens[r] less the row's
            queries, all of them alike.
        return_lse, backend: as in `ragged_attention`.
    Returns:
        [T, heads, head_dim] of q's dtype, or [T, heads, value_dim], as `ragged_attention` does.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_pool("kv_pool", kv_pool, latents=True)
    check_queries(q, kv_pool)
    check.check_scalar("num_decodes", num_decodes)
    cached_only = check.check_flag("cached_only", cached_only)
    if cached_only:
        check.check_int32("query_starts", query_starts, "R + 1", (kv_lens.shape[0] + 1,))
        decodes = jnp.arange(kv_lens.shape[0]) < num_decodes
        kv_lens = kv_lens - jnp.where(decodes, 0, query_starts[1:] - query_starts[:-1])
    features: dict[str, Any] = {
        "scale": scale,
        "sliding_window": sliding_window,
        "logit_softcap": logit_softcap,
        "sinks": sinks,
        "value_dim": value_dim,
        "backend": backend,
    }
    asked = to_pick_by(q, kv_pool, value_dim)
    operands = Operands(q, kv_pool, block_tables, kv_lens, alibi_slopes)
    if q.shape[0] >= LEAST_TOKENS and all(op.pick(backend, *asked).backend != REFERENCE for op in (DECODE, RAGGED)):
        out, lse = attend_apart(operands, query_starts, num_decodes, causal=not cached_only, **features)
    else:
        features |= {"alibi_slopes": alibi_slopes, "causal": not cached_only, "return_lse": True}
        out, lse = ragged_attention(*operands[:4], query_starts, **features)
    return (out, lse) if return_lse else out


def attend_apart(
    operands: Operands, query_starts: jax.Array, num_decodes: jax.Array, *, causal: bool = True, **features: Any
) -> tuple[jax.Array, jax.Array]:
    """`mixed_attention` in two calls, whatever the backend, and its log-sum-exp. causal: as of `ragged_attention`, for
    the rows that do not decode."""
    q, kv_pool, block_tables, kv_lens, alibi_slopes = operands
    features |= {"alibi_slopes": alibi_slopes, "return_lse": True}
    tokens, rows = q.shape[0], kv_lens.shape[0]
    most = min(rows, tokens)
    own_lens = jnp.where(jnp.arange(most) < num_decodes, kv_lens[:most], 0)
    alone, alone_lse = decode_attention(q[:most], kv_pool, block_tables[:most], own_lens, **features)
    # Rows that decode have no queries here; nobody computes theirs.
    starts = jnp.maximum(query_starts, num_decodes)
    if widened.worthwhile(q, kv_pool, features.get("sliding_window"), features.get("backend")):
        together, lse = widened.widened_attention(operands, starts, causal=causal, **features)
    else:
        together, lse = ragged_attention(q, kv_pool, block_tables, kv_lens, starts, causal=causal, **features)
    # Behind a barrier: XLA (JAX 0.11.2) fuses a kernel with the update of a part of its result, which it then refuses
    # ("DynamicSliceFusion: DUS target must be a fusion parameter").
    alone, alone_lse, together, lse = lax.optimization_barrier((alone, alone_lse, together, lse))
    decoded = (jnp.arange(most) < num_decodes)[:, None]
    # In place: few of many tokens.
    out = together.at[:most].set(jnp.where(decoded[..., None], alone, together[:most]))
    return out, lse.at[:most].set(jnp.where(decoded, alone_lse, lse[:most]))
