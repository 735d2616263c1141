"""How many tokens each expert of a mixture has had: what `EngineStats.expert_load` is."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

Counts = tuple[tuple[int, ...], ...]
"""Tokens by sparse layer and expert. A token counts once for each of its experts."""


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """A snapshot.

    layers: numbers of the layers that have experts.
    tokens: since the engine's start. recent: since one to two minutes ago, where snapshots are taken at least once a
        minute; else since the one before the last, if that is longer ago (`RecentCounts`). Both by layer of `layers`
        and by expert; padding does not count, tokens that are computed again after a preemption do.
    """

    layers: tuple[int, ...]
    tokens: Counts
    recent: Counts

    @property
    def imbalance(self) -> tuple[float, ...]:
        """By layer the recent tokens of the busiest expert over those of the mean one: 1 where all have as many, the
        number of experts where one has all; 0 where there were none."""
        return tuple(max(of) * len(of) / sum(of) if sum(of) else 0.0 for of in self.recent)

    @property
    def num_unused(self) -> tuple[int, ...]:
        """By layer the experts that no token has gone to since the start."""
        return tuple(of.count(0) for of in self.tokens)

    @classmethod
    def total(cls, loads: "Iterable[ExpertLoad | None]") -> "ExpertLoad | None":
        """The sum over engines of one model; None where one does not count."""
        every = list(loads)
        known = [load for load in every if load is not None]
        if not known or len(known) < len(every):
            return None
        sums = [np.sum([getattr(load, name) for load in known], axis=0) for name in ("tokens", "recent")]
        return cls(known[0].layers, *map(as_counts, sums))


class RecentCounts:
    """What was counted lately, of counts that only grow.

    window_s: what `since` gives covers at least so many seconds, where there were as many, and at most twice as many
        where it is called as often.
    """

    def __init__(self, start: np.ndarray, now_s: float, window_s: float = 60.0) -> None:
        self._older, self._newer, self._newer_s = start, start, now_s
        self._window_s = window_s

    def since(self, counts: np.ndarray, now_s: float) -> np.ndarray:
        """Of `counts` those of the window that ends now."""
        recent = counts - self._older
        if now_s - self._newer_s >= self._window_s:
            self._older, self._newer, self._newer_s = self._newer, counts, now_s
        return recent


def as_counts(counts: np.ndarray) -> Counts:
    """int [layers, experts]."""
    return tuple(map(tuple, counts.tolist()))
