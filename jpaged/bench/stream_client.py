"""A client of streaming /v1/completions that costs a few microseconds a chunk: the load generator's inner loop.

    server --- b"1f\\r\\ndata: {...}\\n\\n\\r\\n1f\\r\\n..." ---> data_received: one call a segment
                                                            |  undo the chunked encoding
                                                            |  count the lines that begin with "data:"
                                                            v
    StreamRecord.segments: [(arrival in s, events), ...]    only the end of the stream is ever parsed as JSON

One connection a request, HTTP/1.1, no redirects. Clients made for all of HTTP parse each chunk into several objects;
they would be the bottleneck of a server that streams tens of thousands of tokens a second.

This module imports neither JAX nor numpy, because worker processes start with it.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from jpaged.api.errors import InvalidParameterError

TAIL_BYTES = 8192
"""How much of a body's end is kept: more than its last events need, or an error's message."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go: host and port to connect to, path of the endpoint, header lines sent with each request."""

    host: str
    port: int
    path: str
    is_tls: bool
    headers: str

    @classmethod
    def parse(cls, base_url: str, api_key: str | None) -> "Target":
        """base_url: http(s)://host[:port][/path], with or without the trailing /v1.

        Raises InvalidParameterError for any other URL.
        """
        url = urlsplit(base_url)
        try:
            port = url.port
        except ValueError:
            port = 0
        if url.scheme not in ("http", "https") or not url.hostname or port == 0 or url.query or url.fragment:
            raise InvalidParameterError(
                f"--base-url must look like http://127.0.0.1:8000 or https://host/path, got {base_url!r}."
            )
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise InvalidParameterError("--api-key must consist of printable ASCII characters.")
        is_tls = url.scheme == "https"
        headers = f"Host: {url.netloc.rpartition('@')[2]}\r\n"
        if api_key:
            headers += f"Authorization: Bearer {api_key}\r\n"
        path = url.path.rstrip("/").removesuffix("/v1") + "/v1"
        return cls(url.hostname, port or (443 if is_tls else 80), path, is_tls, headers)

    def post(self, endpoint: str, body: bytes) -> bytes:
        """The bytes of a POST request to path/endpoint."""
        head = (
            f"POST {self.path}/{endpoint} HTTP/1.1\r\n{self.headers}Content-Type: application/json\r\n"
            f"Accept: text/event-stream\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body


@dataclass(slots=True)
class StreamRecord:
    """What happened to one request. Times in seconds of `time.perf_counter`, which all processes of a host share.

    scheduled, begun: when the request was to be sent, and when its connection was begun.
    segments: (arrival, events) of every received segment that held tokens. An event is one streamed chunk.
    output_tokens, cached_tokens: as the server's usage says.
    error: why it failed, or None.
    """

    scheduled: float
    begun: float = 0.0
    segments: list[tuple[float, int]] = field(default_factory=list)
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


class ChunkedDecoder:
    """Undoes the chunked transfer encoding, however the chunks are split over segments."""

    def __init__(self) -> None:
        self.is_done = False
        self._buffered = b""  # the start of a chunk's size line
        self._left = 0  # bytes of the current chunk still to come, its closing CRLF included

    def decode(self, data: bytes) -> bytes:
        """The body bytes in the next segment; ValueError if it is not chunked encoding."""
        if self._buffered:
            data, self._buffered = self._buffered + data, b""
        parts, at, end = [], 0, len(data)
        while at < end and not self.is_done:
            if self._left:
                stop = at + self._left
                parts.append(data[at : min(stop - 2, end)])
                self._left = max(0, stop - end)
                at = min(stop, end)
                continue
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                self._buffered = data[at:]
                if len(self._buffered) > TAIL_BYTES:
                    raise ValueError("a chunk's size line does not end")
                break
            size = int(data[at:line_end].partition(b";")[0], 16)
            self.is_done = size == 0
            self._left = size + 2
            at = line_end + 2
        return b"".join(parts)


class StreamClient(asyncio.Protocol):
    """Sends one request as soon as it is connected and fills its record; `done` is set when the response has ended."""

    def __init__(self, request: bytes, record: StreamRecord, on_events: Callable[[int], None]):
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._record = record
        self._on_events = on_events
        self._transport: asyncio.Transport | None = None
        self._head: bytes | None = b""  # None once it is complete
        self._status = 0
        self._chunks: ChunkedDecoder | None = None
        self._length: int | None = None  # body bytes still to come, if the server said so
        self._tail = b"\n"  # a body's first line begins after an imagined newline

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self.done.done():
            return
        try:
            if self._head is not None:
                data = self._read_head(data)
            if self._chunks:
                data = self._chunks.decode(data)
        except ValueError as error:
            self._finish(f"malformed HTTP response: {error}")
            return
        if data:
            self._read_body(data, now)
        if (self._chunks and self._chunks.is_done) or self._length == 0:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done.done():
            return
        if exc or self._head is not None or self._chunks or self._length:
            self._finish("the connection was closed before the response ended")
        else:
            self._end()

    def abort(self, error: str) -> None:
        """Gives the request up for this reason, unless it has ended."""
        if not self.done.done():
            self._finish(error)

    def _read_head(self, data: bytes) -> bytes:
        """Returns what follows the head, once that is complete."""
        assert self._head is not None
        head, is_complete, rest = (self._head + data).partition(b"\r\n\r\n")
        if not is_complete:
            self._head = head
            if len(head) > 8 * TAIL_BYTES:
                raise ValueError("its head does not end")
            return b""
        self._head = None
        first, *lines = head.decode("latin-1").split("\r\n")
        self._status = int(first.split()[1]) if first.startswith("HTTP/1.") and " " in first else 0
        if not self._status:
            raise ValueError(f"it begins with {first[:40]!r}")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("transfer-encoding", "").lower() == "chunked":
            self._chunks = ChunkedDecoder()
        elif "content-length" in headers:
            self._length = int(headers["content-length"])
        return rest

    def _read_body(self, data: bytes, now: float) -> None:
        if self._length is not None:
            self._length -= min(self._length, len(data))
        # JSON has no raw newlines, so "\ndata:" begins an event wherever it stands; it may straddle two segments.
        events = (self._tail[-5:] + data).count(b"\ndata:")
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if events:
            self._record.segments.append((now, events))
            self._on_events(events)

    def _end(self) -> None:
        if self._status != 200:
            self._finish(f"HTTP {self._status}: {_error_message(self._tail)}")
            return
        lines = [line[5:].strip() for line in self._tail.splitlines() if line.startswith(b"data:")]
        self._finish(read_last_events(lines, self._record))

    def _finish(self, error: str | None) -> None:
        self._record.error = error
        self.done.set_result(None)
        if self._transport:
            self._transport.abort()


def read_last_events(lines: list[bytes], record: StreamRecord) -> str | None:
    """Takes the usage from a stream's last events, and what held no tokens out of the segments.

    Returns why the stream counts as failed, or None.
    """
    without_tokens = 0
    if lines and lines[-1] == b"[DONE]":
        lines, without_tokens = lines[:-1], 1
    if not lines:
        return "the response holds no events"
    try:
        last = json.loads(lines[-1])
        usage = last.get("usage")
        if last.get("error"):
            return f"error event: {_one_line(last['error'])}"
        if not usage:
            return "the stream ended without a usage (stream_options.include_usage)"
        record.output_tokens = int(usage["completion_tokens"])
        record.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"the stream's last event cannot be read: {lines[-1][:80]!r}"
    without_tokens += not last.get("choices")
    while without_tokens and record.segments:
        arrival, events = record.segments.pop()
        if events > without_tokens:
            record.segments.append((arrival, events - without_tokens))
        without_tokens = max(0, without_tokens - events)
    return None if record.segments else "the stream holds no tokens"


def _error_message(body: bytes) -> str:
    try:
        return _one_line(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return _one_line(body.decode(errors="replace"))


def _one_line(error: Any) -> str:
    text = error["message"] if isinstance(error, dict) and "message" in error else error
    return " ".join(str(text).split())[:200]


class Reporter(Protocol):
    """Called with events received and requests ended since the last call."""

    def __call__(self, events: int, ended: int) -> None: ...


async def send_all(
    target: Target,
    requests: list[tuple[float, bytes]],
    *,
    timeout_s: float,
    report: Reporter,
) -> list[StreamRecord]:
    """Sends every request at its time, whatever became of those before it, and returns their records in order.

    requests: (time of `perf_counter` in s, body of the POST), in the order of time.
    timeout_s: longest that a request may take.
    """
    loop = asyncio.get_running_loop()
    address = (await loop.getaddrinfo(target.host, target.port, type=1))[0][4][0]  # once, and not for each connection
    context = ssl.create_default_context() if target.is_tls else None
    hostname = target.host if target.is_tls else None
    events = ended = 0

    def count(number: int) -> None:
        nonlocal events
        events += number

    async def send(client: StreamClient) -> None:
        try:
            await loop.create_connection(
                lambda: client, str(address), target.port, ssl=context, server_hostname=hostname
            )
            await client.done
        except OSError as error:
            client.abort(f"cannot connect: {error.strerror or error}")

    async def serve(request: bytes, record: StreamRecord) -> None:
        nonlocal ended
        client = StreamClient(request, record, count)
        record.begun = time.perf_counter()
        try:
            await asyncio.wait_for(send(client), timeout_s)
        except TimeoutError:
            client.abort(f"not done after {timeout_s:g} s")
        ended += 1

    async def report_often() -> None:
        nonlocal events, ended
        while True:
            await asyncio.sleep(0.2)
            report(events, ended)
            events = ended = 0

    reporting = asyncio.create_task(report_often())
    records, tasks = [], []
    for scheduled, body in requests:
        wait = scheduled - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        records.append(StreamRecord(scheduled))
        tasks.append(asyncio.create_task(serve(target.post("completions", body), records[-1])))
    await asyncio.gather(*tasks)
    reporting.cancel()
    report(events, ended)
    return records
