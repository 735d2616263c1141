"""How the invariant product's kernel is cut for an output, by the limits of the chip. Bits do not depend on it."""

import dataclasses
import functools
import itertools
import math

from jpaged.pallas_kernels.gated_product.hopper_tiling import DEPTH, ROWS

_SHARED_BYTES = 224 << 10  # of the 227 KiB that a CTA may have, less its barriers
_MOST_STAGES = 12
_L2_BYTES = 38.0  # a cycle, of each of 132 multiprocessors that all ask (`gated_product.hopper_tiling`)
_ALONE_BYTES = 64.0  # a cycle, that one multiprocessor can take in
_TURN_CYCLES = 3000.0  # of a tile beside its products: the pipeline fills, and results are stored


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the kernel is cut.

    Attributes:
        columns: of a tile: 64, 128 or 256.
        consumers: warpgroups that compute, 64 rows of the tile each; 1 or 2.
        shared: what the two CTAs of a cluster load for each other: "w", if their tiles lie below one another; "x", if
            they lie side by side; or None, without clusters.
    """

    columns: int
    consumers: int
    shared: str | None = None

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread of a consumer and of the producer."""
        return 232, 40

    @property
    def rows(self) -> int:
        return ROWS * self.consumers

    @property
    def blocks(self) -> int:
        """Loads of 64 columns in a step."""
        return self.columns // DEPTH

    @property
    def cluster(self) -> tuple[int, int]:
        """CTAs of a cluster: down and across."""
        return 1 + (self.shared == "w"), 1 + (self.shared == "x")

    @property
    def stage_bytes(self) -> int:
        return 2 * DEPTH * (self.rows + self.columns)

    @property
    def stages(self) -> int:
        return min(_MOST_STAGES, _SHARED_BYTES // self.stage_bytes)

    def clusters(self, rows: int, columns: int) -> tuple[int, int]:
        """How many clusters, down and across, an output has tiles for."""
        down, across = self.cluster
        return -(-rows // (self.rows * down)), -(-columns // (self.columns * across))


TILINGS = tuple(Tiling(*one) for one in itertools.product((64, 128, 256), (1, 2), (None, "w", "x")))


def estimated_cycles(t: Tiling, rows: int, depth: int, columns: int, ctas: int) -> float:
    """What the busiest CTA takes, by the limits of the chip: a step as long as the slowest of its products (2,048
    multiply-adds a cycle), its operands' way from shared memory (128 bytes a cycle) and its loads."""
    down, across = t.cluster
    tiles = math.prod(t.clusters(rows, columns))
    busy = min(tiles * down * across, ctas)
    products = t.rows * t.columns * DEPTH / 2048
    shared = 2 * DEPTH * (t.consumers * (ROWS + t.columns) + t.rows + t.columns) / 128
    loads = 2 * DEPTH * (t.rows / across + t.columns / down) / min(_ALONE_BYTES, _L2_BYTES * 132 / busy)
    return -(-tiles // (ctas // (down * across))) * (max(products, shared, loads) * -(-depth // DEPTH) + _TURN_CYCLES)


@functools.cache
def pick_tiling(rows: int, depth: int, columns: int, ctas: int) -> Tiling:
    """The tiling of the least `estimated_cycles`; of equals the first of `TILINGS`."""
    return min(TILINGS, key=lambda t: estimated_cycles(t, rows, depth, columns, ctas))
