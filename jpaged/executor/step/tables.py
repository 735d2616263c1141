"""The programs that write the tables of constraints (`sampling/tables.py`). Each has one size.

load_classes       once a table: where its places begin, and the class of each token
load_table         once a part of a table: some of its masks, places and entries
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jpaged.engine.interface import PART_ROOM, TABLE_ROOM, TablePart
from jpaged.executor.sampling.records import mask_words
from jpaged.executor.sampling.tables import GrammarTables
from jpaged.executor.step.packing import Field, PackedLayout
from jpaged.executor.step.program import Setup, SingleProgram


def fields(vocab_size: int) -> dict[str, Field]:
    """The fields of a packed layout for a part. firsts, counts: where masks, places and entries go, and how many there
    are of each; the rest of their fields is left as it is.
    """
    return {
        "table": Field((), 0),
        "firsts": Field((3,), 0),
        "counts": Field((3,), 0),
        "mask_of": Field((PART_ROOM.states,), None),
        "first_entry": Field((PART_ROOM.states,), None),
        "entries": Field((PART_ROOM.entries,), None),
        "masks": Field((PART_ROOM.masks, mask_words(vocab_size)), None),
    }


def fill(host: Mapping[str, np.ndarray], part: TablePart) -> None:
    """Writes a part into the fields of a new buffer."""
    host["table"][...] = part.number
    host["firsts"][...] = part.masks_at, part.places_at, part.entries_at
    host["counts"][...] = len(part.masks), len(part.mask_of), len(part.entries)
    host["masks"][: len(part.masks)] = part.masks.view(np.int32)
    host["mask_of"][: len(part.mask_of)] = part.mask_of
    host["first_entry"][: len(part.entries_of)] = part.entries_of
    host["entries"][: len(part.entries)] = part.entries


def write_part(tables: GrammarTables, host: Mapping[str, Array]) -> GrammarTables:
    """The tables with a part of one written. host: `fields`, unpacked."""
    masks = lax.bitcast_convert_type(host["masks"], jnp.uint32)
    of_masks, of_places, of_entries = (
        _indices(host["firsts"][i], host["counts"][i], len(values), len(kept))
        for i, (values, kept) in enumerate(
            ((masks, tables.masks), (host["mask_of"], tables.mask_of), (host["entries"], tables.entries))
        )
    )
    table_of = jnp.broadcast_to(host["table"], host["mask_of"].shape)
    return tables._replace(
        masks=tables.masks.at[of_masks].set(masks, mode="drop"),
        mask_of=tables.mask_of.at[of_places].set(host["mask_of"], mode="drop"),
        table_of=tables.table_of.at[of_places].set(table_of, mode="drop"),
        first_entry=tables.first_entry.at[of_places].set(host["first_entry"], mode="drop"),
        entries=tables.entries.at[of_entries].set(host["entries"].astype(jnp.int16), mode="drop"),
    )


def _indices(first: Array, count: Array, size: int, out_of_bounds: int) -> Array:
    """int32 [size]: `count` indices from `first` on, then indices that are out of bounds, whose values are dropped."""
    each = jnp.arange(size, dtype=jnp.int32)
    return jnp.where(each < count, first + each, out_of_bounds)


@dataclass(frozen=True)
class LoadTable(SingleProgram):
    """Writes a part of a table."""

    kind = "load_table"
    writes = ("tables",)

    def layout(self, setup: Setup) -> PackedLayout:
        return PackedLayout(**fields(setup.model.vocab_size))

    def body(self, setup: Setup, *, tables: GrammarTables, packed: Int[Array, " n"]) -> tuple[dict[str, object], None]:
        return {"tables": write_part(tables, self.layout(setup).unpack(packed))}, None


@dataclass(frozen=True)
class LoadClasses(SingleProgram):
    """Writes where a table begins, and the classes of its tokens; padding writes nothing."""

    kind = "load_classes"
    writes = ("tables",)

    def layout(self, setup: Setup) -> PackedLayout:
        fields = {"table": Field((), TABLE_ROOM.tables), "first_place": Field((), 0)}
        return PackedLayout(**fields, classes=Field((setup.model.vocab_size,), 0))

    def body(self, setup: Setup, *, tables: GrammarTables, packed: Int[Array, " n"]) -> tuple[dict[str, object], None]:
        host = self.layout(setup).unpack(packed)
        first_place = tables.first_place.at[host["table"]].set(host["first_place"], mode="drop")
        classes = tables.classes.at[host["table"]].set(host["classes"].astype(jnp.int16), mode="drop")
        return {"tables": tables._replace(first_place=first_place, classes=classes)}, None


KINDS = (LoadTable, LoadClasses)
