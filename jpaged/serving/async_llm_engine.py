"""`AsyncLLMEngine`: the engine in a process of its own, for programs that run on asyncio. The server is one of them.

    generate() --> InputProcessor --> Router --> Add --> engine process (one for each replica)
       ^                                                   |
       +-- OutputProcessor <-- _Stream (pending) <------- Step

Tokenizing, detokenizing and stop strings are done here. A `Step` only appends to the streams that it concerns and
wakes them; text is made when a consumer takes it, so one that lags behind gets several tokens at once, and a busy
process does less for each.
"""

import asyncio
import itertools
import math
import socket
import time
from array import array
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from jpaged import errors
from jpaged.assets import demo_model_path
from jpaged.beam_search_params import BeamSearchParams
from jpaged.config import EngineArgs
from jpaged.engine.pool_view import PoolView
from jpaged.engine.request import Request, RequestStatus
from jpaged.engine.router import Router
from jpaged.engine.scheduler import RequestUpdate
from jpaged.engine.seeds import request_seed
from jpaged.engine.sequence_group import SequenceGroup
from jpaged.engine.stats import EngineStats
from jpaged.engine.tokenizer import Tokenizer
from jpaged.errors import EngineDeadError, InvalidParameterError, InvalidPromptError, JPagedError
from jpaged.inputs import InputProcessor, ProcessedInput, Prompt
from jpaged.models import resolve
from jpaged.output_processor import OutputProcessor
from jpaged.outputs import RequestOutput
from jpaged.sampling_params import SamplingParams
from jpaged.serving.launch import EngineProcesses, Link
from jpaged.serving.metrics import ServingMetrics
from jpaged.serving.wire import (
    Abort,
    Add,
    Answer,
    Call,
    Dead,
    Failed,
    Finish,
    FrameReader,
    FromEngine,
    Ready,
    Refused,
    Shutdown,
    Step,
    ToEngine,
    Update,
    frame,
)

INLINE_CHARACTERS = 4096
"""Shorter prompts are tokenized at once (about 1 ms); longer ones in a thread, while others are served."""
SHUTDOWN_S = 10.0
"""How long the engine process may take to end by itself."""
_LAST_WORDS_S = 0.5
"""How long its exit code is waited for after it has closed its socket."""

_T = TypeVar("_T")


def load_tokenizer(args: EngineArgs) -> Tokenizer | None:
    """The model's tokenizer; None with skip_tokenizer_init.

    Raises:
        ModelNotFoundError, CheckpointError: there is no such model or tokenizer.
    """
    return None if args.skip_tokenizer_init else Tokenizer.load(args.tokenizer or _directory(args))


def _directory(args: EngineArgs) -> Path:
    return demo_model_path() if args.model is None else resolve(args.model, args.revision, args.load_format)


class AsyncLLMEngine:
    """A model in a process of its own, serving requests that come and go.

        async with AsyncLLMEngine(EngineArgs(model="path/to/model")) as engine:
            params = SamplingParams(max_tokens=64, output_kind=RequestOutputKind.DELTA)
            async for output in engine.generate("Once upon a time", params):
                print(output.outputs[0].text, end="")

    The process starts with the constructor and ends with `shutdown`, or when this process ends in whatever way. All
    methods are called from one event loop. With `data_parallel_size` there are as many, and each request goes to the
    one that has least to do before it is done; a request's tokens do not depend on which that is.

    Args:
        args: what to run and how.
        processes: started by the caller, instead of by the constructor; `shutdown` ends them.
        link: to processes that another process has started and will end.

    Attributes:
        args: as given.
        tokenizer: None with skip_tokenizer_init.
        metrics: what it counts and times.

    Raises:
        ModelNotFoundError, CheckpointError: there is no such model or tokenizer. What else may be wrong with the model
            `ready` raises.
    """

    def __init__(self, args: EngineArgs, *, processes: EngineProcesses | None = None, link: Link | None = None) -> None:
        _directory(args)  # where there is no model, no process is started
        self.args = args
        if link is None:
            processes = processes or EngineProcesses(args)
            link = processes.links[0]
        self._processes = processes
        try:
            self.tokenizer = load_tokenizer(args)
        except BaseException:
            if processes is not None:
                processes.kill()
                processes.wait(SHUTDOWN_S)
            raise
        self._board = link.board
        self.metrics = ServingMetrics(link.board.metrics, link.board.worker)
        self._replicas = [_Replica(index, sock) for index, sock in enumerate(link.sockets)]
        self._router = Router(len(self._replicas), match_prefixes=args.enable_prefix_caching)
        self._is_ready: asyncio.Future[Ready] | None = None
        self._ready: Ready | None = None
        self._failure: JPagedError | None = None
        self._streams: dict[int, _Stream] = {}
        self._request_ids: set[str] = set()
        self._handles = itertools.count(1 + link.board.worker, link.board.num_workers)
        self._call_ids = itertools.count(1)
        self._calls: dict[int, tuple[_Replica, asyncio.Future[Answer]]] = {}
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="jpaged-tokenize")

    async def __aenter__(self) -> Self:
        await self.ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    async def ready(self) -> Ready:
        """Waits until the engine serves; returns what it is like, of several replicas the first one.

        Raises:
            ModelNotFoundError, CheckpointError, UnsupportedModelError, OutOfMemoryError, InvalidParameterError: as
                `LLMEngine`.
            EngineDeadError: its process ended.
        """
        if self._is_ready is None:
            loop = asyncio.get_running_loop()
            self._is_ready = loop.create_future()
            for replica in self._replicas:
                await replica.connect(self)
        return await asyncio.shield(self._is_ready)

    @property
    def is_alive(self) -> bool:
        """Whether requests can be served, or will be once it has started: by some replica, not necessarily by all."""
        return self._failure is None

    @property
    def failure(self) -> JPagedError | None:
        """Why it is not alive."""
        return self._failure

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run; of all API processes, like the next two."""
        return self._board.total("unfinished")

    @property
    def num_queued(self) -> int:
        """Requests that have never run."""
        return self._board.total("queued")

    @property
    def num_queued_tokens(self) -> int:
        """Tokens of the prompts of those."""
        return self._board.total("queued_tokens")

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
        if len(self._replicas) > 1 and isinstance(params, SamplingParams) and params.seed is None:
            # Arrivals are counted here: each replica would begin with the same seed.
            seed = request_seed(None, self.args.seed, handle - 1)  # unsigned; a signed number's bits do as well
            params = replace(params, seed=seed - 2**64 if seed >= 2**63 else seed)
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
        stream = _Stream(self, handle, request, checked, self._replica_for(handle, request))
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
        encodes = isinstance(text, str) or bool(params.bad_words)
        if isinstance(text, str):
            self._check_length(text)
        if encodes and self._encodes_slowly(text):
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
        self._check_length(text)
        if not self._encodes_slowly(text):
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await self.in_thread(lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        """Runs something that takes long for the event loop, such as tokenizing a long text."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def get_metrics(self) -> EngineStats:
        """Counters and occupancy of the engine, of several replicas the sum. Raises EngineDeadError."""
        return EngineStats.total((await self.get_replica_metrics()).values())

    async def get_replica_metrics(self) -> dict[int, EngineStats]:
        """The same of each replica that serves. Raises EngineDeadError."""
        return {replica: answer.stats for replica, answer in (await self._call("stats")).items() if answer.stats}

    async def get_pool_views(self) -> dict[int, tuple[EngineStats, PoolView]]:
        """The same, and a picture of the KV pool, of each replica that serves; reads the whole pool. In a picture
        requests go by numbers, which say nothing about them. Raises EngineDeadError.
        """
        answers = (await self._call("pool")).items()
        return {replica: (answer.stats, answer.pool) for replica, answer in answers if answer.stats and answer.pool}

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. Returns False where requests ran: on such a replica nothing was done."""
        answers = await self._call("reset_prefix_cache")
        done = all(answer.done for answer in answers.values())
        if done:
            self._router.forget_prefixes()
        return done

    async def check_health(self) -> None:
        """Raises EngineDeadError if the engine process, or that of any replica, has failed or ended."""
        self._check_alive()
        for replica in self._replicas:
            if replica.failure is not None:
                raise EngineDeadError(str(replica.failure)) from replica.failure

    async def check_integrity(self) -> None:
        """Checks the engine's blocks, tables, slots and queue; reads everything. Raises EngineDeadError."""
        await self._call("check_integrity")

    async def shutdown(self) -> None:
        """Ends the engine process, if it is this one's, and all requests. Does nothing the second time."""
        if self._processes is not None:
            if self._ready is not None:
                for replica in self._replicas:
                    replica.send(Shutdown())
            else:
                self._processes.kill()
        for replica in self._replicas:
            self._die(replica, EngineDeadError("The engine was shut down."))
        if self._processes is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._processes.wait, SHUTDOWN_S)
        for replica in self._replicas:
            replica.close()
        self._threads.shutdown(wait=False)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(str(self._failure)) from self._failure

    def _encodes_slowly(self, text: Any) -> bool:
        """Whether the event loop should not wait for the tokenizer: the text is long, or another one is before it."""
        is_long = isinstance(text, str) and len(text) > INLINE_CHARACTERS
        return is_long or (self.tokenizer is not None and self.tokenizer.is_busy)

    def _check_length(self, text: str) -> None:
        """Refuses a long text that cannot fit before it is tokenized, which takes time and memory with its length."""
        assert self._ready is not None
        if self.tokenizer is None or len(text) <= INLINE_CHARACTERS:
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

    def _replica_for(self, handle: int, request: Request) -> "_Replica":
        """Where a request will run."""
        if len(self._replicas) == 1:
            return self._replicas[0]
        assert self._ready is not None
        room = self._ready.max_model_len - request.prompt_len
        most = room if request.sampling.max_tokens is None else min(room, request.sampling.max_tokens)
        own, owed = self._router.outstanding, self._board.by_replica("owed_tokens")
        elsewhere = [math.inf if r.failure else owed[r.index] - own[r.index] for r in self._replicas]
        new_tokens, prompt = most * len(request.group.members), request.prompt_token_ids.tolist()
        index = self._router.route(str(handle), prompt, new_tokens, request.cache_salt, elsewhere)
        self._board.set("owed_tokens", index, own[index])
        return self._replicas[index]

    async def _call(self, name: str, replicas: "list[_Replica] | None" = None) -> dict[int, Answer]:
        """What replicas answer, by their numbers; all those that serve by default."""
        await self.ready()
        self._check_alive()
        futures: dict[int, asyncio.Future[Answer]] = {}
        for replica in replicas or [one for one in self._replicas if one.failure is None]:
            if replica.failure is not None:
                raise EngineDeadError(str(replica.failure)) from replica.failure
            call_id = next(self._call_ids)
            futures[replica.index] = asyncio.get_running_loop().create_future()
            self._calls[call_id] = replica, futures[replica.index]
            replica.send(Call(call_id, name))
        answers = dict(zip(futures, await asyncio.gather(*futures.values()), strict=True))
        for answer in answers.values():
            if answer.error is not None:
                raise EngineDeadError(answer.error)
        return answers

    def _open(self, stream: "_Stream") -> None:
        request = stream.request
        self._streams[stream.handle] = stream
        self._request_ids.add(request.request_id)
        replica = stream.replica
        self._board.add("unfinished", replica.index, 1)
        self._board.add("queued", replica.index, 1)
        self._board.add("queued_tokens", replica.index, request.prompt_len)
        replica.send(
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
        request, replica = stream.request, stream.replica
        self._request_ids.discard(request.request_id)
        self._started(stream)
        self._board.add("unfinished", replica.index, -1)
        if len(self._replicas) > 1:
            self._router.finish(str(stream.handle))
            self._board.set("owed_tokens", replica.index, self._router.outstanding[replica.index])
        if stream.end():
            replica.send(Abort([stream.handle]))
        self.metrics.count_finished(replica.index, request)

    def _abort(self, stream: "_Stream") -> None:
        if stream.end():
            stream.replica.send(Abort([stream.handle]))
            stream.wake()

    def _started(self, stream: "_Stream") -> None:
        if stream.queued:
            stream.queued = False
            self._board.add("queued", stream.replica.index, -1)
            self._board.add("queued_tokens", stream.replica.index, -stream.request.prompt_len)

    def _take(self, replica: "_Replica", message: FromEngine) -> None:
        if isinstance(message, Step):
            self._take_step(replica, message)
        elif isinstance(message, Answer):
            call = self._calls.pop(message.call_id, None)
            if call is not None and not call[1].done():
                call[1].set_result(message)
        elif isinstance(message, Refused):
            stream = self._streams.get(message.handle)
            if stream is not None:
                stream.fail(_error(message.kind, message.message))
        elif isinstance(message, Ready):
            replica.ready = message
            if all(one.ready is not None for one in self._replicas):
                self._take_ready([one.ready for one in self._replicas if one.ready is not None])
        elif isinstance(message, Failed):
            self._die(replica, _error(message.kind, message.message))
        elif isinstance(message, Dead):
            self._die(replica, EngineDeadError(f"The engine failed: {message.message}"))

    def _take_ready(self, ready: list[Ready]) -> None:
        """All replicas serve. What one of them cannot take, none is sent."""
        first = ready[0]
        first.max_model_len = min(one.max_model_len for one in ready)
        first.pool_tokens = min(one.pool_tokens for one in ready)
        self._ready = first
        assert self._is_ready is not None
        if not self._is_ready.done():
            self._is_ready.set_result(first)

    def _take_step(self, replica: "_Replica", step: Step) -> None:
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
        self.metrics.count_intervals(replica.index, intervals)

    def _die(self, replica: "_Replica", error: JPagedError) -> None:
        """A replica is of no more use: nobody waits for it any longer."""
        if replica.failure is not None:
            return
        replica.failure = error
        if self._ready is None or all(one.failure is not None for one in self._replicas):
            self._failure = self._failure or error
        if self._is_ready is not None and not self._is_ready.done():
            self._is_ready.set_exception(error)
            self._is_ready.exception()  # retrieved: nobody may be waiting for it
        for stream in self._streams.values():
            if stream.replica is replica:
                stream.fail(EngineDeadError(str(error)))
        for asked, future in self._calls.values():
            if asked is replica and not future.done():
                future.set_exception(EngineDeadError(str(error)))
        self._calls = {call_id: call for call_id, call in self._calls.items() if call[0] is not replica}

    def _lost(self, replica: "_Replica") -> None:
        """The engine closed its socket: its process has ended, or is about to."""
        if replica.failure is None:
            code = None if self._processes is None else self._processes.exit_code(replica.index, _LAST_WORDS_S)
            how = "closed its socket" if code is None else f"ended ({code})"
            if code is not None and code < 0:
                how = f"ended with signal {-code}"
            which = "" if len(self._replicas) == 1 else f" of replica {replica.index}"
            self._die(replica, EngineDeadError(f"The engine process{which} {how}; start it anew."))


class _Replica:
    """An engine process, as this process knows it.

    ready: what it is like, once it serves. failure: why it does not any more.
    """

    def __init__(self, index: int, sock: socket.socket) -> None:
        self.index = index
        self.ready: Ready | None = None
        self.failure: JPagedError | None = None
        self._socket = sock
        self._transport: asyncio.WriteTransport | None = None

    async def connect(self, engine: AsyncLLMEngine) -> None:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: _Protocol(engine, self), sock=self._socket)

    def send(self, message: ToEngine) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        else:
            self._socket.close()


