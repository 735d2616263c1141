"""How large the KV pool can be, and the table that says where the memory goes.

The pool takes what is left of the device's memory after the weights, the slot state, and what the largest programs
need while they run. The last comes from the compiler (`memory_analysis`), not from a trial run.
"""

import os
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.api.config import host_memory
from jpaged.api.errors import OutOfMemoryError
from jpaged.engine.interface import SWAP_CHUNK_BLOCKS
from jpaged.executor.cache.host_chunks import MOST_IN_TRANSIT
from jpaged.executor.start.compilation import Compiler
from jpaged.host.gpu_memory import free_and_total

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

_LEFT_TO_CUDA = 2**29
"""Bytes of a GPU that are left free where others use it, too: for programs, graphs and libraries."""

_LEAST_TAKEN = 2**28
"""Bytes that JAX may be short of without taking them ahead."""

_ROW = 2**21
"""Bytes of a row of the array by which it takes them."""


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


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a GPU.

    total, free: of the device, and of that what no process has.
    limit: that this process's JAX may have. reserved: that it has taken from the device; in_use: of that, for arrays,
        those of a trainer in this process included.
    """

    total: int
    free: int
    limit: int
    reserved: int
    in_use: int

    @classmethod
    def of(cls, device: jax.Device) -> "DeviceMemory | None":
        """As it is now; None for a CPU, whose memory is everybody's."""
        stats = device.memory_stats() if device.platform == "gpu" else None
        if stats is None:
            return None
        limit, in_use = stats["bytes_limit"], stats["bytes_in_use"]
        reserved = max(stats.get("pool_bytes", limit), in_use)
        found = free_and_total(int(device.local_hardware_id or 0))
        if found is None:  # then JAX holds from the beginning what it may have, as far as one can tell
            total = int(limit / float(os.environ[_FRACTION_VARIABLE]))
            return cls(total, limit - reserved, limit, reserved, in_use)
        free, total = found
        return cls(total, free, limit, reserved, in_use)

    def room(self, utilization: float) -> int:
        """Bytes that an engine may have beside what is in use.

        It has at most `utilization` of the device, together with the other arrays of this process; no more than JAX
        may have (XLA_PYTHON_CLIENT_MEM_FRACTION); and no more than other processes leave. Where it has to take memory
        from the device that it does not have yet, some is left for what CUDA needs beside arrays.
        """
        share = int(utilization * self.total) - self.in_use
        allowed = self.limit - self.in_use
        there = self.reserved - self.in_use + max(0, self.free - _LEFT_TO_CUDA)
        return max(0, min(share, allowed, there))

    def to_take(self, room: int) -> int:
        """Bytes of this room that JAX has not taken from the device yet."""
        return max(0, room - (self.reserved - self.in_use))


def free_device_memory(device: jax.Device, utilization: float, *, at_once: bool = False) -> int | None:
    """Bytes that may still be allocated on a GPU (`DeviceMemory.room`); None for a CPU.

    at_once: where JAX would grow bit by bit (XLA_PYTHON_CLIENT_PREALLOCATE=false), let it take now what it has not yet.
        It keeps that. Grown in pieces, it would have none that holds what a large program needs while it runs.
    """
    memory = DeviceMemory.of(device)
    if memory is None:
        return None
    room = memory.room(utilization)
    return room - _take(device, room) if at_once and allocates_on_demand() else room


def take_planned(device: jax.Device, plan: MemoryPlan) -> None:
    """Takes now what a plan needs besides the weights, where JAX allocates on demand: for pools of a given size, whose
    engine leaves the rest of its share to others.

    Raises:
        OutOfMemoryError: others have taken it since the plan was made.
    """
    needed = plan.state + plan.programs + plan.pool
    if DeviceMemory.of(device) is None or not allocates_on_demand():
        return
    if missing := _take(device, needed):
        raise OutOfMemoryError(
            f"Beside its weights the engine needs {needed / 2**30:.2f} GiB of the device, of which"
            f" {missing / 2**30:.2f} GiB are not there any more. Lower num_gpu_blocks_override or"
            " max_num_batched_tokens, or stop what else uses the device."
        )


def allocates_on_demand() -> bool:
    """Whether JAX takes memory of a GPU as arrays are made, and not when it first touches the device."""
    return os.environ.get(_AT_ONCE_VARIABLE) in ("0", "false", "False")


def _take(device: jax.Device, wanted: int) -> int:
    """Lets JAX take memory from a device, in as few pieces as there are, until it has so many bytes that no array is
    in. Returns how many it lacks then; 0 for a few.

    An array that fits what JAX has already makes it take nothing. So arrays are held until there is enough.
    """
    held: list[jax.Array] = []
    try:
        while True:
            memory = DeviceMemory.of(device)
            assert memory is not None
            missing = memory.to_take(wanted - sum(array.nbytes for array in held))
            if missing < _LEAST_TAKEN:
                return 0
            array = _array(device, missing)
            if array is None:
                return missing
            held.append(array)
    finally:
        for array in held:
            array.delete()


def _array(device: jax.Device, size: int) -> jax.Array | None:
    """An array of so many bytes, or of as many, from half of them on, as there are in one piece."""
    for sixteenths in range(16, 7, -1):
        rows = size * sixteenths // 16 // _ROW
        found = free_and_total(int(device.local_hardware_id or 0))
        memory = DeviceMemory.of(device)
        if found is not None and memory is not None and rows * _ROW > max(found[0], memory.reserved - memory.in_use):
            continue  # JAX would wait ten seconds for it
        try:
            return jnp.zeros((rows, _ROW), jnp.uint8, device=device).block_until_ready()
        except jax.errors.JaxRuntimeError:  # others have it meanwhile, or it is in pieces
            continue
    return None


def unreserved_device_memory(device: jax.Device) -> int:
    """Bytes of a GPU that this process leaves to others; 0 for a CPU."""
    memory = DeviceMemory.of(device)
    return 0 if memory is None else max(0, memory.total - memory.limit)


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
        fewer = "max_num_seqs, num_state_snapshots" if config.num_state_snapshots else "max_num_seqs"
        raise OutOfMemoryError(
            f"The device offers {_gib(limit)}; weights take {_gib(weights)}, programs {_gib(programs)} and state "
            f"{_gib(state)}. That leaves {max(room, 0)} blocks of {_gib(block)}, so {asked}. Raise "
            f"gpu_memory_utilization, lower max_num_batched_tokens or {fewer}, or use a smaller model."
        )
    if compiler.setup.model.config.counts_tokens_alone:
        sequences = config.max_num_seqs + config.num_state_snapshots
        room = min(room, sequences * cache.sequence_blocks(config.max_model_len) + 1)
    return MemoryPlan(weights, state, programs, block, num_blocks or room)


def _program_bytes(compiler: Compiler, pipeline_depth: int) -> int:
    """What the largest programs need at once, and the results of the steps in flight."""
    programs = [compiler.result(program) for program in compiler.submit_largest()]
    temporary = max(program.temp_bytes for program in programs)
    results = max(program.output_bytes - program.alias_bytes for program in programs)
    slack = 0.02 * (temporary + results) + 2**29  # fragmentation, and small programs' buffers
    return int(temporary + (pipeline_depth + 1) * results + slack)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
