"""Threads for work that cannot be interrupted once it runs: compiling a program, which takes seconds, loading weights.

After an error, the process waits for such work when it exits, as it would for `concurrent.futures.ThreadPoolExecutor`.
After Ctrl-C it does not.
"""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

_PATIENCE_S = 0.5
"""How long a process that Ctrl-C has ended waits for its threads, so as to end in order."""

_INTERRUPTED = 130
"""The exit code of a process that Ctrl-C has ended, as shells count."""


class WorkerThreads:
    """A pool of `count` threads.

    Used as a context that at its end waits for what was submitted, or if an error ends it, for what has begun. On
    Ctrl-C it waits for nothing.

    check: called before anything is submitted; what it raises, `submit` does.
    """

    def __init__(self, count: int, check: Callable[[], None] | None = None) -> None:
        self._check = check
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=_run, args=(self._work,), daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        atexit.register(self._end_process)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self._drop_waiting()
        for _ in self._threads:
            self._work.put(None)
        if error is None or isinstance(error, Exception):
            for thread in self._threads:
                thread.join()
            atexit.unregister(self._end_process)

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """The future of what the function returns for these arguments."""
        if self._check is not None:
            self._check()
        future: Future[T] = Future()
        self._work.put((future, lambda: function(*args)))
        return future

    def _drop_waiting(self) -> None:
        with suppress(Empty):
            while True:
                item = self._work.get_nowait()
                if item is not None:
                    item[0].cancel()

    def _end_process(self) -> None:
        """Ends it in the midst of what its threads do, who must not come back to an interpreter that is gone."""
        until = time.monotonic() + _PATIENCE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        if getattr(sys, "last_type", None) is KeyboardInterrupt:  # nobody caught it: what started this process sees so
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(_INTERRUPTED)


def _run(work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (item := work.get()) is not None:
        future, call = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:  # whoever asks for the result gets it
                future.set_exception(error)
        del item, future, call  # and all they hold, while this waits
