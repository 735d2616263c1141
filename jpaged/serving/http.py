"""HTTP for routes: reads bodies under limits, turns errors into answers, notices clients that disconnect."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from jpaged.serving.errors import ApiError, api_error

log = logging.getLogger("jpaged.server")

Handler = Callable[[Request], Awaitable[Response]]

_T = TypeVar("_T")


class ClientDisconnected(Exception):
    """The client has disconnected."""


def error_response(error: ApiError, body: bytes | None = None) -> Response:
    """The answer for an error. It closes the connection if more of the request may still come.

    body: in another form than OpenAI's.
    """
    headers = dict(error.headers)
    if error.status in (408, 413):
        headers["connection"] = "close"
    return Response(error.body() if body is None else body, error.status, headers, media_type="application/json")


def json_response(value: Any) -> Response:
    """A successful answer. value: whatever msgspec encodes."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def guarded(handler: Handler, body_of: Callable[[ApiError], bytes] = ApiError.body) -> Handler:
    """Wraps a handler: its errors become answers; a client that disconnected gets none. body_of: the JSON of errors."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnected:
            return Response(status_code=499)
        except Exception as error:  # whatever it is, the client gets an answer in the form of all errors
            return _answer_of(error, body_of)

    return endpoint


def _answer_of(error: Exception, body_of: Callable[[ApiError], bytes]) -> Response:
    # Not in the handler itself: a variable there would keep the error, its traceback and so the request, in a cycle.
    answer = reported(error)
    return error_response(answer, body_of(answer))


def reported(error: Exception, fields: Sequence[str] = (), prompt_field: str | None = None) -> ApiError:
    """The error that the client gets (`api_error`). One that is the server's fault is logged."""
    answer = api_error(error, fields, prompt_field)
    if answer.status == 500:
        log.error("A request failed.", exc_info=error)
    return answer


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """Reads the body, up to a size and within a time. Raises ApiError, ClientDisconnected."""
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {timeout_s:g} s.", code="timeout") from None


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The body is larger than {max_bytes} bytes, the most this server takes.", code="too_large")


async def unless_disconnected(receive: Receive, work: Awaitable[_T]) -> _T:
    """Awaits `work`, and cancels it when the client disconnects. Raises ClientDisconnected."""
    task, left = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        task.cancel()

    others, watcher = task.cancelling(), asyncio.ensure_future(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if left and task.uncancel() <= others:
            raise ClientDisconnected from None
        raise  # the server is about to end
    finally:
        watcher.cancel()
