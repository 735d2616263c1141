"""An HTTP connection under limits: uvicorn's, with request line and headers bounded in size and in time.

    connect --> line and headers --> body --> answer --> (kept) --> line and headers ...
    `--- timed ---------------'                            idle: --keep-alive-timeout
                `--- counted -'   too slow: 408; too large: 431; no HTTP: 400; nothing at all: closed

What stands between and behind the chunks of a body is counted likewise, from one piece of the body to the next.

Connections leave some of the process's descriptors free; one too many gets a 503. Else a flood of them would keep an
engine process that has ended from being started again. What such a client sends is read and dropped for a moment: a
socket that is closed with unread data resets the connection, and the client may see the reset in place of the 503.

An answer waits while its client takes none of it (`--send-timeout`), and no more of it is written meanwhile; then the
connection is cut, which aborts the request. When the server drains, it waits less long.

What is wrong with a request before the application sees it is answered here, in the form that all errors have. When an
answer has begun nothing can be said without spoiling it, so the connection is only closed.

A client that offers to go on in another protocol (Java's offers HTTP/2 with its first request) is answered in this one,
as HTTP has it: its request is read as if it had not offered. One that speaks HTTP/1.0 gets no chunks: its answer ends
with the connection.
"""

import asyncio
import contextlib
import resource
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from jpaged.serving.errors import ApiError
from jpaged.serving.limits import ServerLimits
from jpaged.serving.middleware import access_log

_UNREAD_S = 0.01
"""From a time-out until it takes effect: the loop looks for data in between."""
_DRAINING_SEND_S = 5.0
"""The most that an answer waits for its client when the server drains."""
_OFFER = (b"upgrade", b"connection")
"""Headers that offer another protocol."""
_KEPT_DESCRIPTORS = 256
"""For other things than connections; half of all where there are fewer than twice as many."""
_MOST_TURNED_AWAY = _KEPT_DESCRIPTORS // 2
"""Connections too many that are read from at once; a quarter of all descriptors where these are few."""
_TURNED_AWAY_S = 2.0
"""For so long."""
_TURNED_AWAY_BYTES = 1 << 20
"""And at most so many bytes of each."""


