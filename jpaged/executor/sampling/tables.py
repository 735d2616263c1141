"""Constraints that the device follows by itself: tables of which tokens may come at each place, and where they lead.

    a slot's place --mask_of--> its mask                         what the row may sample
    place, token   --classes, entries--> the next place          where it stands then

Places, masks and entries of all tables lie in common arrays, as `engine/constraints/tables.py` lays them out. NO_PLACE
is in no table: its mask allows all tokens, and all lead back to it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, UInt

from jpaged.engine.interface import NO_PLACE, TABLE_ROOM, TableRoom
from jpaged.executor.sampling.records import mask_words


class GrammarTables(NamedTuple):
    """All tables on the device, in arrays of the sizes of a `TableRoom`.

    masks: uint32 [masks, words].
    mask_of, table_of, first_entry: int32 [places]; of each place its mask, its table, and where its entries begin.
    first_place: int32 [tables].
    classes: int16 [tables, V]; the class of each token, by which a place's entries are ordered.
    entries: int16 [entries]; as `TablePart.entries`.
    """

    masks: UInt[Array, "masks words"]
    mask_of: Int[Array, " places"]
    table_of: Int[Array, " places"]
    first_entry: Int[Array, " places"]
    first_place: Int[Array, " tables"]
    classes: Int[Array, "tables vocab"]
    entries: Int[Array, " entries"]


def init_tables(vocab_size: int, room: TableRoom = TABLE_ROOM) -> GrammarTables:
    """No table: every place is as NO_PLACE."""
    masks = jnp.full((room.masks, mask_words(vocab_size)), 0xFFFFFFFF, jnp.uint32)
    mask_of, table_of, first_entry = (jnp.zeros((room.states,), jnp.int32) for _ in range(3))  # donated one by one
    of_tables = jnp.zeros((room.tables,), jnp.int32), jnp.zeros((room.tables, vocab_size), jnp.int16)
    return GrammarTables(masks, mask_of, table_of, first_entry, *of_tables, jnp.zeros((room.entries,), jnp.int16))


def init_places(num_slots: int) -> Int[Array, " slots"]:
    """No slot follows a table: int32 [num_slots + 1]."""
    return jnp.full((num_slots + 1,), NO_PLACE, jnp.int32)


def masks_at(tables: GrammarTables, places: Int[Array, " rows"]) -> UInt[Array, "rows words"]:
    """The masks of these places: uint32 [rows, words]."""
    return tables.masks[tables.mask_of[places]]


def next_places(
    tables: GrammarTables, places: Int[Array, " rows"], token_ids: Int[Array, " rows"]
) -> Int[Array, " rows"]:
    """Where these tokens, sampled at these places, lead: int32 [rows]; NO_PLACE after one that ends the sequence."""
    table = tables.table_of[places]
    found = tables.entries[tables.first_entry[places] + tables.classes[table, token_ids]].astype(jnp.int32)
    return jnp.where((places == NO_PLACE) | (found < 0), NO_PLACE, tables.first_place[table] + found)
