"""`AsyncLLMEngine`: the engine in a process of its own, for programs that run on asyncio. The server is one of them.

    generate() --> InputProcessor --> Router --> Add --> engine process (one for each replica)
       ^                                                   |
       +-- OutputProcessor <-- RequestStream <---------- Step

Tokenizing, detokenizing and stop strings are done in this process. This module knows which request runs where, and
what is open; `request_stream.py` makes a request's outputs, `tokenizing.py` tokenizes, `links.py` sends and receives.

An engine process may end at any time, and no request is lost with it: this process has the prompts, the seeds and all
tokens that came. `keeper.py` starts another process, to which every open request is added again with its tokens so far;
other replicas take them over at once. Noise is keyed by seed and position, so the tokens are the same.
"""

import asyncio
import itertools
import math
import os
import socket
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Self, TypeVar

from jpaged.api.checks import check_bool, check_choice
from jpaged.api.config import EngineArgs, RestartOptions
from jpaged.api.errors import (
    EngineDeadError,
    EngineRestartingError,
    InvalidParameterError,
    JPagedError,
    SlowConsumerError,
    SuspectRequestError,
    UnsupportedParameterError,
    error_of,
)
from jpaged.api.outputs import RequestOutput
from jpaged.api.sampling_params import SamplingParams
from jpaged.api.weights import InFlight
from jpaged.engine.limits import RequestLimits
from jpaged.engine.sequences.group import SequenceGroup
from jpaged.engine.sequences.request import Request
from jpaged.engine.sequences.seeds import default_seed
from jpaged.engine.stats import EngineStats
from jpaged.frontend.embedding_config import EmbeddingConfig
from jpaged.frontend.inputs import InputProcessor, Params, ProcessedInput, Prompt, request_ids_to_abort
from jpaged.host.hub import model_directory
from jpaged.processes import handover, wire
from jpaged.processes.keeper import EngineKeeper
from jpaged.processes.launch import EngineProcesses, Link, ended_how
from jpaged.processes.links import AsyncLink
from jpaged.processes.pool_view import PoolView
from jpaged.processes.request_metrics import RequestMetrics
from jpaged.processes.request_record import RequestObserver, RequestRecord
from jpaged.processes.request_stream import RequestStream
from jpaged.processes.router import Router
from jpaged.processes.shared_weights import SharedWeights
from jpaged.processes.tokenizing import AsyncTokenizer
from jpaged.text.tokenizer import Tokenizer

SHUTDOWN_S = 10.0
"""The engine process gets this long to end by itself, then it is killed."""
VIEW_S = 5.0
"""What is asked of replicas to look at them has this long to come. One that hangs is left out."""
_LAST_WORDS_S = 0.5
"""After its socket has closed, we wait this long for its exit code, so that the error can name it."""

