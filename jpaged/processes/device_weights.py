"""Weights on their way to engine processes of the same GPU: they stay there, and the processes are told where.

this process      arrays of JAX --in--> allocations --exported--> mapped by engine processes
                                                                  |
                                           their own parameters <-+ copied on the device
"""

import os
import time
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from jpaged.api.weights import flat_weights
from jpaged.host.device_memory import MemoryNotSharedError, SharedMemoryDevice, shared_memory_device
from jpaged.processes.descriptors import DescriptorServer
from jpaged.processes.wire import Allocation, DeviceArray

_TYPES = ("bfloat16", "float16", "float32")


class DeviceWeights:
    """Where arrays are in device memory that other processes may map. The memory is not freed before `close`, or before
    nobody has this object any more, even if the arrays are deleted or donated.

    weights: names to arrays of JAX, nested or flat, as `flat_weights` takes them. Waits until they are computed.

    Attributes:
        address, allocations, arrays: for `wire.UpdateWeightsOnDevice`.
        seconds: "ready" until the arrays were computed, "export" since.

    Raises:
        MemoryNotSharedError: an array is not whole on a GPU, or has a type or an order of its own; or memory cannot be
            exported.
        InvalidParameterError: as `flat_weights`.
    """

    def __init__(self, weights: Mapping[Any, Any]) -> None:
        begun = time.perf_counter()
        found = {name: _on_one_device(name, array) for name, array in flat_weights(weights).items()}
        undo = ExitStack()
        self._finalizer = weakref.finalize(self, undo.close)
        held = [_reference(name, array) for name, array in found.items()]
        undo.callback(held.clear)
        computed = time.perf_counter()
        self.allocations: list[Allocation] = []
        self.arrays: list[DeviceArray] = []
        self._numbers: dict[tuple[bytes, int], int] = {}
        self._fds: list[int] = []
        undo.callback(_close_all, self._fds)
        try:
            for name, array in found.items():
                self.arrays.append(self._place(name, array, shared_memory_device(array.device)))
            server = DescriptorServer(self._fds)
            undo.callback(server.close)
        except (OSError, RuntimeError) as error:  # no socket; no thread
            self.close()
            raise MemoryNotSharedError(f"descriptors cannot be handed out: {error}") from error
        except BaseException:
            self.close()
            raise
        self.address = server.address
        self.seconds = {"ready": computed - begun, "export": time.perf_counter() - computed}

    def close(self) -> None:
        """Lets go of the arrays; no process may read them any more. The second time it does nothing."""
        self._finalizer()

    def _place(self, name: str, array: Any, device: SharedMemoryDevice) -> DeviceArray:
        address = array.unsafe_buffer_pointer()
        base, num_bytes = device.allocation_of(address)
        offset = address - base
        if not 0 <= offset <= num_bytes - array.nbytes:
            raise MemoryNotSharedError(f"{name!r} lies in several allocations")
        number = self._numbers.get((device.uuid, base))
        if number is None:
            exported = device.export(base)
            if isinstance(exported, int):
                self._fds.append(exported)
            handle = None if isinstance(exported, int) else exported
            self.allocations.append(Allocation(device.uuid, num_bytes, handle))
            number = self._numbers[device.uuid, base] = len(self.allocations) - 1
        return DeviceArray(name, str(array.dtype), tuple(array.shape), number, offset)


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


def _on_one_device(name: str, array: Any) -> Any:
    """The array, computed, as one device has it."""
    if not hasattr(type(array), "addressable_shards"):
        raise MemoryNotSharedError(f"{name!r} is a {type(array).__name__}, not an array of JAX")
    try:
        array.block_until_ready()
        is_whole = array.is_fully_replicated
        array = array.addressable_shards[0].data
        layout, memory = array.format.layout, array.sharding.memory_kind
    except Exception as error:  # JAX has several, for one that was deleted, is traced, or lies on other hosts
        raise MemoryNotSharedError(f"{name!r} cannot be had: {error}") from error
    shared_memory_device(array.device)  # raises where processes cannot share the device's memory
    if not is_whole:
        raise MemoryNotSharedError(f"{name!r} is split over devices")
    if str(array.dtype) not in _TYPES:
        raise MemoryNotSharedError(f"{name!r} has type {array.dtype}")
    if memory != "device" or not array.size:
        raise MemoryNotSharedError(f"{name!r} has no memory of the device")
    if tuple(layout.major_to_minor) != tuple(range(array.ndim)):
        raise MemoryNotSharedError(f"{name!r} is not in C order")
    return array


def _reference(name: str, array: Any) -> Any:
    """A reference to the array's memory, which stays while there is one, even if the array is deleted or donated."""
    try:
        return array.__dlpack__()
    except Exception as error:  # JAX has several
        raise MemoryNotSharedError(f"{name!r} cannot be referred to: {error}") from error
