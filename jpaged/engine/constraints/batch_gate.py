"""When a step of constrained rows is worth its while.

A step takes the host and the device hardly longer with more rows, so few large steps are best: one of nearly all rows,
which takes less time than two of a part each; or, of many rows, two, so that one runs while the host sees to the
other's rows. Rows that could run wait for others whose masks are in the making.
"""

import time

LEAST_HALVED = 64
"""So many rows run in one step, even where all constrained rows are ready at once."""

_PATIENCE_S = 0.002
"""The longest that rows wait for others."""
_ENOUGH, _ENOUGH_OF_MANY, _ENOUGH_OF_HALVES = 0.75, 0.5, 0.33
"""Shares of all constrained rows with which a step is worth its while: where these are few; where they are many and
computed ahead, in one step; and where they are many and run in halves.
"""
_CHUNKS_COST = 0.3
"""What a step takes longer with chunks, as a share of what a step without takes; estimated, not measured."""
_AHEAD_COST = 0.8
"""Likewise, where the step before has computed its rows ahead."""


class BatchGate:
    """Decides whether rows wait for others."""

    def __init__(self) -> None:
        self._waits_since: float | None = None  # when the first of them became ready

    def should_wait(self, num_queued: int | None, num_here: int, is_halved: bool, are_enough: bool) -> bool:
        """Whether rows that could run now will have run as soon, and with more others, if they are planned later.

        num_queued: as of `DependentRows.prepare`. num_here: rows that could run. is_halved, are_enough: as below.
        """
        if num_queued is None or not num_here:
            self.reset()
            return False
        if num_queued > is_halved:
            return True
        if are_enough:
            return False
        now = time.perf_counter()
        if self._waits_since is None:
            self._waits_since = now
        return now - self._waits_since < _PATIENCE_S

    def reset(self) -> None:
        """They run: who comes next waits from then on."""
        self._waits_since = None


def is_in_halves(num_all: int, is_ahead: bool) -> bool:
    """Whether so many rows run in halves. is_ahead: they are computed ahead; the device has no need of halves then."""
    return num_all > LEAST_HALVED and not is_ahead


def are_enough(num_here: int, num_all: int, is_ahead: bool) -> bool:
    """Whether a step of some rows is worth its while. is_ahead: as above."""
    share = _ENOUGH if num_all <= LEAST_HALVED else _ENOUGH_OF_MANY if is_ahead else _ENOUGH_OF_HALVES
    return num_here >= share * num_all


def most_together(num_all: int) -> int:
    """Rows that may run in one step, of all constrained ones: a half of many."""
    return max(-(-num_all // 2), LEAST_HALVED)


def gain_by_chunks(num_forced: int, num_rows: int, is_ahead: bool = False) -> bool:
    """Whether forced tokens of some of these rows are to be appended. That saves their sequences as many steps, but
    keeps all rows of the step that computes them as chunks: it takes longer than one of decode rows alone.

    is_ahead: rows have been computed ahead, for nothing if there are chunks.
    """
    return num_forced > (_AHEAD_COST if is_ahead else _CHUNKS_COST) * num_rows