_T = TypeVar("_T")
_AnswerT = TypeVar("_AnswerT", wire.Stats, wire.Pool, wire.Requests, wire.Changed, wire.Intact)


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

    A process that ends by itself, or hangs, is started again; requests wait meanwhile and then go on, with the tokens
    that they would have had. A request that was running each time it ended is refused.

    Args:
        args: what to run and how; or a model alone: a directory or a hub id.
        restarts: when a process counts as hung, and how often it is started again.
        processes: started by the caller, instead of by the constructor; `shutdown` ends them.
        link: to processes that another process has started and will end.

    Attributes:
        args: as given.
        tokenizer: None with skip_tokenizer_init.
        embeddings: how the model embeds.
        metrics: what it counts and times.
        observers: are told of each request that has ended, such as `Traces` and `RequestLog`; closed by `shutdown`.
        keeper: of the processes; None with `link`.

    Raises:
        ModelNotFoundError, CheckpointError: there is no such model or tokenizer. What else may be wrong with the model
            `ready` raises.
    """

    def __init__(
        self,
        args: EngineArgs | str | os.PathLike[str],
        *,
        restarts: RestartOptions | None = None,
        processes: EngineProcesses | None = None,
        link: Link | None = None,
    ) -> None:
        if not isinstance(args, EngineArgs):
            args = EngineArgs(model=args)  # type: ignore[arg-type]  # which takes paths too
        self.embeddings = EmbeddingConfig.load(model_directory(args))  # where there is no model, no process is started
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
        self.keeper: EngineKeeper | None = None
        if processes is not None:
            self.keeper = EngineKeeper(processes, restarts or RestartOptions(), self._replaced, self._given_up)
        self._handover = link.handover
        self._board = link.board
        self.metrics = RequestMetrics(link.board.metrics, link.board.worker)
        self.observers: list[RequestObserver] = []
        self._replicas = [AsyncLink(index, sock) for index, sock in enumerate(link.sockets)]
        self._router = Router(len(self._replicas), match_prefixes=args.enable_prefix_caching)
        self._is_ready: asyncio.Future[wire.Ready] | None = None
        self._ready: wire.Ready | None = None
        self._inputs: InputProcessor | None = None
        self._failure: JPagedError | None = None
        self._failed = asyncio.Event()
        self._closing = False
        self._is_paused = False
        self._update: asyncio.Future[None] | None = None  # of weights, whether or not somebody waits for it
        self._given: list[SharedWeights] = []  # what `update_weights` has brought, for processes started again
        self._connecting: set[asyncio.Task[None]] = set()
        self._streams: dict[int, RequestStream] = {}
        self._request_ids: set[str] = set()
        self._call_ids = itertools.count(1)
        self._calls: dict[int, tuple[AsyncLink, asyncio.Future[wire.Answer | None]]] = {}
        self._tokenizing = AsyncTokenizer(self.tokenizer)

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> Self:
        """The same as the constructor, under vLLM's name."""
        return cls(args)

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
            if self._handover is not None:
                self._handover.setblocking(False)
                loop.add_reader(self._handover, self._take_over)
            for replica in list(self._replicas):
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
    def is_restarting(self) -> bool:
        """Whether some replica's process is being started again."""
        return self._ready is not None and any(one.ready is None and one.failure is None for one in self._replicas)

    async def failed(self) -> JPagedError:
        """Waits until no replica serves or will serve again; returns why."""
        await self._failed.wait()
        assert self._failure is not None
        return self._failure

    @property
    def num_clients(self) -> int:
        """API processes that share the engine, this one included."""
        return self._board.num_workers

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

    def reserve(self, num_requests: int, num_tokens: int = 0) -> None:
        """Counts requests, and tokens of their prompts, as queued before they are; negative numbers give them back."""
        self._board.add("queued", 0, num_requests)
        self._board.add("queued_tokens", 0, num_tokens)

    async def generate(
        self,
        prompt: Prompt | ProcessedInput,
        sampling_params: Params | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        max_backlog_bytes: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Completes a prompt. A caller that stops iterating aborts the request, which frees its blocks at once.

        Args:
            prompt: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; or what `process` made of it.
            sampling_params: how to sample, to search or to pool; the model's defaults if None. `output_kind` says what
                is yielded: all so far (CUMULATIVE), what is new (DELTA), or once at the end (FINAL_ONLY). An output
                may hold several tokens, when they came faster than they were taken.
            request_id: not that of an unfinished request; made up if None.
            priority: with scheduling_policy "priority", lower runs first.
            cache_salt: prefixes are shared only among requests of equal salt.
            max_backlog_bytes: of log-probabilities that are kept while the caller takes none; above it the request is
                aborted. None: no limit. Not for FINAL_ONLY.
            trace_headers: of the client's request, for `observers`: `traceparent`, `tracestate`, `x-request-id`.
        Raises:
            InvalidPromptError, InvalidParameterError, OutOfMemoryError: the input cannot be served.
            EngineDeadError: the engine process has ended, and is not started again.
            SuspectRequestError: it has ended each time that this request was running.
            SlowConsumerError: the caller took nothing for too long.
        """
        arrival_time = time.monotonic()
        ready = await self.ready()
        params = ready.default_sampling_params if sampling_params is None else sampling_params
        checked = prompt if isinstance(prompt, ProcessedInput) else await self.process(prompt, params)
        self._check_alive()
        handle = 1 + self._board.worker + self._board.num_workers * self._board.next_number()
        if isinstance(params, SamplingParams) and params.seed is None:
            # Chosen here, not by an engine process: another one may have to go on with the request.
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
        replica = self._replica_for(handle, request)
        stream = RequestStream(self.tokenizer, handle, group, checked, replica)
        stream.max_backlog_bytes = max_backlog_bytes
        if self.observers:
            stream.record = RequestRecord(request, trace_headers or {})
        try:
            self._open(stream)
            while not stream.closed:
                output = await stream.next()
                if output is not None:
                    yield output
        finally:
            self._close(stream)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends a request, or several. Their iterators return what there is, with finish_reason "abort". Unknown ids are
        ignored.
        """
        request_ids = set(request_ids_to_abort(request_id))
        for stream in list(self._streams.values()):
            if stream.request.request_id in request_ids:
                self._abort(stream)

    async def abort_all(self) -> None:
        """Ends all requests, each as `abort` does."""
        for stream in list(self._streams.values()):
            self._abort(stream)

    async def process(self, prompt: Prompt, params: Params) -> ProcessedInput:
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

    def check_length(self, text: str) -> None:
        """Raises InvalidPromptError for a text that cannot fit the model, before it is tokenized."""
        assert self._ready is not None
        self._tokenizing.check_length(text, self._ready.limits.max_model_len)

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        """Runs work that would block the event loop for too long, such as tokenizing a long text."""
        return await self._tokenizing.in_thread(work)

    async def get_metrics(self) -> EngineStats:
        """Counters and occupancy, summed over the replicas that answer. Raises EngineDeadError."""
        return EngineStats.total((await self.get_replica_metrics()).values())

    async def get_replica_metrics(self) -> dict[int, EngineStats]:
        """Counters and occupancy of each replica that serves and answers within `VIEW_S`, by its number. Raises
        EngineDeadError.
        """
        answers = await self._ask(wire.GetStats(), wire.Stats, VIEW_S)
        return {replica: answer.stats for replica, answer in answers.items()}

    async def get_pool_views(self) -> dict[int, tuple[EngineStats, PoolView]]:
        """The same, and a picture of the KV pool; reads the whole pool. In a picture requests go by numbers, which say
        nothing about them. Raises EngineDeadError.
        """
        answers = await self._ask(wire.GetPool(), wire.Pool, VIEW_S)
        return {replica: (answer.stats, answer.view) for replica, answer in answers.items()}

    async def get_requests(self, most: int = 1000) -> list[dict[str, Any]]:
        """Unfinished requests, a dictionary for each sequence: those that an engine process has, with the fields of
        `wire.RequestView`, the replica and, if they were made here, the request id; and those of this process that wait
        for one. No prompts, no tokens. A replica that does not answer within `VIEW_S` is left out. most: of each
        replica. Raises EngineDeadError.
        """
        answers = await self._ask(wire.GetRequests(most), wire.Requests, VIEW_S)
        found = []
        for index, answer in sorted(answers.items()):
            for view in answer.requests:
                fields = {name: getattr(view, name) for name in view.__struct_fields__}
                stream = self._streams.get(view.handle)
                found.append({"replica": index, "request_id": stream and stream.request.request_id} | fields)
        now = time.monotonic()
        for stream in itertools.islice((one for one in self._streams.values() if one.held), most):
            request = stream.request
            fields = {"handle": stream.handle, "prompt_tokens": request.prompt_len, "is_suspect": stream.is_suspect}
            fields["age_s"] = now - request.stats.arrival_time
            found.append({"replica": None, "request_id": request.request_id, "status": "held"} | fields)
        return found

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. A replica that is running requests does nothing; then this returns False."""
        answers = await self._ask(wire.ResetPrefixCache(), wire.Changed)
        done = all(answer.value for answer in answers.values())
        if done:
            self._router.forget_prefixes()
        return done

    async def sleep(self, level: int = 1) -> bool:
        """As `LLMEngine.sleep`, on every replica. Returns False, and all are awake, where one has unfinished requests.
        A replica whose process ends while it sleeps is awake when it serves again.

        Raises:
            EngineRestartingError: a replica's process is being started again.
        """
        if self.is_restarting:
            raise EngineRestartingError("An engine process is being started again; it cannot sleep until it serves.")
        if any(answer.requests for answer in (await self._ask(wire.GetRequests(1), wire.Requests)).values()):
            return False  # else replicas that have nothing to do would sleep, and refuse what comes to them meanwhile
        answers = await self._ask(wire.Sleep(level), wire.Changed)
        self._router.forget_prefixes()
        if all(answer.value for answer in answers.values()):
            return True
        await self.wake_up()  # a request has come meanwhile
        return False

    async def wake_up(self) -> None:
        """As `LLMEngine.wake_up`, on every replica."""
        await self._ask(wire.WakeUp(), wire.Changed)

    async def update_weights(
        self, weights: Mapping[Any, Any], *, partial: bool = False, in_flight: InFlight = "recompute"
    ) -> None:
        """As `LLMEngine.update_weights`, on every replica. The arrays go through the host, in memory that the engine
        processes map. This process keeps that memory, so that an engine process that ends and is started again has
        the weights that it was given, not the checkpoint's, before it goes on with its requests.

        Args:
            weights: a mapping, nested or flat, from names to arrays, such as an `nnx.State`.
            partial, in_flight: as there.
        Raises:
            InvalidParameterError: as there; all replicas go on with the weights that they have.
            EngineRestartingError: a replica's process is being started again.
            UnsupportedParameterError: another process has started the engine processes; call it there.
        """
        check_choice("in_flight", in_flight, InFlight)
        check_bool("partial", partial)
        await self.ready()
        self._check_alive()
        if self._handover is not None:
            raise UnsupportedParameterError(
                "update_weights is for the process that started the engine processes, which starts them again."
            )
        if self.is_restarting:
            raise EngineRestartingError("An engine process is being started again; it takes weights when it serves.")
        # Who stops waiting does not undo it: processes that have the message take the weights, and all must.
        self._update = asyncio.ensure_future(self._replace_weights(weights, partial, in_flight))
        await asyncio.shield(self._update)

    async def _replace_weights(self, weights: Mapping[Any, Any], partial: bool, in_flight: InFlight) -> None:
        shared = await self.in_thread(lambda: SharedWeights(weights))
        try:
            self._router.forget_prefixes()
            answers = await self._ask(wire.UpdateWeights(shared.path, shared.arrays, partial, in_flight), wire.Changed)
        except BaseException:
            shared.close()
            raise
        replaced = [one for one in self._given if not partial or one.names <= shared.names]
        self._given = [*(one for one in self._given if one not in replaced), shared]
        for one in replaced:
            one.close()
        for replica in self._serving():
            if replica.index not in answers:  # it has been started again meanwhile
                self._restore(replica)

    async def pause(self) -> None:
        """Dispatches no step until `resume`. What was in flight has ended when it returns, and the devices are idle.
        Requests keep what they have, and others may come; they wait.
        """
        self._is_paused = True
        await self._ask(wire.SetPaused(True), wire.Changed)

    async def resume(self) -> None:
        """Goes on where `pause` left off."""
        self._is_paused = False
        await self._ask(wire.SetPaused(False), wire.Changed)

    @property
    def is_paused(self) -> bool:
        """Whether `pause` was called here, and `resume` not since."""
        return self._is_paused

    async def check_health(self) -> None:
        """Raises EngineDeadError if an engine process has ended for good, EngineRestartingError if requests have to
        wait until one has been started again.
        """
        self._check_alive()
        for replica in self._replicas:
            if replica.failure is not None:
                raise EngineDeadError(str(replica.failure)) from replica.failure
        if self._ready is not None and not self._serving():
            raise EngineRestartingError("The engine process is being started again; requests wait meanwhile.")

    async def check_integrity(self) -> None:
        """Checks that blocks, tables, slots and queue agree. Slow: it reads all of them. Raises EngineDeadError."""
        await self._ask(wire.CheckIntegrity(), wire.Intact)

    async def shutdown(self) -> None:
        """Ends all requests, and the engine processes if this process started them. A second call does nothing."""
        self._closing = True
        if self._handover is not None and self._is_ready is not None:
            asyncio.get_running_loop().remove_reader(self._handover)
        for task in self._connecting:
            task.cancel()
        if self._processes is not None and self.keeper is not None:
            self.keeper.stop()
            if self._ready is not None and not self.is_restarting:
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
        for shared in self._given:
            shared.close()
        for observer in self.observers:
            await asyncio.to_thread(observer.close)
        self._tokenizing.close()

    @property
    def _processor(self) -> InputProcessor:
        assert self._inputs is not None  # set before `ready` returns
        return self._inputs

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(str(self._failure)) from self._failure

    def _serving(self) -> list[AsyncLink]:
        return [replica for replica in self._replicas if replica.ready is not None]

    def _replica_for(self, handle: int, request: Request, only: AsyncLink | None = None) -> AsyncLink:
        """Picks the replica that a request will run on, or wait for if none serves, and counts the request there."""
        if len(self._replicas) == 1:
            return self._replicas[0]
        assert self._ready is not None
        room = self._ready.limits.max_model_len - request.prompt_len
        most = room if request.sampling.max_tokens is None else min(room, request.sampling.max_tokens)
        own, owed = self._router.outstanding, self._board.by_replica("owed_tokens")
        takers = self._serving() or [replica for replica in self._replicas if replica.failure is None]
        takers = takers if only is None else [only]
        elsewhere = [owed[r.index] - own[r.index] if r in takers else math.inf for r in self._replicas]
        new_tokens, prompt = most * request.num_sequences, request.prompt_token_ids.tolist()
        index = self._router.route(str(handle), prompt, new_tokens, request.cache_salt, elsewhere)
        self._board.set("owed_tokens", index, own[index])
        return self._replicas[index]

    async def _ask(
        self, question: wire.Question, kind: type[_AnswerT], timeout_s: float | None = None
    ) -> dict[int, _AnswerT]:
        """Asks every replica that serves; returns the answers by replica number, of those that have come in time.

        kind: the type of the answers.
        """
        await self.ready()
        self._check_alive()
        futures: dict[int, asyncio.Future[wire.Answer | None]] = {}
        for replica in self._serving():
            call_id = next(self._call_ids)
            futures[replica.index] = asyncio.get_running_loop().create_future()
            self._calls[call_id] = replica, futures[replica.index]
            replica.send(wire.Call(call_id, question))
        if futures:
            await asyncio.wait(futures.values(), timeout=timeout_s)
        came = {index: future.result() for index, future in futures.items() if future.done()}
        answers = {index: answer for index, answer in came.items() if answer is not None}  # the others have ended
        for answer in answers.values():
            if isinstance(answer.value, wire.Error):
                raise error_of(answer.value.kind, answer.value.message)
        return {index: answer.value for index, answer in answers.items() if isinstance(answer.value, kind)}

    def _open(self, stream: RequestStream) -> None:
        request = stream.request
        self._streams[stream.handle] = stream
        self._request_ids.add(request.request_id)
        replica = stream.replica
        self._board.add("unfinished", replica.index, 1)
        self._board.add("queued", replica.index, 1)
        self._board.add("queued_tokens", replica.index, request.prompt_len)
        if replica.ready is None:
            stream.held = True
        else:
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
        if stream.record is not None:
            record = stream.record
            record.replica, record.error, record.ended = replica.index, stream.error, time.monotonic()
            for observer in self.observers:
                observer.ended(record)

    def _abort(self, stream: RequestStream) -> None:
        if stream.tells_end and stream.running:  # only the engine process has its tokens
            stream.aborting = True
            stream.replica.send(wire.Abort([stream.handle], reports=True))
        elif stream.end():
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
        elif isinstance(message, wire.Trial):
            stream = self._streams.get(message.handle)
            if stream is not None:
                stream.on_trial = True
                if message.passed:
                    stream.clear()
        elif isinstance(message, wire.Ready):
            replica.ready = message
            if self._ready is None:
                self._take_ready()
            else:
                self._rejoin(replica)
        elif isinstance(message, wire.Failed):
            error = error_of(message.kind, message.message)
            if self._ready is not None and self.keeper is not None:
                self.keeper.last_words[replica.index] = str(error)
            elif self._handover is None:  # else: whoever started the process meets the same error
                self._die(replica, error)

    def _take_ready(self) -> None:
        """Begins when all replicas serve, or at least those that ever will. A request must keep to the limits of each,
        since any may get it.
        """
        ready = [one.ready for one in self._replicas if one.ready is not None]
        if len(ready) < sum(one.failure is None for one in self._replicas):
            return
        first = ready[0]
        first.limits = RequestLimits.least(one.limits for one in ready)
        self._ready = first
        self._inputs = InputProcessor(
            self.tokenizer, first.vocab_size, first.limits, first.eos_token_ids, self.embeddings
        )
        self._inputs.prepare_structured_outputs()
        if self.keeper is not None:
            self.keeper.start()
        assert self._is_ready is not None
        if not self._is_ready.done():
            self._is_ready.set_result(first)

    def _rejoin(self, replica: AsyncLink) -> None:
        """A replica's new process serves: it takes the requests that wait for it."""
        assert self._ready is not None
        assert replica.ready is not None
        if self.keeper is not None:
            self.keeper.serves(replica.index, replica.ready.startup_s)
        self._restore(replica)
        self._ready.limits = RequestLimits.least(one.ready.limits for one in self._replicas if one.ready is not None)
        self._processor.limits = self._ready.limits
        self._hand_on(replica)

    def _restore(self, replica: AsyncLink) -> None:
        """Gives a new process what `update_weights` and `pause` had made of the one before it. It does so before it
        reads the requests that are added after this."""
        questions: list[wire.Question] = [
            wire.UpdateWeights(one.path, one.arrays, True, "recompute") for one in self._given
        ]
        if self._is_paused:
            questions.append(wire.SetPaused(True))
        for question in questions:
            replica.send(wire.Call(next(self._call_ids), question))

    def _hand_on(self, fresh: AsyncLink | None = None) -> None:
        """Adds the requests that no process has to those that serve. Those that may be what ended a process go to one
        that has nothing else to lose. fresh: it has just begun.
        """
        num_resumed: dict[int, int] = {}
        for stream in sorted(self._streams.values(), key=lambda one: (one.is_suspect, one.failed_trials)):
            if not stream.held or stream.closed or stream.group.finished:
                continue
            if stream.is_suspect and fresh is None:
                if all(one.ready is not None or one.failure is not None for one in self._replicas):
                    self._suspect(stream)
                continue
            if not self._serving():
                return
            replica = fresh if fresh is not None and stream.is_suspect else None
            self._move(stream, replica)
            if not stream.queued:
                num_resumed[stream.replica.index] = num_resumed.get(stream.replica.index, 0) + 1
        for index, number in num_resumed.items():
            self.metrics.count("requests_resumed", index, number)

    def _move(self, stream: RequestStream, replica: AsyncLink | None) -> None:
        """Adds a request to this replica, or to the best, with what has come of it."""
        request, before = stream.request, stream.replica.index
        if len(self._replicas) > 1:
            self._router.finish(str(stream.handle))
            self._board.set("owed_tokens", before, self._router.outstanding[before])
            picked = self._replica_for(stream.handle, request)
            replica = replica or picked
        replica = replica or self._replicas[0]
        gauges = {"unfinished": 1.0}
        if stream.queued:
            gauges |= {"queued": 1.0, "queued_tokens": float(request.prompt_len)}
        for gauge, amount in gauges.items():
            self._board.add(gauge, before, -amount)
            self._board.add(gauge, replica.index, amount)
        stream.replica, stream.held = replica, False
        again = not stream.queued
        if again and stream.record is not None:
            stream.record.num_resumed += 1
        stream.tells_end &= not again
        replica.send(wire.Add.of(stream.handle, request, again=again, on_trial=stream.is_suspect))

    def _suspect(self, stream: RequestStream) -> None:
        """Refuses a request that ends engine processes."""
        stream.held = False
        self.metrics.count("requests_suspected", stream.replica.index)
        stream.fail(
            SuspectRequestError(
                "The engine process ended each time that this request was running, so it is not tried again; the "
                "server's log says how the process ended."
            )
        )

    def _take_step(self, replica: AsyncLink, step: wire.Step) -> None:
        streams, now = self._streams, time.monotonic()
        for handle in array("q", step.started):
            stream = streams.get(handle)
            if stream is not None:
                self._started(stream)
                stream.running = True
        intervals = []
        for update in step.updates:  # first: those who wait for their first token should not wait for all the others
            stream = streams.get(update.handle)
            if stream is not None and not stream.group.members[update.index].finished:
                if stream.last_token_time and stream.request.reports_each_token and len(stream.pending) == 1:
                    intervals.append(now - stream.last_token_time)
                stream.take(update, now)
                if stream.has_overflowed:
                    self._overflow(stream)
        for handle, token_id in zip(array("q", step.handles), array("i", step.tokens), strict=True):
            stream = streams.get(handle)
            if stream is not None and not stream.request.finished:  # else: ended here while this was under way
                intervals.append(now - stream.last_token_time)
                stream.add_token(token_id, now)
        self.metrics.count_intervals(replica.index, intervals)

    def _overflow(self, stream: RequestStream) -> None:
        """Aborts a request whose outputs nobody takes, and gives back what they take."""
        if stream.end():
            stream.replica.send(wire.Abort([stream.handle]))
        stream.drop()
        stream.fail(
            SlowConsumerError(
                f"More than {stream.max_backlog_bytes} bytes of log-probabilities waited to be taken, so the request"
                " was aborted; read faster, or ask for fewer."
            )
        )

    def _lose(self, replica: AsyncLink) -> None:
        """A replica's process has ended. Its requests wait for another one, or move to other replicas at once."""
        if replica.lost or replica.failure is not None:
            return
        replica.lost, replica.ready = True, None
        replica.close()
        self._router.forget_replica(replica.index)
        for asked, future in self._calls.values():
            if asked is replica and not future.done():
                future.set_result(None)
        self._calls = {call_id: call for call_id, call in self._calls.items() if call[0] is not replica}
        for stream in list(self._streams.values()):
            if stream.replica is not replica or stream.held:
                continue
            if stream.aborting:  # what it had generated ended with the process
                stream.end()
                stream.wake()
                continue
            stream.held = True
            if stream.running:
                stream.count_death(self.args.pipeline_depth + 1)
            if stream.is_convicted:
                self._suspect(stream)
        self._hand_on()

    def _replaced(self, index: int, sock: socket.socket) -> None:
        """A replica's process was started again."""
        self._lose(self._replicas[index])
        replica = self._replicas[index] = AsyncLink(index, sock)
        if self.keeper is not None:
            self.metrics.count("engine_restarts", index)
        task = asyncio.ensure_future(replica.connect(self._take, self._end))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def _given_up(self, index: int, error: EngineDeadError) -> None:
        """A replica's process is not started again."""
        replica = self._replicas[index]
        self._lose(replica)
        if self._ready is None and any(one.failure is None for one in self._replicas if one is not replica):
            replica.failure = error
            self._take_ready()
        else:
            self._die(replica, error)

    def _take_over(self) -> None:
        """Reads what the process that started the engine processes says of them."""
        assert self._handover is not None
        while True:
            try:
                packet, sock = handover.receive(self._handover)
            except BlockingIOError:
                return
            except EOFError:  # that process has ended, and this one is about to
                asyncio.get_running_loop().remove_reader(self._handover)
                return
            if isinstance(packet, handover.Replaced) and sock is not None:
                self._replaced(packet.replica, sock)
            elif isinstance(packet, handover.GivenUp):
                self._given_up(packet.replica, EngineDeadError(packet.message))

    def _die(self, replica: AsyncLink, error: JPagedError) -> None:
        """Gives up on a replica. Its requests move to others, or fail with `error` where there are none; questions to
        it fail.
        """
        if replica.failure is not None:
            return
        replica.failure, replica.ready = error, None
        if self._ready is None or all(one.failure is not None for one in self._replicas):
            self._failure = self._failure or error
            self._failed.set()
        if self._ready is None and self._is_ready is not None and not self._is_ready.done():
            self._is_ready.set_exception(error)
            self._is_ready.exception()  # retrieved: nobody may be waiting for it
        for stream in self._streams.values():
            if stream.replica is replica:
                stream.held = True
            if stream.held and (self._closing or self._failure is not None):
                stream.fail(EngineDeadError(str(error)))
        for asked, future in self._calls.values():
            if asked is replica and not future.done():
                future.set_exception(EngineDeadError(str(error)))
        self._calls = {call_id: call for call_id, call in self._calls.items() if call[0] is not replica}
        if not self._closing and self._failure is None:
            self._hand_on()

    def _end(self, replica: AsyncLink, error: EngineDeadError | None) -> None:
        """A connection is of no more use. error: None if the engine process has ended, or is about to."""
        if replica.failure is not None or replica.lost:
            return
        if self.keeper is not None and self._ready is not None and not self._closing:
            self._lose(replica)
            if error is not None:
                self.keeper.last_words[replica.index] = str(error)
                self.keeper.kill(replica.index)
            return
        if self._handover is not None and error is None:
            self._lose(replica)
            return
        if error is None:
            code = None if self._processes is None else self._processes.exit_code(replica.index, _LAST_WORDS_S)
            how = "closed its socket" if code is None else ended_how(code)
            which = "" if len(self._replicas) == 1 else f" of replica {replica.index}"
            error = EngineDeadError(f"The engine process{which} {how}; start it anew.")
        self._die(replica, error)
