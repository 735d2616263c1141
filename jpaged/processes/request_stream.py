"""A request in an API process: what its engine process reports goes in, outputs for its consumer come out.

    Step, Update --> take, add_token --> pending tokens ... next() --OutputProcessor--> RequestOutput

News only gather and wake the consumer; text is made when it looks, so one that lags behind gets several tokens at once.
"""

import asyncio
import time

import numpy as np

from jpaged.api.errors import JPagedError, NonFiniteLogitsError
from jpaged.api.outputs import RequestOutput
from jpaged.api.sampling_params import RequestOutputKind
from jpaged.engine.scheduler.scheduler import RequestUpdate
from jpaged.engine.sequences.group import SequenceGroup
from jpaged.engine.sequences.request import Request, RequestStatus
from jpaged.frontend.inputs import ProcessedInput
from jpaged.frontend.output_processor import OutputProcessor
from jpaged.processes.links import AsyncLink
from jpaged.processes.request_record import RequestRecord
from jpaged.processes.wire import Finish, Update
from jpaged.text.tokenizer import Tokenizer

_TRIALS = 2
"""A request is refused when the engine has ended so often while it was the one on trial. Once may be chance: a process
can be killed from outside.
"""


_LOGPROB_BYTES = 200
"""What one alternative of a position takes here."""


