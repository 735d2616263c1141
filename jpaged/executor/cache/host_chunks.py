"""The swap space: chunks of KV blocks in host memory.

    out   pool --gather--> staging [arrays, SWAP_CHUNK_BLOCKS, *a block of the pool] --> pinned host memory
    in    pinned host memory --> staging --scatter--> pool

Both copies are dispatched and not waited for: the device gathers between two steps, and the transfer runs beside the
following ones. On a GPU chunks are in pinned host memory (`memory_kind="pinned_host"`), which the device copies at the
link's speed; on a CPU, whose device memory is host memory, a staging array simply stays where it is.
"""

from collections import deque

import jax

MOST_IN_TRANSIT = 4
"""Staging arrays on their way at a time; the next copy waits for the oldest. They bound the device memory it takes."""


class HostChunks:
    """The chunks that hold something, by number."""

    def __init__(self) -> None:
        self._chunks: dict[int, jax.Array] = {}
        self._in_transit: deque[jax.Array] = deque()

    def put(self, chunk: int, staging: jax.Array) -> None:
        """Moves a staging array to host memory, in the place of whatever the chunk held."""
        self._chunks[chunk] = self._move(staging, "pinned_host")

    def take(self, chunk: int, keep: bool = False) -> jax.Array:
        """Moves a chunk to the device, or copies it there, if it is to keep what it holds."""
        return self._move(self._chunks[chunk] if keep else self._chunks.pop(chunk), "device")

    def _move(self, array: jax.Array, memory_kind: str) -> jax.Array:
        if next(iter(array.devices())).platform == "cpu":
            return array
        if len(self._in_transit) == MOST_IN_TRANSIT:
            self._in_transit.popleft().block_until_ready()
        moved = jax.device_put(array, array.sharding.with_memory_kind(memory_kind))
        self._in_transit.append(moved)
        return moved
