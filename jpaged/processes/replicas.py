"""`ReplicatedEngine`: several engines, each in a process and on devices of its own, behind the face of one.

    this process    add_request --> checks, token ids --> Router --+--> replica 0: LLMEngine on devices 0 .. t-1
                    step        <-- outputs of whoever has some  <-+--> replica 1: LLMEngine on devices t .. 2t-1
                                                                   ...

Processes, not threads: a step loop spends some 0.5 ms of Python on each step, and one interpreter would make the
replicas take turns (`benchmarks/replicas.py` measures it). A replica sees only its own GPUs, so JAX in it needs
no telling where to go. This process never touches a device, and each replica makes its own text.

A replica is an engine process (`engine_process.py`) that reports outputs; `wire.py` has the messages. It reads between
steps, so sending never waits for long. What comes from it is read in `step`, or while an answer is waited for; then
outputs and refusals are kept for `step`.
"""

import itertools
import os
import select
import sys
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import msgspec
import numpy as np

from jpaged.api.beam_search_params import BeamSearchParams
from jpaged.api.checks import check_bool, check_choice, check_integer
from jpaged.api.config import EngineArgs
from jpaged.api.errors import (
    EngineDeadError,
    InvalidParameterError,
    JPagedError,
    UnsupportedParameterError,
    error_of,
    shown,
)
from jpaged.api.outputs import RequestOutput
from jpaged.api.sampling_params import SamplingParams
from jpaged.api.weights import InFlight
from jpaged.engine.limits import RequestLimits
from jpaged.engine.sequences.request import Request
from jpaged.engine.sequences.seeds import default_seed
from jpaged.engine.stats import EngineStats
from jpaged.frontend.embedding_config import EmbeddingConfig
from jpaged.frontend.generation_config import GenerationConfig
from jpaged.frontend.inputs import InputProcessor, ProcessedInput, Prompt, request_ids_to_abort
from jpaged.frontend.intake import RequestIntake
from jpaged.host.garbage import set_objects_apart
from jpaged.host.hub import model_directory
from jpaged.processes import wire
from jpaged.processes.launch import EngineProcesses, ended_how
from jpaged.processes.links import SyncLink
from jpaged.processes.router import Router
from jpaged.processes.weight_delivery import WeightDelivery
from jpaged.text.tokenizer import Tokenizer

_WAIT_S = 0.05
"""`step` waits at most this long, so that its caller can check the time or Ctrl-C."""

_STOP_S = 10.0
"""A replica gets this long to end by itself, then it is killed."""

_COMPUTE_ONLY = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
"""Parameters of a request that only puts its prompt into the prefix cache."""

_AnswerT = TypeVar("_AnswerT", wire.Stats, wire.Changed)


@dataclass(frozen=True, slots=True)
class _Open:
    """A request whose end `step` has not told yet. prompt, prompt_token_ids: as its outputs show them."""

    request_id: str
    handle: int
    prompt: str | None
    prompt_token_ids: list[int]


class _Replica:
    """An engine process.

    Attributes:
        ready: what it is like, once it serves. answer: the last one that came.
    """

    def __init__(self, link: SyncLink) -> None:
        self.link = link
        self.ready: wire.Ready | None = None
        self.answer: wire.Answer | None = None


