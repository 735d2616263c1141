"""Sockets that pass from one process to another after both have started.

    owner --NewClient, a socket--> engine process     an API process was started, or started again
    owner --Replaced, a socket---> API process        an engine process was started again
    owner --GivenUp--------------> API process        ... or will not be

The owner is the process that started the others. Each message is one packet; a descriptor travels with it (SCM_RIGHTS).
"""

import socket
from typing import Any

import msgspec

_MOST_BYTES = 1 << 16


class _Packet(msgspec.Struct, array_like=True, tag=True):
    """A message of one packet."""


class NewClient(_Packet):
    """The socket that comes along is a client's."""


class Replaced(_Packet):
    """The socket that comes along leads to a replica's new engine process."""

    replica: int


class GivenUp(_Packet):
    """A replica's engine process has ended and is not started again."""

    replica: int
    message: str


Packet = NewClient | Replaced | GivenUp

_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Packet)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a channel."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(channel: socket.socket, packet: Packet, *sockets: socket.socket) -> None:
    """Sends a message. Raises OSError when the other end is gone."""
    socket.send_fds(channel, [_encoder.encode(packet)], [sock.fileno() for sock in sockets])


def receive(channel: socket.socket) -> tuple[Any, socket.socket | None]:
    """The next message and the socket that came with it.

    Raises:
        EOFError: the other end is gone. BlockingIOError: none has come, and the channel does not block.
    """
    try:
        data, fds, _, _ = socket.recv_fds(channel, _MOST_BYTES, 1)
    except ConnectionError as error:
        raise EOFError from error
    if not data:
        raise EOFError
    return _decoder.decode(data), socket.socket(fileno=fds[0]) if fds else None
