"""How the grouped products' kernel is cut for an output."""

import dataclasses
import functools

from jpaged.pallas_kernels.gated_product.hopper_tiling import DEPTH, ROWS
from jpaged.pallas_kernels.grouped_product.tiles import most_tiles

FEW_ROWS = 16
"""Of a tile that has no more, only so many are loaded."""

_SHARED_BYTES = 226 << 10  # of the 227 KiB that a CTA may have, less its barriers
_MOST_STAGES = 8


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the kernel is cut.

    Attributes:
        columns: of a tile, of each half: 64 or 128.
        consumers: warpgroups that compute, 64 rows of the tile each; 1 or 2.
        paired: whether two CTAs with neighbouring columns load x for each other.
    """

    columns: int = 128
    consumers: int = 1
    paired: bool = False

    def __post_init__(self) -> None:
        if self.columns not in (64, 128):
            raise ValueError(f"columns must be 64 or 128, got {self.columns}")
        if self.consumers not in (1, 2):
            raise ValueError(f"consumers must be 1 or 2, got {self.consumers}")

    @property
    def rows(self) -> int:
        return ROWS * self.consumers

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return 1 + self.paired

    @property
    def blocks(self) -> int:
        """Loads of 64 columns, of each half."""
        return self.columns // DEPTH

    @property
    def stages(self) -> int:
        return min(_MOST_STAGES, _SHARED_BYTES // (2 * DEPTH * (self.rows + 2 * self.columns)))

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a consumer's thread and of the producer's."""
        return 232, 40

    def strips(self, columns: int) -> int:
        """Tiles across an output of so many columns a half, those of a cluster counted as one."""
        return -(-columns // (self.columns * self.cluster))


@functools.cache
def pick_tiling(rows: int, groups: int, columns: int, ctas: int) -> Tiling:
    """The tiling for so many rows in groups whose sizes the device alone knows.

    Up to 32 rows a group, if they are spread evenly, hardly any group has more than the 64 of one consumer. Beyond that
    groups take 128 rows at once, or a matrix would be fetched for each 64.
    """
    if 2 * rows > ROWS * groups:
        return Tiling(128, 2, paired=columns > 128)
    few = most_tiles(rows, groups, ROWS) * Tiling(128).strips(columns) < 2 * ctas
    return Tiling(64 if few else 128)
