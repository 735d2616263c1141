"""The engine process's end of a client's socket."""

import socket
from collections.abc import Iterator

from jpaged.processes.wire import FrameReader, FromEngine, ToEngine, frame

RECEIVE_BYTES = 1 << 16
"""Read in one call. Python allocates this much for each call and gives back what it does not need."""

_MOST_RECEIVES = 4
"""Reads between two steps. 256 KiB of prompts are several steps' work for the device."""


class ConnectionClosedError(Exception):
    """The other end of a connection is gone."""


class Connection:
    """One client. Sending never blocks: what the socket does not take waits in memory."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._reader = FrameReader(ToEngine)
        self._unsent = bytearray()

    def request_id(self, handle: int) -> str:
        """What a request of this client is called in the engine."""
        return f"{self.sock.fileno()}:{handle}"

    def receive(self) -> Iterator[ToEngine]:
        """What has come, up to 256 KiB. Raises ConnectionClosedError when the other end is gone."""
        for _ in range(_MOST_RECEIVES):
            try:
                data = self.sock.recv(RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                raise ConnectionClosedError from error
            if not data:
                raise ConnectionClosedError
            yield from self._reader.feed(data)
            if len(data) < RECEIVE_BYTES:
                return

    def send(self, message: FromEngine) -> None:
        self._unsent += frame(message)
        self.flush()

    def send_last(self, message: FromEngine) -> None:
        """Sends a message and waits until the socket has taken it."""
        self.sock.setblocking(True)
        self.send(message)

    def flush(self) -> None:
        """Sends what the socket takes. A lost connection shows when it is read."""
        while self._unsent:
            try:
                sent = self.sock.send(self._unsent)
            except (BlockingIOError, OSError):
                return
            del self._unsent[:sent]

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)
