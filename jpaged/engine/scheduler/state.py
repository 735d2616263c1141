"""What the scheduler's parts work on together."""

from dataclasses import dataclass

import numpy as np

from jpaged.engine.config import SchedulerConfig
from jpaged.engine.constraints.dependent_rows import Dependents
from jpaged.engine.kv.block_manager import BlockManager
from jpaged.engine.kv.block_pool import BlockPool
from jpaged.engine.kv.swap_space import SwapSpace
from jpaged.engine.scheduler.waiting_queue import WaitingQueue
from jpaged.engine.sequences.request import Request
from jpaged.engine.sequences.slots import Slots
from jpaged.engine.stats import Counters


@dataclass(frozen=True)
class SchedulerState:
    """One scheduler's configuration, and the objects that hold its state.

    pool, slots, blocks: who holds which block, who has which slot, and the slots' block tables.
    swap_space: blocks in host memory.
    waiting: sequences without a slot.
    dependents: rows that wait for their last result.
    counters: totals for `EngineStats`.
    """

    config: SchedulerConfig
    pool: BlockPool
    slots: Slots
    blocks: BlockManager
    swap_space: SwapSpace
    waiting: WaitingQueue
    dependents: Dependents
    counters: Counters


class SchedulerPart:
    """A part of the scheduler, which has the fields of the state as attributes of its own."""

    def __init__(self, state: SchedulerState) -> None:
        self._config = state.config
        self._pool = state.pool
        self._slots = state.slots
        self._blocks = state.blocks
        self._swap_space = state.swap_space
        self._waiting = state.waiting
        self._dependents = state.dependents
        self._counters = state.counters
        self._snapshots = None if state.pool.cache is None else state.pool.cache.snapshots

    def _prefix_hits(self, request: Request, token_ids: np.ndarray) -> np.ndarray:
        """Blocks in the prefix cache for the beginning of a request's known tokens, as `PrefixCache.match`."""
        return self._prefix_match(request, token_ids)[0]

    def _prefix_match(self, request: Request, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same, and those that would be hits if the sequence needed no state after them."""
        cache = self._pool.cache
        reusable = self._num_reusable(request, len(token_ids))
        if cache is None or not reusable:
            none = np.zeros((len(self._config.windows), 0), np.int32)
            return none, none
        if self._snapshots is not None:
            return cache.match_with_state(request.block_digests, token_ids, reusable, request.cache_salt)
        hits = cache.match(request.block_digests, token_ids, reusable, request.cache_salt)
        return hits, hits

    def _num_reusable(self, request: Request, num_known: int) -> int:
        """Blocks that need not be computed, of so many known tokens, if the prefix cache has them."""
        return request.num_skippable_tokens(num_known) // self._config.block_size
