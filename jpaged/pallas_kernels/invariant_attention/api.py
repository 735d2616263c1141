"""Ragged attention whose bits depend on a query and on the keys and values that it sees, and on nothing else.

The same for a query of a chunk, wherever the prompt was cut, and for one that is decoded alone; whatever other rows
there are. A kernel keeps that promise if it takes each query's keys in one order, cut at fixed positions:

    "triton"   `ragged_attention`: steps of fixed size from the first key up; those in which a query sees nothing leave
               its state as it was
    "xla"      every query is an item of its own of the scan in `common/paged_scan.py`, always as many items at a time

Not "hopper", whose `ragged_attention` begins with a tile's last keys, which depend on where the chunk ends.
"""

from typing import Any

import jax

from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.common import attention_arguments as attention
from jpaged.pallas_kernels.common.sinks import count_sinks
from jpaged.pallas_kernels.devices import default_device
from jpaged.pallas_kernels.invariant_attention import by_query
from jpaged.pallas_kernels.ragged_attention.api import OP as RAGGED
from jpaged.pallas_kernels.ragged_attention.api import ragged_attention
from jpaged.pallas_kernels.registry import REFERENCE, canonical

KEPT_BY = ("triton", REFERENCE)
"""Backends that keep the promise."""


def invariant_attention(
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
    backend: str | None = None,
) -> jax.Array:
    """`ragged_attention`, each query's result independent of the batch around it.

    Args:
        q, kv_pool, block_tables, kv_lens, query_starts: as in `ragged_attention`; a block has at most 128 tokens.
        scale, sliding_window, logit_softcap, alibi_slopes, sinks: as in `ragged_attention`.
        backend: "triton" or "xla"; None takes Triton's kernel on GPUs that it supports, where it is installed.
    Returns:
        [T, heads, head_dim] of q's dtype.
    Raises:
        ValueError: an argument does not fit, or a backend that cannot promise this; it is named.
    """
    check.check_pool("kv_pool", kv_pool)
    if kv_pool.shape[3] > by_query.TILE_TOKENS:
        raise ValueError(f"kv_pool must have blocks of at most {by_query.TILE_TOKENS} tokens, got {kv_pool.shape[3]}")
    if backend is not None and canonical(backend) not in KEPT_BY:
        raise ValueError(f"backend must be None or one of {', '.join(KEPT_BY)}, got {backend!r}")
    if backend is None:
        backend = REFERENCE if default_device().platform == "cpu" else ",".join(KEPT_BY)
    features: dict[str, Any] = {
        "scale": scale,
        "sliding_window": sliding_window,
        "logit_softcap": logit_softcap,
        "alibi_slopes": alibi_slopes,
    }
    attention.check_queries(q, kv_pool)
    if RAGGED.pick(backend, q, kv_pool).backend != REFERENCE:
        # With the log-sum-exp, as the other backend has it: sinks are then counted alike.
        out, lse = ragged_attention(
            q, kv_pool, block_tables, kv_lens, query_starts, return_lse=True, backend=backend, **features
        )
    else:
        check.check_int32("block_tables", block_tables, "R, M", (None, None))
        rows = block_tables.shape[0]
        check.check_int32("kv_lens", kv_lens, "R", (rows,))
        check.check_int32("query_starts", query_starts, "R + 1", (rows + 1,))
        operands = attention.Operands(
            q, kv_pool, block_tables, kv_lens, attention.check_alibi(alibi_slopes, q.shape[1])
        )
        checked = attention.check_features(q, kv_pool, block_tables, scale, sliding_window, logit_softcap, None)
        out, lse = by_query.attend(operands, query_starts, checked)
    out, _ = count_sinks(out, lse, attention.check_per_head("sinks", sinks, q.shape[1]))
    return out
