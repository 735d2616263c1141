"""`AsyncLLMEngine`: the engine in a process of its own, for programs that run on asyncio. The server is one of them.

    generate() --> InputProcessor --> Add ------> engine process
       ^                                              |
       +-- OutputProcessor <-- _Stream (pending) <-- Step

Tokenizing, detokenizing and stop strings are done here. A `Step` only appends to the streams that it concerns and
wakes them; text is made when a consumer takes it, so one that lags behind gets several tokens at once, and a busy
process does less for each.
"""

import asyncio
import itertools
import os
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

import jpaged
from jpaged import errors
from jpaged.assets import demo_model_path
from jpaged.beam_search_params import BeamSearchParams
from jpaged.config import EngineArgs
from jpaged.engine.request import Request, RequestStatus
from jpaged.engine.scheduler import RequestUpdate
from jpaged.engine.sequence_group import SequenceGroup
from jpaged.engine.stats import EngineStats
from jpaged.engine.tokenizer import Tokenizer
from jpaged.errors import EngineDeadError, InvalidParameterError, InvalidPromptError, JPagedError
from jpaged.inputs import InputProcessor, ProcessedInput, Prompt
from jpaged.models import resolve
from jpaged.output_processor import OutputProcessor
from jpaged.outputs import RequestOutput
from jpaged.sampling_params import SamplingParams
from jpaged.serving.metrics import ServingMetrics
from jpaged.serving.wire import (
    Abort,
    Add,
    Answer,
    BlockOwners,
    Call,
    Dead,
    Failed,
    Finish,
    FrameReader,
    FromEngine,
    Ready,
    Refused,
    Shutdown,
    Start,
    Step,
    ToEngine,
    Update,
    frame,
)

INLINE_CHARACTERS = 4096
"""Shorter prompts are tokenized at once (about 1 ms); longer ones in a thread, while others are served."""
SHUTDOWN_S = 10.0
"""How long the engine process may take to end by itself."""

_T = TypeVar("_T")


