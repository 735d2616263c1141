"""`ReplicatedEngine`: several engines, each in a process and on devices of its own, behind the face of one.

    this process    add_request --> checks, token ids --> Router --+--> replica 0: LLMEngine on devices 0 .. t-1
                    step        <-- outputs of whoever has some  <-+--> replica 1: LLMEngine on devices t .. 2t-1
                                                                   ...

Processes, not threads: a step loop spends some 0.5 ms of Python on each step, and one interpreter would make the
replicas take turns (`benchmarks/replicas.py` measures it). A replica sees only its own GPUs, so JAX in it needs
no telling where to go. This process never touches a device. The replicas' pipes are inherited, nothing listens
anywhere; a replica whose pipe closes ends itself.

    to a replica      Call                  a request to queue or to abort, or a question to all
    from a replica    Ready | Failed        once; Failed later, too, if the engine fails
                      list of outputs       of a step
                      Refused, Aborted, Reply

Replicas read whatever they do, so sending never waits for long. What comes from them is read in `step`, or while a
reply is waited for; then outputs and refusals are kept for `step`.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from itertools import count
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import numpy as np

from jpaged.api.beam_search_params import BeamSearchParams
from jpaged.api.config import EngineArgs
from jpaged.api.errors import EngineDeadError, InvalidParameterError, JPagedError, shown
from jpaged.api.outputs import RequestOutput
from jpaged.api.sampling_params import SamplingParams
from jpaged.assets import demo_model_path
from jpaged.engine.limits import RequestLimits
from jpaged.engine.sequences.request import Request, checked_salt
from jpaged.engine.sequences.seeds import default_seed
from jpaged.engine.stats import EngineStats
from jpaged.executor.distributed import Cluster
from jpaged.frontend.generation_config import get_default_sampling_params
from jpaged.frontend.inputs import InputProcessor, ProcessedInput, Prompt, request_ids_to_abort
from jpaged.frontend.intake import RequestIntake
from jpaged.frontend.llm_engine import LLMEngine
from jpaged.host.devices import replica_environments
from jpaged.host.garbage import set_objects_apart
from jpaged.host.hub import resolve
from jpaged.processes.router import Router
from jpaged.text.tokenizer import Tokenizer

_WAIT_S = 0.05
"""Longest that `step` waits for outputs, so that its caller can look at the time or at Ctrl-C."""

_STOP_S = 10.0
"""What a replica gets to end by itself."""

_COMPUTE_ONLY = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
"""Of a request that is there to put its prompt into the prefix cache."""


@dataclass(frozen=True, slots=True)
class Call:
    """A method of the replica's engine to call. number: of a question; its value comes as a `Reply` of this number."""

    method: str
    arguments: Sequence[Any] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """A replica's first word. limits: of a request. devices: what it runs on, in words."""

    limits: RequestLimits
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    devices: str


