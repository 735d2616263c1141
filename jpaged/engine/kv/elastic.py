"""A pool whose memory comes and goes while requests run, so that engines can share a device.

    block id     1      2      3      4      5      6      7
    memory       yes    yes    yes    yes    no     no     no
                 used   used   free   free   absent absent absent

An absent block is neither referenced nor on the free list. Blocks become absent when they have not been needed for a
while: the fewest that were free at any moment of the last `idle_s` seconds go, least recently used first, and cached
prefixes in them are forgotten. They come back when requests need more than is free, as far as the device has memory by
then; where it has not, requests wait or are preempted, as they are when a pool is full.
"""

import time
from collections.abc import Callable

import numpy as np

from jpaged.api.errors import OutOfMemoryError
from jpaged.engine.interface import BlockMemory
from jpaged.engine.kv.block_pool import BlockPool

_LEAST_TAKEN = 32
"""Blocks that are asked for at once; making a page of an H200 takes 42 us."""
_GIVEN_AT_ONCE = 64
"""Blocks that are given back in one turn of the engine's loop: their pages take 2 ms."""
_PARTS = 2
"""Parts that `idle_s` is observed in."""


class ElasticPool:
    """Gives blocks of a pool their memory, and gives it back.

    Args:
        pool: no block of it is referenced.
        memory: of its blocks.
        idle_s: seconds for which memory must not have been needed before it goes back.
        least: blocks that keep their memory in any case: those of the longest sequence.
        clock: seconds.

    Raises:
        OutOfMemoryError: the device has no memory for `least` blocks.
    """

    def __init__(
        self,
        pool: BlockPool,
        memory: BlockMemory,
        idle_s: float,
        least: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._memory = memory
        self._part_s = idle_s / _PARTS
        self._least = least
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """No block of the pool is referenced, and others may have changed which of them have memory.

        Raises:
            OutOfMemoryError: as at the beginning.
        """
        self._pool.set_present(self._memory.has_memory(self._pool.num_blocks))
        self._fewest = [self._pool.num_free]  # that were free, in each part of the last `idle_s`
        self._part_ends = self._clock() + self._part_s
        self._num_idle = 0
        self._is_pending = False  # memory that goes back when steps have run
        self.secure(self._least)

    def grow(self, missing: int) -> None:
        """Takes memory for at least so many more blocks, or for as many as the device has it for."""
        wanted = self._pool.absent(max(missing, _LEAST_TAKEN))
        if len(wanted):
            self._pool.restore(wanted[: self._memory.take_memory(wanted)])
        self._num_idle = 0

    def secure(self, num_blocks: int) -> None:
        """Sees to it that so many blocks have memory, used ones included.

        Raises:
            OutOfMemoryError: the device has not so much.
        """
        missing = num_blocks - self._pool.num_present
        if missing > 0:
            self.grow(missing)
        if num_blocks > self._pool.num_present:
            raise OutOfMemoryError(
                f"{num_blocks} blocks are needed, but the device has memory for {self._pool.num_present}: others use "
                f"the rest. Try again when they have given it back."
            )

    def give_back_idle(self, num_available: int, needed: Callable[[], int], nothing_runs: bool) -> bool:
        """Gives back some of what is idle. Called in each turn of the engine's loop.

        Args:
            num_available: blocks that are free, less those that are reserved.
            needed: tells how many blocks unfinished requests, and pinned prefixes, need to keep.
            nothing_runs: no step is in flight, and no request unfinished.

        Returns: whether there is more that can go back at once.
        """
        if nothing_runs and self._is_pending:
            self._memory.give_memory_back(np.zeros((0,), np.int32), nothing_runs)
            self._is_pending = False
        self._fewest[-1] = min(self._fewest[-1], num_available)
        now = self._clock()
        if now >= self._part_ends:
            self._part_ends = now + self._part_s
            self._num_idle = min(self._fewest) if len(self._fewest) == _PARTS else 0
            self._fewest = [*self._fewest[-(_PARTS - 1) :], num_available]
        most = min(self._num_idle, num_available)
        if most > 0:
            most = min(most, self._pool.num_present - max(self._least, needed()))
        if most > 0:
            given = self._pool.withhold(min(most, _GIVEN_AT_ONCE))
            self._memory.give_memory_back(given, nothing_runs)
            self._is_pending |= not nothing_runs
            self._num_idle -= len(given)
            self._fewest = [fewest - len(given) for fewest in self._fewest]
        return most > _GIVEN_AT_ONCE
