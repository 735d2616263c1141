"""Errors in the form that OpenAI's clients expect: `{"error": {"message", "type", "param", "code"}}` and a status."""

import re
from collections.abc import Collection, Mapping

import msgspec

from jpaged.api.errors import (
    EngineAsleepError,
    EngineDeadError,
    EngineRestartingError,
    InvalidParameterError,
    InvalidPromptError,
    JPagedError,
    NonFiniteLogitsError,
    OutOfMemoryError,
    PromptTooLongError,
    SlowConsumerError,
    SuspectRequestError,
    UnsupportedParameterError,
)

_FAILS_AGAIN = ("answer_failed", "engine_ended", "logits_not_finite")
"""Codes of failures that the request itself brings about, as it would again."""
_NO_RETRY = {"x-should-retry": "false"}
"""Heeded by the clients of OpenAI and Anthropic, which try again after any status from 500 on."""
_HALF_PAIR = re.compile(rb'\\u[dD][89abAB][0-9a-fA-F]{2}".{0,4}\Z', re.DOTALL)
"""At the end of a body msgspec misses the other half of the pair, and calls the body truncated."""


class ApiError(Exception):
    """An error that a client gets as its answer.

    status: of HTTP. message: for people. kind: OpenAI's `type`. param: the field of the request that is to blame.
    code: a word for programs. headers: further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
        self.headers = dict(headers or {}) | (_NO_RETRY if code in _FAILS_AGAIN else {})

    def body(self) -> bytes:
        """The JSON of the answer, and of an error event in a stream."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


class OverloadedError(ApiError):
    """The queue is full; the client may try again."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(
            503, message, code="overloaded", kind="overloaded_error", headers={"retry-after": str(retry_after_s)}
        )


def api_error(error: Exception, fields: Collection[str] = (), prompt_field: str | None = None) -> ApiError:
    """The answer that a client gets for an error of ours.

    fields: of the request; our messages begin with the name of the parameter that they blame.
    prompt_field: the field that holds the prompt.
    """
    if isinstance(error, ApiError):
        return error
    message = str(error)
    if isinstance(error, PromptTooLongError):
        return ApiError(400, message, param=prompt_field, code="context_length_exceeded")
    if isinstance(error, InvalidPromptError | OutOfMemoryError):
        return ApiError(400, message, param=prompt_field)
    if isinstance(error, InvalidParameterError | UnsupportedParameterError):
        return ApiError(400, message, param=_blamed_field(message, fields))
    if isinstance(error, EngineAsleepError):
        return ApiError(503, message, code="asleep")
    if isinstance(error, EngineDeadError):
        return ApiError(503, message, code="engine_dead")
    if isinstance(error, EngineRestartingError):
        return ApiError(503, message, code="restarting", headers={"retry-after": "1"})
    if isinstance(error, SuspectRequestError):
        return ApiError(500, message, code="engine_ended")
    if isinstance(error, SlowConsumerError):
        return ApiError(408, message, code="client_too_slow")
    if isinstance(error, NonFiniteLogitsError):
        return ApiError(500, message, code="logits_not_finite")
    if isinstance(error, JPagedError):
        return ApiError(500, message)
    return ApiError(500, "The server met an internal error; its log says more.", code="internal_error")


def decoding_error(error: Exception, body: bytes = b"") -> ApiError:
    """A body that is not JSON, or not that of the request."""
    if isinstance(error, RecursionError):
        return ApiError(400, "The body nests too deeply.", code="invalid_json")
    if isinstance(error, UnicodeDecodeError):
        return ApiError(400, f"The body is not UTF-8: {error.reason} at byte {error.start}.", code="invalid_json")
    message = str(error)
    if not isinstance(error, msgspec.ValidationError):
        if "surrogate" in message or ("truncated" in message and _ends_in_half_pair(body)):
            message = "a string holds a lone surrogate, which is no text; remove it"
        return ApiError(400, f"The body is not JSON: {message}.", code="invalid_json")
    what, _, where = message.partition(" - at `$")
    path = where.removesuffix("`").lstrip(".")
    found = re.match(r"\w+", path)
    if found is None:
        missing = re.search(r"missing required field `(\w+)`", what)
        return ApiError(400, f"{what}.", param=missing and missing[1], code="invalid_type")
    return ApiError(400, f"{path}: {what}.", param=found[0], code="invalid_type")


def _ends_in_half_pair(body: bytes) -> bool:
    """Whether one closes a string near the end of a body."""
    found = _HALF_PAIR.search(body, max(0, len(body) - 12))
    if found is None:
        return False
    num_backslashes = 1
    while body[found.start() - num_backslashes : found.start() - num_backslashes + 1] == b"\\":
        num_backslashes += 1
    return num_backslashes % 2 == 1  # of an even number the last is escaped


def _blamed_field(message: str, fields: Collection[str]) -> str | None:
    found = re.match(r"(?:a key of )?(\w+)", message)
    return found[1] if found is not None and found[1] in fields else None
