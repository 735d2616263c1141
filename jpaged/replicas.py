"""`ReplicatedEngine`: several engines, each in a process and on devices of its own, behind the face of one.

    this process    add_request --> checks, token ids --> Router --+--> replica 0: LLMEngine on devices 0 .. t-1
                    step        <-- outputs of whoever has some  <-+--> replica 1: LLMEngine on devices t .. 2t-1
                                                                   ...

Processes, not threads: a step loop spends around a millisecond of Python on each step, and one interpreter would make
the replicas take turns (`jpaged bench replicas` measures it). A replica sees only its own GPUs, so JAX in it needs
no telling where to go. This process never touches a device. The replicas' pipes are inherited, nothing listens
anywhere; a replica whose pipe closes ends itself.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from jpaged.assets import demo_model_path
from jpaged.beam_search_params import BeamSearchParams
from jpaged.config import EngineArgs
from jpaged.distributed import Cluster
from jpaged.engine.generation_config import get_default_sampling_params
from jpaged.engine.router import Router
from jpaged.engine.seeds import request_seed
from jpaged.engine.stats import EngineStats
from jpaged.engine.tokenizer import Tokenizer
from jpaged.errors import EngineDeadError, InvalidParameterError, JPagedError
from jpaged.inputs import InputProcessor, Prompt
from jpaged.llm_engine import LLMEngine
from jpaged.models import resolve
from jpaged.outputs import RequestOutput
from jpaged.replica_devices import replica_environments
from jpaged.sampling_params import SamplingParams

_WAIT_S = 0.05
"""Longest that `step` waits for outputs, so that its caller can look at the time or at Ctrl-C."""

_STOP_S = 10.0
"""What a replica gets to end by itself."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A replica's first word. devices: what it runs on, in words."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    devices: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that a replica would not take."""

    request_id: str
    error: JPagedError


@dataclass(frozen=True, slots=True)
class Failed:
    """A replica cannot start or go on."""

    error: Exception


class ReplicatedEngine:
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
        environments = replica_environments(args, os.environ)
        self.tokenizer = None
        if not args.skip_tokenizer_init:
            self.tokenizer = Tokenizer.load(args.tokenizer or directory)
        self.default_sampling_params = get_default_sampling_params(directory)
        begun = time.perf_counter()
        own = replace(args, model=str(directory), data_parallel_size=1)
        self._replicas = [
            _Replica(index, replace(own, verbose=args.verbose and index == 0), environment)
            for index, environment in enumerate(environments)
        ]
        self._finalizer = weakref.finalize(self, _stop, self._replicas)
        try:
            ready = [replica.wait_until_ready() for replica in self._replicas]
        except BaseException:
            self.close()
            raise
        self.max_model_len = min(hello.max_model_len for hello in ready)
        self.vocab_size = ready[0].vocab_size
        self.eos_token_ids = ready[0].eos_token_ids
        self._inputs = InputProcessor(self.tokenizer, self.vocab_size, self.max_model_len)
        self._router = Router(self.num_replicas, match_prefixes=args.enable_prefix_caching)
        self._arrived = 0
        self._outputs: list[RequestOutput] = []  # that came while a reply was waited for
        self._failure: Exception | None = None
        if args.verbose:
            seconds = time.perf_counter() - begun
            print(
                f"  {self.num_replicas} replicas of {ready[0].devices} ready after {seconds:.1f} s",
                file=sys.stderr,
                flush=True,
            )

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
    ) -> None:
        """Queues a request with the replica that will be done with it first; as `LLMEngine.add_request`."""
        self._check_alive()
        self._check_new(request_id)
        params = self.default_sampling_params if params is None else params
        if isinstance(params, BeamSearchParams):
            checked = self._inputs.process_search(prompt, params)
        elif isinstance(params, SamplingParams):
            checked = self._inputs.process(prompt, params)
            if params.seed is None:
                seed = request_seed(None, self.args.seed, self._arrived)  # unsigned; a signed number's bits do as well
                params = replace(params, seed=seed - 2**64 if seed >= 2**63 else seed)
        else:
            raise InvalidParameterError(
                f"params must be SamplingParams or BeamSearchParams, got {type(params).__name__}."
            )
        self._arrived += 1
        room = self.max_model_len - len(checked.prompt_token_ids)
        new_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        new_tokens *= params.n if isinstance(params, SamplingParams) else params.beam_width
        replica = self._router.route(request_id, checked.prompt_token_ids, new_tokens, cache_salt)
        sent: dict[str, Any] = {"prompt_token_ids": checked.prompt_token_ids}
        if checked.prompt is not None:
            sent["prompt"] = checked.prompt
        options = {
            "priority": priority,
            "cache_salt": cache_salt,
            "arrival_time": time.monotonic() if arrival_time is None else arrival_time,
        }
        self._send(replica, ("add_request", (request_id, sent, params), options))

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
        self._check_alive()
        self._check_new(request_id)
        tokens = self._inputs.check_scored(token_ids, first_scored)
        replica = self._router.route(request_id, tokens.tolist(), 0, cache_salt)
        options = {"priority": priority, "cache_salt": cache_salt}
        self._send(replica, ("add_score_request", (request_id, tokens, first_scored), options))

    def step(self) -> list[RequestOutput]:
        """Outputs that have come from any replica; waits for some for at most 50 ms.

        Raises:
            EngineDeadError: a replica failed or ended; the engine is of no more use.
            InvalidPromptError, InvalidParameterError, OutOfMemoryError: a replica refused a request, which is named.
        """
        self._check_alive()
        self._collect(0 if self._outputs else _WAIT_S)
        outputs, self._outputs = self._outputs, []
        return outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Ends requests and frees what they hold; no output will come for them. Unknown ids are passed over."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            replica = self._router.replica_of(request_id)
            if replica is not None:
                self._router.finish(request_id)
                if self._failure is None:
                    self._send(replica, ("abort_request", (request_id,), {}))
        self._outputs = [output for output in self._outputs if self._router.replica_of(output.request_id) is not None]

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do."""
        return self._failure is None and (self._router.num_unfinished > 0 or bool(self._outputs))

    def get_metrics(self) -> EngineStats:
        """The sum of the replicas' counters and occupancy."""
        return EngineStats.total(self._ask_all("get_metrics"))

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. Returns False where a replica had requests running and did nothing."""
        self._router.forget_prefixes()
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
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        tokens = self._inputs.process(prompt, params).prompt_token_ids
        sent: dict[str, Any] = {"prompt_token_ids": tokens}
        request_ids = [f"pin-{uuid.uuid4()}" for _ in self._replicas]
        try:
            for index, request_id in enumerate(request_ids):
                self._router.assign(request_id, index, tokens, 1, cache_salt)
                self._send(index, ("add_request", (request_id, sent, params), {"cache_salt": cache_salt}))
            while any(self._router.replica_of(request_id) is not None for request_id in request_ids):
                self._collect(_WAIT_S)
        except BaseException:
            self.abort_request(request_ids)
            raise
        self._outputs = [output for output in self._outputs if output.request_id not in request_ids]
        try:
            return min(self._ask_all("pin_prefix", sent, cache_salt))
        except JPagedError:
            if self._failure is None:
                self._ask_all("unpin_prefix", sent, cache_salt)
            raise

    def unpin_prefix(self, prompt: Prompt, cache_salt: str | None = None) -> bool:
        """Lets a pinned prefix be reused again. Returns whether it was pinned."""
        self._check_alive()
        tokens = self._inputs.process(prompt, SamplingParams()).prompt_token_ids
        return any(self._ask_all("unpin_prefix", {"prompt_token_ids": tokens}, cache_salt))

    def close(self) -> None:
        """Ends the replicas. Called when the engine is collected, too."""
        self._finalizer()

    def _send(self, index: int, call: tuple[str, Sequence[Any], Mapping[str, Any]]) -> None:
        try:
            self._replicas[index].connection.send(call)
        except OSError as error:
            self._fail(self._replicas[index].death())
            raise AssertionError("unreachable") from error

    def _check_new(self, request_id: str) -> None:
        if not isinstance(request_id, str) or not request_id:
            raise InvalidParameterError(f"request_id must be a non-empty string, got {request_id!r}.")
        if self._router.replica_of(request_id) is not None:
            raise InvalidParameterError(f"request_id={request_id!r} is in use by an unfinished request.")

    def _collect(self, timeout_s: float) -> None:
        """Waits so long for messages of any replica and keeps their outputs for `step`."""
        by_connection = {replica.connection: replica for replica in self._replicas}
        for connection in wait(list(by_connection), timeout_s):
            self._outputs += self._receive(by_connection[connection])  # type: ignore[index]

    def _receive(self, replica: "_Replica") -> list[RequestOutput]:
        """Outputs in the replica's next message, those of requests that were aborted left out."""
        message = replica.receive()
        if isinstance(message, Failed):
            self._fail(message.error)
        if isinstance(message, Refused):
            if self._router.replica_of(message.request_id) is None:
                return []
            self._router.finish(message.request_id)
            raise message.error
        outputs = [output for output in message if self._router.replica_of(output.request_id) is not None]
        for output in outputs:
            if output.finished:
                self._router.finish(output.request_id)
        return outputs

    def _ask_all(self, method: str, *arguments: Any) -> list[Any]:
        """What a method of each replica returns. Outputs that come in between are kept for `step`.

        Raises: what it raised in one of them.
        """
        self._check_alive()
        for index in range(self.num_replicas):
            self._send(index, (method, arguments, {}))
        replies = []
        for replica in self._replicas:
            while not replica.replies:
                self._outputs += self._receive(replica)
            replies.append(replica.replies.pop(0))
        for reply in replies:
            if isinstance(reply, JPagedError):
                raise reply
        return replies

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDeadError("The engine failed earlier and must be started anew.") from self._failure

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self.close()
        if isinstance(error, EngineDeadError):
            raise error
        raise EngineDeadError(f"A replica failed: {type(error).__name__}: {error}") from error


class _Replica:
    """A process and the pipe to it."""

    def __init__(self, index: int, args: EngineArgs, environment: Mapping[str, str]) -> None:
        self.index = index
        self.replies: list[Any] = []
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jpaged.replica_process", str(theirs.fileno())],
                env=environment,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
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
        """The next message: outputs, `Refused` or `Failed`; no outputs where it was a reply, which is kept."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            return Failed(self.death())
        if isinstance(message, tuple):
            self.replies.append(message[0])
            return []
        return message

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