class ReplicatedEngine(RequestIntake):
    """`LLMEngine` over `data_parallel_size` replicas; see there for arguments, results and errors.

    A request's tokens do not depend on which replica serves it: requests without a seed get theirs here, in order.

    Attributes:
        max_model_len: the longest a sequence may grow, prompt and output, in tokens.
        vocab_size: token ids that the model knows. eos_token_ids: its end-of-sequence tokens.
        num_replicas: `data_parallel_size`.
    """

    def __init__(self, args: EngineArgs) -> None:
        directory = model_directory(args)
        generation = GenerationConfig.chosen(args.generation_config, directory)  # before processes start
        self.default_sampling_params = generation.sampling_params()
        self.args = args
        self.num_replicas = args.data_parallel_size
        self.tokenizer = None
        self._open: dict[str, _Open] = {}
        self._by_handle: dict[int, _Open] = {}
        self._outputs: list[RequestOutput] = []  # for `step` to return
        self._refused: list[tuple[_Open, JPagedError]] = []  # for `step` to raise
        self._ended = ""  # why the engine can do nothing more
        self._failure: BaseException | None = None
        self._arrived = 0
        self._handles, self._call_ids = itertools.count(1), itertools.count(1)
        begun = time.perf_counter()
        self._processes = EngineProcesses(replace(args, model=str(directory)), reports="outputs")
        links = [
            SyncLink(index, sock) for index, sock in enumerate(self._processes.links[0].sockets) if sock is not None
        ]
        self._finalizer = weakref.finalize(self, _stop, links, self._processes)
        _engines.add(self)
        self._replicas = [_Replica(link) for link in links]
        self._by_fd = {replica.link.sock.fileno(): replica for replica in self._replicas}
        self._poll = select.poll()
        for fd in self._by_fd:
            self._poll.register(fd, select.POLLIN)
        try:
            if not args.skip_tokenizer_init:
                self.tokenizer = Tokenizer.load(args.tokenizer or directory)
                set_objects_apart()
            ready = [self._wait_until_ready(replica) for replica in self._replicas]
        except BaseException:
            self.close()
            raise
        limits = RequestLimits.least(one.limits for one in ready)
        self.max_model_len = limits.max_model_len
        self.vocab_size = ready[0].vocab_size
        self.eos_token_ids = ready[0].eos_token_ids
        self._inputs = InputProcessor(
            self.tokenizer, self.vocab_size, limits, self.eos_token_ids, EmbeddingConfig.load(directory)
        )
        self._router = Router(self.num_replicas, match_prefixes=ready[0].has_prefix_cache)
        if args.verbose:
            seconds = time.perf_counter() - begun
            print(
                f"  {self.num_replicas} replicas of {ready[0].device} ready after {seconds:.1f} s",
                file=sys.stderr,
                flush=True,
            )

    @property
    def pids(self) -> list[int]:
        """Process ids of the replicas."""
        return self._processes.pids

    def queue(self, request: Request, checked: ProcessedInput) -> None:
        """Sends a request to the replica that will be done with it first; as `RequestIntake.queue`. Requests with a
        common prompt go where it is cached, unless waiting there would take longer than computing it elsewhere."""
        self._check_alive()
        if request.request_id in self._open:
            raise InvalidParameterError(f"request_id={request.request_id!r} is in use by an unfinished request.")
        if request.samples:
            self._seed(request)
            tokens, new_tokens = checked.prompt_token_ids, self._most_new_tokens(request)
        elif request.score_targets is None:
            tokens, new_tokens = checked.prompt_token_ids, 0
        else:
            tokens, new_tokens = [*request.prompt_token_ids.tolist(), int(request.score_targets[-1])], 0
        one = self._numbered(request, checked)
        message = _framed(wire.Add.of(one.handle, request))  # before anything is counted
        index = self._router.route(request.request_id, tokens, new_tokens, request.cache_salt)
        self._submit(self._replicas[index], one, message)

    def step(self) -> list[RequestOutput]:
        """Outputs that have come from any replica; waits for some for at most 50 ms.

        Raises:
            EngineDeadError: a replica failed or ended; the engine is of no more use.
            InvalidPromptError, InvalidParameterError, OutOfMemoryError: a replica refused a request, which is named.
        """
        self._check_alive()
        if not self._refused:
            self._collect(0 if self._outputs else _WAIT_S)
        if self._refused:
            refused, error = self._refused.pop(0)
            self._forget(refused)
            raise type(error)(f"Request {refused.request_id!r}: {error}") from error
        outputs, self._outputs = self._outputs, []
        for output in outputs:
            if output.finished:
                self._forget(self._open[output.request_id])
        return outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Ends requests and frees what they hold. They bring no more outputs. Unknown ids are ignored."""
        ids = self._open.keys() & set(request_ids_to_abort(request_ids))
        self._outputs = [output for output in self._outputs if output.request_id not in ids]
        self._refused = [(one, error) for one, error in self._refused if one.request_id not in ids]
        by_replica: dict[int, list[int]] = {}
        for request_id in ids:
            one, replica = self._open[request_id], self._router.replica_of(request_id)
            self._forget(one)
            if replica is not None:
                self._router.finish(request_id)
                by_replica.setdefault(replica, []).append(one.handle)
        for index, handles in by_replica.items():
            if not self._ended:
                with suppress(EngineDeadError):  # they have ended, too; the next call says so
                    self._send(self._replicas[index], wire.frame(wire.Abort(handles)))

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do."""
        return not self._ended and bool(self._open)

    def get_metrics(self) -> EngineStats:
        """The sum of the replicas' counters and occupancy."""
        return EngineStats.total(self.get_replica_metrics())

    def get_replica_metrics(self) -> list[EngineStats]:
        """The counters and occupancy of each replica."""
        return [answer.stats for answer in self._ask_all(wire.GetStats(), wire.Stats)]

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. Returns False where a replica had requests running and did nothing."""
        self._router.forget_prefixes()
        return all(self._change(wire.ResetPrefixCache()))

    def pin_prefix(self, prompt: Prompt, cache_salt: str | None = None) -> int:
        """Computes a prompt on every replica, and keeps the beginning of it in the prefix cache of each, as
        `LLMEngine.pin_prefix`. Other requests run on meanwhile; `step` returns their outputs.

        Returns: the number of tokens kept, on the replica that keeps fewest.

        Raises:
            InvalidPromptError: as `add_request`. InvalidParameterError: there is no prefix cache.
            OutOfMemoryError: too little of a replica's pool would be left; nothing is pinned on any.
        """
        self._check_alive()
        requests = [
            self._inputs.request(f"pin-{uuid.uuid4()}", prompt, _COMPUTE_ONLY, cache_salt=cache_salt)
            for _ in self._replicas
        ]
        salt = requests[0][0].cache_salt
        try:
            for replica, (request, checked) in zip(self._replicas, requests, strict=True):
                tokens = checked.prompt_token_ids
                self._router.assign(request.request_id, replica.link.index, tokens, 1, salt)
                one = self._numbered(request, checked)
                self._submit(replica, one, _framed(wire.Add.of(one.handle, request)))
            while any(self._router.replica_of(request.request_id) is not None for request, _ in requests):
                self._collect(_WAIT_S)
            for refused, error in self._refused:
                if any(refused.request_id == request.request_id for request, _ in requests):
                    raise error
        finally:
            self.abort_request([request.request_id for request, _ in requests])  # what came of them is for nobody
        token_ids = requests[0][0].prompt_token_ids.tobytes()
        try:
            return min(self._change(wire.PinPrefix(token_ids, salt)))
        except JPagedError:
            if not self._ended:
                self._change(wire.UnpinPrefix(token_ids, salt))
            raise

    def unpin_prefix(self, prompt: Prompt, cache_salt: str | None = None) -> bool:
        """Lets a pinned prefix be reused again. Returns whether it was pinned."""
        self._check_alive()
        checked = self._inputs.process(prompt, _COMPUTE_ONLY)
        tokens = np.array(checked.prompt_token_ids, np.int32)
        return any(self._change(wire.UnpinPrefix(tokens.tobytes(), checked.salt(cache_salt))))

    def sleep(self, level: int = 1) -> bool:
        """As `LLMEngine.sleep`, on every replica. Returns False, and does nothing, while requests are unfinished."""
        check_integer("level", level, 1, 2)
        self._check_alive()
        if self._open:
            return False
        self._router.forget_prefixes()
        return all(self._change(wire.Sleep(int(level))))

    def wake_up(self) -> None:
        """As `LLMEngine.wake_up`, on every replica."""
        self._change(wire.WakeUp())

    def pause(self) -> None:
        """As `LLMEngine.pause`, on every replica."""
        self._change(wire.SetPaused(True))

    def resume(self) -> None:
        """As `LLMEngine.resume`, on every replica."""
        self._change(wire.SetPaused(False))

    def update_weights(self, weights: Any, *, partial: bool = False, in_flight: InFlight = "recompute") -> None:
        """As `LLMEngine.update_weights`, on every replica. A replica that sees the GPUs of all arrays reads them
        there; otherwise all go through the host, in memory that the replicas share.

        weights: a mapping, nested or flat, from names to arrays, such as an `nnx.State`.

        Raises:
            InvalidParameterError: as there; all replicas go on with the weights that they have. If only some can take
                these and the engine does not sleep at level 2, it is of no more use.
            OutOfMemoryError: as there; all replicas sleep on, without weights.
        """
        check_choice("in_flight", in_flight, InFlight)
        check_bool("partial", partial)
        self._check_alive()
        delivery = WeightDelivery(weights, partial, in_flight, keep=False)
        try:
            self._router.forget_prefixes()
            values = dict(zip(self._replicas, self._ask_each(delivery.first()), strict=True))
            try:
                unreachable = {one: value for one, value in values.items() if isinstance(value, wire.Unreachable)}
                if unreachable:
                    question = delivery.again(next(iter(unreachable.values())))
                    values |= zip(unreachable, self._ask_each(question, list(unreachable)), strict=True)
                refusal = next((value for value in values.values() if isinstance(value, wire.Error)), None)
                if refusal is not None:
                    raise error_of(refusal.kind, refusal.message)
            except BaseException as error:  # or there can be no copy in host memory, or it was interrupted there
                self._take_back([one for one, value in values.items() if isinstance(value, wire.Changed)], error)
                raise
            self._keep_to_least([value for value in values.values() if isinstance(value, wire.Changed)])
        finally:
            delivery.close()

    def _take_back(self, takers: Sequence[_Replica], error: BaseException) -> None:
        """Has no replica keep weights that another one did not take, for `error`. Those that slept at level 2 do so
        again; where one did not, the engine ends.
        """
        with suppress(EngineDeadError):  # the refusal is what the caller wants to know; the next call tells of the end
            values = self._ask_each(wire.GiveBackWeights(), takers)
            if not all(isinstance(value, wire.Changed) and value.value for value in values):
                self._ended = f"Only some replicas took the weights ({error}); start another engine."
                self._finalizer()

    def weights_as(self, form: str) -> Any:
        """Refuses: arrays of other processes' devices are not to be had here.

        Raises:
            UnsupportedParameterError: always.
        """
        raise UnsupportedParameterError(
            "weights_as is for data_parallel_size=1: replicas' weights are in processes of their own."
        )

    def close(self) -> None:
        """Ends the replicas; the engine is of no more use. Called when it is collected, too. The second time it does
        nothing."""
        self._ended = self._ended or "The engine was closed; start another one."
        self._finalizer()

    def _seed(self, request: Request) -> None:
        """Gives a request without a seed the one that a single engine would give it. Replicas would count their own
        arrivals only, and repeat each other's seeds."""
        request.sampling, request.beam = _own_class(request.sampling), request.beam and _own_class(request.beam)
        if request.beam is None and request.sampling.seed is None:
            request.sampling = replace(request.sampling, seed=default_seed(self.args.seed, self._arrived))
        self._arrived += 1

    def _most_new_tokens(self, request: Request) -> int:
        room, most = self.max_model_len - request.prompt_len, request.sampling.max_tokens
        return (room if most is None else min(room, most)) * request.num_sequences

    def _numbered(self, request: Request, checked: ProcessedInput) -> _Open:
        prompt = None if checked.prompt is None else str.__str__(checked.prompt)
        return _Open(request.request_id, next(self._handles), prompt, checked.prompt_token_ids)

    def _submit(self, replica: _Replica, one: _Open, message: bytes) -> None:
        self._open[one.request_id] = self._by_handle[one.handle] = one
        self._send(replica, message)

    def _forget(self, one: _Open) -> None:
        del self._open[one.request_id], self._by_handle[one.handle]

    def _send(self, replica: _Replica, message: bytes) -> None:
        with self._unbroken():
            try:
                replica.link.send_frame(message)
            except OSError:
                while True:  # until its last words, or its end
                    self._receive(replica)

    def _collect(self, timeout_s: float) -> None:
        """Waits at most `timeout_s` for messages of any replica, and takes those that have come."""
        for fd, _ in self._poll.poll(timeout_s * 1000):
            self._receive(self._by_fd[fd])

    def _receive(self, replica: _Replica) -> None:
        """Waits for bytes from a replica and takes the messages that they complete."""
        with self._unbroken():
            try:
                messages = replica.link.receive()
            except EOFError as error:
                raise self._death(replica) from error
            for message in messages:
                self._take(replica, message)

    def _take(self, replica: _Replica, message: wire.FromEngine) -> None:
        """Takes a message. News of aborted requests are dropped: their handles are known no more."""
        if isinstance(message, wire.Outputs):
            for output in message.outputs:
                one = self._by_handle.get(output.handle)
                if one is not None:
                    self._outputs.append(output.request_output(one.request_id, one.prompt, one.prompt_token_ids))
                    if output.finished:
                        self._router.finish(one.request_id)
        elif isinstance(message, wire.Answer):
            replica.answer = message
        elif isinstance(message, wire.Refused):
            one = self._by_handle.get(message.handle)
            if one is not None:
                self._router.finish(one.request_id)
                self._refused.append((one, error_of(message.kind, message.message)))
        elif isinstance(message, wire.Ready):
            replica.ready = message
        elif isinstance(message, wire.Failed):
            raise error_of(message.kind, message.message)

    def _wait_until_ready(self, replica: _Replica) -> wire.Ready:
        """Raises the error that the engine met in the replica, if it could not start."""
        while replica.ready is None:
            self._receive(replica)
        return replica.ready

    def _ask_all(self, question: wire.Question, kind: type[_AnswerT]) -> list[_AnswerT]:
        """Each replica's answer, of the kind that the question has. Outputs and refusals that come in between are kept
        for `step`.

        Raises: what it raised in one of them.
        """
        values = self._ask_each(question)
        for value in values:
            if isinstance(value, wire.Error):
                raise error_of(value.kind, value.message)
        return [value for value in values if isinstance(value, kind)]

    def _ask_each(self, question: wire.Question, of: Sequence[_Replica] | None = None) -> list[wire.Reply | wire.Error]:
        """The same, with the errors that it raised. of: whom to ask; None: all."""
        asked = self._replicas if of is None else of
        self._check_alive()
        call_id = next(self._call_ids)
        message = wire.frame(wire.Call(call_id, question))
        for replica in asked:
            self._send(replica, message)
        values = []
        for replica in asked:
            while replica.answer is None or replica.answer.call_id != call_id:
                self._receive(replica)
            values.append(replica.answer.value)
        return values

    def _change(
        self,
        question: wire.ResetPrefixCache | wire.PinPrefix | wire.UnpinPrefix | wire.Sleep | wire.WakeUp | wire.SetPaused,
    ) -> list[int]:
        """Changes the replicas or their prefix caches, and with them a request's limits, which pinned blocks lower."""
        answers = self._ask_all(question, wire.Changed)
        self._keep_to_least(answers)
        return [answer.value for answer in answers]

    def _keep_to_least(self, answers: Sequence[wire.Changed]) -> None:
        self._inputs.limits = RequestLimits.least(answer.limits for answer in answers)

    def _death(self, replica: _Replica) -> EngineDeadError:
        """Why a replica does not answer."""
        index = replica.link.index
        code = self._processes.exit_code(index, _STOP_S)
        if code is None:
            return EngineDeadError(f"Replica {index} closed its socket.")
        return EngineDeadError(f"Replica {index} {ended_how(code)}; what it wrote to stderr may say why.")

    def _check_ready(self) -> None:
        self._check_alive()

    def _check_alive(self) -> None:
        if self._ended:
            raise EngineDeadError(self._ended) from self._failure

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Around whatever leaves a socket in the middle of a message when it is interrupted, by Ctrl-C for example.
        The engine is then of no more use. (`LLM` and the commands hold Ctrl-C back.)"""
        try:
            yield
        except BaseException as error:
            self._ended, self._failure = "The engine failed earlier and must be started anew.", error
            self.close()
            raise

    def _leave_to_parent(self) -> None:
        """In a forked process: lets go of the replicas, which belong to the process that started them."""
        self._finalizer.detach()
        for replica in self._replicas:
            replica.link.close()
        self._ended = "The replicas belong to the process that this one was forked from; start an engine here."


def _framed(message: wire.ToEngine) -> bytes:
    """Raises InvalidParameterError if a value of the message is of a type that cannot be sent."""
    try:
        return wire.frame(message)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise InvalidParameterError(f"A replica cannot be sent {shown(message)}: {error}.") from error


_Params = TypeVar("_Params", SamplingParams, BeamSearchParams)


def _own_class(params: _Params) -> _Params:
    """The parameters as jpaged's own class: a caller may pass a subclass, whose constructor may be another."""
    kind = BeamSearchParams if isinstance(params, BeamSearchParams) else SamplingParams
    if type(params) is kind:
        return params
    return kind(**{one.name: getattr(params, one.name) for one in fields(kind)})


_engines: "weakref.WeakSet[ReplicatedEngine]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    for engine in list(_engines):
        engine._leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)  # or the child would keep the replicas' sockets open


def _stop(links: Sequence[SyncLink], processes: EngineProcesses) -> None:
    for link in links:
        link.close()
    processes.wait(_STOP_S)
