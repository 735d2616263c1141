"""Ends a process when its parent is gone."""

import os
import select
import threading
from collections.abc import Sequence

_CHECK_S = 0.5


def end_with_parent(parent: int, fds: Sequence[int] = ()) -> None:
    """Ends this process, whatever it is doing, when its parent is another than `parent`, or when the other ends of all
    `fds` are closed, if there are any.
    """
    threading.Thread(target=_watch, args=(parent, fds), name="jpaged-parent", daemon=True).start()


def _watch(parent: int, fds: Sequence[int]) -> None:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, 0)  # hang-ups are always reported
    left = len(fds)
    while True:
        for fd, _ in poll.poll(_CHECK_S * 1000):
            poll.unregister(fd)
            left -= 1
        if (fds and not left) or os.getppid() != parent:
            os._exit(0)
