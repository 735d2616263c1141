"""A client's end of the socket to an engine process, for programs on asyncio and for those that wait.

    send(Add, Abort, ...) --frames--> socket --frames--> Step, Outputs, Answer, ...

Neither knows what the messages mean.
"""

import asyncio
import socket
from collections.abc import Callable

from jpaged.api.errors import EngineDeadError, JPagedError
from jpaged.processes.wire import FrameReader, FromEngine, Ready, ToEngine, frame

_RECEIVE_BYTES = 1 << 18


class SyncLink:
    """An engine process, as a program that waits for it knows it.

    index: the replica's number. sock: the end of its socket pair.
    """

    def __init__(self, index: int, sock: socket.socket) -> None:
        self.index = index
        self.sock = sock
        self._reader = FrameReader(FromEngine)

    def send_frame(self, framed: bytes) -> None:
        """A message that `frame` made. Waits while the socket is full. Raises OSError when the other end is gone."""
        self.sock.sendall(framed)

    def receive(self) -> list[FromEngine]:
        """Waits for something to come; returns the messages that it completes, if any.

        Raises:
            EOFError: the other end is gone.
            EngineDeadError: what came are no messages.
        """
        try:
            data = self.sock.recv(_RECEIVE_BYTES)
        except ConnectionError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        return list(self._reader.feed(data))

    def close(self) -> None:
        self.sock.close()


class AsyncLink:
    """An engine process, as a program on asyncio knows it.

    index: the replica's number. sock: the end of its socket pair; None where no process runs.

    Attributes:
        ready: what it is like, while it serves.
        lost: its process has ended. failure: and will not be started again; why.
    """

    def __init__(self, index: int, sock: socket.socket | None) -> None:
        self.index = index
        self.ready: Ready | None = None
        self.lost = sock is None
        self.failure: JPagedError | None = None
        self._socket = sock
        self._transport: asyncio.WriteTransport | None = None
        self._is_closed = False

    async def connect(
        self,
        on_message: "Callable[[AsyncLink, FromEngine], None]",
        on_end: "Callable[[AsyncLink, EngineDeadError | None], None]",
    ) -> None:
        """Begins to read, unless no process runs or the link is closed already.

        on_end: called with an error if a frame is wrong, which closes the link; called with None once it is closed.
        """
        if self._socket is None or self._is_closed:
            return

        def protocol() -> asyncio.Protocol:
            return _Frames(lambda message: on_message(self, message), lambda error: on_end(self, error))

        loop = asyncio.get_running_loop()
        sock, self._socket = self._socket, None
        self._transport, _ = await loop.create_unix_connection(protocol, sock=sock)
        if self._is_closed:  # meanwhile
            self._transport.close()

    def send(self, message: ToEngine) -> None:
        """Never waits: what the socket does not take yet is kept in memory. Does nothing on a closed link."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    def close(self) -> None:
        self._is_closed = True
        if self._transport is not None:
            self._transport.close()
        elif self._socket is not None:
            self._socket.close()


class _Frames(asyncio.Protocol):
    """Turns bytes from an engine process into messages."""

    def __init__(
        self, on_message: Callable[[FromEngine], None], on_end: Callable[[EngineDeadError | None], None]
    ) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._reader = FrameReader(FromEngine)
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._on_message(message)
        except EngineDeadError as error:
            if self._transport is not None:
                self._transport.close()  # nothing after a bad frame can be read
            self._on_end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end(None)
