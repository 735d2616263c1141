"""Copy-on-write on the device: the program that copies a step's shared blocks before the step writes to them."""

from jaxtyping import Array, Int

from jpaged.executor.config import ExecutorConfig
from jpaged.executor.step.packing import PackedLayout
from jpaged.executor.step.programs import Pools
from jpaged.pallas_kernels import copy_blocks


def copy_layout(pairs: int) -> PackedLayout:
    """pairs: (from, to) each, padded with null blocks."""
    return PackedLayout(pairs=(pairs, 2))


def copy_blocks_step(config: ExecutorConfig, pairs: int, pools: Pools, packed: Int[Array, " n"]) -> Pools:
    """Copies `pairs` blocks in every layer."""
    source, target = copy_layout(pairs).unpack(packed)["pairs"].T
    return copy_blocks(pools, source, target, backend=config.kernel_backend)
