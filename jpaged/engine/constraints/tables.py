"""Constraints that the device follows by itself: where their tables lie there, and who uses them.

A sequence whose constraint is a finite automaton over tokens needs nothing of the host between two tokens. Its row is
an ordinary one: the device looks up what may follow at the slot's place, and the place that the sampled token leads to
(`SlotStart.place`). The host follows the known tokens of a sequence only when it starts, or starts again after a
preemption, to say at which place.

A large table is tens of megabytes. While others run, the device gets some parts of it with each plan, and sequences
follow it once all are there; if none runs, the first one's plan has all.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jpaged.api.errors import EngineDeadError
from jpaged.engine.constraints.following import Table
from jpaged.engine.interface import NO_PLACE, PART_ROOM, TablePart, TableRoom


class Spans(NamedTuple):
    """Where a table lies on the device: (first, behind the last) of each kind of what it takes (`TableRoom`)."""

    numbers: tuple[int, int]
    places: tuple[int, int]
    masks: tuple[int, int]
    entries: tuple[int, int]


@dataclass(eq=False)
class PlacedTable:
    """A table that has room on the device; a `sequences.request.DeviceTable`.

    num_sent: parts of it that plans have. num_requests: that use it; with none it may make room for another.
    """

    table: Table
    spans: Spans
    num_sent: int = 0
    num_requests: int = 0

    def place_after(self, token_ids: np.ndarray | Sequence[int]) -> int:
        """The place of a sequence after these tokens of its output. Raises EngineDeadError if they may not come so."""
        state = self.table.follow(self.table.start, np.asarray(token_ids).tolist())
        if state < 0:
            raise EngineDeadError("A sequence has tokens that its constraint's table does not allow.")
        return self.spans.places[0] + state

    @property
    def is_sent(self) -> bool:
        """Whether plans have all of it."""
        return self.num_sent == self._num_parts

    def take_parts(self, most: int | None = None) -> list[TablePart]:
        """The next parts that the device has not been told, at most so many, or all."""
        left = range(self.num_sent, self._num_parts)[:most]
        self.num_sent += len(left)
        return [self._part(i) for i in left]

    @property
    def _num_parts(self) -> int:
        table, most = self.table, PART_ROOM
        sizes = (len(table.mask_of), most.states), (len(table.masks), most.masks), (table.next.size, most.entries)
        return max(-(-size // room) for size, room in sizes)

    def _part(self, i: int) -> TablePart:
        (number, _), *firsts = self.spans
        table, rooms = self.table, PART_ROOM
        states, masks, entries = (slice(i * room, (i + 1) * room) for room in rooms)
        places_at, masks_at, entries_at = (first + i * room for (first, _), room in zip(firsts, rooms, strict=True))
        first_place, first_mask, first_entry = (first for first, _ in firsts)
        mask_of = table.mask_of[states]
        num_classes = table.next.shape[1]
        of_state = first_entry + num_classes * np.arange(states.start, states.start + len(mask_of), dtype=np.int32)
        return TablePart(
            number=number,
            first_place=first_place,
            classes=None if i else table.classes,
            masks_at=masks_at,
            masks=table.masks[masks],
            places_at=places_at,
            mask_of=(mask_of + first_mask).astype(np.int32),
            entries_of=of_state,
            entries_at=entries_at,
            entries=table.next.reshape(-1)[entries],
        )

    def hold(self) -> None:
        """A request uses it."""
        self.num_requests += 1

    def release(self) -> None:
        """A request that used it has ended."""
        self.num_requests -= 1


class Tables:
    """Gives tables their places. Those that nobody uses stay until others need the room."""

    def __init__(self, room: TableRoom) -> None:
        # Place 0 and mask 0 are those of rows without a table.
        self._room = Spans((0, room.tables), (NO_PLACE + 1, room.states), (1, room.masks), (0, room.entries))
        self._placed: OrderedDict[int, PlacedTable] = OrderedDict()  # by id of its table; least recently used first

    def place(self, table: Table) -> PlacedTable | None:
        """A table's place; None if others that are in use leave no room for it. Nobody holds it yet."""
        placed = self._placed.get(id(table))
        if placed is None:
            spans = self._spans(table)
            if spans is None:
                return None
            placed = self._placed[id(table)] = PlacedTable(table, spans)
        self._placed.move_to_end(id(table))
        return placed

    def take_parts(self, most: int) -> list[TablePart]:
        """At most so many parts of tables of which the device does not have all."""
        parts: list[TablePart] = []
        for placed in self._placed.values():
            parts += placed.take_parts(most - len(parts))
        return parts

    def _spans(self, table: Table) -> Spans | None:
        """Room for a table, or None. Tables that nobody uses make room, least recently used first, unless those in use
        leave none.
        """
        sizes = 1, len(table.mask_of), len(table.masks), table.next.size
        if any(size > end - begin for size, (begin, end) in zip(sizes, self._room, strict=True)):
            return None
        kept = self._placed.copy()
        while True:
            taken = [placed.spans for placed in kept.values()]
            spans = [
                _first_fit(size, room, sorted(spans[i] for spans in taken))
                for i, (size, room) in enumerate(zip(sizes, self._room, strict=True))
            ]
            found = tuple(span for span in spans if span is not None)
            if len(found) == len(spans):
                self._placed = kept
                return Spans(*found)
            unused = next((key for key, placed in kept.items() if not placed.num_requests), None)
            if unused is None:
                return None
            del kept[unused]


def _first_fit(size: int, room: tuple[int, int], taken: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """The first gap of a size in the room, between spans that are taken, which are in order; None if there is none."""
    begin, last = room
    for first, end in (*taken, (last, last)):
        if first - begin >= size:
            return begin, begin + size
        begin = end
    return None
