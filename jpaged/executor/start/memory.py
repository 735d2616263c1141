"""How large the KV pool can be, and the table that says where the memory goes.

The pool takes what is left of the device's memory after the weights, the slot state, and what the largest programs
need while they run. The last comes from the compiler (`memory_analysis`), not from a trial run.
"""

import os
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np

from jpaged.api.config import host_memory
from jpaged.api.errors import OutOfMemoryError
from jpaged.engine.interface import SWAP_CHUNK_BLOCKS
from jpaged.executor.cache.host_chunks import MOST_IN_TRANSIT
from jpaged.executor.start.compilation import Compiler

CPU_POOL_BYTES = 2**30
"""Most that the pool takes of a CPU's memory unless the number of blocks is given: a CPU serves small models."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each device, by purpose. `programs` is 0 where nothing bounds them (CPU)."""

    weights: int
    state: int
    programs: int
    block: int
    num_blocks: int

    @property
    def pool(self) -> int:
        return self.block * self.num_blocks


_FRACTION_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"


_AT_ONCE_VARIABLE = "XLA_PYTHON_CLIENT_PREALLOCATE"


def reserve_device_memory(utilization: float, at_once: bool = True) -> None:
    """Lets JAX take this fraction of a GPU. It has effect only before JAX first touches the device.

    at_once: take it all at once; else bit by bit, as arrays are made, which leaves the rest to pages of the virtual
        layout.
    """
    os.environ.setdefault(_FRACTION_VARIABLE, f"{utilization:.3f}")
    if not at_once:
        os.environ[_AT_ONCE_VARIABLE] = "false"


def tree_bytes(tree: Any) -> int:
    return sum(prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def free_device_memory(device: jax.Device, utilization: float) -> int | None:
    """Bytes that may still be allocated on a GPU; None for a CPU, whose memory is everybody's.

    JAX holds a fraction of the device from the beginning; of that, no more than `utilization` is offered.
    """
    stats = device.memory_stats() if device.platform == "gpu" else None
    if stats is None:
        return None
    held = float(os.environ[_FRACTION_VARIABLE])
    return int(stats["bytes_limit"] * min(1.0, utilization / held)) - stats["bytes_in_use"]


def unreserved_device_memory(device: jax.Device) -> int:
    """Bytes of a GPU that this process leaves to others; 0 for a CPU."""
    stats = device.memory_stats() if device.platform == "gpu" else None
    return 0 if stats is None else int(stats["bytes_limit"] * (1 / float(os.environ[_FRACTION_VARIABLE]) - 1))


def plan_memory(compiler: Compiler, limit: int | None, num_blocks: int | None, pipeline_depth: int) -> MemoryPlan:
    """Decides the number of blocks.

    Args:
        compiler: of a setup whose `num_blocks` is nominal; programs are analysed with it.
        limit: bytes of each device, before the weights are loaded (`free_device_memory`).
        num_blocks: the user's choice, or None to fill the device.
        pipeline_depth: steps in flight whose results are alive beside the running one's.
    Raises:
        OutOfMemoryError: what is left after weights and programs does not hold the blocks asked for, or any.
    """
    config, cache = compiler.setup.config, compiler.setup.cache
    weights, state = tree_bytes(compiler.setup.model.abstract_weights), compiler.state_bytes
    block = cache.block_bytes
    if limit is None:
        useful = config.max_num_seqs * cache.sequence_blocks(config.max_model_len) + 1
        blocks = num_blocks or max(2, min(useful, CPU_POOL_BYTES // block))
        memory = host_memory()
        if weights + blocks * block > memory:
            raise OutOfMemoryError(
                f"The machine has {_gib(memory)} of memory; weights take {_gib(weights)} and {blocks} blocks "
                f"{_gib(blocks * block)}. Lower num_gpu_blocks_override, or use a smaller model."
            )
        return MemoryPlan(weights, state, 0, block, blocks)

    programs = _program_bytes(compiler, pipeline_depth) + MOST_IN_TRANSIT * SWAP_CHUNK_BLOCKS * block
    room = (limit - weights - state - programs) // block
    if room < (num_blocks or 2):
        asked = f"num_gpu_blocks_override={num_blocks} does not fit" if num_blocks else "there is no room for a KV pool"
        raise OutOfMemoryError(
            f"The device offers {_gib(limit)}; weights take {_gib(weights)}, programs {_gib(programs)} and state "
            f"{_gib(state)}. That leaves {max(room, 0)} blocks of {_gib(block)}, so {asked}. Raise "
            f"gpu_memory_utilization, lower max_num_batched_tokens or max_num_seqs, or use a smaller model."
        )
    return MemoryPlan(weights, state, programs, block, num_blocks or room)


def _program_bytes(compiler: Compiler, pipeline_depth: int) -> int:
    """What the largest programs need at once, and the results of the steps in flight."""
    programs = [compiler.result(program) for program in compiler.submit_largest()]
    temporary = max(program.temp_bytes for program in programs)
    results = max(program.output_bytes - program.alias_bytes for program in programs)
    slack = 0.02 * (temporary + results) + 2**28  # fragmentation, and small programs' buffers
    return int(temporary + (pipeline_depth + 1) * results + slack)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
