"""Weights on their way to engine processes: in memory that all of them map, copied once however many there are.

this process      arrays --copied to the host--> memfd <--mapped-- engine processes --> their devices
"""

import os
import sys
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jpaged.api.errors import InvalidParameterError
from jpaged.api.weights import flat_weights
from jpaged.host.cores import usable_cores
from jpaged.processes.wire import SharedArray

_ALIGNMENT = 64

_NUMBERS = "biufcV"
"""`np.dtype.kind` of numbers; V is that of types which JAX adds, such as bfloat16."""


class SharedWeights:
    """Copies of arrays in memory that other processes of this user can map. It is freed by `close`, and when this
    process ends.

    weights: names to arrays of JAX or numpy, nested or flat, as `flat_weights` takes them.

    Attributes:
        path: where other processes find it. arrays: what is where in it.

    Raises:
        InvalidParameterError: they are no such mapping, or something in it is no array, or was deleted.
    """

    def __init__(self, weights: Mapping[Any, Any]) -> None:
        flat = flat_weights(weights)
        for name, array in flat.items():
            if not hasattr(array, "dtype") or not hasattr(array, "shape"):
                raise InvalidParameterError(f"weights: {name!r} is a {type(array).__name__}, not an array; convert it.")
            if isinstance(array, np.ma.MaskedArray):
                raise InvalidParameterError(f"weights: {name!r} is masked, and the mask would be lost; fill it.")
        self.arrays: list[SharedArray] = []
        offset = 0
        for name, array in flat.items():
            try:
                dtype = np.dtype(array.dtype)
            except TypeError as error:  # of JAX's own, as of random keys
                raise InvalidParameterError(f"weights: {name!r} has type {array.dtype}, not a number's.") from error
            if dtype.kind not in _NUMBERS or dtype.type is np.void:
                raise InvalidParameterError(f"weights: {name!r} has type {dtype}, not a number's.")
            if not dtype.isnative:
                raise InvalidParameterError(
                    f"weights: {name!r} has type {dtype}, in another order of bytes; convert it."
                )
            shared = SharedArray(name, dtype.name, tuple(array.shape), offset)
            self.arrays.append(shared)
            offset += -(-_num_bytes(shared) // _ALIGNMENT) * _ALIGNMENT
        self._fd = os.memfd_create("jpaged-weights", os.MFD_CLOEXEC)
        self._finalizer = weakref.finalize(self, os.close, self._fd)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        try:
            os.ftruncate(self._fd, offset)
            # To make pages takes longer than to write to them, and the kernel makes as many at once as it has cores.
            with ThreadPoolExecutor(min(8, usable_cores())) as threads:
                for done in [threads.submit(self._write, shared, flat[shared.name]) for shared in self.arrays]:
                    done.result()
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> frozenset[str]:
        return frozenset(array.name for array in self.arrays)

    def close(self) -> None:
        """Gives the memory back, once no process maps it any more. The second time it does nothing."""
        self._finalizer()

    def _write(self, shared: SharedArray, array: Any) -> None:
        try:
            host = np.ascontiguousarray(_without_host_copy(array))
        except Exception as error:  # JAX has several, for one that was deleted, is traced, or lies on other hosts
            raise InvalidParameterError(f"weights: {shared.name!r} cannot be copied to the host: {error}") from error
        data, offset = host.reshape(-1).view(np.uint8), shared.offset
        while len(data):
            written = os.pwrite(self._fd, data[: 2**30].data, offset)
            data, offset = data[written:], offset + written


def _num_bytes(array: SharedArray) -> int:
    return int(np.dtype(array.dtype).itemsize * np.prod(array.shape, dtype=np.int64))


def _without_host_copy(array: Any) -> Any:
    """A JAX array under a wrapper of its own: with the caller's, JAX would keep the copy on the host as well."""
    if not hasattr(array, "addressable_shards"):
        return array
    jax = sys.modules["jax"]  # this process has it only where the caller has
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def map_arrays(path: str, arrays: list[SharedArray]) -> dict[str, np.ndarray]:
    """The arrays that another process has shared, by name; read-only, and there as long as they are used.

    Raises:
        InvalidParameterError: a type that numpy does not know, or the memory cannot be mapped.
    """
    try:
        data = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise InvalidParameterError(f"The weights at {path} cannot be mapped ({error}).") from error
    found = {}
    for array in arrays:
        try:
            dtype = np.dtype(array.dtype)
        except TypeError as error:
            raise InvalidParameterError(f"weights: {array.name!r} has the unknown type {array.dtype!r}.") from error
        size = dtype.itemsize * int(np.prod(array.shape, dtype=np.int64))
        found[array.name] = data[array.offset : array.offset + size].view(dtype).reshape(array.shape)
    return found
