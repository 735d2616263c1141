"""The messages between an engine process and its clients: msgpack over a Unix socket, never pickle.

    frame     | length, 4 bytes little-endian | msgpack array, its first element the message's name |

    to the engine   Start            once, by the first client, then
                    Add, Finish, Abort, Call, Shutdown
    from it         Ready | Failed   once, then
                    Step | Outputs   for each engine step that has news, for all requests of the client together
                    Refused, Answer, Trial, Failed

A client is an API process (`AsyncLLMEngine`) or a program with replicas (`ReplicatedEngine`). `Start.reports` says
which reports it wants:

    "steps"     Step: token ids. The client turns them into text; the engine process does nothing that grows with text.
                One token of a running request, the usual case, is an entry of two arrays; anything else is an `Update`.
    "outputs"   Outputs: what `LLMEngine.step` returns. Each replica makes its own text, so one client can drain many.

A request is known by its *handle*, an integer that the client counts up and never uses again.
"""

import struct
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import numpy as np

from jpaged.api.beam_search_params import BeamSearchParams
from jpaged.api.config import EngineArgs
from jpaged.api.errors import EngineDeadError
from jpaged.api.outputs import CompletionOutput, Logprob, RequestOutput, RequestStateStats, TargetScores
from jpaged.api.pooling_params import PoolingParams
from jpaged.api.sampling_params import SamplingParams
from jpaged.api.structured_outputs import StructuredOutputsParams
from jpaged.api.weights import InFlight
from jpaged.engine.limits import RequestLimits
from jpaged.engine.sequences.request import Request
from jpaged.engine.stats import EngineStats
from jpaged.processes.pool_view import PoolView

_LENGTH = struct.Struct("<I")

MAX_FRAME_BYTES = 2**31
"""A longer frame is a defect of the sender."""

Reports = Literal["steps", "outputs"]


class _Message(msgspec.Struct, array_like=True, tag=True):
    """A message is an array: its name, then its fields in order."""


class Start(_Message):
    """What to run, and what to report of it. The engine answers Ready or Failed."""

    args: EngineArgs
    reports: Reports


class Resumed(_Message):
    """How far a request had come in an engine process that has ended.

    generated: by sequence, what the client has of it: int32 token ids as bytes; None: it has ended.
    has_prompt_logprobs: the client has those of the prompt.
    num_cached_tokens, stats: as the engine that began the request reported them.
    """

    generated: list[bytes | None]
    has_prompt_logprobs: bool
    num_cached_tokens: int
    stats: RequestStateStats

    @classmethod
    def of(cls, request: Request) -> "Resumed | None":
        """What a client knows of a request; None where nothing has come, so that it begins anew."""
        members = request.group.members
        if not any(member.output_token_ids or member.finished for member in members):
            return None
        generated = [
            None if member.finished else np.array(member.output_token_ids, np.int32).tobytes() for member in members
        ]
        return cls(generated, not request.wants_prompt_logprobs, request.num_cached_tokens, request.stats)

    def token_ids(self) -> list[list[int] | None]:
        """By sequence, as `Scheduler.add` takes them."""
        return [None if one is None else np.frombuffer(one, np.int32).tolist() for one in self.generated]


class Add(_Message):
    """A request that has passed the checks of `InputProcessor`.

    prompt, score_targets: int32 token ids as bytes. constraint: the fields of `sampling.structured_outputs`, which is
    left out there: checked once more, a large schema would hold up the engine process.
    again: it ran in an engine process that has ended, so every token of it is reported from here on: should this
    process end, too, none is lost. resumed: how far it had come; None for one that begins. on_trial: it may be what
    the last engine processes ended of, so it runs some steps before others that may be (`trials.py`).
    """

    handle: int
    prompt: bytes
    sampling: SamplingParams
    beam: BeamSearchParams | None
    bad_words_token_ids: tuple[tuple[int, ...], ...]
    priority: int
    cache_salt: str | None
    arrival_time: float
    constraint: dict[str, Any] | None = None
    score_targets: bytes | None = None
    again: bool = False
    resumed: Resumed | None = None
    on_trial: bool = False
    pooling: PoolingParams | None = None

    @classmethod
    def of(cls, handle: int, request: Request, *, again: bool = False, on_trial: bool = False) -> "Add":
        """The message that asks for `request`. again, on_trial: as the fields."""
        sampling, constraint = request.sampling, request.sampling.structured_outputs
        return cls(
            handle=handle,
            prompt=request.prompt_token_ids.tobytes(),
            sampling=sampling if constraint is None else sampling.constrained(None),
            beam=request.beam,
            bad_words_token_ids=request.bad_words_token_ids,
            priority=request.priority,
            cache_salt=request.cache_salt,
            arrival_time=request.stats.arrival_time,
            constraint=None if constraint is None else vars(constraint),
            score_targets=None if request.score_targets is None else request.score_targets.tobytes(),
            again=again,
            resumed=Resumed.of(request) if again else None,
            on_trial=on_trial,
            pooling=request.pooling,
        )

    def request(self, request_id: str, eos_token_ids: tuple[int, ...]) -> Request:
        """The request, as the engine's scheduler takes it. Raises what `Request` raises."""
        sampling = self.sampling
        if self.constraint is not None:
            sampling = sampling.constrained(StructuredOutputsParams.of_checked(self.constraint))
        request = Request(
            request_id,
            np.frombuffer(self.prompt, np.int32),
            sampling,
            eos_token_ids=eos_token_ids,
            bad_words_token_ids=self.bad_words_token_ids,
            priority=self.priority,
            cache_salt=self.cache_salt,
            arrival_time=self.arrival_time,
            beam=self.beam,
            score_targets=None if self.score_targets is None else np.frombuffer(self.score_targets, np.int32),
            pooling=self.pooling,
        )
        if self.again and self.beam is None and request.samples:
            request.reports_each_token = True
        if self.resumed is not None:
            request.num_cached_tokens, request.stats = self.resumed.num_cached_tokens, self.resumed.stats
            if self.resumed.has_prompt_logprobs:
                request.prompt_logprobs = None
        return request


