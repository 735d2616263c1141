"""Blocks of preempted sequences in host memory.

    pool     A [ 7 ][ 1 ][ 3 . ]      swapped out together     chunk 4  [ 7 | 1 | 3 . | 1' | 3' . | ... ]
             B [ 7 ][ 1'][ 3'. ]            -------->          A: places 0 1 2      B: places 0 3 4

A chunk holds `SWAP_CHUNK_BLOCKS` blocks and moves in one copy; it belongs to the sequences that were swapped out
together, so it is free again as soon as they are back. Sequences that share full blocks share their places, too. A
last, partly filled block gets a place for each of its owners, since each will write to its own.
"""

from dataclasses import dataclass, field

import numpy as np

from jpaged.engine.block_pool import BlockPool
from jpaged.engine.interface import SWAP_CHUNK_BLOCKS, HostCopy
from jpaged.engine.request import Request
from jpaged.engine.slots import Slots


@dataclass(slots=True)
class SwapRecord:
    """Sequences that are swapped out together, and come back together.

    chunks: where their blocks are. block_ids: int32 [places]; the blocks that were copied there.
    places: int64 [n] for each sequence; where its first n blocks are among them.
    num_computed: for each sequence; tokens in these blocks.
    """

    members: list[Request]
    chunks: list[int]
    block_ids: np.ndarray
    places: list[np.ndarray]
    num_computed: list[int]

    @property
    def num_places(self) -> int:
        return len(self.block_ids)

    def drop(self, request: Request) -> None:
        """Forgets one of the sequences, which has ended."""
        index = self.members.index(request)
        del self.members[index], self.places[index], self.num_computed[index]
        request.swap = None


@dataclass(slots=True)
class Restored:
    """What `SwapSpace.restore` did. tables: int32 [n] for each sequence. copies: for `StepPlan.swap_ins`."""

    tables: list[np.ndarray]
    copies: list[HostCopy]


@dataclass(slots=True)
class SwapSpace:
    """Which chunks of host memory are free.

    num_chunks: how many there are; 0 turns swapping off.
    pending_copies: `StepPlan.swap_outs` for the next plan.
    """

    num_chunks: int
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    pending_copies: list[HostCopy] = field(default_factory=list)
    _free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._free = list(range(self.num_chunks))[::-1]

    @property
    def num_used(self) -> int:
        """Chunks that hold something."""
        return self.num_chunks - len(self._free)

    def store(self, members: list[Request], slots: Slots, block_size: int) -> bool:
        """Copies the blocks of sequences that have nothing in flight, if there is room, and sets their `swap`.

        They still own their blocks; the copies come before whatever the next plan writes.
        """
        blocks: list[int] = []
        place_of: dict[int, int] = {}
        places, num_computed = [], []
        for member in members:
            computed = int(slots.num_computed[member.slot])
            own = []
            for index, block_id in enumerate(slots.blocks(member.slot)[: -(-computed // block_size)].tolist()):
                is_full = (index + 1) * block_size <= computed
                if not is_full or block_id not in place_of:
                    place_of[block_id] = len(blocks)
                    blocks.append(block_id)
                own.append(place_of[block_id])
            places.append(np.array(own, np.int64))
            num_computed.append(computed)
        num_chunks = -(-len(blocks) // SWAP_CHUNK_BLOCKS)
        if not blocks or num_chunks > len(self._free):
            return False
        chunks = [self._free.pop() for _ in range(num_chunks)]
        record = SwapRecord(list(members), chunks, np.array(blocks, np.int32), places, num_computed)
        self.pending_copies += _copies(chunks, record.block_ids)
        self.num_swapped_out += len(blocks)
        for member in members:
            member.swap = record
        return True

    def restore(self, record: SwapRecord, pool: BlockPool) -> Restored:
        """Gives swapped sequences blocks again, shared as before, and their chunks to others.

        Raises:
            OutOfMemoryError: fewer than `record.num_places` blocks are free.
        """
        block_ids = pool.allocate(record.num_places)
        taken = np.zeros((record.num_places,), np.bool_)
        tables = []
        for places in record.places:
            pool.share(block_ids[places[taken[places]]])
            taken[places] = True
            tables.append(block_ids[places])
        pool.free(block_ids[~taken])  # those of sequences that have ended meanwhile
        self.num_swapped_in += record.num_places
        copies = _copies(record.chunks, np.where(taken, block_ids, 0).astype(np.int32))
        self.discard(record)
        return Restored(tables, copies)

    def discard(self, record: SwapRecord) -> None:
        """Frees the chunks of sequences that have ended, are back, or are to be computed again."""
        self._free += record.chunks
        for member in record.members:
            member.swap = None


def _copies(chunks: list[int], block_ids: np.ndarray) -> list[HostCopy]:
    firsts = range(0, len(block_ids), SWAP_CHUNK_BLOCKS)
    return [
        HostCopy(chunk, block_ids[first : first + SWAP_CHUNK_BLOCKS])
        for chunk, first in zip(chunks, firsts, strict=True)
    ]
