"""Passes file descriptors to other processes, which fetch them at an address that they get in a message.

    DescriptorServer(fds).address --in a message--> take_descriptors(address): copies of them, by SCM_RIGHTS

The sockets that messages go over cannot carry them: asyncio writes bytes there. Names of abstract sockets are public
(/proc/net/unix), and containers that share a network see each other's, where root has the same number in all; so the
address has a secret beside the name.
"""

import hmac
import os
import secrets
import socket
import struct
import threading
import uuid
from collections.abc import Sequence

_AT_ONCE = 128
"""Descriptors in one packet; Linux takes up to 253."""

_TIMEOUT_S = 10.0
"""Of a socket's call, on both sides. Neither has anything to wait for, so it is reached only if one hangs."""

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

_SECRET_BYTES = 32


class DescriptorServer:
    """Hands descriptors to processes of this user that know the address, until it is closed. They stay the caller's.

    Attributes:
        address: for `take_descriptors`. Of Linux's abstract sockets, which leave no file.
    """

    def __init__(self, fds: Sequence[int]) -> None:
        name, self._secret = f"jpaged-{uuid.uuid4()}", secrets.token_hex(_SECRET_BYTES // 2)
        self.address = f"{name}:{self._secret}"
        self._fds = list(fds)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{name}")
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, name="descriptors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops handing them out; then the descriptors may be closed. A second call does nothing."""
        if self._thread.is_alive():
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # it was shut down
                return
            with sock:
                sock.settimeout(_TIMEOUT_S)
                try:
                    self._answer(sock)
                except OSError:  # who asked is gone
                    continue

    def _answer(self, sock: socket.socket) -> None:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
            return
        if not hmac.compare_digest(sock.recv(_SECRET_BYTES), self._secret.encode()):
            return
        for first in range(0, len(self._fds), _AT_ONCE):
            socket.send_fds(sock, [b"."], self._fds[first : first + _AT_ONCE])


def take_descriptors(address: str) -> list[int]:
    """Copies of the descriptors that are handed out there, for the caller to close.

    Raises:
        OSError: nobody hands out any there, to this user; or this process may have no more.
    """
    found: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(_TIMEOUT_S)
            name, _, secret = address.partition(":")
            sock.connect(f"\0{name}")
            sock.send(secret.encode())
            while True:
                data, fds, flags, _ = socket.recv_fds(sock, 1, _AT_ONCE)
                found += fds
                for fd in fds:  # `recv_fds` takes flags, and passes none on
                    os.set_inheritable(fd, False)
                if flags & socket.MSG_CTRUNC:
                    raise OSError("no descriptor is left; raise `ulimit -n`")
                if not data:
                    return found
    except BaseException:
        for fd in found:
            os.close(fd)
        raise