class Finish(_Message):
    """The text of a sequence of a request reached a stop string. Only clients that get steps send it."""

    handle: int
    index: int
    stop_reason: str


class Abort(_Message):
    """Requests to end. reports: their client waits for what they have generated; otherwise nobody does any more."""

    handles: list[int]
    reports: bool = False


class GetStats(_Message):
    """Answered by Stats."""


class GetPool(_Message):
    """Answered by Pool."""


class GetRequests(_Message):
    """Answered by Requests, of at most so many."""

    most: int


class ResetPrefixCache(_Message):
    """Answered by Changed: whether it was reset."""


class PinPrefix(_Message):
    """Answered by Changed: the tokens pinned. token_ids: int32 as bytes."""

    token_ids: bytes
    cache_salt: str | None


class UnpinPrefix(_Message):
    """Answered by Changed: whether the prefix was pinned. token_ids: int32 as bytes."""

    token_ids: bytes
    cache_salt: str | None


class Sleep(_Message):
    """Answered by Changed: whether the engine sleeps."""

    level: int


class WakeUp(_Message):
    """Answered by Changed: true."""


class SharedArray(_Message):
    """An array in memory that processes share. dtype: its name. offset: in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class UpdateWeights(_Message):
    """Answered by Changed: true, with seconds; or Error, and the weights are what they were. path: of the memory that
    the arrays are in. partial, in_flight: as of `LLMEngine.update_weights`.
    """

    path: str
    arrays: list[SharedArray]
    partial: bool
    in_flight: InFlight


class Allocation(_Message):
    """Device memory that processes share. device: its UUID. handle: of CUDA IPC; None where a descriptor stands for it:
    the next one of the message's.
    """

    device: bytes
    num_bytes: int
    handle: bytes | None


class DeviceArray(_Message):
    """An array in device memory, in C order. dtype: its name. allocation: the index of the message's that it lies in.
    offset: in that allocation, in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    allocation: int
    offset: int


class UpdateWeightsOnDevice(_Message):
    """Answered as UpdateWeights; or by Unreachable. The arrays stay where they are until the answer. address: where
    `take_descriptors` gets the descriptors of allocations, in their order.
    """

    address: str
    allocations: list[Allocation]
    arrays: list[DeviceArray]
    partial: bool
    in_flight: InFlight


class GiveBackWeights(_Message):
    """Answered by Changed: whether the engine, which slept at level 2 when it took its last weights, sleeps so again
    and is as it was before them. False, and nothing is done, where it did not sleep so.
    """


class SetPaused(_Message):
    """Answered by Changed: whether the engine is paused."""

    paused: bool


class CheckIntegrity(_Message):
    """Answered by Intact, or Error."""


Question = (
    GetStats
    | GetPool
    | GetRequests
    | ResetPrefixCache
    | PinPrefix
    | UnpinPrefix
    | Sleep
    | WakeUp
    | UpdateWeights
    | UpdateWeightsOnDevice
    | GiveBackWeights
    | SetPaused
    | CheckIntegrity
)


class Call(_Message):
    """A question. Its Answer carries the same call_id."""

    call_id: int
    question: Question


class Shutdown(_Message):
    """End now, whatever runs."""


class Ready(_Message):
    """The engine runs. pid: of its process. device: what it runs on, in words. limits: of a request. on_gpu: it runs on
    GPUs. has_prefix_cache: it keeps prefixes of requests that have ended."""

    pid: int
    device: str
    vocab_size: int
    limits: RequestLimits
    eos_token_ids: tuple[int, ...]
    default_sampling_params: SamplingParams
    startup_s: dict[str, float]
    on_gpu: bool = False
    has_prefix_cache: bool = True


class Failed(_Message):
    """The engine could not start, or cannot go on. kind: the name of the error's type."""

    kind: str
    message: str


