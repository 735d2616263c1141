"""What a grammar's rows keep of each constrained sequence, and of what it has guessed."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jpaged.engine.interface import NO_TOKEN

ANY = np.array([NO_TOKEN], np.int32)
"""The mask of a row that guesses: all tokens. One that guesses again has all but those behind the first."""


class HeldGuess(NamedTuple):
    """What was guessed, until it is known which of it is allowed. tokens: best first. code: the `FinishCode` of the
    first. is_full: whether each of them ends the sequence by its length.
    """

    tokens: list[int]
    code: int
    is_full: bool


class AllowedGuess(NamedTuple):
    """A guess that is allowed. ends_here: it ends the sequence, which the device does not know."""

    token: int
    code: int
    ends_here: bool


@dataclass(slots=True, eq=False)
class ConstrainedSequence:
    """One constrained sequence.

    forced: tokens that must come next. mask: what may come after them, as of `StepPlan.masks`.
    skips: whether forced tokens may be appended without being sampled.
    stops, max_len: tokens, and a length, that end it. early_ends: end-of-sequence tokens that the device, which counts
        `min_tokens`, may not take for its end.
    unreported: appended tokens that its caller has not been told of.
    failure: why the grammar cannot be followed further.
    """

    guide: Any
    forced: deque[int]
    mask: np.ndarray
    skips: bool
    stops: frozenset[int]
    max_len: int
    early_ends: frozenset[int] = frozenset()
    unreported: list[int] = field(default_factory=list)
    failure: str = ""


def places_of(stops: frozenset[int], tokens: list[int]) -> int:
    """A bit for each of the tokens that is one of the stops."""
    if stops.isdisjoint(tokens):
        return 0
    return sum(1 << i for i, token in enumerate(tokens) if token in stops)
