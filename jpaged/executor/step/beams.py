"""Beam search on the device: the program that lets slots go on from other slots, with the tokens the search chose."""

from jaxtyping import Array, Int

from jpaged.executor.step.packing import PackedLayout
from jpaged.executor.step.state import SlotState


def beams_layout(rows: int) -> PackedLayout:
    """rows: (slot, parent slot, token) each, padded with the null slot."""
    return PackedLayout(rows=(rows, 3))


def move_beams_step(rows: int, state: SlotState, packed: Int[Array, " n"]) -> SlotState:
    """Every parent is read before any slot is written."""
    slots, parents, tokens = beams_layout(rows).unpack(packed)["rows"].T
    return state._replace(
        last_token=state.last_token.at[slots].set(tokens),
        seq_len=state.seq_len.at[slots].set(state.seq_len[parents]),
        block_tables=state.block_tables.at[slots].set(state.block_tables[parents]),
    )
