"""The parts of HTTP that guard the server: bodies read under limits, keys, request ids, the access log, disconnects."""

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jpaged.serving.errors import ApiError
from jpaged.serving.page import PATHS

access_log = logging.getLogger("jpaged.access")

OPEN_PATHS = ("/health", "/ping", *PATHS)
"""Need no key: load balancers ask them, and browsers open the page before its reader can give one."""

_T = TypeVar("_T")
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class ClientDisconnected(Exception):
    """Nobody waits for the answer."""


def error_response(error: ApiError) -> Response:
    """The answer that an error is. Its connection is closed where more of the request may come."""
    headers = dict(error.headers)
    if error.status in (408, 413):
        headers["connection"] = "close"
    return Response(error.body(), error.status, headers, media_type="application/json")


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The body, as it comes in, up to a size and a time. Raises ApiError, ClientDisconnected."""
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


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """What `work` returns; it is cancelled when the client goes away. Raises ClientDisconnected."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class RequestIds:
    """ASGI middleware: every request has an id, the client's own or a new one, which its answer and the log name.

    The log has no query, header or body: prompts are the clients' business.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _header(scope, b"x-request-id")
        request_id = given if given is not None and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        begin, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            client = scope.get("client") or ("-",)
            access_log.info(
                "%s %s %s %s %s %.1f ms",
                client[0],
                request_id.decode(),
                scope["method"],
                _printable(scope["path"]),
                status or "disconnected",
                1000 * (time.monotonic() - begin),
            )


class ApiKeys:
    """ASGI middleware: refuses requests without one of the keys. Comparing takes the same time whatever is wrong."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._path(scope) not in OPEN_PATHS and not self._knows(scope):
            error = ApiError(
                401,
                "The API key is missing or wrong; send it as `Authorization: Bearer KEY`.",
                code="invalid_api_key",
                kind="authentication_error",
                headers={"www-authenticate": "Bearer"},
            )
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _path(self, scope: Scope) -> str:
        return scope["path"].removeprefix(scope.get("root_path", ""))

    def _knows(self, scope: Scope) -> bool:
        scheme, _, key = (_header(scope, b"authorization") or b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        known = [hmac.compare_digest(digest, other) for other in self._digests]
        return scheme.lower() == b"bearer" and any(known)


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:200])
