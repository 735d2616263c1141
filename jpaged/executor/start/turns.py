"""Turns at what only one of several processes need do: replicas of a model have the same programs to compile.

    replica 0   takes the turn, compiles, ends it
    replica 1   waits .......................... takes it, finds the programs in the executable cache, ends it

A turn is a lock on a file. The kernel releases it when its process ends, however that ends, so a process never waits
for one that is gone.
"""

import fcntl
import logging
import os
import time
from pathlib import Path

log = logging.getLogger("jpaged.startup")

PATIENCE_S = 300.0
"""Longest to wait for a turn: several times what a large model's cold start takes."""

_CHECK_S = 0.05


class Turns:
    """The turns that this process holds."""

    def __init__(self) -> None:
        self._taken: dict[Path, int] = {}

    def take(self, file: Path) -> None:
        """Waits for its turn at what `file`, which need not exist, stands for. Goes without one if that lasts too long,
        or where files cannot be locked.
        """
        if file in self._taken:
            return
        until = time.monotonic() + PATIENCE_S
        try:
            while (descriptor := _lock(file, until)) is None:
                pass
        except OSError as error:  # a timeout among them
            log.info("no turn at %s: %r", file, error)
        else:
            self._taken[file] = descriptor

    def end(self, file: Path) -> None:
        """Lets another process have it."""
        descriptor = self._taken.pop(file, None)
        if descriptor is not None:
            file.unlink(missing_ok=True)
            os.close(descriptor)

    def end_all(self) -> None:
        for file in list(self._taken):
            self.end(file)


def _lock(file: Path, until: float) -> int | None:
    """Returns the descriptor that holds the lock; None if the file has been removed meanwhile by who held it."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        while not _try_lock(descriptor):
            if time.monotonic() > until:
                raise TimeoutError("another process has it")
            time.sleep(_CHECK_S)
        if os.fstat(descriptor).st_nlink:
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
