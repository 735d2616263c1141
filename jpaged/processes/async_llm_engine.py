"""`AsyncLLMEngine`: the engine in a process of its own, for programs that run on asyncio. The server is one of them.

    generate() --> InputProcessor --> Router --> Add --> engine process (one for each replica)
       ^                                                   |
       +-- OutputProcessor <-- RequestStream <---------- Step

Tokenizing, detokenizing and stop strings are done in this process. This module knows which request runs where, and
what is open; `request_stream.py` makes a request's outputs, `tokenizing.py` tokenizes, `links.py` sends and receives.
"""

import asyncio
import itertools
import math
import time
from array import array
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Self, TypeVar

from jpaged.api.beam_search_params import BeamSearchParams
from jpaged.api.config import EngineArgs
from jpaged.api.errors import EngineDeadError, InvalidParameterError, JPagedError, error_of
from jpaged.api.outputs import RequestOutput
from jpaged.api.sampling_params import SamplingParams
from jpaged.engine.limits import RequestLimits
from jpaged.engine.sequences.group import SequenceGroup
from jpaged.engine.sequences.request import Request
from jpaged.engine.sequences.seeds import default_seed
from jpaged.engine.stats import EngineStats
from jpaged.frontend.inputs import InputProcessor, ProcessedInput, Prompt
from jpaged.host.hub import model_directory
from jpaged.processes import wire
from jpaged.processes.launch import EngineProcesses, Link
from jpaged.processes.links import AsyncLink
from jpaged.processes.pool_view import PoolView
from jpaged.processes.request_metrics import RequestMetrics
from jpaged.processes.request_stream import RequestStream
from jpaged.processes.router import Router
from jpaged.processes.tokenizing import AsyncTokenizer
from jpaged.text.tokenizer import Tokenizer

SHUTDOWN_S = 10.0
"""The engine process gets this long to end by itself, then it is killed."""
_LAST_WORDS_S = 0.5
"""After its socket has closed, we wait this long for its exit code, so that the error can name it."""

_T = TypeVar("_T")
_AnswerT = TypeVar("_AnswerT", wire.Stats, wire.Pool, wire.Changed, wire.Intact)


