"""The engine's loop: plan a step, dispatch it, and read an earlier one's tokens.

    EngineCore(scheduler, executor)
        .add_request(request)            raises what `Scheduler.add` raises; nothing is left behind
        .step() -> [RequestUpdate]       one turn; requests that finished, and tokens of those that report each
        .spare_s() -> float              how long the next turn can wait for requests (`engine/pace.py`)
        .collect() -> [RequestUpdate]    what became known meanwhile, beside steps
        .abort(request_ids) -> [Request] in any state; unknown or finished ids are passed over
        .finish(request_id, stop_reason, index)  a stop string was found: drop what is in flight for the sequence
        .has_unfinished()                whether `step` has anything left to do
        .drain()                         read what is in flight for requests that have ended
        .pause() .resume()               dispatch nothing for a while; requests keep what they have
        .take_new_weights(in_flight)     read what is in flight, and forget what old weights have computed
        .rest()                          a turn without requests: memory that is idle goes back
        .stats() .reset_prefix_cache() .pin_prefix(...) .unpin_prefix(...) .check_integrity()

With `pipeline_depth` d a step's results are read when d later ones have been dispatched, so that planning, reading
and detokenizing happen while the device runs. Depth 0 is the plain loop, and gives the same tokens:

    depth 0   plan 0, run 0, read 0,   plan 1, run 1, read 1,   ...
    depth 2   plan 0, plan 1, plan 2, read 0,   plan 3, read 1,   ...

Whoever serves requests as they come dispatches no earlier than the device needs: `step(just_in_time=True)` reads a step
before more than one other is queued if the device has enough to do, and the caller waits `spare_s()` for requests
before the next turn. What runs together then depends on time; without it, only on the calls, but for rows that wait for
their last result (`constraints/`), which is read as soon as it has come.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from jpaged.api.errors import EngineDeadError
from jpaged.api.weights import InFlight
from jpaged.engine.interface import Executor, StepHandle, StepPlan
from jpaged.engine.pace import Pace
from jpaged.engine.scheduler.results import joined
from jpaged.engine.scheduler.scheduler import NoPlan, RequestUpdate, Scheduler
from jpaged.engine.sequences.request import Request
from jpaged.engine.stats import EngineStats


class StepObserver(Protocol):
    """Hears of each step."""

    def planned(self, plan: StepPlan) -> None:
        """It is about to be dispatched."""
        ...

    def read(self, plan: StepPlan) -> None:
        """Its results have come."""
        ...


class EngineCore:
    """Joins a scheduler and an executor. Not thread-safe: one thread calls it.

    Attributes:
        observer: hears of each step; None: nobody does.
        num_starts: how often a sequence has got a slot.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, pace: Pace | None = None) -> None:
        self.scheduler = scheduler
        self.observer: StepObserver | None = None
        self.num_starts = 0
        self._executor = executor
        self._pace = pace or Pace()
        self._depth = scheduler.config.pipeline_depth
        self._in_flight: deque[tuple[StepPlan, StepHandle]] = deque()
        self._settled: list[RequestUpdate] = []
        self._is_paused = False

    def add_request(self, request: Request, generated: Sequence[Sequence[int] | None] | None = None) -> None:
        """Queues a request. generated: as of `Scheduler.add`.

        Raises:
            InvalidPromptError, OutOfMemoryError, InvalidParameterError: as `Scheduler.add`.
        """
        self.scheduler.add(request, generated)

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """Ends requests, whatever their state, with finish_reason "abort" and the tokens read so far.

        Returns: those that were unfinished; no update will come for them.
        """
        request_ids = set(request_ids)
        self._settled = [update for update in self._settled if update.request.request_id not in request_ids]
        aborted = (self.scheduler.abort(request_id) for request_id in request_ids)
        return [request for request in aborted if request is not None]

    def finish(self, request_id: str, stop_reason: int | str | None, index: int = 0) -> Request | None:
        """Ends a sequence of a request whose text reached a stop string; no further update will come for it.

        Returns: the sequence, or None if there is none unfinished of this id and index.
        """
        self._settled = [u for u in self._settled if (u.request.request_id, u.request.index) != (request_id, index)]
        return self.scheduler.finish(request_id, "stop", stop_reason, index)

    def step(self, *, just_in_time: bool = False) -> list[RequestUpdate]:
        """Dispatches a step if one can be planned, and reads the oldest once more than `pipeline_depth` are in
        flight or none could be planned. With `just_in_time` it keeps no more in flight than the device needs.

        Raises:
            EngineDeadError: requests are left, yet nothing can run.
        """
        if self._settled:
            settled, self._settled = self._settled, []
            return settled
        if self._is_paused:
            return []
        if self._has_enough(just_in_time) or self._is_awaited():
            return self.scheduler.collect() or self._read_oldest()
        self.scheduler.give_back_idle()
        self._pace.begins()
        plan = self.scheduler.schedule(self._num_queued)
        while plan is NoPlan.BLOCKED and not self._in_flight[0][1].is_ready() and self.scheduler.wait_for_news():
            if self.scheduler.has_news:
                plan = self.scheduler.schedule(self._num_queued)
                if self.scheduler.has_updates:
                    break
        updates = self.scheduler.take_updates()
        if isinstance(plan, StepPlan):
            self.num_starts += len(plan.starts)
            if self.observer is not None:
                self.observer.planned(plan)
            handle = self._executor.execute(plan)
            was_late = bool(self._in_flight) and self._in_flight[-1][1].is_ready()
            self._in_flight.append((plan, handle))
            self._pace.dispatched(plan, was_late)
            if updates or not self._has_enough(just_in_time):
                return updates
        elif updates or plan is NoPlan.WAITING:
            return updates
        elif plan is NoPlan.IDLE:
            if self.has_unfinished():
                raise EngineDeadError(f"{self.scheduler.num_unfinished} requests are left, but none can run.")
            return []
        return self._read_oldest()

    def spare_s(self) -> float:
        """Seconds that the next `step(just_in_time=True)` can wait for requests; zero or less if it cannot."""
        return self._pace.spare_s()

    def collect(self) -> list[RequestUpdate]:
        """What has come to be known since the last turn without a step's result; nothing is dispatched or read."""
        return self.scheduler.collect()

    @property
    def awaits_news(self) -> bool:
        """Whether `collect` may soon have something to tell."""
        return self.scheduler.awaits_news

    def rest(self) -> bool:
        """One of the turns while nothing is to be done: gives back memory that is idle.

        Returns: as `Scheduler.give_back_idle`.
        """
        if self.scheduler.elastic is None:
            return False
        self.drain()
        return self.scheduler.give_back_idle()

    def drain(self) -> None:
        """Reads the steps that outlived their requests, which hold slots until then."""
        while self._in_flight and not self.has_unfinished():
            self._read_oldest()

    def can_step(self) -> bool:
        """Whether `step` would do anything: not while it is paused, once what was in flight has been told."""
        return bool(self._settled) or (not self._is_paused and self.has_unfinished())

    def has_settled(self, request_id: str) -> bool:
        """Whether the next `step` returns something of this request that `settle` has read."""
        return any(update.request.request_id == request_id for update in self._settled)

    def pause(self) -> None:
        """Dispatches nothing until `resume`, and reads what is in flight. Requests keep what they have."""
        self.settle()
        self._is_paused = True

    def resume(self) -> None:
        """Goes on after `pause`."""
        self._is_paused = False

    @property
    def is_paused(self) -> bool:
        """Whether `pause` was called, and `resume` not since."""
        return self._is_paused

    def settle(self) -> None:
        """Reads all that is in flight; the next `step` returns what it brought."""
        while self._in_flight:
            self._settled += self._read_oldest()
        self.scheduler.settle()
        self._settled = joined(self._settled + self.scheduler.take_updates())

    def take_new_weights(self, in_flight: InFlight) -> None:
        """As `Scheduler.take_new_weights`, once all that is in flight has been read: its tokens are of the old weights.
        To be called before these are gone.
        """
        self.settle()
        self.scheduler.take_new_weights(in_flight)

    def close(self) -> None:
        """Ends what works for the engine in other threads. No step follows."""
        self.scheduler.close()

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs, or `step` has yet to say how one has ended. Steps that outlived their
        requests may still be in flight.
        """
        return self.scheduler.num_unfinished > 0 or self.scheduler.has_updates or bool(self._settled)

    def stats(self) -> EngineStats:
        """A snapshot of counters and occupancy."""
        return self.scheduler.stats()

    def reset_prefix_cache(self) -> bool:
        """As `Scheduler.reset_prefix_cache`."""
        return self.scheduler.reset_prefix_cache()

    def pin_prefix(self, token_ids: np.ndarray, cache_salt: str | None = None) -> int:
        """As `Scheduler.pin_prefix`."""
        return self.scheduler.pin_prefix(token_ids, cache_salt)

    def unpin_prefix(self, token_ids: np.ndarray, cache_salt: str | None = None) -> bool:
        """As `Scheduler.unpin_prefix`."""
        return self.scheduler.unpin_prefix(token_ids, cache_salt)

    def check_integrity(self) -> None:
        """Raises EngineDeadError if blocks, tables, slots and queue disagree."""
        self.scheduler.check_integrity()

    def _has_enough(self, just_in_time: bool) -> bool:
        """Whether a step should be read before another is dispatched."""
        if len(self._in_flight) > self._depth:
            return True
        return just_in_time and self._pace.has_enough()

    def _is_awaited(self) -> bool:
        """Whether the oldest step has ended, and rows wait for what it brought."""
        return (
            bool(self._in_flight) and self.scheduler.awaits(self._in_flight[0][0]) and self._in_flight[0][1].is_ready()
        )

    def _num_queued(self) -> int:
        """Steps that the device has not ended yet."""
        return sum(not handle.is_ready() for _, handle in self._in_flight)

    def _read_oldest(self) -> list[RequestUpdate]:
        plan, handle = self._in_flight.popleft()
        had_ended = handle.is_ready()
        result = handle.result()
        self._pace.read(had_ended)
        if self.observer is not None:
            self.observer.read(plan)
        return self.scheduler.update(plan, result)