def limited_protocol(limits: ServerLimits) -> type[HttpToolsProtocol]:
    """The protocol class for uvicorn, which makes an instance for each connection and cannot pass our limits."""

    class LimitedHttpConnection(HttpConnection):
        pass

    LimitedHttpConnection.limits = limits
    LimitedHttpConnection.most_connections = most = most_connections()
    if most is not None:
        LimitedHttpConnection.most_turned_away = min(_MOST_TURNED_AWAY, most // 2)
    LimitedHttpConnection.turned_away = set()
    LimitedHttpConnection.handshakes = set()
    return LimitedHttpConnection


def most_connections() -> int | None:
    """How many connections this process may have at once; None: any number."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if most == resource.RLIM_INFINITY else most - min(_KEPT_DESCRIPTORS, most // 2)


class HttpConnection(HttpToolsProtocol):
    """One connection of a client.

    limits: of its headers. most_connections: at once.
    most_turned_away: connections too many that may be open at once. turned_away: those that are.
    handshakes: connections whose TLS handshake has not ended, which count (`TlsListener`).
    """

    limits: ServerLimits
    most_connections: int | None = None
    most_turned_away: int = _MOST_TURNED_AWAY
    turned_away: ClassVar[set["HttpConnection"]] = set()
    handshakes: ClassVar[set["HttpConnection"]] = set()
    _dropped_bytes = 0
    _deadline: asyncio.TimerHandle | None = None
    _in_headers = False
    _header_bytes = 0
    _request_ended = False
    _body_came = False
    _refusal: ApiError | None = None
    _unsent: asyncio.TimerHandle | None = None
    _unsent_bytes = 0
    _is_draining = False

    def has_room_for_handshake(self) -> bool:
        """Whether a TLS handshake may begin. A few too many may, as a 503 can be said only after it."""
        if self.most_connections is None:
            return True
        return len(self.connections) + len(self.handshakes) < self.most_connections + self.most_turned_away

    def connection_made(self, transport: Any) -> None:
        self.handshakes.discard(self)
        super().connection_made(transport)
        num_open = len(self.connections) - len(self.turned_away) + len(self.handshakes)
        most = self.most_connections
        if most is not None and num_open > most:
            self._turn_away(ApiError(503, f"{most} connections are open already; try again later."))
        else:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self.turned_away.discard(self)
        self._disarm()
        self._stop_waiting()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_client()

    def resume_writing(self) -> None:
        self._stop_waiting()
        super().resume_writing()

    def shutdown(self) -> None:
        self._is_draining = True
        if self._unsent is not None:
            self._wait_for_client()
        super().shutdown()

    def data_received(self, data: bytes) -> None:
        if self in self.turned_away:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > _TURNED_AWAY_BYTES:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        if self._deadline is None and not self._is_answering:
            self._arm()  # the next request of a connection that was kept
        self._request_ended = self._body_came = False
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(self._refusal or ApiError(400, "The request is not valid HTTP."))
            return
        if not self._request_ended and not self._body_came:  # else: some of it was another's, or a body
            self._header_bytes += len(data)
            if self._header_bytes > self.limits.max_header_bytes:
                self._refuse(_too_large())

    def on_message_begin(self) -> None:
        self._in_headers, self._header_bytes = True, 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:
            super().on_header(name, value)  # else: it comes behind the body, where nobody reads it

    def on_body(self, body: bytes) -> None:
        self._body_came, self._header_bytes = True, 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # `_feed` reads it again
        self._in_headers, self._header_bytes = False, 0
        self._disarm()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self.limits.max_header_bytes:
            self._refusal = _too_large()
            raise self._refusal  # the parser makes it one of its own errors
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (not num_hosts and self.parser.get_http_version() == "1.1"):
            # RFC 9112, 3.2. With two Host headers, a proxy may have checked a different one than we use.
            self._refusal = ApiError(400, f"The request has {num_hosts} Host headers; send one.")
            raise self._refusal
        if self._codings() not in ([], [b"chunked"]):  # RFC 9112, 6.1
            self._refusal = ApiError(501, "Of transfer codings, only chunked is understood: send the body as it is.")
            raise self._refusal
        super().on_headers_complete()
        if self.parser.get_http_version() < "1.1":
            _end_with_connection(self.cycle)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._request_ended = True
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_headers and not self._is_answering and not self.transport.is_closing():
            self._arm()  # headers that began to come beside the answer

    def timeout_keep_alive_handler(self) -> None:
        # What has come but was not read yet, since the loop is busy, is read before the connection is closed.
        self.timeout_keep_alive_task = self.loop.call_later(_UNREAD_S, super().timeout_keep_alive_handler)

    def _codings(self) -> list[bytes]:
        """What Transfer-Encoding says of the request's body, in small letters."""
        values = [value for name, value in self.headers if name == b"transfer-encoding"]
        return [coding.strip().lower() for value in values for coding in value.split(b",")]

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                method = self.parser.get_method()
                if method == b"CONNECT":  # no offer: it wants a tunnel
                    self._refusal = ApiError(400, "CONNECT is for proxies, and this is none.")
                    raise httptools.HttpParserError from offer
                head = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
                head += [name + b": " + value for name, value in self.headers if name not in _OFFER]
                data = b"\r\n".join([*head, b"", data[offer.args[0] :]])  # the parser stopped behind the headers
                self.parser = httptools.HttpRequestParser(self)

    def _wait_for_client(self) -> None:
        self._stop_waiting()
        timeout_s = self.limits.send_timeout_s
        if self._is_draining:
            timeout_s = min(timeout_s, _DRAINING_SEND_S)
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._unsent = self.loop.call_later(timeout_s, self._look_at_client)

    def _look_at_client(self) -> None:
        if self.transport.get_write_buffer_size() < self._unsent_bytes:
            self._wait_for_client()
            return
        self._unsent = None
        access_log.info("%s takes nothing of its answer and is cut off", self.client[0] if self.client else "-")
        self.transport.abort()

    def _stop_waiting(self) -> None:
        if self._unsent is not None:
            self._unsent.cancel()
            self._unsent = None

    def _arm(self) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(self.limits.header_timeout_s, self._late)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = self.loop.call_later(_UNREAD_S, self._too_late)  # as above

    def _too_late(self) -> None:
        self._deadline = None
        if self._in_headers:
            self._refuse(ApiError(408, "The request's headers did not arrive in time."))
        else:
            self.transport.close()

    def _turn_away(self, error: ApiError) -> None:
        self.turned_away.add(self)
        self._say(error)
        if len(self.turned_away) > self.most_turned_away:
            self.transport.close()
            return
        if self.transport.can_write_eof():  # not with TLS, where the length of the answer has to do
            with contextlib.suppress(OSError):  # the client is gone
                self.transport.write_eof()
        self._deadline = self.loop.call_later(_TURNED_AWAY_S, self.transport.abort)

    def _refuse(self, error: ApiError) -> None:
        self._disarm()
        self._say(error)
        self.transport.close()

    def _say(self, error: ApiError) -> None:
        access_log.info("%s refused: %d %s", self.client[0] if self.client else "-", error.status, error.message)
        if not self._is_answering or not self.cycle.response_started:
            body = error.body()
            head = f"HTTP/1.1 {error.status} -\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)


def _end_with_connection(cycle: RequestResponseCycle) -> None:
    """Makes uvicorn send a body that has no length as it is: before HTTP/1.1 there are no chunks, and the end of the
    connection is that of the body.
    """

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            cycle.chunked_encoding = False
        else:
            cycle.expected_content_length = len(message.get("body", b""))
        await RequestResponseCycle.send(cycle, message)

    cycle.keep_alive = False
    cycle.send = send  # type: ignore[method-assign]


def _too_large() -> ApiError:
    return ApiError(431, "The request's line and headers are too large.")
