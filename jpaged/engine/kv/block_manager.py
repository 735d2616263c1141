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

A cache group has block tables of its own (`CacheGroup`). One with a window gives back the blocks that no later query
can see, whenever its sequence needs a new block:

    window 6, blocks of 4           computed 12: next query is at 12 and sees 7 .. 12
    table    [ 8 ][ 3 ][ 5 ]        give back     [ - ][ 3 ][ 5 ]        append     [ - ][ 3 ][ 5 ][ 9 ]

While a prompt is computed, such a group gets blocks for one chunk at a time (`extend`), so that a prompt need not fit
the pool as a whole. How many it will hold at most is reserved when the sequence is admitted (`reserve`): nobody else is
given these, so the prompt goes on to its end. A sequence that counted on blocks coming free which others share by then
takes them from what is free, or waits for them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jpaged.api.errors import EngineDeadError
from jpaged.engine.kv.block_pool import BlockPool
from jpaged.engine.kv.elastic import ElasticPool
from jpaged.engine.sequences.slots import Slots

_NO_UPDATES, _NO_COPIES = np.zeros((0, 4), np.int32), np.zeros((0, 2), np.int32)


class Growth(NamedTuple):
    """What a step's rows need to append a token each, or several.

    rows: int64 [r]; the slots. growing: int64 [g]; those that start a new block, each as often as it starts one.
    copying: those that must first copy their last block, since others share it.
    num_blocks: that all cache groups together need for it.
    num_tokens: that each row appends, or as many as it has left.
    """

    rows: np.ndarray
    growing: np.ndarray
    copying: list[int]
    num_blocks: int
    num_tokens: int = 1


