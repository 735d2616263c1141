"""What the API process and the engine process say to each other: msgpack over a Unix socket, never pickle.

    frame     | length, 4 bytes little-endian | msgpack array, its first element the message's name |

    to the engine   Start            once, then
                    Add, Finish, Abort, Call, Shutdown
    from it         Ready | Failed   once, then
                    Step             one for each engine step, for all its requests together
                    Refused, Answer, Dead

A request is known by its *handle*, an integer that the API process counts up and never uses again. A `Step` holds the
usual case, one token of a running request, as two arrays; what is rarer is an `Update` each.
"""

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from jpaged.api.beam_search_params import BeamSearchParams
from jpaged.api.config import EngineArgs
from jpaged.api.errors import EngineDeadError
from jpaged.api.outputs import Logprob, RequestStateStats
from jpaged.api.sampling_params import SamplingParams
from jpaged.engine.limits import RequestLimits
from jpaged.engine.stats import EngineStats
from jpaged.processes.pool_view import PoolView

_LENGTH = struct.Struct("<I")

MAX_FRAME_BYTES = 2**31
"""A frame that claims more is a defect, not a message."""


class _Message(msgspec.Struct, array_like=True, tag=True):
    """A message is an array: its name, then its fields in order."""


class Start(_Message):
    """What to run. The engine answers Ready or Failed."""

    args: EngineArgs


class Add(_Message):
    """A request that has passed the checks of `InputProcessor`. prompt: int32 token ids as bytes."""

    handle: int
    prompt: bytes
    sampling: SamplingParams
    beam: BeamSearchParams | None
    bad_words_token_ids: tuple[tuple[int, ...], ...]
    priority: int
    cache_salt: str | None
    arrival_time: float


class Finish(_Message):
    """The text of a sequence of a request reached a stop string."""

    handle: int
    index: int
    stop_reason: str


class Abort(_Message):
    """Requests that nobody waits for any more."""

    handles: list[int]


class Call(_Message):
    """A question: "stats", "pool", "reset_prefix_cache" or "check_integrity"."""

    call_id: int
    name: str


class Shutdown(_Message):
    """End now, whatever runs."""


class Ready(_Message):
    """The engine runs. pid: of its process. limits: of a request."""

    pid: int
    vocab_size: int
    limits: RequestLimits
    eos_token_ids: tuple[int, ...]
    default_sampling_params: SamplingParams
    startup_s: dict[str, float]


class Failed(_Message):
    """The engine could not start. kind: the name of a type in `jpaged.api.errors`."""

    kind: str
    message: str


class Update(_Message):
    """News of one sequence of a request that are more than a token.

    token_ids: tokens since its last update. logprobs: of these tokens, where asked for. prompt_logprobs: with the
    first update only. stats: with the first and the last.
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


class Refused(_Message):
    """The engine cannot take a request. kind: the name of a type in `jpaged.api.errors`."""

    handle: int
    kind: str
    message: str


class Answer(_Message):
    """The answer to a Call; its type follows from the question. error: what went wrong."""

    call_id: int
    stats: EngineStats | None = None
    pool: PoolView | None = None
    done: bool | None = None
    error: str | None = None


class Dead(_Message):
    """The engine met an error that it does not survive."""

    message: str


ToEngine = Start | Add | Finish | Abort | Call | Shutdown
FromEngine = Ready | Failed | Step | Refused | Answer | Dead

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