class _Stream:
    """A request as this process knows it, and what its consumer has not taken yet.

    request: kept as the scheduler keeps its own, from what the engine reports. replica: where it runs.
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
        "replica",
        "request",
    )

    def __init__(
        self, engine: AsyncLLMEngine, handle: int, request: Request, checked: ProcessedInput, replica: _Replica
    ) -> None:
        self.handle = handle
        self.request = request
        self.replica = replica
        self.pending: list[list[int]] = [[] for _ in request.group.members]
        self._changed: set[int] = set()
        self.queued = True
        self.closed = False
        self.last_token_time = 0.0
        self._news = False
        self._error: JPagedError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._outputs = OutputProcessor(_RemoteCore(self), engine.tokenizer)
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

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream

    def finish(self, request_id: str, stop_reason: int | str | None, index: int = 0) -> Request | None:
        request = self._stream.request.group.members[index]
        if request.finished:
            return None
        request.status = RequestStatus.FINISHED
        request.stats.finished_time = time.monotonic()
        self._stream.replica.send(Finish(self._stream.handle, index, str(stop_reason)))
        return request


class _Protocol(asyncio.Protocol):
    """Bytes from an engine process."""

    def __init__(self, engine: AsyncLLMEngine, replica: _Replica) -> None:
        self._engine = engine
        self._replica = replica
        self._reader = FrameReader(FromEngine)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._engine._take(self._replica, message)
        except EngineDeadError as error:
            self._engine._die(self._replica, error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine._lost(self._replica)


def _error(kind: str, message: str) -> JPagedError:
    """An error of the engine process, as one of this."""
    error_type: Any = getattr(errors, kind, None)
    if isinstance(error_type, type) and issubclass(error_type, JPagedError):
        return error_type(message)
    return EngineDeadError(f"{kind}: {message}")
