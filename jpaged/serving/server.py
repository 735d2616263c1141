"""`serve`: runs the application on uvicorn, from binding the port to draining the last request."""

import asyncio
import contextlib
import logging
import math
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import cast

import uvicorn

from jpaged.api.config import EngineArgs
from jpaged.api.errors import EngineDeadError, JPagedError
from jpaged.host.cores import usable_cores
from jpaged.host.garbage import collect_rarely, set_objects_apart
from jpaged.processes.async_llm_engine import AsyncLLMEngine
from jpaged.processes.wire import Ready
from jpaged.serving.admission import ClientCounts
from jpaged.serving.app import build_app
from jpaged.serving.browsers import LOCAL_HOSTS, is_loopback
from jpaged.serving.http_connection import HttpConnection, limited_protocol
from jpaged.serving.listeners import BACKLOG
from jpaged.serving.live import LiveView
from jpaged.serving.options import LAST_WORDS_S, SIGNALS, AppOptions, ServerOptions
from jpaged.serving.tls_listener import TlsListener
from jpaged.serving.workers import supervise

log = logging.getLogger("jpaged.server")
_SWITCH_S = 0.0002
"""For so long a thread that reads a large request keeps the interpreter when the event loop waits for it, with tokens
of all streams; Python's default is 5 ms."""
LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def default_api_workers(num_replicas: int) -> int:
    """One for every four `usable_cores`, and at most four; with several replicas one.

    It alone then knows which replica has which prefix, and numbers the requests that have no seed. What several are
    worth to one replica: `benchmarks/serving.sh OUT_DIR --api-workers N`.
    """
    return 1 if num_replicas > 1 else min(4, max(1, usable_cores() // 4))


def serve(args: EngineArgs, app_options: AppOptions, options: ServerOptions) -> None:
    """Serves until SIGTERM or SIGINT, then drains. The port is taken before the model is loaded.

    Raises:
        OSError: the address cannot be taken. What else `AsyncLLMEngine.ready` raises.
    """
    with contextlib.closing(options.listen()) as listeners:
        app_options = _guarded(app_options, options.host, listeners.sockets[0])
        if options.api_workers > 1:
            asyncio.run(supervise(args, app_options, options, listeners.sockets))
            return
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            engine = AsyncLLMEngine(args, restarts=options.restarts)
            runner.run(run(engine, app_options, options, listeners.sockets[0]))


def _guarded(app_options: AppOptions, host: str, sock: socket.socket) -> AppOptions:
    """The options with `allowed_hosts` as the address and the keys ask for it. host: what the address was given as."""
    if app_options.allowed_hosts is not None or app_options.api_keys or sock.family == socket.AF_UNIX:
        return app_options
    if not is_loopback(sock.getsockname()[0]):
        return app_options
    return replace(app_options, allowed_hosts=(*LOCAL_HOSTS, host))


async def run(
    engine: AsyncLLMEngine,
    app_options: AppOptions,
    options: ServerOptions,
    sock: socket.socket,
    signals: Sequence[signal.Signals] = SIGNALS,
    clients: ClientCounts | None = None,
) -> None:
    """Serves an engine in this process until one of `signals`, then drains and shuts the engine down.

    sock: to listen on; taken by `ServerOptions.listen`. clients: counts that several processes share.

    Raises:
        EngineDeadError: the engine has ended and is not started again.
    """
    set_objects_apart()
    collect_rarely()
    sys.setswitchinterval(_SWITCH_S)
    async with engine:
        _log_engine(app_options.served_model_names[0], await engine.ready())
        app = build_app(engine, app_options, clients)
        await _check_chat_template(engine)
        config = uvicorn.Config(
            app,
            http=limited_protocol(app_options.limits),
            ssl_keyfile=options.ssl_keyfile,
            ssl_certfile=options.ssl_certfile,
            root_path=options.root_path,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=math.ceil(app_options.limits.keep_alive_timeout_s),
            timeout_graceful_shutdown=math.ceil(options.shutdown_timeout_s + LAST_WORDS_S),
        )
        server = _Server(config, engine, options, signals, app.state.live, app_options.limits.header_timeout_s)
        end = asyncio.ensure_future(_end_with(engine, server))
        try:
            await server.serve(sockets=[sock])
        finally:
            end.cancel()
            await app.state.background.close()
        if engine.failure is not None:
            raise EngineDeadError(str(engine.failure)) from engine.failure


async def _end_with(engine: AsyncLLMEngine, server: uvicorn.Server) -> None:
    """Ends the server when the engine has failed for good: whoever started it may start it anew, whole."""
    await engine.failed()
    server.should_exit = True


def _log_engine(name: str, ready: Ready) -> None:
    """What runs, and on what. That it is a CPU is said even where little is."""
    limits = ready.limits
    log.info(
        "%s on %s: KV pool of %d blocks of %d tokens, at most %d tokens a sequence, %d sequences at once",
        *(name, ready.device, limits.num_blocks, limits.block_size, limits.max_model_len, limits.max_num_seqs),
    )
    if ready.device.lower().startswith("cpu"):
        log.warning("%s runs on a CPU, since JAX uses no GPU here; that is slow", name)


async def _check_chat_template(engine: AsyncLLMEngine) -> None:
    """Says so if the model's chat template is broken; what is not a chat is served all the same."""
    if engine.tokenizer is not None:
        try:
            await asyncio.to_thread(engine.tokenizer.check_chat_template)
        except JPagedError as error:
            log.error("%s Chats will be refused.", error)


class _Server(uvicorn.Server):
    """Drains when it is told to end: new connections are refused, running requests go on for a while."""

    def __init__(
        self,
        config: uvicorn.Config,
        engine: AsyncLLMEngine,
        options: ServerOptions,
        signals: Sequence[signal.Signals],
        live: LiveView,
        header_timeout_s: float,
    ) -> None:
        super().__init__(config)
        self._live = live
        self._header_timeout_s = header_timeout_s
        self._engine = engine
        self._options = options
        self._signals = signals

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a handled signal is not raised again, which would end this process half-way."""
        before = {number: signal.signal(number, self.handle_exit) for number in self._signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        context = self.config.ssl
        await super().startup(sockets if context is None else [])
        if context is not None:  # uvicorn's own way in has no limits on handshakes
            for sock in sockets or ():
                listener = TlsListener(sock, context, self._connection, self._header_timeout_s)
                self.servers.append(cast(asyncio.Server, listener))
        where = self._options.uds
        if where is None and sockets:
            scheme = "http" if self._options.ssl_certfile is None else "https"
            host, port = sockets[0].getsockname()[:2]
            where = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        log.info("serving on %s", where)

    def _connection(self) -> HttpConnection:
        make: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        made = make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        assert isinstance(made, HttpConnection)
        return made

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("draining %d requests for at most %g s", self._engine.num_unfinished, self._options.shutdown_timeout_s)
        self._live.close()  # would go on for ever
        abort = asyncio.ensure_future(self._abort_later())
        try:
            await super().shutdown(sockets)
        finally:
            abort.cancel()

    async def _abort_later(self) -> None:
        await asyncio.sleep(self._options.shutdown_timeout_s)
        await self._engine.abort_all()
