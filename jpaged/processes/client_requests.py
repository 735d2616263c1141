"""Requests in an engine process, and what each engine step has to report of them to the clients they came from.

StepRequests     "steps"     EngineCore.step()  -> a Step a client:    token ids, as they come
OutputRequests   "outputs"   LLMEngine.step()   -> Outputs a client:   whole outputs, text included
"""

import time
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from jpaged.engine.scheduler.scheduler import RequestUpdate
from jpaged.engine.sequences.request import Request, RequestStatus
from jpaged.frontend.inputs import ProcessedInput
from jpaged.frontend.llm_engine import LLMEngine
from jpaged.processes.connection import Connection
from jpaged.processes.wire import Finish, FromEngine, Output, Outputs, Reports, RequestView, Resumed, Step, Update

_BEFORE_START = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
"""The states of a request that has not run here; one that goes on here begins as preempted."""


@dataclass(slots=True)
class ClientRequest:
    """A client's request. num_logprobs: positions sent, by the index of a sequence that has had an update.
    is_single: it is for one sequence.
    """

    request: Request
    connection: Connection
    handle: int
    is_single: bool
    num_logprobs: dict[int, int] = field(default_factory=dict)


class ClientRequests(ABC):
    """The unfinished requests of all clients."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._requests: dict[str, ClientRequest] = {}

    def add(self, request: Request, connection: Connection, handle: int, resumed: Resumed | None = None) -> None:
        """Queues a request. Raises what the scheduler raises; then nothing is left behind.

        resumed: of one that goes on.
        """
        self._queue(request, None if resumed is None else resumed.token_ids())
        self._requests[request.request_id] = ClientRequest(request, connection, handle, request.num_sequences == 1)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Nobody waits for these any more. Unknown ids are passed over."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def abort_reporting(self, request_ids: Iterable[str]) -> FromEngine | None:
        """Ends requests of one client, which waits for what they have generated; None where there is nothing to say."""
        raise TypeError("Clients of this engine process get whole outputs, and none of a request that was aborted.")

    def of(self, connection: Connection) -> list[str]:
        """The ids of a client's requests."""
        return [entry.request.request_id for entry in self._requests.values() if entry.connection is connection]

    def tables(self) -> list[tuple[int, np.ndarray]]:
        """The handle and the block table of every running sequence."""
        slots, tables = self._engine.core.scheduler.slots, []
        for slot in slots.used().tolist():
            request = slots.requests[slot]
            entry = None if request is None else self._requests.get(request.request_id)
            if entry is not None:  # else: it has ended, and steps that are under way still use its blocks
                tables.append((entry.handle, slots.blocks(slot)))
        return tables

    @abstractmethod
    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to do."""

    def can_step(self) -> bool:
        """Whether `step` would do anything now; not while the engine is paused."""
        return self.has_unfinished()

    @abstractmethod
    def spare_s(self) -> float:
        """Seconds that the next step can wait for more requests; zero or less if it should not."""

    @abstractmethod
    def step(self) -> Mapping[Connection, FromEngine]:
        """One turn of the engine; returns one message for each client that it has news for."""

    @property
    def awaits_news(self) -> bool:
        """Whether `collect` may soon have news."""
        return False

    def collect(self) -> Mapping[Connection, FromEngine]:
        """As `step`, of what became known beside steps; nothing runs."""
        return {}

    @abstractmethod
    def finish(self, request_id: str, message: Finish) -> None:
        """A client has found a stop string."""

    def views(self, most: int) -> list[RequestView]:
        """The sequences of unfinished requests, at most so many, oldest first."""
        views: list[RequestView] = []
        slots, now = self._engine.core.scheduler.slots, time.monotonic()
        for entry in self._requests.values():
            for member in entry.request.group.members:
                if len(views) == most:
                    return views
                has_slot = member.status == RequestStatus.RUNNING and slots.holds_tokens(member.slot)
                known = int(slots.num_known[member.slot]) if has_slot else len(member.known_token_ids())
                views.append(
                    RequestView(
                        handle=entry.handle,
                        index=member.index,
                        status=member.status.name.lower(),
                        slot=member.slot,
                        prompt_tokens=member.prompt_len,
                        known=known,
                        computed=int(slots.num_computed[member.slot]) if has_slot else 0,
                        blocks=len(slots.blocks(member.slot)) if has_slot else 0,
                        num_cached_tokens=member.num_cached_tokens,
                        num_preemptions=member.stats.num_preemptions,
                        age_s=now - member.stats.arrival_time,
                    )
                )
        return views

    def num_generated(self, request_id: str) -> float | None:
        """Tokens that have been read of a request, in the mean over its sequences; None of one that has ended, or of an
        unknown id.
        """
        entry = self._requests.get(request_id)
        if entry is None or entry.request.group.finished:
            return None
        slots, members = self._engine.core.scheduler.slots, entry.request.group.members
        has_slot = [m.status == RequestStatus.RUNNING and slots.holds_tokens(m.slot) for m in members]
        return fmean(
            int(slots.num_known[member.slot]) - member.prompt_len if has else len(member.output_token_ids)
            for member, has in zip(members, has_slot, strict=True)
        )

    @abstractmethod
    def _queue(self, request: Request, generated: list[list[int] | None] | None) -> None: ...


def make_client_requests(engine: LLMEngine, reports: Reports) -> ClientRequests:
    """Client requests that are reported in this form."""
    return StepRequests(engine) if reports == "steps" else OutputRequests(engine)


class OutputRequests(ClientRequests):
    """Requests of clients that wait for whole answers: steps are dispatched as early as possible."""

    def has_unfinished(self) -> bool:
        return self._engine.has_unfinished_requests()

    def spare_s(self) -> float:
        return 0.0

    def step(self) -> Mapping[Connection, FromEngine]:
        news: dict[Connection, Outputs] = {}
        for output in self._engine.step():
            entry = self._requests[output.request_id]
            news.setdefault(entry.connection, Outputs([])).outputs.append(Output.of(entry.handle, output))
            if output.finished:
                del self._requests[output.request_id]
        return news

    def abort(self, request_ids: Iterable[str]) -> None:
        ids = list(request_ids)
        self._engine.abort_request(ids)
        super().abort(ids)

    def finish(self, request_id: str, message: Finish) -> None:
        raise TypeError("Finish is for clients that look for stop strings; this engine process does.")

    def _queue(self, request: Request, generated: list[list[int] | None] | None) -> None:
        if generated is not None:
            raise TypeError("Requests go on in another engine process only where clients get steps.")
        self._engine.queue(request, ProcessedInput(None, request.prompt_token_ids.tolist(), ()))


class StepRequests(ClientRequests):
    """Requests of clients that come and go: each step is dispatched as late as the device allows."""

    def __init__(self, engine: LLMEngine) -> None:
        super().__init__(engine)
        self._core = engine.core
        self._not_started: deque[ClientRequest] = deque()
        self._num_starts = 0  # of the core, when `_not_started` was last looked through

    def add(self, request: Request, connection: Connection, handle: int, resumed: Resumed | None = None) -> None:
        super().add(request, connection, handle, resumed)
        self._not_started.append(self._requests[request.request_id])

    def has_unfinished(self) -> bool:
        return self._core.has_unfinished()

    def can_step(self) -> bool:
        return self._core.can_step()

    def spare_s(self) -> float:
        return self._core.spare_s()

    def step(self) -> Mapping[Connection, FromEngine]:
        return self._report(self._core.step(just_in_time=True))

    @property
    def awaits_news(self) -> bool:
        return self._core.awaits_news

    def collect(self) -> Mapping[Connection, FromEngine]:
        updates = self._core.collect()
        return self._report(updates) if updates else {}

    def abort(self, request_ids: Iterable[str]) -> None:
        ids = list(request_ids)
        self._core.abort(ids)
        super().abort(ids)
        self._num_starts = -1  # the next step looks through `_not_started`, which may have some of these

    def abort_reporting(self, request_ids: Iterable[str]) -> FromEngine | None:
        entries, updates = dict(self._requests), []
        for leader in self._core.abort(request_ids):
            entry = entries[leader.request_id]
            ended = [member for member in leader.group.members if member.finish_reason == "abort"]
            updates += [_update(entry, member, member.output_token_ids) for member in ended]
            super().abort([leader.request_id])
        return Step(b"", b"", updates, b"") if updates else None

    def finish(self, request_id: str, message: Finish) -> None:
        self._core.finish(request_id, message.stop_reason, message.index)
        entry = self._requests.get(request_id)
        if entry is not None and entry.request.group.finished and not self._core.has_settled(request_id):
            del self._requests[request_id]

    def _queue(self, request: Request, generated: list[list[int] | None] | None) -> None:
        self._core.add_request(request, generated)

    def _report(self, updates: list[RequestUpdate]) -> dict[Connection, FromEngine]:
        news: dict[Connection, tuple[array, array, list[Update], array]] = {}
        current: Connection | None = None
        ended: list[str] = []
        finished = RequestStatus.FINISHED
        for request, token_ids in updates:
            entry = self._requests[request.request_id]
            if entry.connection is not current:  # nearly always there is only one
                current = entry.connection
                handles, tokens, rare, _ = news.setdefault(current, _no_news())
            is_plain = len(token_ids) == 1 and request.status is not finished and request.logprobs is None
            if is_plain and entry.num_logprobs and entry.is_single:
                handles.append(entry.handle)
                tokens.append(token_ids[0])
            else:
                rare.append(_update(entry, request, token_ids))
                if request.finished and request.group.finished:
                    ended.append(request.request_id)
        for request_id in ended:
            self._requests.pop(request_id, None)
        if self._not_started and (ended or self._core.num_starts != self._num_starts):
            self._num_starts = self._core.num_starts
            for entry in self._take_started():
                news.setdefault(entry.connection, _no_news())[3].append(entry.handle)
        return {
            connection: Step(handles.tobytes(), tokens.tobytes(), rare, started.tobytes())
            for connection, (handles, tokens, rare, started) in news.items()
        }

    def _take_started(self) -> list[ClientRequest]:
        """Requests started since the last call: the first in the queue, or any of them where some have priority. Others
        overtake those that wait for their grammar.
        """
        waiting, started = self._not_started, []
        if self._engine.args.scheduling_policy == "priority":
            started = [entry for entry in waiting if entry.request.status not in _BEFORE_START]
            if started:
                self._not_started = deque(t for t in waiting if t.request.status in _BEFORE_START)
            return started
        overtaken = []
        while waiting:
            request = waiting[0].request
            if request.status not in _BEFORE_START:
                started.append(waiting.popleft())
            elif request.sampling.structured_outputs is not None:
                overtaken.append(waiting.popleft())
            else:
                break
        waiting.extendleft(reversed(overtaken))
        return started


def _no_news() -> tuple[array, array, list[Update], array]:
    return array("q"), array("i"), [], array("q")


def _update(entry: ClientRequest, request: Request, token_ids: list[int]) -> Update:
    first = request.index not in entry.num_logprobs
    logprobs, num_logprobs = None, 0
    if request.logprobs is not None:
        logprobs = request.logprobs[entry.num_logprobs.get(request.index, 0) :]
        num_logprobs = len(request.logprobs)
    entry.num_logprobs[request.index] = num_logprobs
    return Update(
        handle=entry.handle,
        index=request.index,
        token_ids=token_ids,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        num_cached_tokens=request.num_cached_tokens,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs if first else None,
        stats=request.stats if first or request.finished else None,
        cumulative_logprob=request.cumulative_logprob,
        score=request.score,
        pooled=None if request.pooled is None else request.pooled.tobytes(),
    )
