"""Who owns which block of the KV pool.

    block id     0      1      2      3      4      5      6
    refs         -      2      1      0      0      1      0
               null   shared  owned  free   free  owned   free
                                       \\______\\_____________\\
                                        least recently used first

A block is either referenced or on the free list. Freed blocks keep their contents, and their name in the prefix
cache, until `allocate` hands them out again; until then a prefix hit brings them back (`share`). Which table holds
which block is the business of `BlockManager`.

Some blocks may be absent (`elastic.py`): these have no memory, and are neither referenced nor free.
"""

from collections.abc import Iterable

import numpy as np

from jpaged.api.errors import EngineDeadError, OutOfMemoryError
from jpaged.engine.interface import NULL_BLOCK
from jpaged.engine.kv.prefix_cache import PrefixCache

_ABSENT = -1
_LOOKED_AT = 16
"""Blocks that are looked at to tell whether the next ones in line hold prefixes."""
NOBODY = -1
"""Stands for the slot of a block that is promised to none."""


class FreeList:
    """A queue of block ids from which any block can be taken out in constant time.

    A block's live entry stands at `position[block]`; taking the block out only clears that, and the entry left
    behind is skipped when it comes up. The array holds twice the blocks there are, so that moving the live entries
    to its start when the end is reached costs a constant per entry. All operations are vectorised: a linked list
    would cost about 0.1 us a block in Python.
    """

    def __init__(self, num_blocks: int) -> None:
        self._entries = np.zeros((2 * num_blocks,), np.int32)
        self._index = np.arange(2 * num_blocks, dtype=np.int32)
        self._position = np.full((num_blocks,), _ABSENT, np.int32)
        self._head = 0
        self._tail = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, block_ids: np.ndarray) -> None:
        """Appends blocks that are not in the list, in order."""
        n = len(block_ids)
        if self._tail + n > len(self._entries):
            self._compact()
        places = slice(self._tail, self._tail + n)
        self._entries[places] = block_ids
        self._position[block_ids] = self._index[places]
        self._tail += n
        self._size += n

    def push_front(self, block_ids: np.ndarray) -> None:
        """Puts blocks that are not in the list before all others, in order."""
        n = len(block_ids)
        if self._head < n:
            self._compact(room=n)
        self._head -= n
        places = slice(self._head, self._head + n)
        self._entries[places] = block_ids
        self._position[block_ids] = self._index[places]
        self._size += n

    def pop(self, n: int) -> np.ndarray:
        """Takes the n oldest blocks, int32 [n]; the caller has checked that there are so many."""
        self._size -= n
        taken = []
        missing = n
        while missing:
            stop = min(self._head + missing, self._tail)
            live = self._live(self._head, stop)
            self._head = stop
            missing -= len(live)
            taken.append(live)
        block_ids = taken[0] if len(taken) == 1 else np.concatenate(taken or [np.zeros((0,), np.int32)])
        self._position[block_ids] = _ABSENT
        return block_ids

    def are_old(self, block_ids: np.ndarray) -> np.ndarray:
        """Which of these blocks, which are in the list, are in its older half, about: bool of their shape."""
        old: np.ndarray = self._position[block_ids] < (self._head + self._tail) // 2
        return old

    def remove(self, block_ids: np.ndarray) -> None:
        """Takes these blocks out, wherever they stand."""
        self._position[block_ids] = _ABSENT
        self._size -= len(block_ids)

    def head(self, n: int) -> np.ndarray:
        """At most n of the oldest blocks, oldest first: those among the n oldest entries that are live."""
        return self._live(self._head, min(self._head + n, self._tail))

    def to_array(self) -> np.ndarray:
        """The blocks in the list, oldest first, int32 [len]."""
        return self._live(self._head, self._tail)

    def _live(self, start: int, stop: int) -> np.ndarray:
        window = self._entries[start:stop]
        return window[self._position[window] == self._index[start:stop]]

    def _compact(self, room: int = 0) -> None:
        """Moves the live entries to the start, behind so many places."""
        live = self.to_array()
        self._head, self._tail = room, room + len(live)
        self._entries[room : self._tail] = live
        self._position[live] = self._index[room : self._tail]


