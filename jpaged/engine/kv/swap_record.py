"""Where sequences that were swapped out together lie in host memory."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

Sequence = TypeVar("Sequence")


NO_PLACE = -1


@dataclass(slots=True)
class SwapRecord(Generic[Sequence]):
    """Sequences that are swapped out together, and come back together.

    chunks: where their blocks are. block_ids: int32 [places]; the blocks that were copied there.
    places: int64 [groups, n] for each sequence; where the first n blocks of its tables are among them, NO_PLACE for
        those that it does not hold.
    num_computed: for each sequence; tokens in these blocks.
    """

    members: list[Sequence]
    chunks: list[int]
    block_ids: np.ndarray
    places: list[np.ndarray]
    num_computed: list[int]

    @property
    def num_places(self) -> int:
        return len(self.block_ids)
