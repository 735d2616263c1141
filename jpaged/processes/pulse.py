"""A sign of life of an engine or API process, in memory that it shares with the process that started it.

    float64 | beat | steps | serves |    beat: `time.monotonic()` when its loop last came round; 0 before it begins
                                         serves: 1 once its loop has come round: its start is over

The clock is the same in all processes of a machine. A loop that has nothing to do comes round once a second. While the
process does what may take any time, such as its start, a thread beats instead: a busy process is told from one that is
stopped, or that holds Python's lock for good. The loop of an API process is asyncio's, and beats once a second.
"""

import mmap
import os
import threading
import time
from typing import Self

IDLE_BEAT_S = 1.0
"""An idle engine process comes round this often, and a resting one beats."""

BEGIN_S = 120.0
"""A process may take this long to begin: Python starts and imports, on a machine that may be busy."""

PULSE_BYTES = mmap.PAGESIZE
"""Of the memory; what follows is the flight recorder's (`flight_recorder.py`)."""


class Pulse:
    """The memory behind a file descriptor. `create` allocates it; the engine process writes, its owner reads."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._cells = memoryview(mmap.mmap(fd, PULSE_BYTES)).cast("d")
        self._made_at = time.monotonic()
        self._rests = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def create(cls) -> Self:
        """Allocates zeroed memory, whose descriptor a child process inherits."""
        fd = os.memfd_create("jpaged-pulse")
        os.ftruncate(fd, PULSE_BYTES)
        return cls(fd)

    def beat(self) -> None:
        """The loop comes round."""
        if self._rests.is_set():
            self._rests.clear()
        self._cells[0] = time.monotonic()
        self._cells[2] = 1.0

    def rest(self) -> None:
        """What comes before the next beat may take long: a thread beats until then."""
        self._cells[0] = time.monotonic()
        self._rests.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat_while_resting, name="jpaged-pulse", daemon=True)
            self._thread.start()

    def _beat_while_resting(self) -> None:
        while self._rests.wait():
            self._cells[0] = time.monotonic()
            time.sleep(IDLE_BEAT_S)

    def count_step(self) -> None:
        """A step's results have been read."""
        self._cells[1] += 1

    @property
    def num_steps(self) -> int:
        return int(self._cells[1])

    @property
    def beat_at(self) -> float:
        """When it last beat; 0 before the first time."""
        return self._cells[0]

    def silence_s(self) -> float:
        """Seconds since the last beat. Before the first: since `BEGIN_S` after this object was made, 0 until then."""
        now = time.monotonic()
        return now - self.beat_at if self.beat_at else max(0.0, now - self._made_at - BEGIN_S)

    def starting_s(self) -> float:
        """Seconds since this object was made, while the process has yet to serve; 0 from then on."""
        return 0.0 if self._cells[2] else time.monotonic() - self._made_at

    def close(self) -> None:
        """Gives back the descriptor; the memory goes with the last process that has it."""
        os.close(self.fd)
