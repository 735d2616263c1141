"""Sends outputs: whole, or as server-sent events.

    AsyncLLMEngine.generate, one for each prompt --outputs--> Answer.chunk --> one ASGI message for all that is new

A stream is sent from the task that reads the engine's outputs. While a client is slow to take what was sent, its
tokens gather in the engine's stream and leave together; log-probabilities up to a bound (`--max-unsent-bytes`). When
the client goes away the task is cancelled, which aborts what the engine still does for it.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jpaged.api.outputs import RequestOutput
from jpaged.frontend.inputs import Params, ProcessedInput
from jpaged.processes.async_llm_engine import AsyncLLMEngine
from jpaged.serving.admission import Ticket
from jpaged.serving.errors import ApiError
from jpaged.serving.http import ClientDisconnected, error_response, reported, unless_disconnected
from jpaged.serving.jobs import INLINE_LOGPROBS, Job
from jpaged.serving.live import LiveView

EVENT_STREAM = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
)
"""Headers of a stream."""


class Work(Protocol):
    """What the engine is to do for a request, as `Job` has it. max_backlog_bytes: as of `AsyncLLMEngine.generate`."""

    @property
    def request_id(self) -> str: ...

    @property
    def prompts(self) -> Sequence[ProcessedInput]: ...

    @property
    def params(self) -> Params: ...

    @property
    def ticket(self) -> Ticket: ...

    @property
    def priority(self) -> int: ...

    @property
    def cache_salt(self) -> str | None: ...

    @property
    def trace_headers(self) -> Mapping[str, str]: ...

    @property
    def max_backlog_bytes(self) -> int | None: ...


async def all_outputs(engine: AsyncLLMEngine, job: Work) -> list[RequestOutput]:
    """The last output of each prompt."""
    last: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(_outputs(engine, job)) as arriving:
        async for i, output in arriving:
            last[i] = output
    return [last[i] for i in range(len(job.prompts))]


async def chunks(engine: AsyncLLMEngine, job: Job) -> AsyncGenerator[bytes, None]:
    """The events for each output as it comes; some are empty. Closing it aborts the job. A caller that is cancelled
    gets the events that a thread is making first: the answer has counted them.
    """
    async with contextlib.aclosing(_outputs(engine, job)) as outputs:
        async for i, output in outputs:
            if _num_logprobs(output) > INLINE_LOGPROBS:  # as after a client was slow
                making = asyncio.ensure_future(engine.in_thread(partial(job.answer.chunk, i, output)))
                try:
                    events = await asyncio.shield(making)
                except asyncio.CancelledError:
                    yield await making
                    raise
                yield events
            else:
                yield job.answer.chunk(i, output)


class JobStream(Response):
    """An answer as server-sent events. It begins with the first output, so what is refused until then has a status of
    its own; later errors are events.
    """

    def __init__(self, engine: AsyncLLMEngine, job: Job) -> None:
        super().__init__()
        self._engine = engine
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.closing(self._job.ticket), contextlib.suppress(ClientDisconnected):
            await unless_disconnected(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer, begun = self._job.answer, False
        start = {"type": "http.response.start", "status": 200, "headers": list(EVENT_STREAM)}
        try:
            async with contextlib.aclosing(chunks(self._engine, self._job)) as arriving:
                async for chunk in arriving:
                    if not begun:
                        begun = True
                        await send(start)
                    if chunk:
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
            last = answer.end()
        except Exception as error:  # whatever it is, the client is told, who has begun to read
            if not begun:
                await self._failed(error)(scope, receive, send)
                return
            last = self._last(error)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    # Not in `_run`: a variable there would keep the error, its traceback and so the request, in a cycle.
    def _failed(self, error: Exception) -> Response:
        failure = self._reported(error)
        return error_response(failure, self._job.answer.error_body(failure))

    def _last(self, error: Exception) -> bytes:
        return self._job.answer.failed(self._reported(error))

    def _reported(self, error: Exception) -> ApiError:
        return reported(error, self._job.fields, self._job.prompt_field)


class LiveStream(Response):
    """Snapshots of the engine as server-sent events, until the client disconnects or the server ends; none for HEAD."""

    def __init__(self, live: LiveView) -> None:
        super().__init__()
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnected):
            await unless_disconnected(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        try:
            async with contextlib.aclosing(self._live.watch()) as events:
                async for chunk in events:
                    if not begun:
                        begun = True
                        await send({"type": "http.response.start", "status": 200, "headers": list(EVENT_STREAM)})
                    if scope["method"] == "HEAD":
                        break
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except ApiError as error:  # before the first event
            await error_response(error)(scope, receive, send)
            return
        if not begun:
            await error_response(ApiError(503, "The server is about to end."))(scope, receive, send)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _num_logprobs(output: RequestOutput) -> int:
    total = 0
    for one in output.outputs:  # a loop, since nearly always there are none
        if one.logprobs:
            total += sum(map(len, one.logprobs))
    return total


async def _outputs(engine: AsyncLLMEngine, job: Work) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of all prompts as they come, with the prompt's number. Closing it aborts all."""
    if len(job.prompts) == 1:
        async with contextlib.aclosing(_generation(engine, job, 0)) as outputs:
            async for output in outputs:
                yield 0, output
        return
    arrived: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(maxsize=len(job.prompts))

    async def forward(i: int) -> None:
        try:
            async with contextlib.aclosing(_generation(engine, job, i)) as outputs:
                async for output in outputs:
                    await arrived.put((i, output))
        except Exception as error:  # whatever it is, it is raised by the one who reads
            await arrived.put((i, error))
        else:
            await arrived.put((i, None))

    tasks = [asyncio.ensure_future(forward(i)) for i in range(len(job.prompts))]
    try:
        left = len(tasks)
        while left:
            i, item = await arrived.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield i, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _generation(engine: AsyncLLMEngine, job: Work, i: int) -> AsyncGenerator[RequestOutput, None]:
    """A prompt's outputs. Whoever calls this asks for the first at once: from then on the engine counts the prompt."""
    job.ticket.opened(len(job.prompts[i].prompt_token_ids))
    return engine.generate(
        job.prompts[i],
        job.params,
        job.request_id if len(job.prompts) == 1 else f"{job.request_id}-{i}",
        priority=job.priority,
        cache_salt=job.cache_salt,
        trace_headers=job.trace_headers,
        max_backlog_bytes=job.max_backlog_bytes,
    )
