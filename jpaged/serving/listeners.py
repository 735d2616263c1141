"""The sockets that a server listens on. They are bound before the model is loaded, one for each API process.

    host and port   a socket for each process, on one port: the kernel deals out connections
    Unix socket     one socket that all processes share: whoever is free takes the next connection

They listen at once, and who connects while the model is loaded waits. A socket that is bound and does not listen holds
no address: another server could bind the same port, and would take a Unix socket for that of a server which was killed.

A Unix socket is a file, and outlives a server that was killed. So one that nobody answers on is replaced; one with a
server behind it is not; and a server that ends removes its own file, not that of another which took its place.
"""

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path
from typing import Self

BACKLOG = 4096
"""Connections that may wait to be accepted."""


class Listeners:
    """Bound sockets.

    sockets: one for each API process.
    """

    def __init__(self, sockets: list[socket.socket], path: str | None = None) -> None:
        self.sockets = sockets
        self._path = path
        self._file = None if path is None else _identity(path)

    @classmethod
    def on_port(cls, host: str, port: int, num_processes: int = 1) -> Self:
        """Takes a port; 0 takes a free one. Raises OSError, which names it."""
        with contextlib.ExitStack() as taken:
            # The first does not share its port until it has it, so no two servers can come to share one.
            sockets = [taken.enter_context(_bind(host, port))]
            port = sockets[0].getsockname()[1]
            if num_processes > 1:
                sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sockets += [taken.enter_context(_bind(host, port, reuse_port=True)) for _ in range(1, num_processes)]
            taken.pop_all()
        return cls(sockets)

    @classmethod
    def on_path(cls, path: str, num_processes: int = 1, mode: int = 0o600) -> Self:
        """Takes a path for a Unix socket, with the permissions `mode`. Raises OSError, which names it."""
        return cls([_bind_unix(path, mode)] * num_processes, path)

    def close(self) -> None:
        """Closes the sockets, and removes the file of a Unix socket unless another server has put its own there."""
        for sock in self.sockets:
            sock.close()
        if self._path is not None and self._file is not None and _identity(self._path) == self._file:
            Path(self._path).unlink(missing_ok=True)


def _bind(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise OSError(f"cannot listen on {host}: it is no address of this machine ({error}); correct --host") from error
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror}; choose another") from error
    return sock


def _bind_unix(path: str, mode: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_unanswered(path)
        before = os.umask(0o777 & ~mode)  # from the beginning nobody else may connect
        try:
            sock.bind(path)
        finally:
            os.umask(before)
        os.chmod(path, mode)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        why = error.strerror or error  # Python's own errors, such as of a path too long, have a message only
        raise OSError(error.errno, f"cannot listen on {path}: {why}; choose another path") from error
    return sock


def _remove_unanswered(path: str) -> None:
    """Removes the socket of a server that has ended. Raises OSError if one answers there."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return  # binding will fail, and say so
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)  # with a full backlog it would wait
            probe.connect(path)
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        Path(path).unlink(missing_ok=True)
        return
    except BlockingIOError:
        pass
    raise OSError(errno.EADDRINUSE, "a server answers there")


def _identity(path: str) -> tuple[int, int, int] | None:
    """Tells a file from another that took its place. It includes the time, since inode numbers are used again."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns
