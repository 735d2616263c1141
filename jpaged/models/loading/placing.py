"""Writes pieces of checkpoint tensors (`pieces.py`) into parameters and reads them out again, on the device by compiled
programs, or on the host by numpy.
"""

from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MOST_HOST_BYTES = 1 << 24
"""Largest parameter on a CPU that is put together by numpy: to compile what writes it takes longer than to copy it."""


def empty_parameter(leaf: jax.ShapeDtypeStruct, device: jax.Device | None) -> jax.Array | np.ndarray:
    """Zeros for pieces to be placed in: on the device, or a numpy array where that is faster (`MOST_HOST_BYTES`). What
    comes of it belongs on the device by `jax.device_put`, which leaves arrays that are there alone.

    device: the default device if None.
    """
    platform = jax.default_backend() if device is None else device.platform
    if platform == "cpu" and prod(leaf.shape) * leaf.dtype.itemsize <= MOST_HOST_BYTES:
        return np.zeros(leaf.shape, leaf.dtype)
    return jnp.zeros(leaf.shape, leaf.dtype, device=device)


def parameter_to_read(parameter: jax.Array) -> jax.Array | np.ndarray:
    """What tensors are read out of: the parameter, or a view of it in numpy where that is faster, likewise."""
    on_cpu = all(device.platform == "cpu" for device in parameter.devices())
    return np.asarray(parameter) if on_cpu and parameter.nbytes <= MOST_HOST_BYTES else parameter


def place(
    parameter: Any,
    tensor: Any,
    split: tuple[int, ...],
    axes: tuple[int, ...],
    offsets: tuple[int, ...],
    order: tuple[int, tuple[int, ...]] | None,
    keeps_largest: bool,
) -> Any:
    """The parameter, a JAX array (donated) or a numpy one (written to), with a tensor of it written into it.

    split: the shape that the tensor is reshaped to; order: then an axis of it and the entries that it takes; axes: then
        the transposition. offsets: where in the parameter the result begins. keeps_largest: as of `Piece`.
    """
    if isinstance(parameter, np.ndarray):
        return _place_on_host(parameter, np.asarray(tensor), split, axes, offsets, order, keeps_largest)
    return _place_at(parameter, tensor, split, axes, order, keeps_largest, np.asarray(offsets, np.int32))


def take(
    parameter: Any,
    shape: tuple[int, ...],
    split: tuple[int, ...],
    axes: tuple[int, ...],
    offsets: tuple[int, ...],
    order: tuple[int, tuple[int, ...]] | None,
) -> Any:
    """What `place` wrote, in the tensor's shape: a JAX array of a JAX parameter, a numpy array of a numpy one."""
    if isinstance(parameter, np.ndarray):
        return _take_on_host(parameter, shape, split, axes, offsets, order)
    return _take_at(parameter, shape, split, axes, order, np.asarray(offsets, np.int32))


def _place_on_host(
    parameter: np.ndarray,
    tensor: np.ndarray,
    split: tuple[int, ...],
    axes: tuple[int, ...],
    offsets: tuple[int, ...],
    order: tuple[int, tuple[int, ...]] | None,
    keeps_largest: bool,
) -> np.ndarray:
    """What `_place_at` computes."""
    piece = tensor.reshape(split)
    if order is not None:
        piece = piece.take(order[1], order[0])
    piece = piece.transpose(axes).astype(parameter.dtype)
    target = parameter[tuple(slice(start, start + size) for start, size in zip(offsets, piece.shape, strict=True))]
    target[...] = np.maximum(piece, target) if keeps_largest else piece
    return parameter


def _take_on_host(
    parameter: np.ndarray,
    shape: tuple[int, ...],
    split: tuple[int, ...],
    axes: tuple[int, ...],
    offsets: tuple[int, ...],
    order: tuple[int, tuple[int, ...]] | None,
) -> np.ndarray:
    """What `_take_at` computes."""
    piece = parameter[tuple(slice(start, start + split[axis]) for start, axis in zip(offsets, axes, strict=True))]
    piece = piece.transpose(np.argsort(axes))
    if order is not None:
        piece = piece.take(np.argsort(order[1]), order[0])
    return piece.reshape(shape)


# Compiled once for each kind of tensor, not for each tensor: neither names nor places are static.
@partial(jax.jit, static_argnums=(2, 3, 4, 5), donate_argnums=0)
def _place_at(
    parameter: jax.Array,
    tensor: jax.Array,
    split: tuple[int, ...],
    axes: tuple[int, ...],
    order: tuple[int, tuple[int, ...]] | None,
    keeps_largest: bool,
    offsets: jax.Array,
) -> jax.Array:
    piece = tensor.reshape(split)
    if order is not None:
        piece = jnp.take(piece, np.array(order[1]), order[0])
    piece = piece.transpose(axes).astype(parameter.dtype)
    if keeps_largest:
        piece = jnp.maximum(piece, jax.lax.dynamic_slice(parameter, list(offsets), piece.shape))
    return jax.lax.dynamic_update_slice(parameter, piece, list(offsets))


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _take_at(
    parameter: jax.Array,
    shape: tuple[int, ...],
    split: tuple[int, ...],
    axes: tuple[int, ...],
    order: tuple[int, tuple[int, ...]] | None,
    offsets: jax.Array,
) -> jax.Array:
    piece = jax.lax.dynamic_slice(parameter, list(offsets), tuple(split[axis] for axis in axes))
    piece = jnp.transpose(piece, sorted(range(len(axes)), key=axes.__getitem__))
    if order is not None:
        piece = jnp.take(piece, np.argsort(order[1]), order[0])
    return piece.reshape(shape)
