"""The op by a kernel's two calls, dense and packed: what its implementations share.

one query a row      dense
a mixed step         rows 0 .. d-1, one query each: dense      rows d .. R-1, a chunk each: packed, two calls
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.pallas_kernels.contiguous_attention.addresses import Addresses
from jpaged.pallas_kernels.contiguous_attention.calls import (
    DenseCall,
    PackedCall,
    dense_call,
    merged,
    of_rows,
    packed_calls,
)


class Operands(NamedTuple):
    """The arrays of the op.

    q: [T, heads, head_dim]. keys, values: [entries, kv_heads, head_dim]. stretches, kv_lens: int32 [R]. chunks: None
    where each row has one query, else (query_starts [R + 1], num_decodes []), int32.
    """

    q: jax.Array
    keys: jax.Array
    values: jax.Array
    stretches: jax.Array
    kv_lens: jax.Array
    chunks: tuple[jax.Array, jax.Array] | None


class Keys(NamedTuple):
    """What queries attend to: keys and values, [entries, kv_heads, head_dim], how both are cut, and what multiplies
    scores."""

    keys: jax.Array
    values: jax.Array
    addresses: Addresses
    scale: float


class Kernel(Protocol):
    """A kernel for contiguous keys and values."""

    def dense(self, call: DenseCall, kv: Keys) -> jax.Array:
        """[stretches, 1, heads, head_dim]."""
        ...

    def packed(self, q: jax.Array, call: PackedCall, kv: Keys) -> tuple[jax.Array, jax.Array]:
        """q: [1, T, heads, head_dim]. Returns the same, and its natural log-sum-exp, float32 [R, heads, T], by the
        query's number in its segment."""
        ...


def attend(kernel: Kernel, operands: Operands, addresses: Addresses, scale: float) -> jax.Array:
    """`contiguous_attention` of the package, checked."""
    q, keys, values, stretches, kv_lens, chunks = operands
    kv, rows = Keys(keys, values, addresses, scale), kv_lens.shape[0]
    if chunks is None:
        out = kernel.dense(dense_call(q, stretches, kv_lens, addresses), kv)
        return of_rows(out, stretches, kv_lens)
    query_starts, num_decodes = chunks
    most = min(rows, q.shape[0])
    is_decode = jnp.arange(rows) < num_decodes
    own_lens = jnp.where(is_decode, kv_lens, 0)[:most]
    alone = of_rows(
        kernel.dense(dense_call(q[:most], stretches[:most], own_lens, addresses), kv), stretches[:most], own_lens
    )
    starts = jnp.maximum(query_starts, num_decodes)  # rows that decode have no queries here
    chunk_lens = jnp.where(is_decode, 0, kv_lens)
    before, own = packed_calls(stretches, chunk_lens, starts, q.shape[0], addresses)
    together = merged(kernel.packed(q[None], before, kv), kernel.packed(q[None], own, kv), starts, chunk_lens)
    # A barrier for the reason that `mixed_attention` gives.
    alone, together = lax.optimization_barrier((alone, together))
    decoded = is_decode[:most, None, None]
    return together.at[:most].set(jnp.where(decoded, alone, together[:most]))
