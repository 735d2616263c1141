"""What a grammar's rows keep of each constrained sequence."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jpaged.engine.interface import NO_TOKEN

ANY = np.array([NO_TOKEN], np.int32)
"""The mask of a row that guesses: all tokens. One that guesses again has all but those behind the first."""


@dataclass(slots=True, eq=False)
class ConstrainedSequence:
    """One constrained sequence.

    forced: tokens that must come next. mask: what may come after them, as of `StepPlan.masks`.
    skips: whether forced tokens may be appended without being sampled.
    stops: tokens that end it. early_ends: end-of-sequence tokens that the device, which counts
        `min_tokens`, may not take for its end.
    unreported: appended tokens that its caller has not been told of.
    failure: why the grammar cannot be followed further.
    """

    guide: Any
    forced: deque[int]
    mask: np.ndarray
    skips: bool
    stops: frozenset[int]
    early_ends: frozenset[int] = frozenset()
    unreported: list[int] = field(default_factory=list)
    failure: str = ""
