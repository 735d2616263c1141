"""Who gives way when decode rows need more blocks than are free.

The last group in policy order is preempted: its sequences give up their blocks, keep their tokens and wait. Their
blocks go to host memory and come back later (`kv/swap_space.py`), or, where that is full or not asked for, they are
computed again. The first in policy order is never preempted while another runs, and if it does not fit alone it gives
up its sequences one by one, last first. One sequence always fits alone, so there is always progress.
"""

from collections.abc import Iterator

import numpy as np

from jpaged.api.config import PreemptionMode
from jpaged.engine.scheduler.state import SchedulerPart, SchedulerState
from jpaged.engine.scheduler.tenants import Tenants
from jpaged.engine.sequences.request import Request, RequestStatus


class Preemption(SchedulerPart):
    """Takes slots and blocks from sequences with nothing in flight, and puts them back into the queue."""

    def __init__(self, state: SchedulerState, tenants: Tenants) -> None:
        super().__init__(state)
        self._tenants = tenants

    def one_by_one(self) -> Iterator[None]:
        """Preempts from the end of the policy's order; each step of the iterator gives up some blocks.

        What is left over when the caller has enough is less than the last one preempted held, so that one does not
        start again in the same plan.
        """
        running = self._in_policy_order(self._slots.used())
        first = self._slots.requests[running[0]] if len(running) else None
        for slot in running[::-1].tolist():
            request = self._slots.requests[slot]
            if request is None:  # preempted with its group
                continue
            group = request.group
            alone = first is not None and group is first.group and group.forked and not group.runs_together
            self.preempt([request] if alone else group.running(), self._config.preemption_mode)
            yield

    def preempt(self, members: list[Request], mode: PreemptionMode) -> None:
        """Preempts sequences of one group, with nothing in flight: with their blocks in host memory, if the mode says
        so, their blocks hold what they count as computed, and there is room; or with their tokens only.
        """
        group = members[0].group
        for request in members:
            kind = self._dependents.of(request)
            if kind is not None:
                kind.leaves(request)
        stores = mode == "swap" or (mode == "auto" and len(members) > 1)
        if stores and group.can_be_stored and not self._config.keeps_states:
            started = [member for member in members if self._slots.holds_tokens(member.slot)]
            stored = self._swap_space.store(started, self._slots, self._config.block_size)
            self._counters.num_swap_preemptions += stored
        for request in members:
            self._tenants.give_up(request)
            request.status = RequestStatus.PREEMPTED
            if request.swap is None:  # else it comes back to the blocks that it had
                request.has_stale_blocks = False
        for request in group.waiting():
            if request in members:
                self._waiting.push(request)
        members[0].stats.num_preemptions += 1
        self._counters.num_preemptions += 1

    def start_over(self, members: list[Request]) -> None:
        """Preempts sequences of one group, with nothing in flight. They compute all their tokens themselves: what was
        in the cached blocks that they had is not to be trusted, and no prefix will hit their blocks.
        """
        held = [self._slots.blocks(member.slot).copy() for member in members]
        self.preempt(members, "recompute")
        for member, block_ids in zip(members, held, strict=True):
            member.distrusts_cache = True
            self._tenants.drop_cached(block_ids, member.block_digests)

    def _in_policy_order(self, slots: np.ndarray) -> np.ndarray:
        """Sorts slots, those that are preempted last first; the sequences of a group stand together, by index."""
        keys = [self._slots.index[slots], self._slots.arrival[slots]]
        if self._config.policy == "priority":
            keys.append(self._slots.priority[slots])
        return slots[np.lexsort(keys)]
