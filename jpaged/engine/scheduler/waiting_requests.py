"""The part of a plan that lets waiting requests in.

They come in policy order (`waiting_queue.py`), never past the first that does not fit. `Admission` says whether one
fits; the step then computes a first chunk of what it knows.
"""

from jpaged.engine.kv.swap_record import SwapRecord
from jpaged.engine.plan_in_progress import PlanInProgress
from jpaged.engine.scheduler.admission import Admission
from jpaged.engine.scheduler.chunks import Chunks
from jpaged.engine.scheduler.foresight import Foresight
from jpaged.engine.scheduler.state import SchedulerPart, SchedulerState
from jpaged.engine.scheduler.tenants import Tenants
from jpaged.engine.sequences.request import Request


class WaitingRequests(SchedulerPart):
    """Takes requests from the queue into plans."""

    def __init__(self, state: SchedulerState, tenants: Tenants, chunks: Chunks, foresight: Foresight) -> None:
        super().__init__(state)
        self._tenants = tenants
        self._chunks = chunks
        self._admission = Admission(state, foresight)
        self._did_not_fit: tuple[Request, int, int] | None = None

    def admit(self, plan: PlanInProgress) -> None:
        """Admits requests while the step has budget, slots are free and the next one in policy order fits."""
        others_run = self._slots.num_used > 0
        while plan.budget and self._slots.num_free:
            request = self._waiting.peek()
            if request is None:
                return
            # If it did not fit, and nothing happened since that could make room, it is not looked at again.
            registrations = self._pool.cache.num_registrations if self._pool.cache is not None else 0
            state = (request, self._pool.num_releases + self._blocks.num_unreserved, registrations)
            if state == self._did_not_fit:
                return
            # Only now: it may have waited until what it needs for that was there.
            self._dependents.hand_over(request, others_run)
            admitted = self._admission.admit(plan, request)
            if not admitted and request.swap is not None and not self._slots.num_used:
                self._give_up_swap(request, request.swap)
                continue
            if not admitted:
                self._did_not_fit = state
                return
            self._waiting.pop()
            kind = self._dependents.of(request)
            if kind is not None:
                kind.admitted(request.group)
            for member in admitted:
                if plan.budget:
                    self._chunks.plan_one(plan, member)
                else:
                    self._tenants.prefilling.append(member)

    def _give_up_swap(self, request: Request, record: SwapRecord[Request]) -> None:
        """Lets sequences that do not fit the pool together come back one by one, and compute their tokens again: in the
        swap space each has a last block of its own.
        """
        self._waiting.pop()
        members = record.members.copy()
        self._swap_space.discard(record)
        for member in request.group.waiting():
            if member in members:
                self._waiting.push(member)
