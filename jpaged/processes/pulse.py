"""A sign of life of an engine process, in memory that it shares with the process that started it.

    float64 | beat | steps |        beat: `time.monotonic()` when its loop last came round; 0 before it serves, and
                                    while it does what may take as long as a start

The clock is the same in all processes of a machine. A loop that has nothing to do comes round once a second.
"""

import mmap
import os
import time
from typing import Self

import numpy as np

IDLE_BEAT_S = 1.0
"""An idle engine process comes round this often."""

PULSE_BYTES = mmap.PAGESIZE
"""Of the memory; what follows is the flight recorder's (`flight_recorder.py`)."""


class Pulse:
    """The memory behind a file descriptor. `create` allocates it; the engine process writes, its owner reads."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._cells = np.frombuffer(mmap.mmap(fd, PULSE_BYTES), np.float64, 2)

    @classmethod
    def create(cls) -> Self:
        """Allocates zeroed memory, whose descriptor a child process inherits."""
        fd = os.memfd_create("jpaged-pulse")
        os.ftruncate(fd, PULSE_BYTES)
        return cls(fd)

    def beat(self) -> None:
        """The loop comes round."""
        self._cells[0] = time.monotonic()

    def rest(self) -> None:
        """What comes before the next beat may take long."""
        self._cells[0] = 0.0

    def count_step(self) -> None:
        """A step's results have been read."""
        self._cells[1] += 1

    @property
    def num_steps(self) -> int:
        return int(self._cells[1])

    def silence_s(self) -> float:
        """Seconds since the last beat; 0 before the first, and after a `rest`."""
        last = float(self._cells[0])
        return time.monotonic() - last if last else 0.0

    def close(self) -> None:
        """Gives back the descriptor; the memory goes with the last process that has it."""
        os.close(self.fd)
