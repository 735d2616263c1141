"""Threads that a start-up may leave behind: what they do when it ends well, with an error, or by Ctrl-C."""

import threading

import pytest

from jpaged.executor.start.worker_threads import WorkerThreads


def test_results_and_errors_reach_who_asks():
    with WorkerThreads(2) as threads:
        product, failure = threads.submit(int.__mul__, 6, 7), threads.submit(int, "six")
    assert product.result(0) == 42
    with pytest.raises(ValueError, match="six"):
        failure.result(0)


def test_nothing_is_submitted_where_the_check_raises():
    def check() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), WorkerThreads(1, check) as threads:
        threads.submit(int)


class Work:
    """Something that one thread has begun, and something that waits for it."""

    def __init__(self, threads: WorkerThreads) -> None:
        self.may_end = threading.Event()
        begun = threading.Event()
        self.running = threads.submit(lambda: begun.set() or self.may_end.wait(60))
        self.waiting = threads.submit(int)
        begun.wait()


def test_after_an_error_what_has_begun_is_waited_for_and_the_rest_dropped():
    threads = WorkerThreads(1)
    work = Work(threads)
    threading.Timer(0.1, work.may_end.set).start()
    with pytest.raises(ValueError, match="no room"), threads:
        raise ValueError("no room")
    assert work.waiting.cancelled()
    assert work.running.done()


def test_after_ctrl_c_nothing_is_waited_for():
    threads = WorkerThreads(1)
    work = Work(threads)
    with pytest.raises(KeyboardInterrupt), threads:
        raise KeyboardInterrupt
    assert work.waiting.cancelled()
    assert work.running.running()
    work.may_end.set()
    assert work.running.result(60)
