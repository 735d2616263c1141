"""The block tables of the slots: append, fork and free, with copy-on-write.

    fork    the child gets the parent's table; every block has one reference more
    append  a row gets room for one more token: a new block where its last one is full, or a copy of its own where
            the last one is partly filled and shared
    free    a slot gives its references back

    after the fork      A  [ 7 ][ 1 . ]            refs   7: 2   1: 2
                        B  [ 7 ][ 1 . ]
    A appends           A  [ 7 ][ 3 a ]            refs   7: 2   1: 1   3: 1     copy 1 -> 3 before the step
    B appends           B  [ 7 ][ 1 b ]            block 1 is B's own by now: written in place

Only a fork makes two sequences share a block that is not full, so only forked slots are looked at for copies, once,
when they next append: a step in which nobody was forked costs nothing for it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jpaged.engine.kv.block_pool import BlockPool
from jpaged.engine.sequences.slots import Slots

_NO_UPDATES, _NO_COPIES = np.zeros((0, 4), np.int32), np.zeros((0, 2), np.int32)


class Growth(NamedTuple):
    """What a step's rows need to append one token each.

    rows: int64 [r]; the slots. growing: int64 [g]; those that start a new block.
    copying: those that must first copy their last block, since others share it.
    """

    rows: np.ndarray
    growing: np.ndarray
    copying: list[int]

    @property
    def num_blocks(self) -> int:
        return len(self.growing) + len(self.copying)


class BlockManager:
    """Keeps `Slots.block_table` and `Slots.capacity` in agreement with the pool's reference counts."""

    def __init__(self, pool: BlockPool, slots: Slots) -> None:
        self._pool = pool
        self._slots = slots
        self._block_size = pool.block_size
        self._forked: dict[int, None] = {}  # in the order of the forks

    def fork(self, parent: int, children: Sequence[int]) -> None:
        """Gives `children`, slots without blocks, all that `parent` has computed; they share every block.

        A fork takes 2 to 5 us for 10 to 1,000 blocks, less where a parent has several (`jpaged bench scheduler`).
        """
        block_ids, ends_full = self._slots.fork(parent, children)
        self._pool.add_owners(block_ids, len(children))
        if not ends_full:
            self._forked[parent] = None
            self._forked.update(dict.fromkeys(children))

    def growth(self, rows: np.ndarray) -> Growth:
        """What these distinct rows need to append a token each. The last owner of a shared block need not copy it."""
        is_full = self._slots.num_computed == self._slots.capacity  # of all slots: cheaper than picking rows of both
        growing = rows[is_full[rows]]
        return Growth(rows, growing, self._copying(rows) if self._forked else [])

    def append(self, growth: Growth) -> tuple[np.ndarray, np.ndarray]:
        """Makes room for one more token of each row.

        Returns: table updates, int32 [u, 4], and copies, int32 [c, 2], as in `StepPlan`.

        Raises:
            OutOfMemoryError: the pool has not so many blocks free; nothing is changed.
        """
        updates, copies = self._grow(growth) if growth.num_blocks else (_NO_UPDATES, _NO_COPIES)
        if self._forked:
            for slot in self._forked_among(growth.rows):
                del self._forked[slot]
        return updates, copies

    def free(self, slot: int) -> None:
        """Gives the slot's references back; its table is no longer to be read."""
        self._pool.free(self._slots.blocks(slot))
        self._forked.pop(slot, None)

    def _forked_among(self, rows: np.ndarray) -> list[int]:
        """The forked slots that are among the rows."""
        forked = np.fromiter(self._forked, np.intp, len(self._forked))
        runs = np.zeros(self._slots.capacity.shape, np.bool_)
        runs[rows] = True
        found: list[int] = forked[runs[forked]].tolist()
        return found

    def _copying(self, rows: np.ndarray) -> list[int]:
        """Those of the rows that write to a block which others have; the last of its owners keeps it."""
        forked = self._forked_among(rows)
        last_blocks = self._slots.block_table[forked, self._slots.capacity[forked] // self._block_size - 1].tolist()
        copying: list[int] = []
        owners: dict[int, int] = {}
        for slot, block_id in zip(forked, last_blocks, strict=True):
            left = owners.get(block_id) or self._pool.ref_count(block_id)
            if left > 1:
                copying.append(slot)
            owners[block_id] = left - 1
        return copying

    def _grow(self, growth: Growth) -> tuple[np.ndarray, np.ndarray]:
        growing, copying = growth.growing, growth.copying
        num_growing = len(growing)
        updates, copies = np.zeros((growth.num_blocks, 4), np.int32), _NO_COPIES
        updates[:, 3] = block_ids = self._pool.allocate(len(updates))
        updates[:num_growing, 0] = growing
        updates[:num_growing, 2] = self._slots.append_blocks(growing, block_ids[:num_growing])
        if copying:
            last, shared = self._slots.replace_last_blocks(copying, block_ids[num_growing:])
            updates[num_growing:, 0], updates[num_growing:, 2] = copying, last
            copies = np.stack([shared, block_ids[num_growing:]], axis=1)
            self._pool.unshare(shared)
        return updates, copies
