"""`AsyncLLMEngine`: the engine in a process of its own, for programs that run on asyncio. The server is one of them.

    generate() --> InputProcessor --> Router --> Add --> engine process (one for each replica)
       ^                                                   |
       +-- OutputProcessor <-- RequestStream <---------- Step

Tokenizing, detokenizing and stop strings are done in this process: `tokenizing.py` tokenizes, `request_stream.py` makes
a request's outputs. `open_requests.py` knows which request runs where, `fleet.py` which replicas serve, and `links.py`
sends and receives.

An engine process may end at any time, and no request is lost with it: this process has the prompts, the seeds and all
tokens that came. `keeper.py` starts another process, to which every open request is added again with its tokens so far;
other replicas take them over at once. Noise is keyed by seed and position, so the tokens are the same.
"""

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar

from jpaged.api.checks import check_bool, check_choice, check_integer
from jpaged.api.config import EngineArgs, RestartOptions
from jpaged.api.errors import (
    EngineDeadError,
    EngineRestartingError,
    InvalidParameterError,
    JPagedError,
    UnsupportedParameterError,
)
from jpaged.api.outputs import RequestOutput
from jpaged.api.sampling_params import SamplingParams
from jpaged.api.unknown_names import ExplainsMissing
from jpaged.api.weights import InFlight
from jpaged.engine.sequences.group import SequenceGroup
from jpaged.engine.sequences.seeds import default_seed
from jpaged.engine.stats import EngineStats
from jpaged.frontend.embedding_config import EmbeddingConfig
from jpaged.frontend.inputs import (
    InputProcessor,
    Params,
    ProcessedInput,
    Prompt,
    refuse_call_options,
    request_ids_to_abort,
)
from jpaged.frontend.reranking import Reranker
from jpaged.host.hub import model_directory
from jpaged.processes import wire
from jpaged.processes.fleet import SHUTDOWN_S, Answers, Fleet, raise_refusal
from jpaged.processes.kept_weights import KeptWeights
from jpaged.processes.launch import EngineProcesses, Link
from jpaged.processes.links import AsyncLink
from jpaged.processes.pool_view import PoolView
from jpaged.processes.request_record import RequestRecord
from jpaged.processes.request_stream import RequestStream
from jpaged.processes.tokenizing import AsyncTokenizer
from jpaged.processes.weight_delivery import WeightDelivery
from jpaged.text.tokenizer import Tokenizer

VIEW_S = 5.0
"""What is asked of replicas to look at them has this long to come. One that hangs is left out."""

_ELSEWHERE = {
    "add_lora": "adapters are not loaded; merge the adapter into the checkpoint",
    "add_request": "`generate` adds a request and yields its outputs",
    "collective_rpc": "`update_weights` reaches the weights",
    "dead_error": "it is `failure`",
    "do_log_stats": "`get_metrics` has the counters",
    "errored": "`is_alive` says whether it serves",
    "get_model_config": "`args` has the options, and `ready` returns what the model has",
    "get_tokenizer": "it is `tokenizer`, and transformers' own is `tokenizer.hf`",
    "get_vllm_config": "`args` has the options",
    "is_running": "it is `is_alive`",
    "is_sleeping": "`get_metrics` says it: `asleep`",
    "is_stopped": "`is_alive` says whether it serves",
    "model_config": "`args` has the options, and `ready` returns what the model has",
    "pause_generation": "it is `pause`",
    "resume_generation": "it is `resume`",
    "start_profile": "JAX's profiler traces steps, in a process that has an `LLMEngine`",
    "stop_profile": "JAX's profiler traces steps, in a process that has an `LLMEngine`",
    "vllm_config": "`args` has the options",
    "wait_for_requests_to_drain": "`num_unfinished` says how many requests there are",
}
"""Of vLLM's methods and properties, what does the same here, or why there is none."""

_NOT_KEPT = "no copy was kept of its weights (update_weights with keep=False); start an engine and give it weights"

_T = TypeVar("_T")
_AnswerT = TypeVar("_AnswerT", wire.Stats, wire.Pool, wire.Requests, wire.Changed, wire.Intact)


