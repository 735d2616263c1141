"""What the next plans will need, for an executor that maps blocks at places of slots (`SchedulerConfig.plans_ahead`).

    a row that grows     the blocks of its next tokens, several at once while many are free: neighbouring places are
                         mapped at less cost than single ones
    a request that       its first blocks, in the free slot that it will get: the one whose former tenants' blocks fit
    waits                best

These blocks stay free. They are promised to the slot (`BlockPool.promise`), go to the end of the free list, and stand
in the slot's table behind what its tenant holds, as the blocks of former tenants do: `Slots.wanted` names both, and
whoever gets there next is given them if nobody else had to have them meanwhile. Where blocks are short, nothing is
promised beyond the next step, and a promise keeps no block from who needs it.

Layers with windows, steps of several tokens a row and prefixes in host memory are foreseen one block a row.
"""

import numpy as np

from jpaged.engine.interface import NULL_BLOCK
from jpaged.engine.scheduler.state import SchedulerPart, SchedulerState
from jpaged.engine.sequences.request import Request, RequestStatus

_RUN_TOKENS = 128
"""Tokens whose blocks a row that grows is promised at once: eight pages of an 8B model in sliced pages."""
_STEPS_AHEAD = 8
"""Steps before a row needs a block, from which on it may be promised one: rows that grow in one step are spread."""
_ROWS_A_STEP = 64
"""Rows that a plan promises blocks to; more only where they need them in the next step."""
_MOST_PROMPTS = 64
"""Requests that wait, at most, for which slots are prepared."""
_FREE_SHARE = 4
"""Promises take one free block in so many at the most, beyond the next step's."""