class AsyncLLMEngine:
    """A model in a process of its own, serving requests that come and go.

        async with AsyncLLMEngine(EngineArgs(model="path/to/model")) as engine:
            params = SamplingParams(max_tokens=64, output_kind=RequestOutputKind.DELTA)
            async for output in engine.generate("Once upon a time", params):
                print(output.outputs[0].text, end="")

    The process starts with the constructor and ends with `shutdown`, or when this process ends in whatever way. All
    methods are called from one event loop.

    Args:
        args: what to run and how.

    Attributes:
        args: as given.
        tokenizer: None with skip_tokenizer_init.
        metrics: what it counts and times.

    Raises:
        ModelNotFoundError, CheckpointError: there is no such model or tokenizer. What else may be wrong with the model
            `ready` raises.
    """

    def __init__(self, args: EngineArgs) -> None:
        directory = demo_model_path() if args.model is None else resolve(args.model, args.revision, args.load_format)
        self.args = args
        self.metrics = ServingMetrics()
        self._process, self._socket = _start_process()
        self._first_frame = frame(Start(args))
        try:
            self.tokenizer = None if args.skip_tokenizer_init else Tokenizer.load(args.tokenizer or directory)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        self._transport: asyncio.WriteTransport | None = None
        self._is_ready: asyncio.Future[Ready] | None = None
        self._ready: Ready | None = None
        self._failure: JPagedError | None = None
        self._streams: dict[int, _Stream] = {}
        self._request_ids: set[str] = set()
        self._handles = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="jpaged-tokenize")
        self._num_queued = self._queued_tokens = 0

    async def __aenter__(self) -> Self:
        await self.ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    async def ready(self) -> Ready:
        """Waits until the engine serves; returns what it is like.

        Raises:
            ModelNotFoundError, CheckpointError, UnsupportedModelError, OutOfMemoryError, InvalidParameterError: as
                `LLMEngine`.
            EngineDeadError: its process ended.
        """
        if self._is_ready is None:
            loop = asyncio.get_running_loop()
            self._is_ready = loop.create_future()
            transport, _ = await loop.create_unix_connection(lambda: _Protocol(self), sock=self._socket)
            self._transport = transport
            transport.write(self._first_frame)
        return await asyncio.shield(self._is_ready)

    @property
    def is_alive(self) -> bool:
        """Whether requests can be served, or will be once it has started."""
        return self._failure is None

    @property
    def failure(self) -> JPagedError | None:
        """Why it is not alive."""
        return self._failure

    @property
    def pid(self) -> int:
        """Of the engine process."""
        return self._process.pid

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._streams)

    @property
    def num_queued(self) -> int:
        """Requests that have never run."""
        return self._num_queued

    @property
    def num_queued_tokens(self) -> int:
        """Tokens of the prompts of those."""
        return self._queued_tokens

    def unfinished_request_ids(self) -> dict[int, str]:
        """By handle, as `block_owners` names them."""
        return {handle: stream.request.request_id for handle, stream in self._streams.items()}

    async def generate(
        self,
        prompt: Prompt | ProcessedInput,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Completes a prompt. Whoever stops iterating aborts the request, and its blocks are free at once.

        Args:
            prompt: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; or what `process` made of it.
            sampling_params: how to sample, or to search; the model's defaults if None. `output_kind` says what is
                yielded: all so far (CUMULATIVE), what is new (DELTA), or once at the end (FINAL_ONLY). An output may
                hold several tokens, when they came faster than they were taken.
            request_id: not that of an unfinished request; made up if None.
            priority: with scheduling_policy "priority", lower runs first.
            cache_salt: prefixes are shared only among requests of equal salt.
        Raises:
            InvalidPromptError, InvalidParameterError, OutOfMemoryError: the input cannot be served.
            EngineDeadError: the engine process has ended.
        """
        arrival_time = time.monotonic()
        ready = await self.ready()
        params = ready.default_sampling_params if sampling_params is None else sampling_params
        checked = prompt if isinstance(prompt, ProcessedInput) else await self.process(prompt, params)
        self._check_alive()
        handle = next(self._handles)
        request_id = f"request-{handle}" if request_id is None else request_id
        if not isinstance(request_id, str) or not request_id:
            raise InvalidParameterError(f"request_id must be a non-empty string, got {request_id!r}.")
        if request_id in self._request_ids:
            raise InvalidParameterError(f"request_id={request_id!r} is in use by an unfinished request.")
        beam = params if isinstance(params, BeamSearchParams) else None
        request = Request(
            request_id,
            checked.prompt_token_ids,
            params.sampling_params() if isinstance(params, BeamSearchParams) else params,
            eos_token_ids=ready.eos_token_ids,
            bad_words_token_ids=checked.bad_words_token_ids,
            priority=priority,
            cache_salt=cache_salt,
            arrival_time=arrival_time,
            beam=beam,
        )
        SequenceGroup(request)
        stream = _Stream(self, handle, request, checked)
        self._open(stream)
        try:
            while not stream.closed:
                output = await stream.next()
                if output is not None:
                    yield output
        finally:
            self._close(stream)

    async def abort(self, request_id: str) -> None:
        """Ends a request; its iterator ends with finish_reason "abort" and what there is. Passes over unknown ids."""
        for stream in list(self._streams.values()):
            if stream.request.request_id == request_id:
                self._abort(stream)

    async def abort_all(self) -> None:
        """Ends all requests, as `abort`."""
        for stream in list(self._streams.values()):
            self._abort(stream)

    async def process(self, prompt: Prompt, params: SamplingParams | BeamSearchParams) -> ProcessedInput:
        """Tokenizes and checks a prompt and its parameters, without queueing anything.

        Raises:
            InvalidPromptError, InvalidParameterError: they cannot be served.
        """
        text: Any
        if isinstance(prompt, dict):
            text = None if "prompt_token_ids" in prompt else prompt.get("prompt")
        else:
            text = prompt
        inputs = await self._input_processor()
        if isinstance(params, BeamSearchParams):
            search = params
            return await self.in_thread(lambda: inputs.process_search(prompt, search))
        if isinstance(text, str) and len(text) > INLINE_CHARACTERS:
            self._check_length(text)
            return await self.in_thread(lambda: inputs.process(prompt, params))
        return inputs.process(prompt, params)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to token ids.

        Raises:
            InvalidPromptError: no text, one that cannot fit the model, or no tokenizer.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise InvalidPromptError("The prompt is text, but the engine was started without a tokenizer.")
        await self.ready()
        if len(text) <= INLINE_CHARACTERS:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        self._check_length(text)
        return await self.in_thread(lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        """Runs something that takes long for the event loop, such as tokenizing a long text."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def get_metrics(self) -> EngineStats:
        """Counters and occupancy of the engine. Raises EngineDeadError."""
        answer = await self._call("stats")
        assert answer.stats is not None
        return answer.stats

    async def block_owners(self) -> BlockOwners:
        """The KV pool, block by block. Raises EngineDeadError."""
        answer = await self._call("blocks")
        assert answer.blocks is not None
        return answer.blocks

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. Returns False, and does nothing, while requests run."""
        return bool((await self._call("reset_prefix_cache")).done)

    async def check_health(self) -> None:
        """Raises EngineDeadError if the engine process has failed or ended."""
        self._check_alive()

    async def check_integrity(self) -> None:
        """Checks the engine's blocks, tables, slots and queue; reads everything. Raises EngineDeadError."""
        await self._call("check_integrity")

    async def shutdown(self) -> None:
        """Ends the engine process and all requests. Does nothing the second time."""
        if self._transport is not None and self._failure is None:
            self._send(Shutdown())
        else:
            self._process.kill()
        self._die(EngineDeadError("The engine was shut down."))
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(None, lambda: self._process.wait(SHUTDOWN_S))
        except subprocess.TimeoutExpired:
            self._process.kill()
            await loop.run_in_executor(None, self._process.wait)
        if self._transport is not None:
            self._transport.close()
        else:
            self._socket.close()
        self._threads.shutdown(wait=False)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(str(self._failure)) from self._failure

    def _check_length(self, text: str) -> None:
        """Refuses what cannot fit before it is tokenized, which takes time and memory with its length."""
        assert self._ready is not None
        if self.tokenizer is None:
            return
        longest = self.tokenizer.max_token_characters
        if len(text) > self._ready.max_model_len * longest:
            raise InvalidPromptError(
                f"The prompt has {len(text)} characters; max_model_len={self._ready.max_model_len} tokens of at most "
                f"{longest} characters cannot hold it. Shorten it or raise max_model_len."
            )

    async def _input_processor(self) -> InputProcessor:
        ready = await self.ready()
        return InputProcessor(self.tokenizer, ready.vocab_size, min(ready.max_model_len, ready.pool_tokens))

    async def _call(self, name: str) -> Answer:
        await self.ready()
        self._check_alive()
        call_id = next(self._handles)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._send(Call(call_id, name))
        try:
            answer: Answer = await future
        finally:
            self._calls.pop(call_id, None)
        if answer.error is not None:
            raise EngineDeadError(answer.error)
        return answer

    def _send(self, message: ToEngine) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    def _open(self, stream: "_Stream") -> None:
        request = stream.request
        self._streams[stream.handle] = stream
        self._request_ids.add(request.request_id)
        self._num_queued += 1
        self._queued_tokens += request.prompt_len
        self._send(
            Add(
                handle=stream.handle,
                prompt=request.prompt_token_ids.tobytes(),
                sampling=request.sampling,
                beam=request.beam,
                bad_words_token_ids=request.bad_words_token_ids,
                priority=request.priority,
                cache_salt=request.cache_salt,
                arrival_time=request.stats.arrival_time,
            )
        )

    def _close(self, stream: "_Stream") -> None:
        """Forgets a stream; one whose request has not ended is aborted."""
        if self._streams.pop(stream.handle, None) is None:
            return
        request = stream.request
        self._request_ids.discard(request.request_id)
        self._started(stream)
        if stream.end():
            self._send(Abort([stream.handle]))
        self.metrics.count_finished(request)

    def _abort(self, stream: "_Stream") -> None:
        if stream.end():
            self._send(Abort([stream.handle]))
            stream.wake()

    def _started(self, stream: "_Stream") -> None:
        if stream.queued:
            stream.queued = False
            self._num_queued -= 1
            self._queued_tokens -= stream.request.prompt_len

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Step):
            self._take_step(message)
        elif isinstance(message, Answer):
            future = self._calls.pop(message.call_id, None)
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, Refused):
            stream = self._streams.get(message.handle)
            if stream is not None:
                stream.fail(_error(message.kind, message.message))
        elif isinstance(message, Ready):
            self._ready = message
            assert self._is_ready is not None
            if not self._is_ready.done():
                self._is_ready.set_result(message)
        elif isinstance(message, Failed):
            self._die(_error(message.kind, message.message))
        elif isinstance(message, Dead):
            self._die(EngineDeadError(f"The engine failed: {message.message}"))

    def _take_step(self, step: Step) -> None:
        streams, now = self._streams, time.monotonic()
        for handle in array("q", step.started):
            stream = streams.get(handle)
            if stream is not None:
                self._started(stream)
        intervals = []
        for handle, token_id in zip(array("q", step.handles), array("i", step.tokens), strict=True):
            stream = streams.get(handle)
            if stream is not None and not stream.request.finished:  # else: ended here while this was under way
                stream.request.output_token_ids.append(token_id)
                intervals.append(now - stream.last_token_time)
                stream.last_token_time = now
                stream.pending[0].append(token_id)
                stream.wake()
        for update in step.updates:
            stream = streams.get(update.handle)
            if stream is not None and not stream.request.group.members[update.index].finished:
                if stream.last_token_time and stream.request.reports_each_token and len(stream.pending) == 1:
                    intervals.append(now - stream.last_token_time)
                stream.take(update, now)
        self.metrics.count_step(len(step.handles) // 8 + len(step.updates), intervals)

    def _die(self, error: JPagedError) -> None:
        """The engine is of no more use: nobody waits for it any longer."""
        if self._failure is not None:
            return
        self._failure = error
        if self._is_ready is not None and not self._is_ready.done():
            self._is_ready.set_exception(error)
            self._is_ready.exception()  # retrieved: nobody may be waiting for it
        for stream in self._streams.values():
            stream.fail(EngineDeadError(str(error)))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(str(error)))

    def _lost(self) -> None:
        """The engine closed its socket: its process has ended, or is about to."""
        try:
            code = self._process.wait(0.5) if self._failure is None else 0
        except subprocess.TimeoutExpired:
            code = None
        how = "closed its socket" if code is None else f"ended with signal {-code}" if code < 0 else f"ended ({code})"
        self._die(EngineDeadError(f"The engine process {how}; start it anew."))


