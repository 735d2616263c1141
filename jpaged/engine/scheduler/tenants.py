"""The sequences that have slots, and how they leave them.

    leave      the slot is emptied: tokens are kept, full blocks get their names and are freed
    end        the sequence is finished; with its last sequence the request is

A sequence that the device ended itself just leaves. For any other running sequence, the next plan tells the device to
end it.
"""

import time

import numpy as np

from jpaged.engine.scheduler.state import SchedulerPart, SchedulerState
from jpaged.engine.sequences.group import SequenceGroup
from jpaged.engine.sequences.request import FinishReason, Request, RequestStatus


class Tenants(SchedulerPart):
    """Who has which slot.

    groups: of all unfinished requests, by request id.
    prefilling: running sequences that have known tokens left to compute, in the order in which these are planned.
    """

    def __init__(self, state: SchedulerState) -> None:
        super().__init__(state)
        self._block_size = state.config.block_size
        self._cache = state.pool.cache
        self._pending_ends: list[int] = []
        self.groups: dict[str, SequenceGroup] = {}
        self.prefilling: list[Request] = []

    def take_ends(self) -> list[int]:
        """Slots that the device must be told to end; they are named once."""
        ends = self._pending_ends
        if ends:
            self._pending_ends = []
        return ends

    def end_on_device(self, slot: int) -> None:
        """A slot's sequence has ended, which the device is to be told."""
        self._pending_ends.append(slot)

    def register(self, request: Request, num_tokens: int) -> None:
        """Names the full blocks among the first `num_tokens` tokens of a running request, known and computed."""
        cache, slot = self._cache, request.slot
        stop = num_tokens // self._block_size
        if cache is None or request.has_stale_blocks or stop <= request.num_registered_blocks:
            return
        cache.register(
            request.block_digests,
            self._slots.known(slot),
            self._slots.table(slot),
            request.num_registered_blocks,
            stop,
            request.cache_salt,
        )
        request.num_registered_blocks = stop

    def give_up(self, request: Request) -> None:
        """Takes a request out of its slot and tells the device, if it knows of it."""
        if self._slots.holds_tokens(request.slot):
            self._pending_ends.append(request.slot)
        self.leave(request)

    def leave(self, request: Request) -> None:
        """Takes a request out of its slot: keeps its tokens, names its full blocks and frees them.

        Generated blocks get their names here, all at once, rather than one by one in the middle of decode steps:
        nobody can ask for a continuation before it has been returned. A sequence's last known token need not have
        been computed, so a block that ends with it gets none.
        """
        slots, slot = self._slots, request.slot
        known = slots.known(slot)
        self.register(request, min(int(slots.num_computed[slot]), len(known) - 1))
        if self._snapshots is not None and self._cache is not None:
            digests = [] if request.has_stale_blocks else request.block_digests[: request.num_registered_blocks]
            self._snapshots.leave(slot, digests, self._cache.names)
        if not request.reports_each_token:
            request.output_token_ids = known[request.prompt_len :].tolist()
        self._blocks.free(slot)
        kind = self._dependents.of(request)
        if kind is not None:
            kind.left(request)
        slots.release(slot)
        if request in self.prefilling:
            self.prefilling.remove(request)

    def end_all(self, group: SequenceGroup, reason: FinishReason) -> None:
        """Finishes a request in whatever state, with what its sequences have generated so far, and frees their blocks.

        What an "error" leaves in its blocks is not to be hit by any prefix.
        """
        for _ in group.waiting():
            self._waiting.count_out()
        for member in group.members:
            if member.swap is not None:
                self._swap_space.discard(member.swap)
            if member.status == RequestStatus.RUNNING:
                block_ids = self._slots.blocks(member.slot).copy()
                self.give_up(member)
                if reason == "error":
                    self.drop_cached(block_ids, member.block_digests)
            if not member.finished:
                self.end(member, reason, None)

    def drop_cached(self, block_ids: np.ndarray, digests: list[bytes]) -> None:
        """No prefix will hit the blocks that a sequence had, nor go on from a state of its own.

        block_ids: int32 [n]. digests: of its tokens' blocks; equal ones of others may have the names.
        """
        if self._cache is not None:
            self._cache.drop(block_ids)
        if self._snapshots is not None:
            for digest in digests:
                self._snapshots.forget(digest)

    def end(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        """Finishes a sequence that has no slot, or no longer."""
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.stats.finished_time = time.monotonic()
        request.block_digests = []
        if request.group.finished:
            del self.groups[request.request_id]
            self._dependents.forget(request)
            if request.table is not None:
                request.table.release()
            self._counters.num_finished += 1
