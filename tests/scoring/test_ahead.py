"""Items made ahead by a thread."""

import gc
import threading
import time

import pytest

from jpaged.scoring.ahead import Ahead


def test_items_come_in_order_and_the_end_stays_the_end():
    items = Ahead(range(100), 3)
    assert list(items) == list(range(100))
    assert list(items) == []


def test_what_the_iterator_raises_is_raised_in_its_place():
    def numbers():
        yield 1
        raise KeyError("lost")

    items = Ahead(numbers(), 3)
    assert next(items) == 1
    with pytest.raises(KeyError, match="lost"):
        next(items)
    with pytest.raises(StopIteration):
        next(items)


def test_no_more_are_made_ahead_than_asked_for_and_none_when_nobody_wants_them():
    made = []

    def numbers():
        for i in range(1000):
            made.append(i)
            yield i

    before = threading.active_count()
    items = Ahead(numbers(), 3)
    assert next(items) == 0
    end = time.monotonic() + 60
    while len(made) < 4:
        assert time.monotonic() < end, "nothing is made ahead"
        time.sleep(0.01)
    settled = -1
    while settled != len(made):
        settled = len(made)
        time.sleep(0.05)
    assert len(made) <= 6
    del items
    gc.collect()
    end = time.monotonic() + 60
    while threading.active_count() > before:
        assert time.monotonic() < end, "the thread goes on"
        time.sleep(0.01)
    assert len(made) <= 7


def test_ready_says_whether_waiting_would_be_needed():
    given = threading.Event()

    def one():
        given.wait(60)
        yield 1

    items = Ahead(one(), 1)
    assert not items.ready()
    given.set()
    assert next(items) == 1
    assert list(items) == []
    assert items.ready()