class RequestStream:
    """A request, and the news of it that its consumer has not taken yet.

    request: kept as the scheduler keeps its own, from what the engine reports. group: all its sequences.
    replica: where it runs.
    pending: by sequence, tokens that came since the consumer last looked; empty also where only other news came.
    queued: it has not run yet. closed: nothing more will come. is_counted: its end belongs in the metrics.
    held: no engine process has it at the moment. running: the process that has it has started it. on_trial: on trial.
    backlog_bytes: about what log-probabilities take that the consumer has not looked at; max_backlog_bytes: the most,
        where outputs report what is new. Tokens alone are as many as the model takes at most.
    record: what happened to it, where somebody watches requests.
    tells_end: its engine process tells its tokens only when it ends. aborting: what it has generated is on its way.
    """

    __slots__ = (
        "_changed",
        "_deaths",
        "_error",
        "_failed_trials",
        "_has_failed",
        "_news",
        "_outputs",
        "_tokens_at_death",
        "_waiter",
        "aborting",
        "backlog_bytes",
        "closed",
        "group",
        "handle",
        "held",
        "is_counted",
        "last_token_time",
        "max_backlog_bytes",
        "on_trial",
        "pending",
        "queued",
        "record",
        "replica",
        "request",
        "running",
        "tells_end",
    )

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        handle: int,
        group: SequenceGroup,
        checked: ProcessedInput,
        replica: AsyncLink,
    ) -> None:
        self.handle = handle
        self.group = group
        self.request = group.members[0]
        self.replica = replica
        self.pending: list[list[int]] = [[] for _ in group.members]
        self._changed: set[int] = set()
        self.queued = True
        self.closed = False
        self.is_counted = True
        self.held = False
        self.running = False
        self.on_trial = False
        self.tells_end = not self.request.reports_each_token
        self.aborting = False
        self.record: RequestRecord | None = None
        self.backlog_bytes = 0
        self.max_backlog_bytes: int | None = None
        self.last_token_time = 0.0
        self._deaths = 0
        self._failed_trials = 0
        self._tokens_at_death = [0] * len(group.members)
        self._news = False
        self._error: JPagedError | None = None
        self._has_failed = False
        self._waiter: asyncio.Future[None] | None = None
        self._outputs = OutputProcessor(_RemoteCore(self), tokenizer)
        self._outputs.add(self.request, checked.prompt, checked.prompt_token_ids)

    def add_token(self, token_id: int, now: float) -> None:
        """Takes the most frequent news: one token of a request for one sequence, and nothing else."""
        self.request.output_token_ids.append(token_id)
        self.last_token_time = now
        self.pending[0].append(token_id)
        self.wake()

    def take(self, update: Update, now: float) -> None:
        """Takes any other news."""
        request = self.group.members[update.index]
        self.request.num_cached_tokens = update.num_cached_tokens
        request.output_token_ids.extend(update.token_ids)
        if update.logprobs is not None and request.logprobs is not None:
            request.logprobs.extend(update.logprobs)
            self.backlog_bytes += _LOGPROB_BYTES * sum(map(len, update.logprobs))
        if update.prompt_logprobs is not None:
            request.prompt_logprobs = update.prompt_logprobs
        if update.stats is not None:
            for member in self.group.members:  # it is one for all of them
                member.stats = update.stats
        if update.finish_reason is not None:
            request.status = RequestStatus.FINISHED
            request.finish_reason = update.finish_reason  # type: ignore[assignment]  # the scheduler's own words
            self._has_failed |= update.finish_reason == "error"
            request.stop_reason = update.stop_reason
            request.cumulative_logprob, request.score = update.cumulative_logprob, update.score
            if update.pooled is not None:
                request.pooled = np.frombuffer(update.pooled, np.float32)
        self.last_token_time = now
        self.pending[update.index].extend(update.token_ids)
        self._changed.add(update.index)
        self.wake()

    @property
    def is_suspect(self) -> bool:
        """Whether two engine processes in a row ended while it ran, and it got next to nothing between."""
        return self._deaths > 1

    @property
    def failed_trials(self) -> int:
        """How often an engine process ended while this request was on trial. One that has passed begins anew."""
        return self._failed_trials

    @property
    def is_convicted(self) -> bool:
        """Whether it is not to be tried again."""
        return self._failed_trials >= _TRIALS

    def count_death(self, most_under_way: int) -> None:
        """The engine process has ended while it ran.

        most_under_way: tokens of a sequence that may have been computed, but not told of, when the one before ended.
        """
        num_tokens = [len(member.output_token_ids) for member in self.group.members]
        gained = max(now - before for now, before in zip(num_tokens, self._tokens_at_death, strict=True))
        self._deaths = self._deaths + 1 if self._deaths and gained <= most_under_way else 1
        self._tokens_at_death = num_tokens
        self.running = False
        if self.on_trial:
            self.on_trial = False
            self._failed_trials += 1

    def clear(self) -> None:
        """It has run a step that others might not have survived, and the engine lives."""
        self.on_trial = False
        self._deaths = self._failed_trials = 0

    def end(self) -> bool:
        """Aborts the sequences that have not ended. Returns whether there were any."""
        members = [member for member in self.group.members if not member.finished]
        for member in members:
            member.status, member.finish_reason = RequestStatus.FINISHED, "abort"
            member.stats.finished_time = time.monotonic()
            self._changed.add(member.index)
        return bool(members)

    @property
    def error(self) -> JPagedError | None:
        """Why it failed."""
        is_finite = not any(member.finish_reason == "error" for member in self.group.members)
        return self._error if is_finite else self._error or NonFiniteLogitsError()

    @property
    def has_overflowed(self) -> bool:
        """Whether more waits for the consumer than is kept."""
        is_whole = self.request.sampling.output_kind == RequestOutputKind.FINAL_ONLY
        return self.max_backlog_bytes is not None and not is_whole and self.backlog_bytes > self.max_backlog_bytes

    def drop(self) -> None:
        """Forgets what the consumer has not looked at."""
        self.pending = [[] for _ in self.group.members]
        for member in self.group.members:
            if member.logprobs is not None:
                member.logprobs.clear()

    def fail(self, error: JPagedError) -> None:
        self._error, self._has_failed = error, True
        self.wake()

    def wake(self) -> None:
        self._news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> RequestOutput | None:
        """Waits for news; returns the output that they make, or None if the request does not report yet."""
        while not self._news:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._news = False
        self.backlog_bytes = 0
        if self._has_failed and (error := self.error) is not None:
            self.closed = True
            raise error
        group, changed = self.group, self._changed
        updates = []
        for i, new_token_ids in enumerate(self.pending):
            if new_token_ids or i in changed:
                updates.append(RequestUpdate(group.members[i], new_token_ids))
                self.pending[i] = []
        changed.clear()
        if self.record is None:
            outputs = self._outputs.process(updates)
        else:
            with self.record.making_text():
                outputs = self._outputs.process(updates)
        self.closed = group.finished
        return outputs[-1] if outputs else None


class _RemoteCore:
    """What an `OutputProcessor` asks of a core: to end a request whose text reached a stop string."""

    def __init__(self, stream: RequestStream) -> None:
        self._stream = stream

    def finish(self, request_id: str, stop_reason: int | str | None, index: int = 0) -> Request | None:
        request = self._stream.group.members[index]
        if request.finished:
            return None
        request.status = RequestStatus.FINISHED
        request.stats.finished_time = time.monotonic()
        self._stream.replica.send(Finish(self._stream.handle, index, str(stop_reason)))
        return request
