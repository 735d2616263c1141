"""The prefix cache's second tier: blocks that the pool reused, kept in what the swap space has to spare.

    pool    free list, oldest first   [ 8 | 3 | 5 | 9 | ... ]     a plan takes 8 and 3: their prefixes would be lost
    out     chunk 2  <--------------  [ 8 | 3 | 5 | 9 | ... ]     with the next in line, so that the chunk is full
    in      chunk 2  -------------->  [ - | - | 4 | - | ... ]     later, a prompt with what was in 5 gets block 4

A block goes out before the step whose plan reuses it, those next in line ahead of time: they keep their contents and
names in the pool, and need no copy when their turn comes. A hit copies, so what is here stays, in whole chunks, until
the swap space needs the chunk: for sequences, or for blocks evicted later. The chunk used least recently goes first.

What a plan reads must not be overwritten by the same plan, whose copies out come before its copies in. So chunks that
it reads are not dropped before `end_plan`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jpaged.api.errors import EngineDeadError
from jpaged.engine.interface import NULL_BLOCK, SWAP_CHUNK_BLOCKS, HostCopy


class NamedBlock(NamedTuple):
    """A block of the pool and what the prefix cache knows it by. token_ids: int32 [block_size]."""

    block_id: int
    digest: bytes
    parent: bytes
    token_ids: np.ndarray


@dataclass(slots=True)
class _Chunk:
    """What is in a chunk's places. token_ids: int32 [places, block_size]."""

    digests: list[bytes]
    parents: list[bytes]
    token_ids: np.ndarray


class HostTier:
    """Which prefixes are in which place of which chunk. `SwapSpace` hands it chunks and takes them back."""

    def __init__(self) -> None:
        self._chunks: dict[int, _Chunk] = {}  # least recently used first
        self._place_of: dict[bytes, tuple[int, int]] = {}
        self._evicted: dict[bytes, NamedBlock] = {}
        self._read: set[int] = set()

    def __len__(self) -> int:
        """Blocks that can be hit."""
        return len(self._place_of)

    @property
    def chunks(self) -> list[int]:
        """The chunks that it has, least recently used first."""
        return list(self._chunks)

    @property
    def num_droppable(self) -> int:
        """Chunks that this plan does not read."""
        return len(self._chunks) - len(self._read)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._place_of

    def holds(self, digest: bytes, parent: bytes, token_ids: np.ndarray) -> bool:
        """Whether these tokens are here, under this name and after this parent."""
        if digest not in self._place_of:
            return False
        number, place = self._place_of[digest]
        chunk = self._chunks[number]
        return chunk.parents[place] == parent and np.array_equal(chunk.token_ids[place], token_ids)

    def evict(self, blocks: Iterator[NamedBlock]) -> None:
        """Takes note of blocks that the plan being made reuses. Their contents last until it is carried out."""
        for block in blocks:
            if block.digest in self._place_of:
                self._touch(self._place_of[block.digest][0])
            else:
                self._evicted[block.digest] = block

    def take_evicted(self) -> list[NamedBlock]:
        """The blocks evicted since the last plan that are not here yet."""
        evicted = list(self._evicted.values())
        self._evicted.clear()
        return evicted

    def put(self, number: int, blocks: Sequence[NamedBlock]) -> None:
        """Fills an empty chunk with blocks, at most SWAP_CHUNK_BLOCKS, that are not here."""
        digests = [block.digest for block in blocks]
        token_ids = np.stack([block.token_ids for block in blocks])
        self._chunks[number] = _Chunk(digests, [block.parent for block in blocks], token_ids)
        self._place_of.update((digest, (number, place)) for place, digest in enumerate(digests))

    def fetch(self, digests: Sequence[bytes], block_ids: np.ndarray) -> list[HostCopy]:
        """Copies of what is here to blocks of the pool, for `StepPlan.swap_ins`.

        Args:
            digests: all of them held. block_ids: int32 [digests]; where each is to go.
        """
        targets: dict[int, np.ndarray] = {}
        for digest, block_id in zip(digests, block_ids.tolist(), strict=True):
            number, place = self._place_of[digest]
            if number not in targets:
                targets[number] = np.full((SWAP_CHUNK_BLOCKS,), NULL_BLOCK, np.int32)
                self._read.add(number)
                self._touch(number)
            targets[number][place] = block_id
        return [HostCopy(number, target, keep=True) for number, target in targets.items()]

    def drop_oldest(self) -> int:
        """Forgets the chunk used least recently, of those that this plan does not read, and gives it back."""
        number = next(number for number in self._chunks if number not in self._read)
        self._forget(number)
        return number

    def clear(self) -> list[int]:
        """Forgets everything and gives all chunks back."""
        numbers = list(self._chunks)
        for number in numbers:
            self._forget(number)
        self._evicted.clear()
        return numbers

    def end_plan(self) -> None:
        """The plan is complete: what it reads may be overwritten by the next."""
        self._read.clear()

    def check_integrity(self) -> None:
        """Raises EngineDeadError unless names and places correspond one to one."""
        held = {
            digest: (number, place)
            for number, chunk in self._chunks.items()
            for place, digest in enumerate(chunk.digests)
        }
        places = sum(len(chunk.digests) for chunk in self._chunks.values())
        if held != self._place_of or places != len(held):
            raise EngineDeadError("The prefix cache's names and places in host memory do not correspond.")

    def _touch(self, number: int) -> None:
        self._chunks[number] = self._chunks.pop(number)

    def _forget(self, number: int) -> None:
        for digest in self._chunks.pop(number).digests:
            del self._place_of[digest]
