"""Blocks in host memory: those of preempted sequences, and, in what is left, prefixes that the pool had no room for.

    pool     A [ 7 ][ 1 ][ 3 . ]      swapped out together     chunk 4  [ 7 | 1 | 3 . | 1' | 3' . | ... ]
             B [ 7 ][ 1'][ 3'. ]            -------->          A: places 0 1 2      B: places 0 3 4

A chunk holds `SWAP_CHUNK_BLOCKS` blocks and moves in one copy; it belongs to the sequences that were swapped out
together, so it is free again as soon as they are back. Sequences that share full blocks share their places, too. A
last, partly filled block gets a place for each of its owners, since each will write to its own.

Prefixes (`host_tier.py`) have the chunks that no sequences need, and lose them, oldest first, when these do.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from jpaged.api.errors import EngineDeadError
from jpaged.engine.interface import NULL_BLOCK, SWAP_CHUNK_BLOCKS, HostCopy
from jpaged.engine.kv.block_pool import BlockPool
from jpaged.engine.kv.host_tier import HostTier
from jpaged.engine.kv.swap_record import NO_PLACE, SwapRecord
from jpaged.engine.sequences.request import Request
from jpaged.engine.sequences.slots import Slots

_FEWEST_EVICTED = SWAP_CHUNK_BLOCKS // 2
"""A chunk for fewer evicted blocks would waste more of the link and of the space than it uses."""

_ENTRIES_AHEAD = 4 * SWAP_CHUNK_BLOCKS
"""How far down the free list to look for prefixes that fill a chunk."""


@dataclass(slots=True)
class Restored:
    """What `SwapSpace.restore` did. tables: int32 [groups, n] for each sequence. copies: for `StepPlan.swap_ins`."""

    tables: list[np.ndarray]
    copies: list[HostCopy]


@dataclass(slots=True)
class SwapSpace:
    """Which chunks of host memory are free.

    num_chunks: how many there are; 0 turns swapping off.
    tier: the prefixes in host memory; None where there are none.
    """

    num_chunks: int
    tier: HostTier | None = None
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    _pending_copies: list[HostCopy] = field(default_factory=list)
    _free: list[int] = field(init=False)
    _free_after_plan: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free = list(range(self.num_chunks))[::-1]

    @property
    def num_used(self) -> int:
        """Chunks that hold sequences."""
        num_cached = 0 if self.tier is None else len(self.tier.chunks)
        return self.num_chunks - len(self._free) - len(self._free_after_plan) - num_cached

    def store(self, members: list[Request], slots: Slots, block_size: int) -> bool:
        """Copies the blocks of sequences that have nothing in flight, if there is room, and sets their `swap`.

        They still own their blocks; the copies come before whatever the next plan writes.
        """
        blocks: list[int] = []
        place_of: dict[int, int] = {}
        places, num_computed = [], []
        for member in members:
            computed = int(slots.num_computed[member.slot])
            tables = slots.block_tables[:, member.slot, : -(-computed // block_size)]
            own = np.full(tables.shape, NO_PLACE, np.int64)
            for group, index in np.argwhere(tables != NULL_BLOCK).tolist():
                block_id = int(tables[group, index])
                is_full = (index + 1) * block_size <= computed
                if not is_full or block_id not in place_of:
                    place_of[block_id] = len(blocks)
                    blocks.append(block_id)
                own[group, index] = place_of[block_id]
            places.append(own)
            num_computed.append(computed)
        chunks = self._take(-(-len(blocks) // SWAP_CHUNK_BLOCKS))
        if not chunks:
            return False
        record = SwapRecord(list(members), chunks, np.array(blocks, np.int32), places, num_computed)
        self._pending_copies += _copies(chunks, record.block_ids)
        self.num_swapped_out += len(blocks)
        for member in members:
            member.swap = record
        return True

    def restore(self, record: SwapRecord[Request], pool: BlockPool) -> Restored:
        """Gives swapped sequences blocks again, shared as before, and their chunks to others.

        Raises:
            OutOfMemoryError: fewer than `record.num_places` blocks are free.
        """
        block_ids = pool.allocate(record.num_places)
        taken = np.zeros((record.num_places,), np.bool_)
        tables = []
        for places in record.places:
            held = places[places != NO_PLACE]
            pool.share(block_ids[held[taken[held]]])
            taken[held] = True
            tables.append(np.where(places != NO_PLACE, block_ids[places], NULL_BLOCK))
        pool.free(block_ids[~taken])  # those of sequences that have ended meanwhile
        self.num_swapped_in += record.num_places
        copies = _copies(record.chunks, np.where(taken, block_ids, 0).astype(np.int32))
        self._free_after_plan += record.chunks
        for member in record.members:
            member.swap = None
        return Restored(tables, copies)

    def drop(self, request: Request) -> None:
        """Forgets a swapped sequence that has ended; others may have been swapped out with it."""
        record = request.swap
        if record is None:
            return
        if len(record.members) == 1:
            self.discard(record)
            return
        index = record.members.index(request)
        del record.members[index], record.places[index], record.num_computed[index]
        request.swap = None

    def discard(self, record: SwapRecord[Request]) -> None:
        """Frees the chunks of sequences that have ended or are to be computed again."""
        self._free += record.chunks
        for member in record.members:
            member.swap = None

    def keep_evicted(self, pool: BlockPool) -> None:
        """Copies the prefixes to host memory that the plan being made reuses the blocks of, as far as there is room
        besides sequences. Chunks are filled up with the prefixes that are next in line.
        """
        if self.tier is None or pool.cache is None or not (blocks := self.tier.take_evicted()):
            return
        if missing := -len(blocks) % SWAP_CHUNK_BLOCKS:
            ahead = pool.cache.named(pool.next_to_allocate(_ENTRIES_AHEAD))
            blocks += islice((block for block in ahead if block.digest not in self.tier), missing)
        for first in range(0, len(blocks), SWAP_CHUNK_BLOCKS):
            part = blocks[first : first + SWAP_CHUNK_BLOCKS]
            chunks = self._take(1) if len(part) >= _FEWEST_EVICTED else []
            if not chunks:
                return
            self.tier.put(chunks[0], part)
            self._pending_copies += _copies(chunks, np.array([block.block_id for block in part], np.int32))

    def drop_prefixes(self) -> None:
        """Forgets all prefixes in host memory."""
        if self.tier is not None:
            self._free += self.tier.clear()

    def end_plan(self) -> tuple[HostCopy, ...]:
        """`StepPlan.swap_outs` for the plan that is complete. What it reads may be overwritten by the next."""
        copies = tuple(self._pending_copies)
        self._pending_copies.clear()
        self._free += self._free_after_plan
        self._free_after_plan.clear()
        if self.tier is not None:
            self.tier.end_plan()
        return copies

    def check_integrity(self, records: Iterable[SwapRecord[Request]]) -> None:
        """Raises EngineDeadError unless each chunk is free, or holds prefixes, or the sequences of one record."""
        held = [*self._free, *self._free_after_plan, *(chunk for record in records for chunk in record.chunks)]
        if self.tier is not None:
            self.tier.check_integrity()
            held += self.tier.chunks
        if sorted(held) != list(range(self.num_chunks)):
            raise EngineDeadError(f"Of {self.num_chunks} chunks of swap space, free or in use are {sorted(held)}.")

    def _take(self, n: int) -> list[int]:
        """So many free chunks, or such as hold only prefixes; none if there are fewer."""
        if n > len(self._free) + (0 if self.tier is None else self.tier.num_droppable):
            return []
        while self.tier is not None and len(self._free) < n:
            self._free.append(self.tier.drop_oldest())
        return [self._free.pop() for _ in range(n)]


def _copies(chunks: list[int], block_ids: np.ndarray) -> list[HostCopy]:
    firsts = range(0, len(block_ids), SWAP_CHUNK_BLOCKS)
    return [
        HostCopy(chunk, block_ids[first : first + SWAP_CHUNK_BLOCKS])
        for chunk, first in zip(chunks, firsts, strict=True)
    ]
