"""What the decode attention kernel has to compute, as a list that plain XLA operations make on the device.

Sequences are cut at fixed positions, on two levels:

    kv_lens        [ 2500                       , 700      ]
    chunks, 2,048  |0..2047          |2048..2499|0..699    |
    leaves         |0   |1   |2   |3 |0         |0|1|..|5  |

A unit of work is a chunk or, in batches too small to occupy half of the multiprocessors, a leaf of one (128 tokens in
sequences of up to 1,024, 256 up to 2,048, 512 in longer ones); times the groups of query heads that share a KV head.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

ROW, CHUNK, CHUNKS, BEGIN, END, LENGTH, LEAF_TILES, LEAF, LEAVES, CUT = range(FIELDS := 10)
"""Columns of the list, one row a unit: see `Plan`."""

_LEAVES = 8  # the most of the smallest size; a sequence of more has leaves twice as large, of more than 16 four times


@dataclass(frozen=True)
class Cuts:
    """Where sequences are cut, and for how many.

    tile: tokens that are computed at once, a multiple of 64.
    leaf: tokens of the smallest unit of work, a multiple of the tile; twice and four times as many in sequences longer
        than 8 and 16 leaves.
    chunk: tokens of the largest unit of work, a multiple of the leaf.
    ctas: size of the persistent grid.
    """

    tile: int
    leaf: int
    chunk: int
    ctas: int

    @property
    def most_leaves(self) -> int:
        """The most that a chunk has."""
        return min(self.chunk // self.leaf, max(_LEAVES, self.chunk // (4 * self.leaf)))


class Plan(NamedTuple):
    """Work of one call, made on the device.

    units: int32 [capacity, 10]; sequence, chunk of it (from the first that the window lets see) and how many it has,
        first position, end position, length of the sequence, tiles of its leaves; and of a unit that is a leaf: its
        number, how many the chunk has (1 for a unit that is a whole chunk), the chunk's place in the list of chunks.
    num_units: int32 [1].
    """

    units: jax.Array
    num_units: jax.Array


def max_chunks(max_len: int, chunk: int, sliding_window: int | None) -> int:
    """The most chunks that a sequence can touch."""
    chunks = -(-max_len // chunk)
    return chunks if sliding_window is None else min(chunks, (sliding_window - 2) // chunk + 2)


def chunks_of(
    kv_lens: jax.Array, max_len: int, chunk: int, tile: int, sliding_window: int | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Four numbers of each sequence, int32 [batch]: where the first tile begins that is seen, where the sequence
    ends, the index of its first chunk, and how many chunks it has. An empty sequence has one, so that its zeros are
    written.
    """
    ends = jnp.clip(kv_lens, 0, max_len)
    if sliding_window is None:
        begins = jnp.zeros_like(ends)
    else:
        begins = jnp.maximum(ends - sliding_window, 0) // tile * tile
    first = begins // chunk
    return begins, ends, first, jnp.maximum((ends + chunk - 1) // chunk - first, 1)


def max_cut_chunks(batch: int, groups: int, slots: int, cuts: Cuts) -> int:
    """The most chunks that `plan` cuts into leaves: units for half of the CTAs."""
    return min(batch * slots, cuts.ctas // (2 * groups))


def plan(kv_lens: jax.Array, max_len: int, groups: int, sliding_window: int | None, cuts: Cuts) -> Plan:
    """Lists the chunks, longest first, or their leaves where the chunks would leave half of the CTAs idle.

    Every layer of a model plans alike, so inside one jit the compiler plans once.

    Args:
        kv_lens: int32 [batch]; above `max_len`, they count as that.
        groups: of query heads; each does every unit.
    """
    slots = max_chunks(max_len, cuts.chunk, sliding_window)
    units, total = _list_chunks(kv_lens, max_len, slots, sliding_window, cuts)
    most = max_cut_chunks(kv_lens.shape[0], groups, slots, cuts)
    if most == 0 or cuts.most_leaves == 1:
        return Plan(units, total[None])
    leaves, live = _cut_chunks(units[:most], total, cuts)
    # Leaves that are live, packed, take the place of the chunks; if none are, because there are chunks enough, these
    # stay.
    count = jnp.cumsum(live, dtype=jnp.int32)
    capacity = max(units.shape[0], live.shape[0])
    units = jnp.pad(units, ((0, capacity - units.shape[0]), (0, 0)))
    at = jnp.where(live, count - 1, capacity)
    units = units.at[at].set(leaves, mode="drop", unique_indices=True)
    return Plan(units, jnp.where(total <= most, count[-1], total)[None])


def _list_chunks(
    kv_lens: jax.Array, max_len: int, slots: int, sliding_window: int | None, cuts: Cuts
) -> tuple[jax.Array, jax.Array]:
    """All chunks [batch * slots, 10], longest first and those that do not exist last, and how many do."""
    batch, chunk, tile = kv_lens.shape[0], cuts.chunk, cuts.tile
    begins, ends, first, chunks = chunks_of(kv_lens, max_len, chunk, tile, sliding_window)
    doublings = (ends > _LEAVES * cuts.leaf).astype(jnp.int32) + (ends > 2 * _LEAVES * cuts.leaf)
    leaf_tiles = (cuts.leaf // tile) << doublings

    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    slot = jnp.arange(slots, dtype=jnp.int32)[None]
    begin = jnp.maximum((first[:, None] + slot) * chunk, begins[:, None])
    end = jnp.maximum(jnp.minimum((first[:, None] + slot + 1) * chunk, ends[:, None]), begin)
    zero = jnp.zeros_like(begin)
    columns = [rows, slot, chunks[:, None], begin, end, ends[:, None], leaf_tiles[:, None], zero, zero + 1, zero]
    units = jnp.stack([jnp.broadcast_to(x, begin.shape) for x in columns], axis=-1).reshape(batch * slots, FIELDS)
    if batch * slots > 1:
        size = jnp.where(slot < chunks[:, None], begin - end, 1)
        units = units[jnp.argsort(size.reshape(-1), stable=True)]
    return units, jnp.sum(chunks, dtype=jnp.int32)


def _cut_chunks(chunks: jax.Array, total: jax.Array, cuts: Cuts) -> tuple[jax.Array, jax.Array]:
    """The leaves of the first `most` chunks [most * most_leaves, 10], and which of them are to be computed: those that
    exist, if these are all the chunks there are (`total`)."""
    most, source = chunks.shape[0], chunks[:, None]
    number = jnp.arange(cuts.most_leaves, dtype=jnp.int32)[None]
    leaf = source[..., LEAF_TILES] * cuts.tile
    count = jnp.maximum((source[..., END] - source[..., BEGIN] + leaf - 1) // leaf, 1)
    begin = source[..., BEGIN] + number * leaf
    leaves = jnp.broadcast_to(source, (most, cuts.most_leaves, FIELDS))
    leaves = leaves.at[..., BEGIN].set(begin).at[..., END].set(jnp.minimum(begin + leaf, source[..., END]))
    leaves = leaves.at[..., LEAF].set(number).at[..., LEAVES].set(count)
    leaves = leaves.at[..., CUT].set(jnp.arange(most, dtype=jnp.int32)[:, None])
    chunk_exists = jnp.arange(most, dtype=jnp.int32)[:, None] < total
    live = ((number < count) & chunk_exists & (total <= most)).reshape(-1)
    return leaves.reshape(-1, FIELDS), live
