"""Attention over keys and values that are contiguous, each in an array of its own: the contract.

For kernels that know no block tables. Each sequence has a stretch of addresses as long as the longest sequence; only
the pages that hold its tokens need memory (vAttention, arXiv:2405.04437).
"""

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.common.attention_arguments import check_scale
from jpaged.pallas_kernels.contiguous_attention.addresses import Addresses
from jpaged.pallas_kernels.contiguous_attention.attend import Operands
from jpaged.pallas_kernels.decode_attention.api import OP as DECODE
from jpaged.pallas_kernels.registry import Op

OP = Op("contiguous_attention", __package__)

TILE_TOKENS = 128
"""Keys that kernels read at a time, at the most. Tiles begin at a stretch's first token, or at a chunk's."""

READ_BEHIND = TILE_TOKENS - 1
"""Entries behind a chunk's last token that a kernel may read: the rest of a tile."""


def is_for_contiguous(backend: str) -> bool:
    """Whether a backend's attention is for contiguous keys and values, and for those alone.

    Raises:
        ValueError: there is no such backend.
    """
    return OP.may_have(backend) and not DECODE.may_have(backend)


def contiguous_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    stretches: jax.Array,
    kv_lens: jax.Array,
    addresses: Addresses,
    *,
    query_starts: jax.Array | None = None,
    num_decodes: jax.Array | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> jax.Array:
    """Attention of decode rows and prefill chunks over keys and values that each sequence has in one stretch.

    Args:
        q: [T, heads, head_dim]; heads is a multiple of kv_heads, and query head h reads KV head
            h // (heads / kv_heads).
        keys, values: [entries, kv_heads, head_dim], of q's dtype; at least `addresses.num_entries`. Memory is needed
            below a row's tokens, the rest of the tile of TILE_TOKENS entries that holds the last of them, counted from
            the stretch's first entry, and READ_BEHIND entries behind a chunk; other entries need none.
        stretches: int32 [R]; where each row's tokens are. Distinct, save those of rows without tokens.
        kv_lens: int32 [R]; tokens to attend to, the queries' own included, at most `addresses.longest`. Rows of 0
            tokens give 0.
        addresses: how the arrays are cut.
        query_starts: None where each row has one query, its last token's (T = R). Else int32 [R + 1], as in
            `ragged_attention`.
        num_decodes: int32 [], with query_starts: rows 0 .. num_decodes - 1 have one query each.
        scale: multiplies the scores; 1 / sqrt(head_dim) by default.
        backend: "cudnn" (NVIDIA GPUs; chunks from Hopper on), "xla", or one from outside; None is "xla", since which
            kernel serves decides how keys and values are kept.
    Returns:
        [T, heads, head_dim] of q's dtype.
    Raises:
        ValueError: an argument does not fit, or the backend cannot do it; it is named.
    """
    check.check_floats("q", q, "T, heads, head_dim")
    for name, x in (("keys", keys), ("values", values)):
        check.check_array(name, x, q.dtype, "entries, kv_heads, head_dim", (keys.shape[0], None, q.shape[2]))
    if values.shape != keys.shape:
        raise ValueError(f"values must be like keys {tuple(keys.shape)}, got shape {tuple(values.shape)}")
    if keys.shape[0] < addresses.num_entries:
        raise ValueError(f"keys must have at least {addresses.num_entries} entries, got {keys.shape[0]}")
    if q.shape[1] < 1 or q.shape[1] % keys.shape[1]:
        raise ValueError(f"q must have a multiple of the {keys.shape[1]} KV heads, got {q.shape[1]} heads")
    check.check_int32("stretches", stretches, "R", (None,))
    rows = stretches.shape[0]
    check.check_int32("kv_lens", kv_lens, "R", (rows,))
    if (query_starts is None) != (num_decodes is None):
        raise ValueError("query_starts and num_decodes must be given together")
    chunks = None
    if query_starts is not None and num_decodes is not None:
        check.check_int32("query_starts", query_starts, "R + 1", (rows + 1,))
        check.check_scalar("num_decodes", num_decodes)
        chunks = query_starts, num_decodes
    elif q.shape[0] != rows:
        raise ValueError(f"q must have a query for each of {rows} rows, got {q.shape[0]}")
    kernel = OP.pick(backend, q, keys, addresses, chunks is not None).run
    if q.shape[0] == 0 or rows == 0:
        return jnp.zeros_like(q)
    return kernel(Operands(q, keys, values, stretches, kv_lens, chunks), addresses, check_scale(scale, q.shape[2]))
