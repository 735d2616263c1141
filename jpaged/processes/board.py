"""Numbers that the API processes of a server share: what each has open, and what it has measured.

    cells, float64 [workers, replicas, columns], in shared memory
                                   | queued | queued tokens | unfinished | owed tokens | arrived | metrics ... |
    worker 0   requests to replica 0
               requests to replica 1
    worker 1   ...

A worker writes only into its own row and reads the sum over all, so limits hold for the server as a whole and any
worker can answer for it. Nothing is locked: an aligned number is written at once, and a sum that is a moment old will
do. Counts in float64 are exact up to 2**53.
"""

import mmap
import os

import numpy as np

GAUGES = ("queued", "queued_tokens", "unfinished", "owed_tokens")
_ARRIVED = "arrived"
"""Requests that a worker has numbered; they stand in its first replica's cell and outlive the worker."""
_COLUMNS = (*GAUGES, _ARRIVED)
_COLUMN = {name: number for number, name in enumerate(_COLUMNS)}


class Board:
    """The cells, and one worker's row of them.

    worker: which row is its own. num_columns: of metrics, after the gauges. fd: of memory that `shared` made, for
    workers in other processes; by default it is this process's own.
    """

    def __init__(self, num_workers: int, num_replicas: int, num_columns: int, worker: int = 0, fd: int = -1) -> None:
        shape = (num_workers, num_replicas, len(_COLUMNS) + num_columns)
        memory = mmap.mmap(fd, _num_bytes(*shape))
        self.cells = np.frombuffer(memory, np.float64).reshape(shape)
        # Gauges change some ten times a request; single numbers of a memoryview take a third of the time.
        self._numbers = memoryview(memory).cast("d")
        self._width = shape[2]
        self._own = worker * num_replicas * shape[2]
        self.worker = worker

    @property
    def num_workers(self) -> int:
        return len(self.cells)

    @property
    def metrics(self) -> np.ndarray:
        """float64 [workers, replicas, columns]: the columns after the gauges."""
        return self.cells[:, :, len(_COLUMNS) :]

    def add(self, gauge: str, replica: int, amount: float) -> None:
        """Adds to this worker's gauge."""
        self._numbers[self._own + replica * self._width + _COLUMN[gauge]] += amount

    def set(self, gauge: str, replica: int, value: float) -> None:
        """Sets this worker's gauge."""
        self._numbers[self._own + replica * self._width + _COLUMN[gauge]] = value

    def next_number(self) -> int:
        """Numbers a request: 0, 1, 2, ... for this worker, and on from there for one that takes its place."""
        at = self._own + _COLUMN[_ARRIVED]
        number = int(self._numbers[at])
        self._numbers[at] = number + 1
        return number

    def clear_gauges(self, worker: int) -> None:
        """A worker has ended, and what it had open with it."""
        self.cells[worker, :, : len(GAUGES)] = 0.0

    def total(self, gauge: str) -> int:
        """The sum over all workers and replicas."""
        return int(sum(self._numbers[_COLUMN[gauge] :: self._width]))

    def by_replica(self, gauge: str) -> list[float]:
        """For each replica, the sum over all workers."""
        by_replica: list[float] = self.cells[:, :, _COLUMN[gauge]].sum(axis=0).tolist()
        return by_replica


def shared_memory(num_workers: int, num_replicas: int, num_columns: int) -> int:
    """Allocates zeroed memory for a board. Returns its file descriptor, which child processes inherit."""
    fd = os.memfd_create("jpaged-board")
    os.ftruncate(fd, _num_bytes(num_workers, num_replicas, len(_COLUMNS) + num_columns))
    return fd


def _num_bytes(num_workers: int, num_replicas: int, num_columns: int) -> int:
    return 8 * num_workers * num_replicas * num_columns
