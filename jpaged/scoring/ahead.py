"""Runs an iterator in a thread, some items ahead of whoever consumes it."""

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar, cast

T = TypeVar("T")

_END = object()


def ahead(items: Iterable[T], depth: int) -> Iterator[T]:
    """The items, made by a thread that is at most `depth` of them ahead. What it raises is raised here, in its place.

    A consumer that stops early (closes this generator) stops the thread at its next item.
    """
    made: queue.Queue[object] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: object) -> bool:
        while not stop.is_set():
            try:
                made.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not put((item, None)):
                    return
            put((_END, None))
        except BaseException as error:
            put((_END, error))

    threading.Thread(target=work, name="ahead", daemon=True).start()
    try:
        while True:
            item, error = cast(tuple[object, BaseException | None], made.get())
            if error is not None:
                raise error
            if item is _END:
                return
            yield cast(T, item)
    finally:
        stop.set()
