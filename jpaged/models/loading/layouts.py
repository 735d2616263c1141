"""Writes arrays that are on the device into parameters that are there, in place: what `checkpoint.load` does with what
it reads from files.

    tensor [out, in] --relayout--> piece --written at its offsets--> parameter, donated: its buffer stays the same

One program for each kind of parameter and of tensors that are written into it together, compiled when the first of them
come.
"""

from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jpaged.models.loading.pieces import Part, Piece, repeat_kv_heads


@dataclass(frozen=True)
class Layout:
    """How an array becomes what is written into a parameter; fields as of `Piece`.

    kv_head_copies, kv_head_axis, kv_slots: of a whole parameter with key-value heads: how often the shards hold each,
        where in it the heads are, and slots behind those of the queries (`repeat_kv_heads`).
    """

    split: tuple[int, ...]
    axes: tuple[int, ...]
    copies: int = 1
    copied_axis: int = 0
    order: tuple[int, ...] = ()
    ordered_axis: int = 0
    part: Part | None = None
    kv_head_copies: int = 1
    kv_head_axis: int = 0
    kv_slots: int = 0

    @classmethod
    def of_piece(cls, piece: Piece) -> "Layout":
        """Of a checkpoint's tensor."""
        return cls(
            piece.split, piece.axes, piece.copies, piece.copied_axis, piece.order, piece.ordered_axis, piece.part
        )

    @classmethod
    def of_parameter(
        cls, shape: tuple[int, ...], kv_head_copies: int = 1, kv_head_axis: int = 0, kv_slots: int = 0
    ) -> "Layout":
        """Of a whole parameter, given as the model has it."""
        axes = tuple(range(len(shape)))
        if kv_head_copies == 1:
            return cls(shape, axes)
        return cls(shape, axes, kv_head_copies=kv_head_copies, kv_head_axis=kv_head_axis, kv_slots=kv_slots)

    def apply(self, tensor: jax.Array) -> jax.Array:
        """The array in the parameter's layout; traced."""
        piece = tensor if self.part is None else self.part.of(tensor)
        piece = piece.reshape(self.split)
        if self.order:
            piece = jnp.take(piece, np.array(self.order), self.ordered_axis)
        if self.copies > 1:
            piece = jnp.repeat(piece, self.copies, self.copied_axis)
        piece = piece.transpose(self.axes)
        if self.kv_head_copies == 1:
            return piece
        return repeat_kv_heads(piece, self.kv_head_copies, self.kv_head_axis, self.kv_slots)


@dataclass(frozen=True)
class Places:
    """Where some tensors go in one parameter. layouts, offsets: of each."""

    layouts: tuple[Layout, ...]
    offsets: tuple[tuple[int, ...], ...]


_THREADS = 4
"""That copy arrays from host memory: one alone does not keep the bus busy."""

_AHEAD = 6
"""Groups of arrays, at most, that are on their way."""

COPIED_BYTES = 256 << 20
"""That copies may take on a device until they are written, unless one alone takes more: no plan of its memory counts
them."""


def brought(groups: Sequence[Sequence[Any]], targets: Sequence[Sharding]) -> Generator[list[jax.Array], None, None]:
    """Groups of arrays, one after the other, where they are to be. Those that are there come as they are; others are
    copied ahead of the group that is asked for, as many as `COPIED_BYTES` hold, or as the largest takes.

    Who asks for the next group must have written the one before, and hold none of its copies: then there is room.

    targets: of each group.
    """
    sizes = [sum(copied_bytes(one, target) for one in tensors) for tensors, target in zip(groups, targets, strict=True)]
    most = max(COPIED_BYTES, *sizes, 0)
    with ThreadPoolExecutor(_THREADS) as threads:
        window: deque[list[jax.Array | Future[jax.Array]]] = deque()
        ahead = 0  # bytes of copies in the window
        for number, size in enumerate(sizes):
            while ahead + size > most or len(window) >= _AHEAD:
                ahead -= sizes[number - len(window)]
                yield [_arrived(one) for one in window.popleft()]
            tensors, target = groups[number], targets[number]
            window.append([one if _is_at(one, target) else threads.submit(_copied, one, target) for one in tensors])
            ahead += size
        while window:
            yield [_arrived(one) for one in window.popleft()]


def copied_bytes(tensor: Any, target: Sharding) -> int:
    """Bytes that a copy of an array takes on each of the devices where it is to be; 0 of one that is there."""
    return 0 if _is_at(tensor, target) else int(tensor.nbytes)