@dataclass(frozen=True, slots=True)
class Reply:
    """What a question's method returned, or raised."""

    number: int
    value: Any


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that a replica would not take."""

    request_id: str
    error: JPagedError


@dataclass(frozen=True, slots=True)
class Aborted:
    """Nothing more will come of these requests."""

    request_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class Failed:
    """A replica cannot start or go on."""

    error: Exception


class ReplicatedEngine(RequestIntake):
    """`LLMEngine` over `data_parallel_size` replicas; see there for arguments, results and errors.

    A request's tokens do not depend on which replica serves it: requests without a seed get theirs here, in order.

    Attributes:
        max_model_len: the longest a sequence may grow, prompt and output, in tokens.
        vocab_size: token ids that the model knows. eos_token_ids: its end-of-sequence tokens.
        num_replicas: `data_parallel_size`.
    """

    def __init__(self, args: EngineArgs) -> None:
        directory = demo_model_path() if args.model is None else resolve(args.model, args.revision, args.load_format)
        self.args = args
        self.num_replicas = args.data_parallel_size
        self._open: set[str] = set()  # requests whose end `step` has not told yet
        self._outputs: list[RequestOutput] = []  # for `step` to return
        self._refused: list[Refused] = []  # for `step` to raise
        self._ended = ""  # why the engine can do nothing more
        self._failure: BaseException | None = None
        environments = replica_environments(args, os.environ)
        self.tokenizer = None
        if not args.skip_tokenizer_init:
            self.tokenizer = Tokenizer.load(args.tokenizer or directory)
            set_objects_apart()
        self.default_sampling_params = get_default_sampling_params(directory)
        begun = time.perf_counter()
        own = replace(args, model=str(directory), data_parallel_size=1)
        self._replicas = [
            _Replica(index, replace(own, verbose=args.verbose and index == 0), environment)
            for index, environment in enumerate(environments)
        ]
        self._finalizer = weakref.finalize(self, _stop, self._replicas)
        _engines.add(self)
        try:
            ready = [replica.wait_until_ready() for replica in self._replicas]
        except BaseException:
            self.close()
            raise
        limits = RequestLimits.least(hello.limits for hello in ready)
        self.max_model_len = limits.max_model_len
        self.vocab_size = ready[0].vocab_size
        self.eos_token_ids = ready[0].eos_token_ids
        self._inputs = InputProcessor(self.tokenizer, self.vocab_size, limits, self.eos_token_ids)
        self._router = Router(self.num_replicas, match_prefixes=args.enable_prefix_caching)
        self._arrived = 0
        self._numbers = count()
        self._limits_are_known = True
        if args.verbose:
            seconds = time.perf_counter() - begun
            print(
                f"  {self.num_replicas} replicas of {ready[0].devices} ready after {seconds:.1f} s",
                file=sys.stderr,
                flush=True,
            )

    def queue(self, request: Request, checked: ProcessedInput) -> None:
        """Sends a request to the replica that will be done with it first, which may begin with it at once; as
        `RequestIntake.queue`."""
        self._check_alive()
        self._check_new(request.request_id)
        params = _own_class(request.sampling if request.beam is None else request.beam)
        if isinstance(params, SamplingParams) and params.seed is None:
            params = replace(params, seed=default_seed(self.args.seed, self._arrived))
        self._arrived += 1
        room, most = self.max_model_len - request.prompt_len, request.sampling.max_tokens
        new_tokens = (room if most is None else min(room, most)) * request.num_sequences
        sent: dict[str, Any] = {"prompt_token_ids": checked.prompt_token_ids}
        if checked.prompt is not None:
            sent["prompt"] = str.__str__(checked.prompt)
        options = {"arrival_time": request.stats.arrival_time}
        self._route("add_request", request, checked.prompt_token_ids, new_tokens, (sent, params), options)

    def add_score_request(
        self,
        request_id: str,
        token_ids: Sequence[int] | np.ndarray,
        first_scored: int = 1,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queues tokens to score with the replica that will be done with them first; as `LLMEngine.add_score_request`.

        Rows with a common prompt go where it is cached, as long as that takes less than it costs in waiting.
        """
        self._check_ready()
        request = self._inputs.score_request(
            request_id, token_ids, first_scored, priority=priority, cache_salt=cache_salt
        )
        self._check_new(request.request_id)
        assert request.score_targets is not None
        tokens = [*request.prompt_token_ids.tolist(), int(request.score_targets[-1])]
        self._route("add_score_request", request, tokens, 0, (np.array(tokens, np.int32), int(first_scored)), {})

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
            refused = self._refused.pop(0)
            self._open.discard(refused.request_id)
            raise type(refused.error)(f"Request {refused.request_id!r}: {refused.error}") from refused.error
        outputs, self._outputs = self._outputs, []
        self._open.difference_update(output.request_id for output in outputs if output.finished)
        return outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Ends requests and frees what they hold; no output will come for them. Unknown ids are passed over."""
        ids = self._open.intersection(request_ids_to_abort(request_ids))
        self._open -= ids
        self._outputs = [output for output in self._outputs if output.request_id not in ids]
        self._refused = [refused for refused in self._refused if refused.request_id not in ids]
        by_replica: dict[int, list[str]] = {}
        for request_id in ids:
            replica = self._router.replica_of(request_id)
            if replica is not None:
                self._router.finish(request_id)
                by_replica.setdefault(replica, []).append(request_id)
        for replica, of_replica in by_replica.items():
            if not self._ended:
                self._replicas[replica].aborting.update(of_replica)
                with suppress(EngineDeadError):  # they have ended, too; the next call says so
                    self._send(replica, _pickled(Call("abort_request", (of_replica,))))

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do."""
        return not self._ended and bool(self._open)

    def get_metrics(self) -> EngineStats:
        """The sum of the replicas' counters and occupancy."""
        return EngineStats.total(self._ask_all("get_metrics"))

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. Returns False where a replica had requests running and did nothing."""
        self._router.forget_prefixes()
        self._limits_are_known = False
        return all(self._ask_all("reset_prefix_cache"))

    def pin_prefix(self, prompt: Prompt, cache_salt: str | None = None) -> int:
        """Computes a prompt on every replica, and keeps the beginning of it in the prefix cache of each, as
        `LLMEngine.pin_prefix`. Other requests run on meanwhile; `step` returns their outputs.

        Returns: the number of tokens kept, on the replica that keeps fewest.

        Raises:
            InvalidPromptError: as `add_request`. InvalidParameterError: there is no prefix cache.
            OutOfMemoryError: too little of a replica's pool would be left; nothing is pinned on any.
        """
        self._check_alive()
        tokens, salt = self._inputs.process(prompt, _COMPUTE_ONLY).prompt_token_ids, checked_salt(cache_salt)
        sent = {"prompt_token_ids": tokens}
        request_ids = [f"pin-{uuid.uuid4()}" for _ in self._replicas]
        self._open.update(request_ids)
        try:
            for index, request_id in enumerate(request_ids):
                self._router.assign(request_id, index, tokens, 1, salt)
                call = Call("add_request", (request_id, sent, _COMPUTE_ONLY), {"cache_salt": salt})
                self._send(index, _pickled(call))
            while any(self._router.replica_of(request_id) is not None for request_id in request_ids):
                self._collect(_WAIT_S)
            for refused in self._refused:
                if refused.request_id in request_ids:
                    raise refused.error
        finally:
            self.abort_request(request_ids)  # what came of them is for nobody
        self._limits_are_known = False
        try:
            return min(self._ask_all("pin_prefix", sent, salt))
        except JPagedError:
            if not self._ended:
                self._ask_all("unpin_prefix", sent, salt)
            raise

    def unpin_prefix(self, prompt: Prompt, cache_salt: str | None = None) -> bool:
        """Lets a pinned prefix be reused again. Returns whether it was pinned."""
        self._check_alive()
        tokens = self._inputs.process(prompt, _COMPUTE_ONLY).prompt_token_ids
        self._limits_are_known = False
        return any(self._ask_all("unpin_prefix", {"prompt_token_ids": tokens}, checked_salt(cache_salt)))

    def close(self) -> None:
        """Ends the replicas; the engine is of no more use. Called when it is collected, too. The second time it does
        nothing."""
        self._ended = self._ended or "The engine was closed; start another one."
        self._finalizer()

    def _route(
        self,
        method: str,
        request: Request,
        tokens: Sequence[int],
        new_tokens: int,
        arguments: Sequence[Any],
        options: Mapping[str, Any],
    ) -> None:
        """Sends a checked request to the replica that will be done with it first. All that is sent is of types that
        every process knows."""
        request_id, salt = request.request_id, request.cache_salt
        options = {**options, "priority": request.priority, "cache_salt": salt}
        message = _pickled(Call(method, (request_id, *arguments), options))
        replica = self._router.route(request_id, tokens, new_tokens, salt)
        self._open.add(request_id)
        self._send(replica, message)

    def _check_new(self, request_id: str) -> None:
        if request_id in self._open:
            raise InvalidParameterError(f"request_id={request_id!r} is in use by an unfinished request.")

    def _send(self, index: int, message: bytes) -> None:
        replica = self._replicas[index]
        with self._unbroken():
            try:
                replica.connection.send_bytes(message)
                return
            except OSError:
                error = replica.death()
        self._fail(error)

    def _collect(self, timeout_s: float) -> None:
        """Waits so long for messages of any replica, and takes one of each that has some."""
        by_connection = {replica.connection: replica for replica in self._replicas}
        for connection in wait(list(by_connection), timeout_s):
            self._receive(by_connection[connection])  # type: ignore[index]

    def _receive(self, replica: "_Replica") -> None:
        """Takes a replica's next message; what it says of requests that were aborted is left out."""
        with self._unbroken():
            message = replica.receive()
        if isinstance(message, Failed):
            self._fail(message.error)
        elif isinstance(message, Reply):
            replica.reply = message
        elif isinstance(message, Aborted):
            replica.aborting -= Counter(message.request_ids)
        elif isinstance(message, Refused):
            if self._expects(replica, message.request_id):
                self._router.finish(message.request_id)
                self._refused.append(message)
        else:
            for output in message:
                if self._expects(replica, output.request_id):
                    self._outputs.append(output)
                    if output.finished:
                        self._router.finish(output.request_id)

    def _expects(self, replica: "_Replica", request_id: str) -> bool:
        """Whether what a replica says of a request is of the one that has this id now: the id of an aborted request is
        free at once, while its replica may not know yet."""
        return self._router.replica_of(request_id) is not None and request_id not in replica.aborting

    def _ask_all(self, method: str, *arguments: Any) -> list[Any]:
        """What a method of each replica returns. Outputs and refusals that come in between are kept for `step`.

        Raises: what it raised in one of them.
        """
        self._check_alive()
        number = next(self._numbers)
        question = _pickled(Call(method, arguments, number=number))
        for index in range(self.num_replicas):
            self._send(index, question)
        replies = []
        for replica in self._replicas:
            while replica.reply is None or replica.reply.number != number:
                self._receive(replica)
            replies.append(replica.reply.value)
        for reply in replies:
            if isinstance(reply, JPagedError):
                raise reply
        return replies

    def _check_ready(self) -> None:
        """Asks the replicas what a request must keep to, where prefixes may have been pinned since."""
        self._check_alive()
        if not self._limits_are_known:
            self._inputs.limits = RequestLimits.least(self._ask_all("request_limits"))
            self._limits_are_known = True

    def _check_alive(self) -> None:
        if self._ended:
            raise EngineDeadError(self._ended) from self._failure

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        """For what leaves a pipe in the middle of a message if it is broken off, by Ctrl-C say: then it is of no more
        use. (`LLM` and the commands hold Ctrl-C back.)"""
        try:
            yield
        except BaseException as error:
            self._end(error)
            raise

    def _end(self, failure: BaseException) -> None:
        self._ended, self._failure = "The engine failed earlier and must be started anew.", failure
        self.close()

    def _fail(self, error: Exception) -> NoReturn:
        self._end(error)
        if isinstance(error, EngineDeadError):
            raise error
        raise EngineDeadError(f"A replica failed: {type(error).__name__}: {error}") from error

    def _leave_to_parent(self) -> None:
        """In a forked process: lets go of the replicas, which belong to the process that started them."""
        self._finalizer.detach()
        for replica in self._replicas:
            replica.connection.close()
        self._ended = "The replicas belong to the process that this one was forked from; start an engine here."