class Update(_Message):
    """News of one sequence of a request that are more than a token.

    token_ids: tokens since its last update. logprobs: of these tokens, where asked for. prompt_logprobs: with the
    first update only. stats: with the first and the last. pooled: `Request.pooled`, as bytes, with the last.
    """

    handle: int
    index: int
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    num_cached_tokens: int
    logprobs: list[dict[int, Logprob]] | None
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    stats: RequestStateStats | None
    cumulative_logprob: float | None
    score: float | None
    pooled: bytes | None = None


class Step(_Message):
    """What one step brought.

    handles, tokens: int64 and int32 [n] as bytes; requests for one sequence that got one token and nothing else.
    updates: of the others that have news.
    started: int64 [m] as bytes; requests that have left the waiting queue for the first time.
    """

    handles: bytes
    tokens: bytes
    updates: list[Update]
    started: bytes


class Scores(_Message):
    """`TargetScores`: float32 and bool [m] as bytes."""

    logprobs: bytes
    greedy: bytes


class Output(_Message):
    """A `RequestOutput` without what the client knows already: the request's id and prompt. embedding: as bytes."""

    handle: int
    completions: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    num_cached_tokens: int
    metrics: RequestStateStats
    scores: Scores | None
    embedding: bytes | None = None

    @classmethod
    def of(cls, handle: int, output: RequestOutput) -> "Output":
        scores, embedding = output.scores, output.embedding
        return cls(
            handle=handle,
            completions=output.outputs,
            finished=output.finished,
            prompt_logprobs=output.prompt_logprobs,
            num_cached_tokens=output.num_cached_tokens,
            metrics=output.metrics,
            scores=None if scores is None else Scores(scores.logprobs.tobytes(), scores.greedy.tobytes()),
            embedding=None if embedding is None else embedding.tobytes(),
        )

    def request_output(self, request_id: str, prompt: str | None, prompt_token_ids: list[int]) -> RequestOutput:
        scores = self.scores
        return RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            outputs=self.completions,
            finished=self.finished,
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
            scores=None
            if scores is None
            else TargetScores(
                np.frombuffer(bytearray(scores.logprobs), np.float32), np.frombuffer(bytearray(scores.greedy), np.bool_)
            ),
            embedding=None if self.embedding is None else np.frombuffer(bytearray(self.embedding), np.float32),
        )


class Outputs(_Message):
    """What one step returned."""

    outputs: list[Output]


class Refused(_Message):
    """The engine cannot take a request. kind: the name of the error's type."""

    handle: int
    kind: str
    message: str


class Trial(_Message):
    """A request that was added `on_trial` runs now. passed: it has run some steps, and the engine lives."""

    handle: int
    passed: bool


class Stats(_Message):
    """Counters and occupancy."""

    stats: EngineStats


class Pool(_Message):
    """The same, and a picture of the KV pool."""

    stats: EngineStats
    view: PoolView


class RequestView(_Message):
    """A sequence of an unfinished request.

    handle: the client's. status: "waiting", "running", "preempted" or "finished". slot: -1 without one.
    known: tokens of prompt and answer that the host knows; computed: of these and those in flight, those that are
    computed. blocks: that it holds, shared ones included. age_s: since the request arrived.
    """

    handle: int
    index: int
    status: str
    slot: int
    prompt_tokens: int
    known: int
    computed: int
    blocks: int
    num_cached_tokens: int
    num_preemptions: int
    age_s: float


class Requests(_Message):
    """Unfinished requests, oldest first."""

    requests: list[RequestView]


class Changed(_Message):
    """The cache or the engine was asked to change. value: as the question says. limits: of a request, from then on.
    seconds: that parts of it took, where the question says so.
    """

    value: int
    limits: RequestLimits
    seconds: dict[str, float] = {}


class Unreachable(_Message):
    """The engine process cannot map the device memory that a message names, and has changed nothing."""

    reason: str


class Intact(_Message):
    """Blocks, tables, slots and queue agree."""


class Error(_Message):
    """What was asked for raised an error. kind: the name of its type."""

    kind: str
    message: str


Reply = Stats | Pool | Requests | Changed | Unreachable | Intact


class Answer(_Message):
    """The answer to the Call of the same call_id."""

    call_id: int
    value: Reply | Error


ToEngine = Start | Add | Finish | Abort | Call | Shutdown
FromEngine = Ready | Failed | Step | Outputs | Refused | Answer | Trial

_encoder = msgspec.msgpack.Encoder()


def frame(message: ToEngine | FromEngine) -> bytes:
    """A message as it goes over the socket."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Bytes in, messages out.

    kind: `ToEngine` or `FromEngine`, the messages that may come.
    """

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that these bytes complete.

        Raises:
            EngineDeadError: the bytes are no messages; the connection is of no more use.
        """
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer, start)
                if length > MAX_FRAME_BYTES:
                    raise EngineDeadError(f"A frame claims {length} bytes; the two processes do not agree.")
                stop = start + _LENGTH.size + length
                if len(self._buffer) < stop:
                    break
                try:
                    message = self._decoder.decode(bytes(memoryview(self._buffer)[start + _LENGTH.size : stop]))
                except msgspec.MsgspecError as error:
                    raise EngineDeadError(f"A frame is no message: {error}") from error
                start = stop
                yield message
        finally:
            del self._buffer[:start]