class _Stream:
    """A request as this process knows it, and what its consumer has not taken yet.

    request: kept as the scheduler keeps its own, from what the engine reports.
    pending: by sequence, tokens that came since the consumer last looked; empty also where only other news came.
    queued: it has not run yet. closed: nothing more will come.
    """

    __slots__ = (
        "_changed",
        "_error",
        "_news",
        "_outputs",
        "_waiter",
        "closed",
        "handle",
        "last_token_time",
        "pending",
        "queued",
        "request",
    )

    def __init__(self, engine: AsyncLLMEngine, handle: int, request: Request, checked: ProcessedInput) -> None:
        self.handle = handle
        self.request = request
        self.pending: list[list[int]] = [[] for _ in request.group.members]
        self._changed: set[int] = set()
        self.queued = True
        self.closed = False
        self.last_token_time = 0.0
        self._news = False
        self._error: JPagedError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._outputs = OutputProcessor(_RemoteCore(engine, self), engine.tokenizer)
        self._outputs.add(request, checked.prompt, checked.prompt_token_ids)

    def take(self, update: Update, now: float) -> None:
        """News from the engine."""
        request = self.request.group.members[update.index]
        self.request.num_cached_tokens = update.num_cached_tokens
        request.output_token_ids.extend(update.token_ids)
        if update.logprobs is not None and request.logprobs is not None:
            request.logprobs.extend(update.logprobs)
        if update.prompt_logprobs is not None:
            request.prompt_logprobs = update.prompt_logprobs
        if update.stats is not None:
            for member in request.group.members:  # it is one for all of them
                member.stats = update.stats
        if update.finish_reason is not None:
            request.status = RequestStatus.FINISHED
            request.finish_reason = update.finish_reason  # type: ignore[assignment]  # the scheduler's own words
            request.stop_reason = update.stop_reason
            request.cumulative_logprob, request.score = update.cumulative_logprob, update.score
        self.last_token_time = now
        self.pending[update.index].extend(update.token_ids)
        self._changed.add(update.index)
        self.wake()

    def end(self) -> bool:
        """Ends the sequences that have not ended, as aborted; returns whether there were any."""
        members = [member for member in self.request.group.members if not member.finished]
        for member in members:
            member.status, member.finish_reason = RequestStatus.FINISHED, "abort"
            member.stats.finished_time = time.monotonic()
            self._changed.add(member.index)
        return bool(members)

    def fail(self, error: JPagedError) -> None:
        self._error = error
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
        if self._error is not None:
            self.closed = True
            raise self._error
        group, changed = self.request.group, self._changed
        updates = []
        for i, new_token_ids in enumerate(self.pending):
            if new_token_ids or i in changed:
                updates.append(RequestUpdate(group.members[i], new_token_ids))
                self.pending[i] = []
        changed.clear()
        outputs = self._outputs.process(updates)
        self.closed = group.finished
        return outputs[-1] if outputs else None


