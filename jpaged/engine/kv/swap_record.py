"""Where sequences that were swapped out together lie in host memory."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

Sequence = TypeVar("Sequence")


@dataclass(slots=True)
class SwapRecord(Generic[Sequence]):
    """Sequences that are swapped out together, and come back together.

    chunks: where their blocks are. block_ids: int32 [places]; the blocks that were copied there.
    places: int64 [n] for each sequence; where its first n blocks are among them.
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