def _is_at(tensor: Any, target: Sharding) -> bool:
    return isinstance(tensor, jax.Array) and tensor.sharding == target


def _copied(tensor: Any, target: Sharding) -> jax.Array:
    return jax.device_put(tensor, target).block_until_ready()


def _arrived(tensor: "jax.Array | Future[jax.Array]") -> jax.Array:
    return tensor.result() if isinstance(tensor, Future) else tensor


def write(parameter: jax.Array, tensors: Sequence[jax.Array], places: Places) -> jax.Array:
    """The parameter, on one device, with arrays that are there written into it at their places, in its type. Donates
    the parameter, never the arrays: what a trainer holds stays its own.
    """
    return _write(parameter, tuple(tensors), _on_devices(places.offsets, parameter.sharding), places.layouts)


def write_sharded(
    parameter: jax.Array, tensors: Sequence[jax.Array], places: Places, axis: int | None, mesh: Mesh
) -> jax.Array:
    """As `write`, into a parameter whose shards lie along `axis` of it (None: whole on each device), each the size of
    the last padded. Each device has all of the arrays.
    """
    offsets = _on_devices(places.offsets, NamedSharding(mesh, PartitionSpec()))
    return _sharded_writer(mesh, axis, parameter.ndim)(parameter, tuple(tensors), offsets, places.layouts)


@lru_cache(maxsize=4096)
def _on_devices(offsets: tuple[tuple[int, ...], ...], sharding: Sharding) -> jax.Array:
    """Offsets where the parameter is, int32 [tensors, axes]. They are kept: sending them takes longer than starting the
    program that reads them."""
    return jax.device_put(np.array(offsets, np.int32).reshape(len(offsets), -1), sharding)


@partial(jax.jit, static_argnums=3, donate_argnums=0)
def _write(
    parameter: jax.Array, tensors: tuple[jax.Array, ...], offsets: jax.Array, layouts: tuple[Layout, ...]
) -> jax.Array:
    for tensor, layout, start in zip(tensors, layouts, offsets, strict=True):
        piece = layout.apply(tensor).astype(parameter.dtype)
        parameter = jax.lax.dynamic_update_slice(parameter, piece, list(start))
    return parameter


@cache
def _sharded_writer(mesh: Mesh, axis: int | None, ndim: int) -> Any:
    (name,) = mesh.axis_names
    spec = PartitionSpec() if axis is None else PartitionSpec(*(name if i == axis else None for i in range(ndim)))

    def write_all(
        parameter: jax.Array, tensors: tuple[jax.Array, ...], offsets: jax.Array, layouts: tuple[Layout, ...]
    ) -> jax.Array:
        def write_shard(shard: jax.Array, tensors: tuple[jax.Array, ...], offsets: jax.Array) -> jax.Array:
            for tensor, layout, start in zip(tensors, layouts, offsets, strict=True):
                piece = layout.apply(tensor).astype(shard.dtype)
                if axis is None:
                    shard = jax.lax.dynamic_update_slice(shard, piece, list(start))
                else:
                    shard = _write_part(shard, piece, list(start), axis, jax.lax.axis_index(name))
            return shard

        whole = PartitionSpec()
        mapped = jax.shard_map(write_shard, mesh=mesh, in_specs=(spec, whole, whole), out_specs=spec, check_vma=False)
        return mapped(parameter, tensors, offsets)

    return jax.jit(write_all, static_argnums=3, donate_argnums=0, out_shardings=NamedSharding(mesh, spec))


def _write_part(shard: jax.Array, piece: jax.Array, offsets: list[jax.Array], axis: int, index: jax.Array) -> jax.Array:
    """A shard with those entries of a piece that are its own written into it; offsets: in the whole parameter."""
    size = shard.shape[axis]
    places = index * size + jnp.arange(size) - offsets[axis]  # of the shard's entries, in the piece
    own = (places >= 0) & (places < piece.shape[axis])
    taken = jnp.take(piece, jnp.clip(places, 0, piece.shape[axis] - 1), axis)
    local = [jnp.zeros_like(offset) if i == axis else offset for i, offset in enumerate(offsets)]
    held = jax.lax.dynamic_slice(shard, local, taken.shape)
    mask = own.reshape([size if i == axis else 1 for i in range(shard.ndim)])
    return jax.lax.dynamic_update_slice(shard, jnp.where(mask, taken, held), local)
