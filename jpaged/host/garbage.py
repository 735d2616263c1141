"""Keeps long-lived objects away from Python's garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def set_objects_apart() -> None:
    """Takes all objects there are from the collector, once what stays until the end has been made and imported.

    A full collection would visit all of it, 200 ms in the midst of serving: the library behind tokenizers alone imports
    whatever it finds, and with PyTorch that makes 300,000 objects. The price: what the caller has by then and drops
    later is freed only if it is in no cycle.
    """
    gc.collect()
    gc.freeze()


def collect_rarely() -> None:
    """For a process whose event loop must not stand still: a collection after 50,000 new containers, not after 700.

    A request's JSON may have tens of thousands, which are freed with it. Python would look through all of them several
    times while they are made, 6 ms at a time for 300 KB.
    """
    gc.set_threshold(50_000)


@contextmanager
def without_collections() -> Iterator[None]:
    """Leaves garbage lie: lowering makes millions of objects, and looking through them took a fifth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
