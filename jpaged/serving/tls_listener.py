"""Accepts TLS connections within the limit of plain ones: an unfinished handshake counts as a connection.

    accept --> too many: closed, since there is no way to answer before the handshake
        `----> handshake, at most --header-timeout --> `HttpConnection`, which may still answer 503 for too many

asyncio's own server reports a connection only after its handshake, for which it waits a minute.
"""

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable

from jpaged.serving.http_connection import HttpConnection
from jpaged.serving.middleware import access_log

_ACCEPTED_AT_ONCE = 64
"""Connections accepted before the event loop does something else."""
_RETRY_S = 0.5
"""From a lack of descriptors or memory to the next attempt."""
_GOODBYE_S = 5.0
"""For a client to end its half of a connection that we end."""
_SHORTAGE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class TlsListener:
    """A server on a listening socket, with what uvicorn needs of an `asyncio.Server`. It accepts from now on.

    make_connection: called for each client that is accepted. timeout_s: for its handshake.
    """

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        make_connection: Callable[[], HttpConnection],
        timeout_s: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._context = context
        self._make_connection = make_connection
        self._timeout_s = timeout_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        self._loop.add_reader(sock, self._accept)

    def close(self) -> None:
        """Accepts no more, and ends handshakes that have not ended. The socket itself stays open."""
        self._loop.remove_reader(self._sock)
        if self._retry is not None:
            self._retry.cancel()
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Until all handshakes have ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _SHORTAGE:
                    raise
                access_log.warning("cannot accept a connection: %s", error)
                self._loop.remove_reader(self._sock)
                self._retry = self._loop.call_later(_RETRY_S, self._loop.add_reader, self._sock, self._accept)
                return
            connection = self._make_connection()
            if connection.has_room_for_handshake():
                self._begin(sock, connection)
            else:
                sock.close()

    def _begin(self, sock: socket.socket, connection: HttpConnection) -> None:
        connection.handshakes.add(connection)  # now, so that the next one that is accepted with it finds it counted
        task = self._loop.create_task(self._shake_hands(sock, connection))
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            connection.handshakes.discard(connection)

        task.add_done_callback(ended)

    async def _shake_hands(self, sock: socket.socket, connection: HttpConnection) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError, TimeoutError):  # the client's fault, or it is gone
            await self._loop.connect_accepted_socket(
                lambda: connection,
                sock,
                ssl=self._context,
                ssl_handshake_timeout=self._timeout_s,
                ssl_shutdown_timeout=_GOODBYE_S,
            )