class BlockPool:
    """Reference counts and the free list of `num_blocks` blocks, block 0 excepted, and the names of full blocks.

    Args:
        num_blocks: blocks in the pool, the null block included.
        block_size: tokens a block holds.
        enable_prefix_caching: keep names of full blocks, so that `cache` finds them; `cache` is None without.
        windows: of the cache groups that draw on the pool (`CacheGroup.window`).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.cache = PrefixCache(num_blocks, block_size, windows) if enable_prefix_caching else None
        self._ref_counts = np.zeros((num_blocks,), np.int32)
        self._free_list = FreeList(num_blocks)
        self._free_list.push(np.arange(1, num_blocks, dtype=np.int32))
        self._is_absent = np.zeros((num_blocks,), np.bool_)
        self._promised_to = np.full((num_blocks,), NOBODY, np.int32)
        self.num_absent = 0
        self.num_releases = 0

    @property
    def capacity(self) -> int:
        """Blocks that can be allocated at most: all but the null block, absent ones included."""
        return self.num_blocks - 1

    @property
    def num_present(self) -> int:
        """Blocks that are not absent, less the null block."""
        return self.capacity - self.num_absent

    @property
    def num_free(self) -> int:
        return len(self._free_list)

    @property
    def num_used(self) -> int:
        return self.num_present - self.num_free

    def ref_count(self, block_id: int) -> int:
        return int(self._ref_counts[block_id])

    def occupancy(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies of the references to each block, int32 [num_blocks], and of whether a prefix could hit it, bool."""
        named = np.zeros((self.num_blocks,), np.bool_) if self.cache is None else self.cache.registered()
        return self._ref_counts.copy(), named

    def blocks_to_admit(self, num_tokens: int, prompt_len: int, max_len: int) -> int:
        """Blocks that a sequence gets, in a group without a window, when it is admitted: just enough for its known
        tokens, the rest as it grows.

        Args:
            num_tokens: known tokens.
            prompt_len, max_len: of the prompt, and the length at which the sequence ends at the latest; an allocator
                that reserves ahead needs them.
        """
        del prompt_len, max_len
        return -(-num_tokens // self.block_size)

    def num_unreferenced(self, block_ids: np.ndarray) -> int:
        """How many of these blocks are on the free list, so that sharing them uses up free blocks."""
        return int(np.count_nonzero(self._ref_counts[block_ids] == 0)) if len(block_ids) else 0

    def allocate(self, n: int, wanted: np.ndarray | None = None, slots: np.ndarray | int = NOBODY) -> np.ndarray:
        """Hands out the n least recently used free blocks with one reference each.

        wanted: int32 [n]; blocks to have instead where that costs little (`can_have`). The null block for places
            without a wish.
        slots: int [n], or one for all; that wish for them.

        Returns: int32 [n].

        Raises:
            OutOfMemoryError: fewer are free; nothing is allocated.
        """
        if n > self.num_free:
            raise OutOfMemoryError(f"{n} blocks wanted, {self.num_free} of {self.num_present} are free.")
        granted = None if wanted is None else self.granted(wanted, slots)
        if wanted is None or granted is None or not granted.any():
            block_ids = self._free_list.pop(n)
        else:
            block_ids = wanted.astype(np.int32)
            self._free_list.remove(block_ids[granted])
            block_ids[~granted] = self._free_list.pop(n - int(np.count_nonzero(granted)))
        self._ref_counts[block_ids] = 1
        self._promised_to[block_ids] = NOBODY
        if self.cache is not None:
            self.cache.forget(block_ids)
        return block_ids

    def can_have(self, wanted: np.ndarray, slots: np.ndarray | int) -> np.ndarray:
        """Which of these blocks can be given to these slots out of turn: those that are free, promised to no other
        slot, and that no prefix could hit. Where the next ones in line would cost prefixes, too, also those that have
        been free for longer than half of the others. Bool of their shape.
        """
        promised_to = self._promised_to[wanted]
        fits = (self._ref_counts[wanted] == 0) & (wanted != NULL_BLOCK) & ~self._is_absent[wanted]
        fits &= (promised_to == NOBODY) | (promised_to == slots)
        if self.cache is not None:
            named = self.cache.are_named(wanted)
            if self.cache.host is None and (fits & named).any():
                next_ones = self._free_list.head(_LOOKED_AT)
                if 2 * np.count_nonzero(self.cache.are_named(next_ones)) >= len(next_ones):
                    named &= ~self._free_list.are_old(wanted)
            fits &= ~named
        return fits

    def granted(self, wanted: np.ndarray, slots: np.ndarray | int = NOBODY) -> np.ndarray:
        """Which of the wishes `allocate` would fulfil now: bool [n]. A block that is wished for twice is given once."""
        granted = self.can_have(wanted, slots)
        candidates = np.flatnonzero(granted)
        if len(candidates) > 1:
            first = np.unique(wanted[candidates], return_index=True)[1]
            granted[np.delete(candidates, first)] = False
        return granted

    def next_to_allocate(self, n: int) -> np.ndarray:
        """At most n of the free blocks that `allocate` hands out next, in order; those it skips over count, too."""
        return self._free_list.head(n)

    def promise(self, slots: np.ndarray) -> np.ndarray:
        """The least recently used free blocks, one for each of these slots, which can wish for them from now on while
        others cannot. They stay free, but come last in line. Prefixes in them are forgotten.

        Returns: int32 [n]; the caller has checked that so many are free.
        """
        block_ids = self._free_list.pop(len(slots))
        self._free_list.push(block_ids)
        if self.cache is not None:
            self.cache.forget(block_ids)
        self._promised_to[block_ids] = slots
        return block_ids

    def touch(self, block_ids: np.ndarray) -> None:
        """Those of these distinct blocks that are free come last in line, as if just used: they are about to be hit."""
        free = block_ids[(self._ref_counts[block_ids] == 0) & (block_ids > NULL_BLOCK)].astype(np.int32)
        self._free_list.remove(free)
        self._free_list.push(free)

    def withhold(self, n: int) -> np.ndarray:
        """Makes the n least recently used free blocks absent, int32 [n]; prefixes in them are forgotten. The caller has
        checked that so many are free.
        """
        block_ids = self._free_list.pop(n)
        if self.cache is not None:
            self.cache.drop(block_ids)
        self._is_absent[block_ids] = True
        self.num_absent += n
        return block_ids

    def restore(self, block_ids: np.ndarray) -> None:
        """Makes absent blocks free; they are allocated before all others, which prefixes might hit."""
        self._is_absent[block_ids] = False
        self.num_absent -= len(block_ids)
        self._free_list.push_front(block_ids)

    def absent(self, n: int) -> np.ndarray:
        """At most n of the absent blocks, int32, ascending."""
        return np.flatnonzero(self._is_absent)[:n].astype(np.int32)

    def set_present(self, present: np.ndarray) -> None:
        """Makes those blocks absent that are not in `present`, bool [num_blocks], and all others free. None is
        referenced, and no prefix is in the cache.
        """
        self._is_absent[1:] = ~present[1:]
        self.num_absent = int(np.count_nonzero(self._is_absent))
        self._free_list.pop(len(self._free_list))
        self._free_list.push(np.flatnonzero(~self._is_absent)[1:].astype(np.int32))

    def share(self, block_ids: np.ndarray) -> None:
        """Adds a reference to each of these distinct blocks; those that were free leave the free list."""
        if not len(block_ids):
            return
        block_ids = block_ids.astype(np.intp)  # which numpy would do at each use of them as an index
        refs = self._ref_counts[block_ids]
        self._free_list.remove(block_ids[refs == 0])
        self._ref_counts[block_ids] = refs + 1

    def add_owners(self, block_ids: np.ndarray, count: int) -> None:
        """Adds `count` references to each of these distinct blocks, all of which have one: `share` without looking for
        free ones.
        """
        self._ref_counts[block_ids.astype(np.intp)] += count

    def free(self, block_ids: np.ndarray) -> None:
        """Drops a reference to each of a sequence's distinct blocks, given in the order of its table.

        Those that nobody references any more join the free list in reverse order: the tail of a sequence is useless
        without its head, so it is reused first.

        Raises:
            EngineDeadError: one of them is not referenced.
        """
        backwards = block_ids[::-1].astype(np.intp)
        left = self._ref_counts[backwards] - 1
        if len(left) and left.min() < 0:
            raise EngineDeadError(f"Blocks freed that nobody owns: {backwards[left < 0].tolist()}.")
        self._ref_counts[backwards] = left
        self._free_list.push(backwards[left == 0])
        self.num_releases += 1

    def release(self, block_ids: np.ndarray) -> int:
        """Drops a reference for each time a block is named here, in any order. Returns how many became free.

        Raises:
            EngineDeadError: a block is named more often than it is referenced.
        """
        np.subtract.at(self._ref_counts, block_ids, 1)
        left = self._ref_counts[block_ids]
        if len(left) and left.min() < 0:
            raise EngineDeadError(f"Blocks released that nobody owns: {block_ids[left < 0].tolist()}.")
        free = np.unique(block_ids[left == 0])
        self._free_list.push(free)
        self.num_releases += 1
        return len(free)

    def unshare(self, block_ids: np.ndarray) -> None:
        """Drops a reference for each time a block is named here; every one of them keeps at least one."""
        np.subtract.at(self._ref_counts, block_ids, 1)

    def check_integrity(self, tables: Iterable[np.ndarray]) -> None:
        """Compares the counts with the block tables that hold the references: no block lost, none doubly owned.

        Args:
            tables: int32 [n] each; the blocks of every sequence.

        Raises:
            EngineDeadError: they disagree; the message names the blocks.
        """
        expected = np.zeros((self.num_blocks,), np.int32)
        for table in tables:
            np.add.at(expected, table, 1)
        _refuse(self._ref_counts != expected, "referenced more or less often than the block tables say")
        times_free = np.bincount(self._free_list.to_array(), minlength=self.num_blocks)
        free = expected == 0
        free[NULL_BLOCK] = False
        _refuse(self._is_absent & ~free, "referenced, though absent")
        free &= ~self._is_absent
        _refuse(times_free != free, "lost, or free and owned at once")
        if len(self._free_list) != np.count_nonzero(free):
            raise EngineDeadError(f"{np.count_nonzero(free)} blocks are free, counted {len(self._free_list)}.")
        if self.cache is not None:
            self.cache.check_integrity()


def _refuse(wrong: np.ndarray, what: str) -> None:
    if wrong.any():
        raise EngineDeadError(f"Blocks {what}: {np.flatnonzero(wrong)[:16].tolist()}.")
