"""What attention kernels that know no block tables are called with: shapes, lengths, offsets and masks.

    dense      a query a stretch, of all stretches of the array       q [stretches, 1, heads, head_dim]
    packed     any number of queries of some stretches                q [1, tokens, heads, head_dim], by offsets

A kernel's causal mask counts queries and keys from 0: query i sees keys 0 .. i (aligned at the top left). That is right
for a whole prompt. A chunk's queries stand at the end of its keys, so it takes two calls, whose results merge by their
log-sum-exps: over the tokens before the chunk, without a mask, and over the chunk's own, with that mask. Offsets say
where a segment's keys begin, at any token, so neither call copies a key.

            keys    0 .. start-1      start .. start+n-1
    queries         before: all       own: causal

Everything here is pure and works on lengths and queries alone; keys and values stay where they are.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.contiguous_attention.addresses import Addresses


class DenseCall(NamedTuple):
    """q: [stretches, 1, heads, head_dim]. kv_lens: int32 [stretches]; where nobody asks it is 0, and the result is
    anything."""

    q: jax.Array
    kv_lens: jax.Array


@dataclass(frozen=True)
class PackedCall:
    """Segments of the flat queries, each with a segment of the flat keys.

    q_lens, kv_lens: int32 [1, rows]. q_offsets, kv_offsets: int32 [1, rows + 1], where segments begin; the last entry
        is where the arrays end. is_causal: whether query i of a segment sees its keys 0 .. i only.
    """

    q_lens: jax.Array
    kv_lens: jax.Array
    q_offsets: jax.Array
    kv_offsets: jax.Array
    is_causal: bool


def dense_call(q: jax.Array, stretches: jax.Array, kv_lens: jax.Array, addresses: Addresses) -> DenseCall:
    """q: [R, heads, head_dim], the query of each row, its last token's. stretches, kv_lens: int32 [R]; the stretches of
    rows with tokens are distinct."""
    nowhere = addresses.num_stretches
    target = jnp.where(kv_lens > 0, stretches, nowhere)
    queries = jnp.zeros((nowhere, 1, *q.shape[1:]), q.dtype).at[target, 0].set(q, mode="drop")
    return DenseCall(queries, jnp.zeros((nowhere,), jnp.int32).at[target].set(kv_lens, mode="drop"))


def of_rows(out: jax.Array, stretches: jax.Array, kv_lens: jax.Array) -> jax.Array:
    """[R, heads, head_dim]: of what a dense call gave, [stretches, 1, heads, head_dim], that of the rows; 0 for those
    without tokens."""
    found = out.at[jnp.where(kv_lens > 0, stretches, 0), 0].get(mode="clip")
    return jnp.where((kv_lens > 0)[:, None, None], found, 0)


def packed_calls(
    stretches: jax.Array, kv_lens: jax.Array, query_starts: jax.Array, num_tokens: int, addresses: Addresses
) -> tuple[PackedCall, PackedCall]:
    """The call over what is before each row's chunk, and that over the chunk itself.

    stretches, kv_lens: int32 [R]. query_starts: int32 [R + 1]; row r's queries are query_starts[r] ..
    query_starts[r + 1] - 1 of `num_tokens`, and its last tokens.
    """
    counts = jnp.maximum(query_starts[1:] - query_starts[:-1], 0)
    counts = jnp.where(kv_lens > 0, counts, 0)
    starts = jnp.where(counts > 0, kv_lens - counts, 0)
    first = jnp.where(counts > 0, stretches, 0) * addresses.stretch
    q_offsets = jnp.append(query_starts[:-1], jnp.int32(num_tokens))

    def call(first: jax.Array, lens: jax.Array, is_causal: bool) -> PackedCall:
        kv_offsets = jnp.append(first, jnp.int32(addresses.num_entries))
        return PackedCall(counts[None], lens[None], q_offsets[None], kv_offsets[None], is_causal)

    return call(first, starts, False), call(first + starts, counts, True)


def merged(
    before: tuple[jax.Array, jax.Array],
    own: tuple[jax.Array, jax.Array],
    query_starts: jax.Array,
    kv_lens: jax.Array,
) -> jax.Array:
    """What the two calls of `packed_calls` gave, as one.

    before, own: each the output [1, T, heads, head_dim], and its log-sum-exp, float32 [R, heads, T], by the query's
    number in its segment. Where a call saw no keys, both may be anything.
    Returns [T, heads, head_dim], 0 for tokens that are no row's queries.
    """
    tokens, rows = own[0].shape[1], kv_lens.shape[0]
    token = jnp.arange(tokens, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(query_starts[1:], token, side="right").astype(jnp.int32), rows - 1)
    nth = token - query_starts[row]
    is_query = (nth >= 0) & (token < query_starts[row + 1]) & (kv_lens[row] > 0)
    has_before = is_query & (kv_lens[row] > query_starts[row + 1] - query_starts[row])
    at = (row, slice(None), jnp.maximum(nth, 0))
    wide = jnp.promote_types(own[0].dtype, jnp.float32)
    share = jax.nn.sigmoid(before[1][at] - own[1][at])[..., None].astype(wide)  # of the softmax, [T, heads, 1]
    both = before[0][0].astype(wide) * share + own[0][0].astype(wide) * (1 - share)
    out = jnp.where(has_before[:, None, None], both, own[0][0].astype(wide))
    return jnp.where(is_query[:, None, None], out, 0).astype(own[0].dtype)