class _Replica:
    """A process and the pipe to it.

    Attributes:
        reply: the last one that came.
        aborting: ids of requests that the process has been told to abort, and has not yet said that it did.
    """

    def __init__(self, index: int, args: EngineArgs, environment: Mapping[str, str]) -> None:
        self.index = index
        self.reply: Reply | None = None
        self.aborting: Counter[str] = Counter()
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "jpaged.processes.replica_process", str(theirs.fileno())],
                env=environment,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is for this process, which deals with it
            )
        self.connection = Connection(ours.detach())
        self.connection.send(args)

    def wait_until_ready(self) -> Ready:
        """Raises what went wrong in the replica, as it would without one."""
        message = self.receive()
        if isinstance(message, Failed):
            raise message.error
        return message

    def receive(self) -> Any:
        """The next message; `Failed` where none will come."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return Failed(self.death())

    def death(self) -> EngineDeadError:
        """Why nobody answers."""
        try:
            code = self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            return EngineDeadError(f"Replica {self.index} closed its pipe.")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return EngineDeadError(f"Replica {self.index} {how}; what it wrote to stderr may say why.")


def start_engine(args: EngineArgs) -> LLMEngine | ReplicatedEngine:
    """One engine, or as many replicas as `data_parallel_size` asks for.

    Raises:
        InvalidParameterError: replicas are asked for of a model over several processes.
    """
    check_one_host(args)
    return LLMEngine(args) if args.data_parallel_size == 1 else ReplicatedEngine(args)


def check_one_host(args: EngineArgs) -> None:
    """Raises InvalidParameterError if replicas are asked for of a model over several processes."""
    if args.data_parallel_size > 1 and Cluster.find(args) is not None:
        raise InvalidParameterError(
            f"data_parallel_size={args.data_parallel_size} is for one host; with num_processes, use"
            f" tensor_parallel_size, or start one engine a host."
        )


def _pickled(call: Call) -> bytes:
    """A call as it goes to a replica. Raises InvalidParameterError if an argument of it is of a type that cannot go."""
    try:
        return pickle.dumps(call)
    except Exception as error:  # a type of the caller's, which may raise anything
        raise InvalidParameterError(f"A replica cannot be sent {shown(call.arguments)}: {error}.") from error


def _own_class(params: SamplingParams | BeamSearchParams) -> SamplingParams | BeamSearchParams:
    """The parameters as the class that a replica knows; a caller may have made one of its own of it."""
    kind = BeamSearchParams if isinstance(params, BeamSearchParams) else SamplingParams
    if type(params) is kind:
        return params
    return kind(**{one.name: getattr(params, one.name) for one in fields(kind)})


_engines: "weakref.WeakSet[ReplicatedEngine]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    for engine in list(_engines):
        engine._leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)  # or the child would keep the replicas' pipes open


def _stop(replicas: Sequence[_Replica]) -> None:
    for replica in replicas:
        replica.connection.close()
    deadline = time.monotonic() + _STOP_S
    for replica in replicas:
        try:
            replica.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            replica.process.kill()
            replica.process.wait()
