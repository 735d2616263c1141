"""Ctrl-C: deferred where it must not break in, and kept where it could be lost.

Interruptible    between steps of the engine, never inside one: a step broken off would lose what it had donated
KeptInterrupt    while JAX lowers programs, which it does in callbacks of C++ too, where an exception is dropped
"""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class Interruptible:
    """Turns the first Ctrl-C into a flag, so that no engine step is broken off half-way; the second one raises.

    with Interruptible() as interrupt:
        while not interrupt.requested: ...
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


class KeptInterrupt:
    """Remembers a Ctrl-C, whose KeyboardInterrupt may come to nothing, until the context ends.

    with KeptInterrupt() as interrupt:
        for program in programs:
            interrupt.check()
            ...

    Where Ctrl-C means anything but KeyboardInterrupt, and outside of the main thread, it does nothing.
    """

    def __init__(self) -> None:
        self._requested = False
        self._installed = False

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_signal)
            self._installed = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if error is None:
            self.check()

    def check(self) -> None:
        """Raises KeyboardInterrupt if Ctrl-C was pressed since the context began."""
        if self._requested:
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._requested = True
        signal.default_int_handler(number, frame)
