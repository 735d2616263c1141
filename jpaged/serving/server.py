"""`serve`: the application on uvicorn, from the port that is taken to the last request that is drained."""

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jpaged.config import EngineArgs
from jpaged.errors import InvalidParameterError
from jpaged.serving.app import AppOptions, build_app
from jpaged.serving.async_llm_engine import AsyncLLMEngine
from jpaged.serving.errors import ApiError
from jpaged.serving.limits import ServerLimits

log = logging.getLogger("jpaged.server")
LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"

_UNREAD_S = 0.01
"""From a time-out until it takes effect: the loop looks for data in between."""
LAST_WORDS_S = 2.0
"""For answers of requests that were aborted when the time to drain was up."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Begin to drain."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where and how to listen.

    Args:
        host, port: port 0 takes a free one. uds: a Unix socket instead.
        ssl_keyfile, ssl_certfile: PEM files, for HTTPS; both or none.
        root_path: under which a proxy shows the server.
        shutdown_timeout_s: for running requests to end after SIGTERM; then they are aborted.
        api_workers: processes that tokenize, detokenize and speak HTTP; one engine serves them all.

    Raises:
        InvalidParameterError: a value out of range, or files that are not there.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    root_path: str = ""
    shutdown_timeout_s: float = 30.0
    api_workers: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidParameterError(f"port must be from 0 to 65535, got {self.port}.")
        if not 0 <= self.shutdown_timeout_s < float("inf"):
            raise InvalidParameterError(f"shutdown_timeout must be at least 0 s, got {self.shutdown_timeout_s}.")
        if self.api_workers < 1:
            raise InvalidParameterError(f"api_workers must be at least 1, got {self.api_workers}.")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise InvalidParameterError("ssl_keyfile and ssl_certfile belong together; give both.")
        for name in ("ssl_keyfile", "ssl_certfile"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise InvalidParameterError(f"{name}={path} is no file.")
        if self.root_path and not self.root_path.startswith("/"):
            raise InvalidParameterError(f"root_path must begin with a slash, got {self.root_path!r}.")


def serve(args: EngineArgs, app_options: AppOptions, options: ServerOptions) -> None:
    """Serves until SIGTERM or SIGINT, then drains. The port is taken before the model is loaded.

    Raises:
        OSError: the address cannot be taken. What else `AsyncLLMEngine.ready` raises.
    """
    if options.api_workers > 1:
        from jpaged.serving.workers import supervise

        with contextlib.closing(_Listeners(options)) as listeners:
            asyncio.run(supervise(args, app_options, options, listeners.sockets))
        return
    import uvloop

    sock = None if options.uds is not None else _bind(options.host, options.port)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(AsyncLLMEngine(args), app_options, options, sock))


async def run(
    engine: AsyncLLMEngine,
    app_options: AppOptions,
    options: ServerOptions,
    sock: socket.socket | None,
    signals: Sequence[signal.Signals] = SIGNALS,
) -> None:
    """Serves an engine in this process until one of `signals`, then drains and shuts the engine down.

    sock: bound, to listen on; None: the options say where.
    """
    async with engine:
        config = uvicorn.Config(
            build_app(engine, app_options),
            http=_limited_protocol(app_options.limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            uds=options.uds,
            ssl_keyfile=options.ssl_keyfile,
            ssl_certfile=options.ssl_certfile,
            root_path=options.root_path,
            proxy_headers=False,
            backlog=4096,
            timeout_keep_alive=math.ceil(app_options.limits.keep_alive_timeout_s),
            timeout_graceful_shutdown=math.ceil(options.shutdown_timeout_s + LAST_WORDS_S),
        )
        server = _Server(config, engine, options, signals)
        await server.serve(sockets=None if sock is None else [sock])


class _Server(uvicorn.Server):
    """Drains when it is told to end: new connections are refused, running requests go on for a while."""

    def __init__(
        self,
        config: uvicorn.Config,
        engine: AsyncLLMEngine,
        options: ServerOptions,
        signals: Sequence[signal.Signals],
    ) -> None:
        super().__init__(config)
        self._engine = engine
        self._options = options
        self._signals = signals

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a signal that was served is over: raised again it would end this process half-way."""
        before = {number: signal.signal(number, self.handle_exit) for number in self._signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        where = self._options.uds
        if where is None and sockets:
            scheme = "http" if self._options.ssl_certfile is None else "https"
            host, port = sockets[0].getsockname()[:2]
            where = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        log.info("serving on %s", where)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("draining %d requests for at most %g s", self._engine.num_unfinished, self._options.shutdown_timeout_s)
        abort = asyncio.ensure_future(self._abort_later())
        try:
            await super().shutdown(sockets)
        finally:
            abort.cancel()

    async def _abort_later(self) -> None:
        await asyncio.sleep(self._options.shutdown_timeout_s)
        await self._engine.abort_all()


def _limited_protocol(limits: ServerLimits) -> type[asyncio.Protocol]:
    """uvicorn's HTTP with limits on what comes before a body: its size, and the time that it takes."""

    class LimitedHttp(HttpToolsProtocol):
        _deadline: asyncio.TimerHandle | None = None
        _header_bytes = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._deadline is None and self.cycle is not None and self.cycle.response_complete:
                self._arm()  # the next request of a connection that was kept
            if self._deadline is not None:
                self._header_bytes += len(data)
                if self._header_bytes > limits.max_header_bytes and b"\r\n\r\n" not in data[: limits.max_header_bytes]:
                    self._refuse(431, "The request's line and headers are too large.")
                    return
            super().data_received(data)

        def on_headers_complete(self) -> None:
            self._disarm()
            super().on_headers_complete()

        def timeout_keep_alive_handler(self) -> None:
            # What has come but was not read yet, since the loop is busy, is read before the connection is closed.
            self.timeout_keep_alive_task = self.loop.call_later(_UNREAD_S, super().timeout_keep_alive_handler)

        def _arm(self) -> None:
            self._header_bytes = 0
            self._deadline = self.loop.call_later(limits.header_timeout_s, self._late)

        def _disarm(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _late(self) -> None:
            self._deadline = self.loop.call_later(_UNREAD_S, self._too_late)  # as above

        def _too_late(self) -> None:
            self._deadline = None
            if self._header_bytes:
                self._refuse(408, "The request's headers did not arrive in time.")
            else:
                self.transport.close()

        def _refuse(self, status: int, message: str) -> None:
            self._disarm()
            body = ApiError(status, message).body()
            head = f"HTTP/1.1 {status} -\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
            self.transport.close()

    return LimitedHttp


class _Listeners:
    """A bound socket for each API process. The kernel deals out connections to those that listen on a TCP port; a
    Unix socket they share, and whoever is free takes the next.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._uds = options.uds
        if options.uds is not None:
            self.sockets = [_bind_unix(options.uds)] * options.api_workers
            return
        with _bind(options.host, options.port) as probe:  # a port of another server could be shared, and must not be
            port = probe.getsockname()[1]
        self.sockets = []
        try:
            for _ in range(options.api_workers):
                self.sockets.append(_bind(options.host, port, reuse_port=True))
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()
        if self._uds is not None:
            with contextlib.suppress(OSError):
                Path(self._uds).unlink()


def _bind(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror}; choose another") from error
    return sock


def _bind_unix(path: str) -> socket.socket:
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)  # of a server that has ended
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        os.chmod(path, 0o666)  # as with one API process: keys guard the server, or the directory
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {path}: {error.strerror}; choose another") from error
    return sock
