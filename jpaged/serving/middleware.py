"""Middleware: request ids and the access log, answers to requests cut off at shutdown, and the check of keys."""

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jpaged.serving.errors import ApiError
from jpaged.serving.http import error_response
from jpaged.serving.page import PATHS

access_log = logging.getLogger("jpaged.access")

HEALTH_PATHS = ("/health", "/ping")
"""Paths that load balancers ask, by any name and without a key."""
OPEN_PATHS = (*HEALTH_PATHS, *PATHS)
"""Paths that need no key: those, and the page, which a browser opens before its user can give a key."""

ErrorBody = Callable[[Scope, ApiError], bytes]
"""The JSON of an error, in the form that a request's clients expect."""

_REQUEST_ID_KEY = "jpaged.request_id"
"""Of the scope: what `RequestIds` calls the request."""
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


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
        given = header_of(scope, b"x-request-id")
        request_id = given if given is not None and _REQUEST_ID.fullmatch(given) else secrets.token_hex(16).encode()
        begin, status = time.monotonic(), 0
        scope[_REQUEST_ID_KEY] = request_id

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                names = (b"x-request-id", b"request-id") if is_anthropic(scope) else (b"x-request-id",)
                message["headers"] = [*message.get("headers", ()), *((name, request_id) for name in names)]
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


class RootPath:
    """ASGI middleware: a proxy that shows the server under a path may take it off what it passes on, or leave it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        root = scope.get("root_path", "").rstrip("/")
        if root and (scope["path"] + "/").startswith(f"{root}{root}/"):  # uvicorn has put it in front once more
            scope = {**scope, "path": scope["path"].removeprefix(root)}
        await self._app(scope, receive, send)


class LastWords:
    """ASGI middleware: a request that is cut off when the server's time to drain is up, and has no answer yet, gets a
    503. That is when its body has not come; what the engine runs has been aborted before, and answered.
    """

    def __init__(self, app: ASGIApp, error_body: ErrorBody) -> None:
        self._app = app
        self._error_body = error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:  # only the end of the server cancels a request as a whole
            if not begun:
                error = ApiError(503, "The server is about to end.")
                await error_response(error, self._error_body(scope, error))(scope, receive, send)


class ApiKeys:
    """ASGI middleware: refuses requests without one of the keys. Comparing takes the same time whatever is wrong."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], error_body: ErrorBody) -> None:
        self._app = app
        self._error_body = error_body
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and path_of(scope) not in OPEN_PATHS and not self._knows(scope):
            error = ApiError(
                401,
                "The API key is missing or wrong; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`.",
                code="invalid_api_key",
                kind="authentication_error",
                headers={"www-authenticate": "Bearer"},
            )
            await error_response(error, self._error_body(scope, error))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        digest = hashlib.sha256(key_of(scope)).digest()
        known = [hmac.compare_digest(digest, other) for other in self._digests]
        return any(known)


def key_of(scope: Scope) -> bytes:
    """The key that a request has, as OpenAI's clients send it or as Anthropic's do; empty if there is none."""
    scheme, _, key = (header_of(scope, b"authorization") or b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else (header_of(scope, b"x-api-key") or b"").strip()


def path_of(scope: Scope) -> str:
    """The path of a request below the one that a proxy shows the server under."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path


def is_anthropic(scope: Scope) -> bool:
    """Whether a request is one of Anthropic's clients', which send their API's version."""
    return path_of(scope).startswith("/v1/messages") or header_of(scope, b"anthropic-version") is not None


def header_of(scope: Scope, name: bytes) -> bytes | None:
    """The value of a request's header, given by its name in lower case."""
    return next((value for key, value in scope["headers"] if key == name), None)


def trace_headers(request: Request) -> dict[str, str]:
    """What names a request and its trace: `traceparent` and `tracestate`, as far as the client sends them, and the
    `x-request-id` that its answer has.
    """
    found = {name: request.headers[name] for name in ("traceparent", "tracestate") if name in request.headers}
    if _REQUEST_ID_KEY in request.scope:
        found["x-request-id"] = request.scope[_REQUEST_ID_KEY].decode()
    return found


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:200])
