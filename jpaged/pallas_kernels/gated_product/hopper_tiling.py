"""How the gated product's kernel is cut for an output, by the limits of the chip, and from how many rows on it pays."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

ROWS = 64  # of a wgmma, and so of a consumer
DEPTH = 64  # of a stage: elements of a line of 128 bytes, in which the swizzle permutes pieces of 16

LEAST_ROWS = 96
"""From which on the kernel is taken by default. Measured on an H200 at sizes from 128 rows on it wins, 65 us against
XLA's 113 for Llama-3.1-8B and 11.5 against 14.3 for Qwen3-0.6B at the least of them, or loses by little
(`docs/kernels_products.md`). 96 rows take the same tile as 128, hence the same time; XLA's product alone takes 65 us
for them.
"""

_SHARED_BYTES = 226 << 10  # of the 227 KiB that a CTA may have, less its barriers
_MOST_STAGES = 6


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the kernel is cut.

    Attributes:
        columns: of a tile, a multiple of 16 up to 128.
        consumers: warpgroups that compute, 64 rows of the tile each; 2 or 3.
        shared: what the two CTAs of a cluster load for each other: "w", if their tiles lie below one another; "x", if
            they lie side by side; or None, without clusters.
    """

    columns: int = 128
    consumers: int = 2
    shared: str | None = None

    def __post_init__(self) -> None:
        if self.columns % 16 or not 16 <= self.columns <= 128:
            raise ValueError(f"columns must be a multiple of 16 up to 128, got {self.columns}")
        if self.consumers not in (2, 3):
            raise ValueError(f"consumers must be 2 or 3, got {self.consumers}")
        if self.consumers == 3 and self.columns > 112:
            raise ValueError(f"columns must be at most 112 for the registers of 3 consumers, got {self.columns}")
        if self.shared not in (None, "w", "x"):
            raise ValueError(f"shared must be None, 'w' or 'x', got {self.shared!r}")

    @property
    def rows(self) -> int:
        return ROWS * self.consumers

    @property
    def cluster(self) -> tuple[int, int]:
        """CTAs of a cluster: down and across."""
        return 1 + (self.shared == "w"), 1 + (self.shared == "x")

    @property
    def blocks(self) -> int:
        """Loads of 64 columns, of gate and of up each; what they have more than `columns` is loaded in vain."""
        return -(-self.columns // DEPTH)

    @property
    def stage_bytes(self) -> int:
        return 2 * DEPTH * (self.rows + 2 * self.blocks * DEPTH)

    @property
    def stages(self) -> int:
        return min(_MOST_STAGES, _SHARED_BYTES // self.stage_bytes)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a consumer's thread and of the producer's."""
        return (232, 40) if self.consumers == 2 else (160, 32)

    def clusters(self, rows: int, columns: int) -> tuple[int, int]:
        """How many clusters, down and across, an output has tiles for."""
        down, across = self.cluster
        return -(-rows // (self.rows * down)), -(-columns // (self.columns * across))


def tilings(rows: int) -> Iterator[Tiling]:
    """All that `pick_tiling` picks from, for an output of so many rows."""
    for shared, consumers, columns in itertools.product((None, "w", "x"), (2, 3), (128, 112, 96, 64)):
        if consumers == 2 or columns <= 112:
            tiling = Tiling(columns, consumers, shared)
            if shared != "w" or rows > tiling.rows:
                yield tiling


_L2_BYTES = 38.0
"""Bytes a cycle that the L2 cache can give each of 132 multiprocessors that all ask: 5,120 in all, as NVIDIA states of
the A100; Hopper's rate is not published."""
_TURN_CYCLES = 4000.0
"""Cycles of a tile beside its products: the activation (two special functions an output, 16 a cycle) and the store."""


def estimated_cycles(tiling: Tiling, rows: int, depth: int, columns: int, ctas: int) -> float:
    """What the busiest CTA takes, by the limits of the chip.

    A stage of 64 takes as long as the slowest of its products (2,048 multiply-adds a cycle), its operands' way from
    shared memory (128 bytes a cycle, which loads into it take part in) and its loads. All CTAs take as many turns as
    the busiest.
    """
    t = tiling
    products = ROWS * t.consumers * 2 * t.columns * DEPTH / 2048
    whole = t.columns == DEPTH * t.blocks  # then x is read once for both, see `hopper_primitives.add_products`
    lines = t.consumers * ((1 if whole else 2) * ROWS + 2 * t.columns)
    shared = 2 * DEPTH * (lines + t.rows + 2 * t.blocks * DEPTH) / 128
    down, across = t.cluster
    loads = 2 * DEPTH * (t.rows / across + 2 * t.blocks * DEPTH / down) / _L2_BYTES
    turns = -(-math.prod(t.clusters(rows, columns)) // (ctas // (down * across)))
    return turns * (max(products, shared, loads) * -(-depth // DEPTH) + _TURN_CYCLES)


@functools.cache
def pick_tiling(rows: int, depth: int, columns: int, ctas: int) -> Tiling:
    """The tiling of the least `estimated_cycles`; of equals, the narrowest, and of these the first of `tilings`.

    Equals are bound by the same loads in as many turns, and the narrower has less to compute beside them: with 96
    columns instead of 128, 512 rows of Qwen3-0.6B took 13.4 us instead of 15.2, and 1,024 rows 22.4 instead of 26.3.
    """
    return min(tilings(rows), key=lambda t: (estimated_cycles(t, rows, depth, columns, ctas), t.columns))