def load_tokenizer(args: EngineArgs) -> Tokenizer | None:
    """The model's tokenizer; None with skip_tokenizer_init.

    Raises:
        ModelNotFoundError, CheckpointError: there is no such model or tokenizer.
        InvalidParameterError: it is no reranker's, which `args` asks for.
    """
    found = None if args.skip_tokenizer_init else Tokenizer.load(args.tokenizer or model_directory(args))
    if args.reranker is not None:
        Reranker(found)
    return found


class AsyncLLMEngine(ExplainsMissing):
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
        update_seconds: of the parts of the last `update_weights`, as `WeightDelivery.seconds`.

    Raises:
        ModelNotFoundError, CheckpointError: there is no such model or tokenizer. What else may be wrong with the model
            `ready` raises.
    """

    _elsewhere = _ELSEWHERE

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
        try:
            self.tokenizer = load_tokenizer(args)
        except BaseException:  # Ctrl-C too: no process is left behind
            if processes is not None:
                processes.kill()
                processes.wait(SHUTDOWN_S)
            raise
        restarts = restarts or RestartOptions()
        self._may_restart = restarts.max_restarts > 0
        self._fleet = Fleet(args, restarts, processes, link, self._begin, self._begin_again)
        self._requests = self._fleet.requests
        self.keeper = self._fleet.keeper
        self.metrics, self.observers = self._requests.metrics, self._requests.observers
        self._board = link.board
        self._inputs: InputProcessor | None = None
        self._is_paused = False
        self._update: asyncio.Future[None] | None = None  # of weights, whether or not somebody waits for it
        self._one_update = asyncio.Lock()  # another one waits: all replicas take updates in the same order
        self._kept = KeptWeights()
        self.update_seconds: dict[str, float] = {}
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
        return await self._fleet.ready()

    @property
    def is_alive(self) -> bool:
        """Whether at least one replica serves requests, or will once it has started."""
        return self._fleet.failure is None

    @property
    def failure(self) -> JPagedError | None:
        """Why it is not alive."""
        return self._fleet.failure

    @property
    def is_restarting(self) -> bool:
        """Whether some replica's process is being started again."""
        return self._fleet.is_restarting

    async def failed(self) -> JPagedError:
        """Waits until no replica serves or will serve again; returns why."""
        return await self._fleet.failed()

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
        if num_requests:
            self._board.add("queued", 0, num_requests)
        if num_tokens:
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
        lora_request: None = None,
        tokenization_kwargs: None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Completes a prompt. A caller that stops iterating aborts the request, which frees its blocks at once.

        Args:
            prompt: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}, with or without a "cache_salt"; or
                what `process` made of it.
            sampling_params: how to sample, to search or to pool; the model's defaults if None. `output_kind` says what
                is yielded: all so far (CUMULATIVE), what is new (DELTA), or once at the end (FINAL_ONLY). An output
                may hold several tokens, when they came faster than they were taken.
            request_id: not that of an unfinished request; made up if None.
            priority: with scheduling_policy "priority", lower runs first.
            cache_salt: prefixes are shared only among requests of equal salt.
            max_backlog_bytes: of log-probabilities that are kept while the caller takes none; above it the request is
                aborted. None: no limit. Not for FINAL_ONLY.
            trace_headers: of the client's request, for `observers`: `traceparent`, `tracestate`, `x-request-id`.
            lora_request, tokenization_kwargs: vLLM's options that are not supported.
        Raises:
            InvalidPromptError, InvalidParameterError, OutOfMemoryError: the input cannot be served.
            UnsupportedParameterError: an option that is not supported is given, and not None.
            EngineDeadError: the engine process has ended, and is not started again.
            SuspectRequestError: it has ended each time that this request was running.
            SlowConsumerError: the caller took nothing for too long.
        """
        arrival_time = time.monotonic()
        refuse_call_options(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        ready = await self.ready()
        params = ready.default_sampling_params if sampling_params is None else sampling_params
        checked = prompt if isinstance(prompt, ProcessedInput) else await self.process(prompt, params)
        self._fleet.check_alive()
        handle = self._requests.next_handle()
        if isinstance(params, SamplingParams) and params.seed is None:
            # Chosen here, not by an engine process: another one may have to go on with the request.
            params = params.seeded(default_seed(self.args.seed, handle - 1))
        request, checked = self._processor.request(
            f"request-{handle}" if request_id is None else request_id,
            checked,
            params,
            priority=priority,
            cache_salt=cache_salt,
            arrival_time=arrival_time,
        )
        if request.request_id in self._requests.request_ids:
            raise InvalidParameterError(f"request_id={request.request_id!r} is in use by an unfinished request.")
        group = SequenceGroup.form(request)
        replica = self._requests.route(handle, request)
        stream = RequestStream(self.tokenizer, handle, group, checked, replica)
        stream.max_backlog_bytes = max_backlog_bytes
        if self.observers:
            stream.record = RequestRecord(request, trace_headers or {})
        try:
            self._requests.open(stream)
            while not stream.closed:
                output = await stream.next()
                if output is not None:
                    yield output
        finally:
            self._requests.close(stream)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends a request, or several. Their iterators return what there is, with finish_reason "abort". Unknown ids are
        ignored.
        """
        request_ids = set(request_ids_to_abort(request_id))
        for stream in list(self._requests.streams.values()):
            if stream.request.request_id in request_ids:
                self._requests.abort(stream)

    async def abort_all(self) -> None:
        """Ends all requests, each as `abort` does."""
        for stream in list(self._requests.streams.values()):
            self._requests.abort(stream)

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
        assert self._fleet.description is not None
        self._tokenizing.check_length(text, self._fleet.description.limits.max_model_len)

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
        answers = await self._fleet.ask(wire.GetStats(), wire.Stats, VIEW_S)
        return {replica: answer.stats for replica, answer in answers.items()}

    async def get_pool_views(self) -> dict[int, tuple[EngineStats, PoolView]]:
        """The same, and a picture of the KV pool; reads the whole pool. In a picture requests go by numbers, which say
        nothing about them. Raises EngineDeadError.
        """
        answers = await self._fleet.ask(wire.GetPool(), wire.Pool, VIEW_S)
        return {replica: (answer.stats, answer.view) for replica, answer in answers.items()}

    async def get_requests(self, most: int = 1000) -> list[dict[str, Any]]:
        """Unfinished requests, a dictionary for each sequence: those that an engine process has, with the fields of
        `wire.RequestView`, the replica and, if they were made here, the request id; and those of this process that wait
        for one. No prompts, no tokens. A replica that does not answer within `VIEW_S` is left out. most: of each
        replica. Raises EngineDeadError.
        """
        answers = await self._fleet.ask(wire.GetRequests(most), wire.Requests, VIEW_S)
        found = []
        for index, answer in sorted(answers.items()):
            for view in answer.requests:
                fields = {name: getattr(view, name) for name in view.__struct_fields__}
                stream = self._requests.streams.get(view.handle)
                found.append({"replica": index, "request_id": stream and stream.request.request_id} | fields)
        now = time.monotonic()
        for stream in itertools.islice((one for one in self._requests.streams.values() if one.held), most):
            request = stream.request
            fields = {"handle": stream.handle, "prompt_tokens": request.prompt_len, "is_suspect": stream.is_suspect}
            fields["age_s"] = now - request.stats.arrival_time
            found.append({"replica": None, "request_id": request.request_id, "status": "held"} | fields)
        return found

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. A replica that is running requests does nothing; then this returns False."""
        answers = await self._fleet.ask(wire.ResetPrefixCache(), wire.Changed)
        done = all(answer.value for answer in answers.values())
        if done:
            self._requests.router.forget_prefixes()
        return done

    async def sleep(self, level: int = 1) -> bool:
        """As `LLMEngine.sleep`, on every replica. Returns False, and all are awake, where one has unfinished requests.
        A replica whose process ends while it sleeps is awake when it serves again.

        Raises:
            InvalidParameterError: another level.
            EngineRestartingError: a replica's process is being started again, or ended meanwhile. All are awake.
        """
        check_integer("level", level, 1, 2)
        if self.is_restarting:
            raise EngineRestartingError("An engine process is being started again; it cannot sleep until it serves.")
        if any(answer.requests for answer in (await self._fleet.ask(wire.GetRequests(1), wire.Requests)).values()):
            return False  # else replicas that have nothing to do would sleep, and refuse what comes to them meanwhile
        try:
            answers = await self._fleet.ask_each(wire.Sleep(int(level)))
            raise_refusal(answers)
        except JPagedError:
            with contextlib.suppress(JPagedError):
                await self.wake_up()
            raise
        self._requests.router.forget_prefixes()
        has_ended = any(replica.ready is None for replica in answers)  # even if it had answered
        if not has_ended and all(isinstance(one, wire.Changed) and one.value for one in answers.values()):
            return True
        await self.wake_up()
        if has_ended:
            raise EngineRestartingError("An engine process ended when it was to sleep; try again once it serves.")
        return False  # a request has come meanwhile

    async def wake_up(self) -> None:
        """As `LLMEngine.wake_up`, on every replica."""
        await self._fleet.ask(wire.WakeUp(), wire.Changed)

    async def update_weights(
        self,
        weights: Mapping[Any, Any],
        *,
        partial: bool = False,
        in_flight: InFlight = "recompute",
        keep: bool = True,
    ) -> None:
        """As `LLMEngine.update_weights`, on every replica. Engine processes that see the GPUs of all arrays read them
        there; otherwise all go through the host, in memory that the engine processes map. This process keeps a copy in
        such memory, so that an engine process that ends and is started again has the weights that it was given, not
        the checkpoint's, before it goes on with its requests. An update that comes while another one runs waits for it.

        Args:
            weights: a mapping, nested or flat, from names to arrays, such as an `nnx.State`.
            partial, in_flight: as there.
            keep: whether to keep that copy; with `max_restarts=0` none is kept. Without it, an engine process that ends
                is not started again, until calls with `keep=True` have brought new values for all of these arrays.
        Raises:
            InvalidParameterError: as there; all replicas go on with the weights that they have.
            OutOfMemoryError: as there; all replicas sleep on, without weights.
            EngineRestartingError: a replica's process is being started again; or all ended while they took the weights,
                for want of memory say, and go on with those that they had.
            EngineDeadError: all ended while they took the weights, and nothing was kept of those that they had.
            UnsupportedParameterError: another process has started the engine processes; call it there.
        """
        check_choice("in_flight", in_flight, InFlight)
        check_bool("partial", partial)
        check_bool("keep", keep)
        await self.ready()
        self._fleet.check_alive()
        if self._fleet.is_kept_elsewhere:
            raise UnsupportedParameterError(
                "update_weights is for the process that started the engine processes, which starts them again."
            )
        keep = keep and self._may_restart
        # Who stops waiting does not undo it: processes that have the message take the weights, and all must.
        self._update = asyncio.ensure_future(self._replace_weights(weights, partial, in_flight, keep))
        await asyncio.shield(self._update)

    async def _replace_weights(
        self, weights: Mapping[Any, Any], partial: bool, in_flight: InFlight, keep: bool
    ) -> None:
        async with self._one_update:
            if self.is_restarting:
                raise EngineRestartingError(
                    "An engine process is being started again; it takes weights when it serves."
                )
            delivery = await self.in_thread(lambda: WeightDelivery(weights, partial, in_flight, keep))
            try:
                takers = await self._deliver(delivery)
                if self._may_restart:
                    self._kept.add(delivery.names, delivery.take_copy() if keep else None, partial=partial)
                    if self._fleet.keeper is not None:
                        self._fleet.keeper.why_not_again = _NOT_KEPT if self._kept.missing else ""
            finally:
                delivery.close()
            for replica in self._requests.serving():
                if replica not in takers:  # it was started again meanwhile, whether or not the one before had them
                    self._restore(replica)

    async def _deliver(self, delivery: WeightDelivery) -> list[AsyncLink]:
        """Returns the replicas that took the weights. If one refuses them, none has them, and its refusal is raised."""
        self._requests.router.forget_prefixes()
        answers = await self._fleet.ask_each(await self.in_thread(delivery.first))
        try:
            unreachable = {one: answer for one, answer in answers.items() if isinstance(answer, wire.Unreachable)}
            if unreachable:
                reason = next(iter(unreachable.values()))
                question = await self.in_thread(lambda: delivery.again(reason))
                answers |= await self._fleet.ask_each(question, of=unreachable)
            raise_refusal(answers)
        except Exception:  # a refusal; or there can be no copy in host memory for those that need it
            await self._take_back(_takers(answers))
            raise
        finally:
            delivery.count(answers.values())
            self.update_seconds = delivery.seconds
        if takers := _takers(answers):
            return takers
        what = "The engine process ended while it took the weights"
        if self._kept.missing or not self._may_restart:
            raise EngineDeadError(f"{what}; {_NOT_KEPT if self._kept.missing else 'start it anew'}.")
        raise EngineRestartingError(  # those that take its place are given what they had
            f"{what}; the next one goes on with those that it had. The log says how it ended."
        )

    async def _take_back(self, takers: Sequence[AsyncLink]) -> None:
        """Has no replica keep weights that another one did not take. Those that slept at level 2 do so again; the
        processes of the others are replaced, and the next ones are given the weights of before.
        """
        answers: Answers = {}
        with contextlib.suppress(JPagedError):  # the refusal is what the caller wants to know
            answers = await self._fleet.ask_each(wire.GiveBackWeights(), of=takers)
        for replica in takers:
            answer = answers.get(replica)
            if replica.ready is not None and not (isinstance(answer, wire.Changed) and answer.value):
                self._fleet.replace(replica, "It took weights that another replica did not take")

    async def pause(self) -> None:
        """Dispatches no step until `resume`. What was in flight has ended when it returns, and the devices are idle.
        Requests keep what they have, and others may come; they wait.
        """
        self._is_paused = True
        await self._fleet.ask(wire.SetPaused(True), wire.Changed)

    async def resume(self) -> None:
        """Goes on where `pause` left off."""
        self._is_paused = False
        await self._fleet.ask(wire.SetPaused(False), wire.Changed)

    @property
    def is_paused(self) -> bool:
        """Whether `pause` was called here, and `resume` not since."""
        return self._is_paused

    async def check_health(self) -> None:
        """Raises EngineDeadError if an engine process has ended for good, EngineRestartingError if requests have to
        wait until one has been started again.
        """
        self._fleet.check_health()

    async def check_integrity(self) -> None:
        """Checks that blocks, tables, slots and queue agree. Slow: it reads all of them. Raises EngineDeadError."""
        await self._fleet.ask(wire.CheckIntegrity(), wire.Intact)

    async def shutdown(self) -> None:
        """Ends all requests, and the engine processes if this process started them. A second call does nothing."""
        await self._fleet.shutdown()
        self._kept.close()
        for observer in self.observers:
            await asyncio.to_thread(observer.close)
        self._tokenizing.close()

    @property
    def _processor(self) -> InputProcessor:
        assert self._inputs is not None  # set before `ready` returns
        return self._inputs

    def _begin(self, ready: wire.Ready) -> None:
        """All replicas serve that ever will."""
        self._inputs = InputProcessor(
            self.tokenizer, ready.vocab_size, ready.limits, ready.eos_token_ids, self.embeddings
        )
        self._inputs.prepare_structured_outputs()

    def _begin_again(self, replica: AsyncLink) -> None:
        """A replica's new process serves, which may have other limits."""
        assert self._fleet.description is not None
        self._processor.limits = self._fleet.description.limits
        self._restore(replica)

    def _restore(self, replica: AsyncLink) -> None:
        """Gives a new process what `update_weights` and `pause` had made of the one before it. It does so before it
        reads the requests that are added after this. If weights are missing, it ends the process."""
        if self._kept.missing:
            self._fleet.replace(replica, f"It cannot have the weights of the one before it: {_NOT_KEPT}")
            return
        questions: list[wire.Question] = [*self._kept.questions()]
        if self._is_paused:
            questions.append(wire.SetPaused(True))
        for question in questions:
            self._fleet.tell(replica, question)


def _takers(answers: Answers) -> list[AsyncLink]:
    """Those that took weights."""
    return [replica for replica, answer in answers.items() if isinstance(answer, wire.Changed)]
