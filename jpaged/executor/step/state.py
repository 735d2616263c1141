"""What the device knows of every running sequence, by slot.

    slot                 0      1      2    ...  S-1     S (null slot: padded rows read and write it)
    last_token  [S+1]   the token a decode step computes next
    seq_len     [S+1]   tokens whose keys and values are in the pool
    active      [S+1]   False: writes go to the null block, nothing is sampled
    block_tables [S+1, groups, max_blocks_per_seq]   one table for each `CacheGroup`

Sampling parameters live beside it (`sampling/state.py`). All of it is donated to each program and updated in place; the
host sends only differences.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jpaged.executor.cache.paged import PagedCache


class SlotState(NamedTuple):
    """Per-slot state of the step; see the module's picture."""

    last_token: Int[Array, " slots"]
    seq_len: Int[Array, " slots"]
    active: Bool[Array, " slots"]
    block_tables: Int[Array, "slots groups blocks"]


def initial_slot_state(cache: PagedCache) -> SlotState:
    """Every slot inactive, every block-table entry the null block."""
    rows = cache.config.max_num_seqs + 1
    return SlotState(
        last_token=jnp.zeros((rows,), jnp.int32),
        seq_len=jnp.zeros((rows,), jnp.int32),
        active=jnp.zeros((rows,), bool),
        block_tables=cache.empty_tables(),
    )


def append_blocks(
    block_tables: Int[Array, "slots groups blocks"], updates: Int[Array, "n 4"]
) -> Int[Array, "slots groups blocks"]:
    """Writes entries of (slot, group, index, block) each. Padding names the null slot, whose tables are never attended
    through.
    """
    slots, groups, indices, blocks = updates.T
    return block_tables.at[slots, groups, indices].set(blocks)


def start_slots(
    state: SlotState, slots: Int[Array, " n"], num_computed_tokens: Int[Array, " n"], null_slot: int
) -> SlotState:
    """Sequences take their slots, with `num_computed_tokens` tokens in the pool already. Padding: the null slot."""
    return state._replace(
        seq_len=state.seq_len.at[slots].set(num_computed_tokens),
        active=state.active.at[slots].set(slots != null_slot),
    )


def end_slots(state: SlotState, slots: Int[Array, " n"]) -> SlotState:
    """Slots stop because the host says so."""
    return state._replace(active=state.active.at[slots].set(False))
