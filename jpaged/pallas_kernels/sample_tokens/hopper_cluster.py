"""The cluster of CTAs that shares a row of logits."""

from dataclasses import dataclass
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

WARPS = 4  # of a warpgroup
RECORD_WORDS = 8  # a record's place in shared memory: two stores of 16 bytes


@dataclass(frozen=True)
class Cluster:
    """Who reduces, and arrays of which shape.

    ctas: of a cluster; 1, 2, 4 or 8.
    warpgroups: of a CTA.
    tile: elements that a warpgroup handles at once, a multiple of 512.
    """

    ctas: int = 8
    warpgroups: int = 2
    tile: int = 1024

    @property
    def workers(self) -> int:
        """Warpgroups."""
        return self.ctas * self.warpgroups

    @property
    def records(self) -> int:
        """Records of an exchange: one a warp of the cluster, a power of two."""
        return self.workers * WARPS

    @property
    def layout(self) -> Any:
        """A tile's layout in a warpgroup's registers: four neighbours a thread, as one load of 16 bytes brings them."""
        return plgpu.Layout.WG_STRIDED((self.tile,), vec_size=4)

    def records_bytes(self) -> int:
        """Shared memory of a CTA that exchanges take: two turns of records."""
        return 2 * self.records * RECORD_WORDS * 4
