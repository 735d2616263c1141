"""What web pages may ask of the server. A browser runs pages of any origin, and reaches servers that its user reaches.

    a page of another origin posts          Origins: 403, unless --allowed-origins has it
    a body that needs no preflight          `check_json`: 415, since only application/json is read
    a name that was made to lead here       Hosts: 403, where there is no key and only this machine is served
    (DNS rebinding)

Requests of other programs have no `Origin`, and a `Host` that they chose themselves.
"""

from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from jpaged.serving.errors import ApiError
from jpaged.serving.http import error_response
from jpaged.serving.middleware import HEALTH_PATHS, ErrorBody, header_of, path_of

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
"""The names that a server on a loopback address is known by."""

_ANY = "*"
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_SAME_SITE = (b"same-origin", b"none")
"""Values of `Sec-Fetch-Site`, which pages cannot set: the page is this server's own, or it is the user who asks."""


class Origins:
    """ASGI middleware: refuses requests that may change something and come from a page of a foreign origin.

    allowed: origins that may ask, such as "https://example.org"; "*": any.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str], error_body: ErrorBody) -> None:
        self._app = app
        self._error_body = error_body
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in _SAFE_METHODS:
            origin = header_of(scope, b"origin")
            if origin is not None and not self._may_ask(scope, origin.decode("latin-1")):
                error = ApiError(
                    403,
                    f"Pages of the origin {_cut(origin)} may not ask; start the server with --allowed-origins.",
                    code="origin_not_allowed",
                    kind="permission_error",
                )
                await error_response(error, self._error_body(scope, error))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _may_ask(self, scope: Scope, origin: str) -> bool:
        if _ANY in self._allowed or origin in self._allowed:
            return True
        if header_of(scope, b"sec-fetch-site") in _SAME_SITE:
            return True
        hosts = (header_of(scope, b"host"), header_of(scope, b"x-forwarded-host"))  # the latter: a proxy's
        _, _, own = origin.partition("://")
        return bool(own) and own.encode() in hosts


class Hosts:
    """ASGI middleware: refuses requests whose `Host` is not one of these names, whatever its port. Health checks pass.

    allowed: names and addresses; "*": any.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str], error_body: ErrorBody) -> None:
        self._app = app
        self._error_body = error_body
        self._allowed = frozenset(name.lower().strip("[]") for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = header_of(scope, b"host") if scope["type"] == "http" else None
        if host is not None and not self._knows(host.decode("latin-1")) and path_of(scope) not in HEALTH_PATHS:
            error = ApiError(
                403,
                f"This server is not known as {_cut(host)}; start it with --allowed-hosts, or with a key.",
                code="host_not_allowed",
                kind="permission_error",
            )
            await error_response(error, self._error_body(scope, error))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, host: str) -> bool:
        if _ANY in self._allowed:
            return True
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            return False
        return name is not None and name.lower() in self._allowed


def check_json(request: Request) -> None:
    """Raises ApiError unless the body is announced as JSON, and is not compressed."""
    encoding = header_of(request.scope, b"content-encoding")
    if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
        message = f"Content-Encoding {_cut(encoding)} is not supported; send the body as it is."
        raise ApiError(415, message, code="unsupported_content_encoding")
    header = header_of(request.scope, b"content-type")
    if header == b"application/json":
        return  # nearly all
    kind = (header or b"").decode("latin-1").partition(";")[0].strip().lower()
    if kind != "application/json":
        got = f"got {kind[:100]!r}" if kind else "there is none"
        raise ApiError(415, f"The header Content-Type must be application/json; {got}.", code="unsupported_media_type")


def is_loopback(host: str) -> bool:
    """Whether an address that a socket is bound to is reached from this machine only."""
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _cut(header: bytes) -> str:
    return repr(header.decode("latin-1")[:100])