class _RemoteCore:
    """What an `OutputProcessor` asks of a core: to end a request whose text reached a stop string."""

    def __init__(self, engine: AsyncLLMEngine, stream: _Stream) -> None:
        self._engine = engine
        self._stream = stream

    def finish(self, request_id: str, stop_reason: int | str | None, index: int = 0) -> Request | None:
        request = self._stream.request.group.members[index]
        if request.finished:
            return None
        request.status = RequestStatus.FINISHED
        request.stats.finished_time = time.monotonic()
        self._engine._send(Finish(self._stream.handle, index, str(stop_reason)))
        return request


class _Protocol(asyncio.Protocol):
    """Bytes from the engine process."""

    def __init__(self, engine: AsyncLLMEngine) -> None:
        self._engine = engine
        self._reader = FrameReader(FromEngine)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._engine._take(message)
        except EngineDeadError as error:
            self._engine._die(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine._lost()


def _start_process() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The engine process, and this end of the socket pair to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (ours, theirs):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
    root = str(Path(jpaged.__file__).parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    path = root if not inherited else f"{root}{os.pathsep}{inherited}"
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "jpaged.serving.engine_process", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "PYTHONPATH": path},
        )
    return process, ours


def _error(kind: str, message: str) -> JPagedError:
    """An error of the engine process, as one of this."""
    error_type: Any = getattr(errors, kind, None)
    if isinstance(error_type, type) and issubclass(error_type, JPagedError):
        return error_type(message)
    return EngineDeadError(f"{kind}: {message}")
