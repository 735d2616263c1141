"""Tables of constraints on the device: each arrives in parts, and leads where it says."""

import jax
import numpy as np

from jpaged.engine.constraints.tables import Tables
from jpaged.engine.interface import NO_PLACE, PartRoom, TableRoom
from jpaged.executor.sampling.tables import init_tables, masks_at, next_places
from jpaged.executor.step.packing import PackedLayout
from jpaged.executor.step.tables import fields, fill, write_part
from tests.engine.fake_executor import VOCAB_SIZE
from tests.engine.test_tables import Table

ROOM = TableRoom(tables=4, states=64, masks=40, entries=400)
PART_ROOM = PartRoom(states=4, masks=3, entries=16)


def test_tables_arrive_in_parts_and_lead_where_they_say(monkeypatch):
    for module in ("engine.constraints.tables", "executor.step.tables"):
        monkeypatch.setattr(f"jpaged.{module}.PART_ROOM", PART_ROOM)
    layout = PackedLayout(**fields(VOCAB_SIZE))
    write = jax.jit(lambda held, buffer: write_part(held, layout.unpack(buffer)))
    tables, held, rng = Tables(ROOM), init_tables(VOCAB_SIZE, ROOM), np.random.default_rng(0)
    placed = [tables.place(Table(seed, states)) for seed, states in ((1, 11), (2, 17), (3, 4))]
    parts = [part for one in placed for part in one.take_parts()]
    assert len(parts) > 2 * len(placed)
    for part in parts:
        if part.classes is not None:
            first_place = held.first_place.at[part.number].set(part.first_place)
            classes = held.classes.at[part.number].set(part.classes.astype(np.int16))
            held = held._replace(first_place=first_place, classes=classes)
        buffer, host = layout.new()
        for name in ("masks", "mask_of", "first_entry", "entries"):  # what memory happens to hold
            host[name][...] = rng.integers(-(2**31), 2**31, host[name].shape)
        fill(host, part)
        held = write(held, buffer)
    for one in placed:
        table, first = one.table, one.spans.places[0]
        states = np.repeat(np.arange(len(table.mask_of)), VOCAB_SIZE)
        tokens = np.tile(np.arange(VOCAB_SIZE), len(table.mask_of))
        expected = table.next[states, table.classes[tokens]]
        found = np.asarray(next_places(held, states + first, tokens))
        np.testing.assert_array_equal(found, np.where(expected < 0, NO_PLACE, expected + first))
        places = np.arange(len(table.mask_of)) + first
        np.testing.assert_array_equal(masks_at(held, places), table.masks[table.mask_of])
    nowhere = np.full((VOCAB_SIZE,), NO_PLACE)
    assert (np.asarray(next_places(held, nowhere, np.arange(VOCAB_SIZE))) == NO_PLACE).all()
    assert (np.asarray(masks_at(held, nowhere[:1])) == 0xFFFFFFFF).all()
