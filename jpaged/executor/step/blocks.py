"""The programs that move whole blocks: copy-on-write, and swaps to and from host memory.

copy_blocks[N]    a step's shared blocks, before it writes to them
gather_blocks     a chunk of blocks, on its way to host memory (`cache/host_chunks.py`)
scatter_blocks    a chunk that comes back
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import jax
from jaxtyping import Array, Int

from jpaged.engine.interface import NULL_BLOCK, SWAP_CHUNK_BLOCKS
from jpaged.executor.cache.paged import Pools
from jpaged.executor.mesh import Specs
from jpaged.executor.step.packing import Field, PackedLayout
from jpaged.executor.step.program import Setup, SingleProgram, StepProgram


@dataclass(frozen=True)
class CopyBlocks(StepProgram):
    """Copies blocks in every layer: pairs of (from, to)."""

    pairs: int

    kind = "copy_blocks"
    writes = ("pools",)

    @classmethod
    def programs(cls, setup: Setup) -> Iterable[Self]:
        return map(cls, setup.config.copy_buckets)

    def layout(self, setup: Setup) -> PackedLayout:
        return PackedLayout(pairs=Field((self.pairs, 2), NULL_BLOCK))

    def body(self, setup: Setup, *, pools: Pools, packed: Int[Array, " n"]) -> tuple[dict[str, object], None]:
        source, target = self.layout(setup).unpack(packed)["pairs"].T
        return {"pools": setup.cache.copy(pools, source, target)}, None


@dataclass(frozen=True)
class _ChunkProgram(SingleProgram):
    """Works on a chunk of blocks; `block_ids` says which."""

    def layout(self, setup: Setup) -> PackedLayout:
        return PackedLayout(block_ids=Field((SWAP_CHUNK_BLOCKS,), NULL_BLOCK))


@dataclass(frozen=True)
class GatherBlocks(_ChunkProgram):
    """A chunk's blocks of every layer, in one array."""

    kind = "gather_blocks"
    reads = ("pools",)

    def result_spec(self, setup: Setup) -> Specs:
        return setup.cache.staging_spec

    def body(self, setup: Setup, *, pools: Pools, packed: Int[Array, " n"]) -> tuple[dict[str, object], jax.Array]:
        return {}, setup.cache.gather(pools, self.layout(setup).unpack(packed)["block_ids"])


@dataclass(frozen=True)
class ScatterBlocks(_ChunkProgram):
    """Puts one chunk's blocks into the pool; places of no interest name the null block."""

    kind = "scatter_blocks"
    writes = ("pools",)

    def inputs(self, setup: Setup) -> dict[str, Any]:
        return {"staging": setup.cache.staging}

    def input_specs(self, setup: Setup) -> dict[str, Specs]:
        return {"staging": setup.cache.staging_spec}

    def body(
        self, setup: Setup, *, pools: Pools, staging: Array, packed: Int[Array, " n"]
    ) -> tuple[dict[str, object], None]:
        block_ids = self.layout(setup).unpack(packed)["block_ids"]
        return {"pools": setup.cache.scatter(pools, staging, block_ids)}, None


KINDS = (CopyBlocks, GatherBlocks, ScatterBlocks)
