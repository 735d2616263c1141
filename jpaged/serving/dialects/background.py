"""Responses that run in the background: nobody has to wait for them.

    POST, background: true -- start --> Run: reads the engine's outputs --> EventRecord <-- any number of readers
    GET     the response as far as it is          GET ?stream=true&starting_after=N     its events behind the N-th
    cancel, DELETE, or the end of the server      abort it

A run that has ended is kept in the `ResponseStore`, with its record.
"""

import asyncio
import contextlib

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jpaged.processes.async_llm_engine import AsyncLLMEngine
from jpaged.serving.dialects.event_record import EventRecord
from jpaged.serving.dialects.items import named_event
from jpaged.serving.dialects.response_store import Holding, ResponseStore
from jpaged.serving.dialects.responses_answer import ResponsesAnswer
from jpaged.serving.errors import ApiError, OverloadedError
from jpaged.serving.http import ClientDisconnected, error_response, reported, unless_disconnected
from jpaged.serving.jobs import Job
from jpaged.serving.limits import RETRY_AFTER_S
from jpaged.serving.streams import EVENT_STREAM, chunks

MAX_RUNNING = 1024
"""Responses in the background at once; they have no connections that would bound their number."""

_TOO_SLOW = {
    "type": "error",
    "code": "client_too_slow",
    "message": "The stream was not read as fast as events came; the response goes on.",
    "param": None,
}
"""The event that ends a stream whose reader fell behind."""


class Run:
    """One response in the background. holding: its memory. record: None if it was not asked for as a stream."""

    def __init__(self, engine: AsyncLLMEngine, job: Job, holding: Holding) -> None:
        assert isinstance(job.answer, ResponsesAnswer)
        self.answer = job.answer
        self.record = holding.record
        self._holding = holding
        self._engine = engine
        self._job = job
        self._is_cancelled = False
        self._record(self.answer.queued())
        self.task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        try:
            with contextlib.closing(self._job.ticket):
                async with contextlib.aclosing(chunks(self._engine, self._job)) as arriving:
                    async for chunk in arriving:
                        self._take(chunk)
            last = self.answer.end()
        except asyncio.CancelledError:  # by `cancel`: nobody else knows the task
            last = self.answer.cancelled()
        except Exception as error:  # whatever it is, those who ask for the response are told
            last = self.answer.failed(reported(error, self._job.fields, self._job.prompt_field))
        self._record(last)
        if self.record is not None:
            self.record.end()
        self._holding.release()
        self.answer.keep(self.record)

    async def cancel(self) -> None:
        """Aborts the response, unless it ends meanwhile; then it is in the store."""
        if not self._is_cancelled:  # a second time would break off how it ends
            self._is_cancelled = True
            self.task.cancel()
        await asyncio.wait([self.task])

    def _take(self, events: bytes) -> None:
        """Raises OverloadedError if there is no room for more."""
        self._record(events)
        self._holding.grow_to(self.answer.num_bytes)

    def _record(self, events: bytes) -> None:
        if self.record is not None:
            self.record.add(events)


class BackgroundResponses:
    """Those that run. store: where they are kept when they have ended."""

    def __init__(self, engine: AsyncLLMEngine, store: ResponseStore) -> None:
        self.store = store
        self._engine = engine
        self._runs: dict[str, Run] = {}

    def start(self, job: Job, *, records: bool) -> Run:
        """Runs a job, whose answer is a `ResponsesAnswer`. records: its events, up to the job's `max_unsent_bytes`.

        Raises:
            OverloadedError: as many run as may, or hold all the memory that they may.
        """
        if len(self._runs) >= MAX_RUNNING:
            job.ticket.close()
            raise OverloadedError(
                f"{len(self._runs)} responses run in the background already, of at most {MAX_RUNNING}; try again"
                " later.",
                RETRY_AFTER_S,
            )
        assert isinstance(job.answer, ResponsesAnswer)
        try:
            holding = self.store.hold(job.answer.num_bytes, EventRecord(job.max_unsent_bytes) if records else None)
        except BaseException:
            job.ticket.close()
            raise
        run = Run(self._engine, job, holding)
        response_id = run.answer.response_id
        self._runs[response_id] = run
        run.task.add_done_callback(lambda _: self._runs.pop(response_id))
        return run

    def get(self, response_id: str) -> Run | None:
        """The run of a response; None if it does not run."""
        return self._runs.get(response_id)

    async def close(self) -> None:
        """Aborts all."""
        await asyncio.sleep(0)  # a task that has not begun could not tell that it was cancelled
        await asyncio.gather(*(run.cancel() for run in list(self._runs.values())))


class RecordedStream(Response):
    """The events of a record as server-sent events, from a number on; none for HEAD. A client that goes ends no run."""

    def __init__(self, record: EventRecord, number: int = 0) -> None:
        super().__init__()
        self._record = record
        self._number = number

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnected):
            await unless_disconnected(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._record.check(self._number)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": list(EVENT_STREAM)})
        last = b""
        if scope["method"] != "HEAD":
            try:
                async with contextlib.aclosing(self._record.read(self._number)) as arriving:
                    async for events in arriving:
                        await send({"type": "http.response.body", "body": events, "more_body": True})
            except ApiError:
                last = named_event(_TOO_SLOW)
        await send({"type": "http.response.body", "body": last, "more_body": False})