class Foresight(SchedulerPart):
    """Promises blocks to slots, and says which slot a request should have."""

    def __init__(self, state: SchedulerState) -> None:
        super().__init__(state)
        cache, size = state.pool.cache, state.config.block_size
        self._promises = (
            state.config.plans_ahead
            and state.config.windows == (None,)
            and state.config.tokens_per_row == 1
            and (cache is None or cache.host is None)
        )
        self._run = max(1, _RUN_TOKENS // size)
        self._steps_ahead = min(_STEPS_AHEAD, size - 1)
        self._prepared: dict[int, Request] = {}  # by slot

    def entries(self) -> np.ndarray:
        """As `StepPlan.ahead`. It errs where others are served first."""
        if not self._promises:
            return self._next_blocks()
        growing = self._of_growing_rows()
        waiting = self._of_waiting_requests()
        return np.concatenate([growing, waiting]) if len(waiting) else growing

    def slot_for(self, request: Request, first: int, stop: int) -> int | None:
        """The free slot for a request that gets new blocks at these indices of its table: the one that was prepared for
        it, or whose blocks fit best. None where it makes no difference.
        """
        if not self._promises:
            return None
        for slot, prepared in self._prepared.items():
            if prepared is request and self._slots.requests[slot] is None:
                del self._prepared[slot]
                return slot
        slot = self._best_fit(first, stop)
        self._prepared.pop(slot, None)
        return slot

    def _best_fit(self, first: int, stop: int) -> int:
        """Of the slots that were freed first and last the one where getting blocks at these indices costs least.

        A block that can be had again costs nothing. Another one must be mapped, and the one that is there unmapped, at
        about half the cost. Of several such slots it is the one with the fewest blocks behind these, and of those the
        one freed first. Slots that are prepared for others come last.
        """
        candidates = self._slots.free_candidates(self._prepared)
        if len(candidates) == 1:
            return int(candidates[0])
        width = self._slots.block_tables.shape[2]
        indices = np.arange(first, max(first + 1, min(2 * stop, width)))
        there = self._slots.block_tables[0][candidates[:, None], indices]
        fits, n = self._pool.can_have(there, candidates[:, None]), stop - first
        in_the_way = (there[:, :n] != NULL_BLOCK) & ~fits[:, :n]
        saved = 2 * fits[:, :n].sum(axis=1) - in_the_way.sum(axis=1)
        return int(candidates[np.argmax(saved * (width + 1) - fits[:, n:].sum(axis=1))])

    def _of_growing_rows(self) -> np.ndarray:
        slots, pool, size = self._slots, self._pool, self._config.block_size
        rows = slots.decodable()
        room = slots.capacity[rows] - slots.num_computed[rows]
        is_near = room <= self._steps_ahead
        rows, room = rows[is_near], room[is_near]
        if not len(rows):
            return _NOTHING
        next_index = slots.capacity[rows] // size
        grows = slots.end[rows] > slots.capacity[rows]
        rows, room, next_index = rows[grows], room[grows], next_index[grows]
        needs = ~pool.can_have(slots.block_tables[0][rows, next_index], rows)
        rows, room, next_index = rows[needs], room[needs], next_index[needs]
        if len(rows) > _ROWS_A_STEP:
            order = np.argsort(room, kind="stable")
            order = order[: max(_ROWS_A_STEP, int(np.count_nonzero(room <= 0)))]
            rows, room, next_index = rows[order], room[order], next_index[order]
        if not len(rows):
            return _NOTHING
        run = min(self._run, self._spare() // len(rows))
        if run < 1:  # blocks are short: what the next step needs
            rows, next_index, run = rows[room <= 0], next_index[room <= 0], 1
        indices = next_index[:, None] + np.arange(run)
        last = -(-slots.end[rows] // size)
        slots_of, at = np.repeat(rows, run), indices.reshape(-1)
        needed = at < np.repeat(last, run)
        return self._promise(slots_of[needed], at[needed])

    def _of_waiting_requests(self) -> np.ndarray:
        """Of the requests whose turn comes next, as many as a step has room for and slots and blocks are free for."""
        slots, size = self._slots, self._config.block_size
        self._prepared = {
            slot: request
            for slot, request in self._prepared.items()
            if slots.requests[slot] is None and request.status not in (RequestStatus.RUNNING, RequestStatus.FINISHED)
        }
        spare, budget = self._spare(), self._config.max_num_batched_tokens
        leader = self._waiting.peek()
        if leader is None or slots.num_free <= len(self._prepared) or -(-leader.prompt_len // size) > spare:
            return _NOTHING
        found: list[np.ndarray] = []
        prepared = set(map(id, self._prepared.values()))
        for request in self._waiting.first(_MOST_PROMPTS):
            budget -= request.prompt_len
            if budget < 0 and (found or prepared):
                break
            if id(request) in prepared:
                spare -= -(-request.prompt_len // size)
                continue
            resumes_together = request.group.runs_together and request.group.forked
            if request.swap is not None or resumes_together or slots.num_free <= len(self._prepared):
                break
            token_ids = request.known_token_ids()
            hits = self._prefix_hits(request, token_ids)
            first, stop = hits.shape[1], -(-len(token_ids) // size)
            spare -= stop - first
            if spare < 0:
                break
            self._pool.touch(hits.reshape(-1))
            slot = self._best_fit(first, stop)
            self._prepared[slot] = request
            found.append(self._promise(np.full((stop - first,), slot), np.arange(first, stop)))
        return np.concatenate(found) if found else _NOTHING

    def _promise(self, slots: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Sees to it that these slots' tables have blocks at these indices that they can have. Returns the entries that
        are new.
        """
        table = self._slots.block_tables[0]
        missing = ~self._pool.can_have(table[slots, indices], slots)
        slots, indices = slots[missing], indices[missing]
        slots, indices = slots[: self._blocks.num_available], indices[: self._blocks.num_available]
        entries = np.zeros((len(slots), 4), np.int32)
        if len(slots):
            block_ids = self._pool.promise(slots)
            self._slots.expect(slots, indices, block_ids)
            entries[:, 0], entries[:, 2], entries[:, 3] = slots, indices, block_ids
        return entries

    def _spare(self) -> int:
        """Blocks that may be promised beyond the next step's needs."""
        reserve = int(self._config.watermark * self._pool.capacity)
        return max(0, self._blocks.num_available - reserve) // _FREE_SHARE

    def _next_blocks(self) -> np.ndarray:
        """The blocks that rows will need to decode on, if they need one in the next step."""
        slots = self._slots
        rows = slots.decodable()
        growing = rows[slots.num_computed[rows] == slots.capacity[rows]]
        wanted = slots.wanted(growing, slots.capacity[growing] // self._config.block_size)
        if wanted is not None:  # what the slot had is mapped already
            growing = growing[~self._pool.granted(wanted, growing)]
        num_groups, n = len(slots.windows), len(growing)
        block_ids = self._pool.next_to_allocate(num_groups * n)
        entries = np.empty((num_groups * n, 4), np.int32)
        entries[:, 0], entries[:, 1] = np.tile(growing, num_groups), np.repeat(np.arange(num_groups), n)
        entries[:, 2] = np.tile(slots.capacity[growing] // self._config.block_size, num_groups)
        entries = entries[: len(block_ids)]
        entries[:, 3] = block_ids
        return entries


_NOTHING = np.zeros((0, 4), np.int32)