def load_tokenizer(args: EngineArgs) -> Tokenizer | None:
    """The model's tokenizer; None with skip_tokenizer_init.

    Raises:
        ModelNotFoundError, CheckpointError: there is no such model or tokenizer.
    """
    return None if args.skip_tokenizer_init else Tokenizer.load(args.tokenizer or model_directory(args))


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
        model_directory(args)  # where there is no model, no process is started
        self.args = args
        if link is None:
            processes = processes or EngineProcesses(args)
            link = processes.links[0]
        self._processes = processes
        try:
            self.tokenizer = load_tokenizer(args)
        except BaseException:  # Ctrl-C too: no process is left behind
            if processes is not None:
                processes.kill()
                processes.wait(SHUTDOWN_S)
            raise
        self._board = link.board
        self.metrics = RequestMetrics(link.board.metrics, link.board.worker)
        self._replicas = [AsyncLink(index, sock) for index, sock in enumerate(link.sockets)]
        self._router = Router(len(self._replicas), match_prefixes=args.enable_prefix_caching)
        self._is_ready: asyncio.Future[wire.Ready] | None = None
        self._ready: wire.Ready | None = None
        self._inputs: InputProcessor | None = None
        self._failure: JPagedError | None = None
        self._streams: dict[int, RequestStream] = {}
        self._request_ids: set[str] = set()
        self._handles = itertools.count(1 + link.board.worker, link.board.num_workers)
        self._call_ids = itertools.count(1)
        self._calls: dict[int, tuple[AsyncLink, asyncio.Future[wire.Answer]]] = {}
        self._tokenizing = AsyncTokenizer(self.tokenizer)

    async def __aenter__(self) -> Self:
        await self.ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    async def ready(self) -> wire.Ready:
        """Waits until the engine serves. Returns its description; with several replicas, the first one's.

        Raises:
            ModelNotFoundError, CheckpointError, UnsupportedModelError, OutOfMemoryError, InvalidParameterError: as
                `LLMEngine`.
            EngineDeadError: its process ended.
        """
        if self._ready is not None:
            return self._ready
        if self._is_ready is None:
            loop = asyncio.get_running_loop()
            self._is_ready = loop.create_future()
            for replica in self._replicas:
                await replica.connect(self._take, self._end)
        return await asyncio.shield(self._is_ready)

    @property
    def is_alive(self) -> bool:
        """Whether at least one replica serves requests, or will once it has started."""
        return self._failure is None

    @property
    def failure(self) -> JPagedError | None:
        """Why it is not alive."""
        return self._failure

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run, over all API processes."""
        return self._board.total("unfinished")

    @property
    def num_queued(self) -> int:
        """Requests that have never run, over all API processes."""
        return self._board.total("queued")

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of the requests that have never run, over all API processes."""
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
        """Completes a prompt. A caller that stops iterating aborts the request, which frees its blocks at once.

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
        if len(self._replicas) > 1 and isinstance(params, SamplingParams) and params.seed is None:
            # Arrivals are counted here: each replica would begin with the same seed.
            params = replace(params, seed=default_seed(self.args.seed, handle - 1))
        request, checked = self._processor.request(
            f"request-{handle}" if request_id is None else request_id,
            checked,
            params,
            priority=priority,
            cache_salt=cache_salt,
            arrival_time=arrival_time,
        )
        if request.request_id in self._request_ids:
            raise InvalidParameterError(f"request_id={request.request_id!r} is in use by an unfinished request.")
        group = SequenceGroup.form(request)
        replica = self._replica_for(handle, request, len(group.members))
        stream = RequestStream(self.tokenizer, handle, group, checked, replica)
        try:
            self._open(stream)
            while not stream.closed:
                output = await stream.next()
                if output is not None:
                    yield output
        finally:
            self._close(stream)

    async def abort(self, request_id: str) -> None:
        """Ends a request. Its iterator returns what there is, with finish_reason "abort". Unknown ids are ignored."""
        for stream in list(self._streams.values()):
            if stream.request.request_id == request_id:
                self._abort(stream)

    async def abort_all(self) -> None:
        """Ends all requests, each as `abort` does."""
        for stream in list(self._streams.values()):
            self._abort(stream)

    async def process(self, prompt: Prompt, params: SamplingParams | BeamSearchParams) -> ProcessedInput:
        """Tokenizes and checks a prompt and its parameters, without queueing anything.

        Raises:
            InvalidPromptError, InvalidParameterError, OutOfMemoryError: they cannot be served.
        """
        await self.ready()
        return await self._tokenizing.process(prompt, params, self._processor)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to token ids.

        Raises:
            InvalidPromptError: no text, one that cannot fit the model, or no tokenizer.
        """
        limits = (await self.ready()).limits
        return await self._tokenizing.encode(text, limits.max_model_len, add_special_tokens=add_special_tokens)

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        """Runs work that would block the event loop for too long, such as tokenizing a long text."""
        return await self._tokenizing.in_thread(work)

    async def get_metrics(self) -> EngineStats:
        """Counters and occupancy, summed over the replicas. Raises EngineDeadError."""
        return EngineStats.total((await self.get_replica_metrics()).values())

    async def get_replica_metrics(self) -> dict[int, EngineStats]:
        """Counters and occupancy of each replica that serves, by its number. Raises EngineDeadError."""
        return {replica: answer.stats for replica, answer in (await self._ask(wire.GetStats(), wire.Stats)).items()}

    async def get_pool_views(self) -> dict[int, tuple[EngineStats, PoolView]]:
        """The same, and a picture of the KV pool, of each replica that serves; reads the whole pool. In a picture
        requests go by numbers, which say nothing about them. Raises EngineDeadError.
        """
        answers = await self._ask(wire.GetPool(), wire.Pool)
        return {replica: (answer.stats, answer.view) for replica, answer in answers.items()}

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. A replica that is running requests does nothing; then this returns False."""
        answers = await self._ask(wire.ResetPrefixCache(), wire.Changed)
        done = all(answer.value for answer in answers.values())
        if done:
            self._router.forget_prefixes()
        return done

    async def sleep(self, level: int = 1) -> bool:
        """As `LLMEngine.sleep`, on every replica; one that has unfinished requests goes on, and this returns False."""
        answers = await self._ask(wire.Sleep(level), wire.Changed)
        self._router.forget_prefixes()
        return all(answer.value for answer in answers.values())

    async def wake_up(self) -> None:
        """As `LLMEngine.wake_up`, on every replica."""
        await self._ask(wire.WakeUp(), wire.Changed)

    async def check_health(self) -> None:
        """Raises EngineDeadError if an engine process has failed or ended."""
        self._check_alive()
        for replica in self._replicas:
            if replica.failure is not None:
                raise EngineDeadError(str(replica.failure)) from replica.failure

    async def check_integrity(self) -> None:
        """Checks that blocks, tables, slots and queue agree. Slow: it reads all of them. Raises EngineDeadError."""
        await self._ask(wire.CheckIntegrity(), wire.Intact)

    async def shutdown(self) -> None:
        """Ends all requests, and the engine processes if this process started them. A second call does nothing."""
        if self._processes is not None:
            if self._ready is not None:
                for replica in self._replicas:
                    replica.send(wire.Shutdown())
            else:
                self._processes.kill()
        for replica in self._replicas:
            self._die(replica, EngineDeadError("The engine was shut down."))
        if self._processes is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._processes.wait, SHUTDOWN_S)
        for replica in self._replicas:
            replica.close()
        self._tokenizing.close()

    @property
    def _processor(self) -> InputProcessor:
        assert self._inputs is not None  # set before `ready` returns
        return self._inputs

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(str(self._failure)) from self._failure

    def _replica_for(self, handle: int, request: Request, num_sequences: int) -> AsyncLink:
        """Picks the replica that a request will run on, and counts the request there."""
        if len(self._replicas) == 1:
            return self._replicas[0]
        assert self._ready is not None
        room = self._ready.limits.max_model_len - request.prompt_len
        most = room if request.sampling.max_tokens is None else min(room, request.sampling.max_tokens)
        own, owed = self._router.outstanding, self._board.by_replica("owed_tokens")
        elsewhere = [math.inf if r.failure else owed[r.index] - own[r.index] for r in self._replicas]
        new_tokens, prompt = most * num_sequences, request.prompt_token_ids.tolist()
        index = self._router.route(str(handle), prompt, new_tokens, request.cache_salt, elsewhere)
        self._board.set("owed_tokens", index, own[index])
        return self._replicas[index]

    async def _ask(self, question: wire.Question, kind: type[_AnswerT]) -> dict[int, _AnswerT]:
        """Asks every replica that serves; returns the answers by replica number. kind: the type of the answers."""
        await self.ready()
        self._check_alive()
        futures: dict[int, asyncio.Future[wire.Answer]] = {}
        for replica in self._replicas:
            if replica.failure is not None:
                continue
            call_id = next(self._call_ids)
            futures[replica.index] = asyncio.get_running_loop().create_future()
            self._calls[call_id] = replica, futures[replica.index]
            replica.send(wire.Call(call_id, question))
        answers = dict(zip(futures, await asyncio.gather(*futures.values()), strict=True))
        for answer in answers.values():
            if isinstance(answer.value, wire.Error):
                raise EngineDeadError(answer.value.message)
        return {index: answer.value for index, answer in answers.items() if isinstance(answer.value, kind)}

    def _open(self, stream: RequestStream) -> None:
        request = stream.request
        self._streams[stream.handle] = stream
        self._request_ids.add(request.request_id)
        replica = stream.replica
        self._board.add("unfinished", replica.index, 1)
        self._board.add("queued", replica.index, 1)
        self._board.add("queued_tokens", replica.index, request.prompt_len)
        replica.send(wire.Add.of(stream.handle, request))

    def _close(self, stream: RequestStream) -> None:
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
            replica.send(wire.Abort([stream.handle]))
        if stream.is_counted:
            self.metrics.count_finished(replica.index, request)

    def _abort(self, stream: RequestStream) -> None:
        if stream.end():
            stream.replica.send(wire.Abort([stream.handle]))
            stream.wake()

    def _started(self, stream: RequestStream) -> None:
        if stream.queued:
            stream.queued = False
            self._board.add("queued", stream.replica.index, -1)
            self._board.add("queued_tokens", stream.replica.index, -stream.request.prompt_len)

    def _take(self, replica: AsyncLink, message: wire.FromEngine) -> None:
        if isinstance(message, wire.Step):
            self._take_step(replica, message)
        elif isinstance(message, wire.Answer):
            call = self._calls.pop(message.call_id, None)
            if call is not None and not call[1].done():
                call[1].set_result(message)
        elif isinstance(message, wire.Refused):
            stream = self._streams.get(message.handle)
            if stream is not None:
                stream.is_counted = False  # it has not run, nor waited
                stream.fail(error_of(message.kind, message.message))
        elif isinstance(message, wire.Ready):
            replica.ready = message
            if all(one.ready is not None for one in self._replicas):
                self._take_ready([one.ready for one in self._replicas if one.ready is not None])
        elif isinstance(message, wire.Failed):
            self._die(replica, error_of(message.kind, message.message))

    def _take_ready(self, ready: list[wire.Ready]) -> None:
        """All replicas serve. A request must keep to the limits of each, since any may get it."""
        first = ready[0]
        first.limits = RequestLimits.least(one.limits for one in ready)
        self._ready = first
        self._inputs = InputProcessor(self.tokenizer, first.vocab_size, first.limits, first.eos_token_ids)
        assert self._is_ready is not None
        if not self._is_ready.done():
            self._is_ready.set_result(first)

    def _take_step(self, replica: AsyncLink, step: wire.Step) -> None:
        streams, now = self._streams, time.monotonic()
        for handle in array("q", step.started):
            stream = streams.get(handle)
            if stream is not None:
                self._started(stream)
        intervals = []
        for update in step.updates:  # first: those who wait for their first token should not wait for all the others
            stream = streams.get(update.handle)
            if stream is not None and not stream.group.members[update.index].finished:
                if stream.last_token_time and stream.request.reports_each_token and len(stream.pending) == 1:
                    intervals.append(now - stream.last_token_time)
                stream.take(update, now)
        for handle, token_id in zip(array("q", step.handles), array("i", step.tokens), strict=True):
            stream = streams.get(handle)
            if stream is not None and not stream.request.finished:  # else: ended here while this was under way
                intervals.append(now - stream.last_token_time)
                stream.add_token(token_id, now)
        self.metrics.count_intervals(replica.index, intervals)

    def _die(self, replica: AsyncLink, error: JPagedError) -> None:
        """Gives up on a replica: its requests and the questions to it fail with `error`."""
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

    def _end(self, replica: AsyncLink, error: EngineDeadError | None) -> None:
        """A connection is of no more use. error: None if the engine process has ended, or is about to."""
        if replica.failure is not None:
            return
        if error is None:
            code = None if self._processes is None else self._processes.exit_code(replica.index, _LAST_WORDS_S)
            how = "closed its socket" if code is None else f"ended ({code})"
            if code is not None and code < 0:
                how = f"ended with signal {-code}"
            which = "" if len(self._replicas) == 1 else f" of replica {replica.index}"
            error = EngineDeadError(f"The engine process{which} {how}; start it anew.")
        self._die(replica, error)