class BlockManager:
    """Keeps `Slots.block_tables` and `Slots.capacity` in agreement with the pool's reference counts.

    elastic: what gives absent blocks of the pool their memory; None where all have theirs for ever.

    num_unreserved: how often less came to be reserved for a sequence, which may make room for another.
    """

    def __init__(self, pool: BlockPool, slots: Slots, elastic: ElasticPool | None = None) -> None:
        self._pool = pool
        self._elastic = elastic
        self._slots = slots
        self._block_size = pool.block_size
        self._num_groups = len(slots.windows)
        self._windows = [(group, window) for group, window in enumerate(slots.windows) if window is not None]
        self._reserved: dict[int, int] = {}  # blocks that prompts being computed will yet take, by slot
        self._num_reserved = 0
        self.num_unreserved = 0
        self._forked: dict[int, None] = {}  # in the order of the forks

    @property
    def num_available(self) -> int:
        """Blocks that are free and reserved for nobody."""
        return self._pool.num_free - self._num_reserved

    def can_have(self, num_blocks: int) -> bool:
        """Whether so many blocks are available, once the pool has got what memory it can get for them."""
        missing = num_blocks - self.num_available
        if missing > 0 and self._elastic is not None:
            self._elastic.grow(missing)
            missing = num_blocks - self.num_available
        return missing <= 0

    def fork(self, parent: int, children: Sequence[int]) -> None:
        """Gives `children`, slots without blocks, all that `parent` has computed; they share every block. The parent
        has no room beyond the block of its last computed token.

        A fork takes 2 to 5 us for 10 to 1,000 blocks, less where a parent has several (`jpaged bench scheduler`).
        """
        block_ids, ends_full = self._slots.fork(parent, children)
        self._pool.add_owners(block_ids, len(children))
        if not ends_full:
            self._forked[parent] = None
            for child in children:
                self._forked[child] = None

    def growth(self, rows: np.ndarray, num_tokens: int = 1) -> Growth:
        """What these distinct rows need to append so many tokens each, or as many as they have left. The last owner of
        a shared block need not copy it. Rows that need a new block give back first what their next query does not see.
        """
        slots = self._slots
        if num_tokens == 1:
            is_full = slots.num_computed == slots.capacity  # of all slots: cheaper than picking rows of both
            growing = rows[is_full[rows]]
        else:
            missing = slots.num_computed[rows] + slots.num_ahead(rows, num_tokens) - slots.capacity[rows]
            growing = np.repeat(rows, np.maximum(0, -(-missing // self._block_size)))
        if self._windows and len(growing):
            self._give_back(growing if num_tokens == 1 else np.unique(growing))
        copying = self._copying(rows) if self._forked else []
        return Growth(rows, growing, copying, (len(growing) + len(copying)) * self._num_groups, num_tokens)

    def append(self, growth: Growth) -> tuple[np.ndarray, np.ndarray]:
        """Makes room for the tokens that the rows append.

        Returns: table updates, int32 [u, 4], and copies, int32 [c, 2], as in `StepPlan`.

        Raises:
            OutOfMemoryError: the pool has not so many blocks free; nothing is changed.
        """
        updates, copies = self._grow(growth) if growth.num_blocks else (_NO_UPDATES, _NO_COPIES)
        if self._forked:
            for slot in self._forked_among(growth.rows):
                del self._forked[slot]
        return updates, copies

    def owns_last_block(self, slot: int) -> bool:
        """Whether nobody else has the block that the slot's sequence writes to next, so that it need not be copied."""
        return slot not in self._forked

    def own_last_blocks(self, slots: np.ndarray) -> np.ndarray:
        """`owns_last_block` of each of these slots: int64 [n] -> bool [n]."""
        if not self._forked:
            return np.ones((len(slots),), np.bool_)
        return np.array([self.owns_last_block(slot) for slot in slots.tolist()], np.bool_)

    def free(self, slot: int) -> None:
        """Gives the slot's references back; its table is no longer to be read."""
        self._pool.free(self._slots.blocks(slot))
        self._forked.pop(slot, None)
        if self._windows:
            self._reserve(slot, 0)

    def reserve(self, slot: int, num_blocks: int) -> None:
        """Keeps so many blocks for what a sequence computes in chunks, besides those that it has; they are available.
        Groups without a window need none: they have all their blocks by then.
        """
        if self._windows:
            self._reserve(slot, num_blocks)

    def reach(self, slot: int, stop: int) -> int:
        """How many of its first `stop` tokens a sequence has room for once `extend` has given it what it can have; all
        of them, unless others came to share blocks that it gave back. What its next query does not see is given back.
        """
        if not self._windows or stop <= self._slots.capacity[slot]:
            return stop
        reserved = self._reserved.get(slot, 0)
        self._reserve(slot, reserved + self._give_back(np.array([slot])))
        wanted = -(-(stop - int(self._slots.capacity[slot])) // self._block_size) * len(self._windows)
        self.can_have(wanted - self._reserved.get(slot, 0))
        num_blocks = (self._reserved.get(slot, 0) + max(0, self.num_available)) // len(self._windows)
        return min(stop, int(self._slots.capacity[slot]) + num_blocks * self._block_size)

    def extend(self, slot: int, stop: int, known: int) -> np.ndarray:
        """Gives a sequence's groups with a window blocks for its first `stop` tokens, which are within its `reach`.
        What is reserved for it shrinks to what it can still need for its `known` tokens.

        Returns: table updates, int32 [u, 4].
        """
        if not self._windows:
            return _NO_UPDATES
        capacity = int(self._slots.capacity[slot])
        n = max(0, -(-(stop - capacity) // self._block_size))
        updates = _NO_UPDATES
        if n:
            block_ids = self._pool.allocate(n * len(self._windows)).reshape(len(self._windows), n)
            first = self._slots.append_windowed(slot, block_ids)
            updates = np.empty((len(self._windows), n, 4), np.int32)
            updates[..., 0] = slot
            updates[..., 1] = np.array([group for group, _ in self._windows])[:, None]
            updates[..., 2] = np.arange(first, first + n)
            updates[..., 3] = block_ids
        left = -(-known // self._block_size) - int(self._slots.capacity[slot]) // self._block_size
        reserved = self._reserved.get(slot, 0) - n * len(self._windows)
        self._reserve(slot, max(0, min(reserved, left * len(self._windows))))
        return updates.reshape(-1, 4)

    def check_integrity(self) -> None:
        """Raises EngineDeadError unless what is reserved is there, and tables hold blocks where they should."""
        if self.num_available < 0 or self._num_reserved != sum(self._reserved.values()):
            raise EngineDeadError(f"{self._num_reserved} blocks are reserved, {self._pool.num_free} are free.")
        for slot in self._slots.used().tolist() if self._windows else ():
            num_blocks = int(self._slots.capacity[slot]) // self._block_size
            for group, _ in self._windows:
                held = np.flatnonzero(self._slots.block_tables[group, slot])
                if held.tolist() != list(range(int(self._slots.first_held[group, slot]), num_blocks)):
                    raise EngineDeadError(f"Slot {slot} holds blocks {held.tolist()} in group {group}.")

    def _reserve(self, slot: int, num_blocks: int) -> None:
        reserved = self._reserved.pop(slot, 0)
        self._num_reserved += num_blocks - reserved
        self.num_unreserved += num_blocks < reserved
        if num_blocks:
            self._reserved[slot] = num_blocks

    def _give_back(self, rows: np.ndarray) -> int:
        """Gives back what the next queries of these distinct slots do not see. Returns how many blocks became free."""
        slots, num_freed = self._slots, 0
        for group, window in self._windows:
            first = np.maximum(slots.num_computed[rows] - (window - 1), 0) // self._block_size
            passed = first > slots.first_held[group, rows]
            if passed.any():
                num_freed += self._pool.release(slots.give_back(group, rows[passed], first[passed]))
        return num_freed

    def _forked_among(self, rows: np.ndarray) -> list[int]:
        """The forked slots that are among the rows."""
        forked = np.fromiter(self._forked, np.intp, len(self._forked))
        runs = np.zeros(self._slots.capacity.shape, np.bool_)
        runs[rows] = True
        found: list[int] = forked[runs[forked]].tolist()
        return found

    def _copying(self, rows: np.ndarray) -> list[int]:
        """The rows that write to a block which others have; the last of its owners keeps it."""
        forked = self._forked_among(rows)
        last = self._slots.capacity[forked] // self._block_size - 1
        last_blocks = self._slots.block_tables[0, forked, last].tolist()  # in the other groups it is the same
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
        num_growing, n = len(growing), len(growing) + len(copying)
        wanted = (
            None
            if copying or growth.num_tokens > 1
            else self._slots.wanted(growing, self._slots.capacity[growing] // self._block_size)
        )
        block_ids = self._pool.allocate(growth.num_blocks, wanted, growing)
        updates, copies = np.zeros((n, 4), np.int32), _NO_COPIES  # of the first group
        if copying:  # before anything is appended: the shared blocks are the last ones
            new = block_ids.reshape(self._num_groups, n)[:, num_growing:]
            last, shared = self._slots.replace_last_blocks(copying, new)
            updates[num_growing:, 0], updates[num_growing:, 2] = copying, last
            copies = np.stack([shared, new], axis=-1).reshape(-1, 2)
            self._pool.unshare(copies[:, 0])
        index = self._slots.append_blocks(growing, block_ids, n, growth.num_tokens > self._block_size)
        updates[:num_growing, 0], updates[:num_growing, 2] = growing, index
        if self._num_groups > 1:
            updates = np.tile(updates, (self._num_groups, 1))
            updates[:, 1] = np.repeat(np.arange(self._num_groups), n)
        updates[:, 3] = block_ids
        return updates, copies
