"""Messages over a socket: each is its length, 4 bytes little-endian, and its bytes."""

import socket
import struct
import time

NO_TOKEN = -1
"""Stands behind the last of several tokens."""
_LENGTH = struct.Struct("<I")


def framed(data: bytes) -> bytes:
    """One message as it is sent."""
    return _LENGTH.pack(len(data)) + data


def write_frame(sock: socket.socket, data: bytes) -> None:
    """Sends one message."""
    sock.sendall(framed(data))


def read_frame(sock: socket.socket, deadline: float | None = None) -> bytes | None:
    """Receives one message; None if the other end is closed. deadline: of `time.monotonic`; TimeoutError after it."""
    head = _read(sock, _LENGTH.size, deadline)
    return None if head is None else _read(sock, _LENGTH.unpack(head)[0], deadline)


def _read(sock: socket.socket, num_bytes: int, deadline: float | None) -> bytes | None:
    data = bytearray()
    while len(data) < num_bytes:
        if deadline is not None:
            sock.settimeout(max(1e-3, deadline - time.monotonic()))
        part = sock.recv(min(num_bytes - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)
