"""Runs an iterator in a thread, some items ahead of its consumer."""

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_END = object()


class Ahead(Generic[T]):
    """The items, made by a thread that is at most `depth` of them ahead. What it raises is raised here, in its place.

    A consumer that stops early and drops this stops the thread at its next item.
    """

    def __init__(self, items: Iterable[T], depth: int) -> None:
        self._made: queue.Queue = queue.Queue(depth)
        self._stop = threading.Event()
        arguments = (items, self._made, self._stop)  # without self, so that dropping it ends the thread
        threading.Thread(target=_make, args=arguments, name="ahead", daemon=True).start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        item, error = self._made.get()
        if item is not _END:
            return item
        self._made.put((_END, None))  # the end stays the end
        raise StopIteration if error is None else error

    def ready(self) -> bool:
        """Whether the next item, or the end, is available without waiting."""
        return not self._made.empty()

    def __del__(self) -> None:
        self._stop.set()


def _make(items: Iterable, made: queue.Queue, stop: threading.Event) -> None:
    def put(item: object, error: BaseException | None = None) -> bool:
        while not stop.is_set():
            try:
                made.put((item, error), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    try:
        for item in items:
            if not put(item):
                return
        put(_END)
    except BaseException as error:
        put(_END, error)
