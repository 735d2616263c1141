"""Ctrl-C between steps of the engine, never inside one: a step broken off would lose what it had donated."""

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
