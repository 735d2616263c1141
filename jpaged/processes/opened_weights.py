"""Weights in another process's device memory, as arrays of this process; `device_weights.py` is the sender's side."""

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import jax
import numpy as np

from jpaged.executor.views import view
from jpaged.host.device_memory import MemoryNotSharedError, SharedMemoryDevice, shared_memory_device
from jpaged.processes.descriptors import take_descriptors
from jpaged.processes.wire import UpdateWeightsOnDevice

log = logging.getLogger("jpaged.engine")


@contextmanager
def opened(message: UpdateWeightsOnDevice) -> Iterator[dict[str, jax.Array]]:
    """The arrays by name. At the end of the block they are deleted, once the devices have read them.

    Raises:
        MemoryNotSharedError: this process does not see their device, or cannot open their memory.
    """
    devices = _by_uuid()
    with ExitStack() as stack:
        bases = _map(message, devices, stack)
        views = {}
        for array in message.arrays:
            device, _ = devices[message.allocations[array.allocation].device]
            address = bases[array.allocation] + array.offset
            try:
                found = view(address, array.shape, np.dtype(array.dtype), device)
            except Exception as error:  # JAX has several
                raise MemoryNotSharedError(f"JAX does not take {array.name!r}: {error}") from error
            stack.callback(found.delete)
            views[array.name] = found
        for _, memory in devices.values():
            stack.callback(_settle, memory)
        yield views


def _by_uuid() -> dict[bytes, tuple[jax.Device, SharedMemoryDevice]]:
    """The devices of this process that can open memory. By UUID, since ordinals count only what a process sees."""
    found = {}
    for device in jax.local_devices():
        with suppress(MemoryNotSharedError):
            memory = shared_memory_device(device)
            found[memory.uuid] = device, memory
    return found


def _map(
    message: UpdateWeightsOnDevice, devices: dict[bytes, tuple[jax.Device, SharedMemoryDevice]], stack: ExitStack
) -> list[int]:
    """Where the allocations begin here, until the stack is closed."""
    num_created = sum(one.handle is None for one in message.allocations)
    with ExitStack() as descriptors:
        fds: list[int] = []
        if num_created:
            try:
                fds = take_descriptors(message.address)
            except OSError as error:
                raise MemoryNotSharedError(f"no descriptors can be had: {error}") from error
            for fd in fds:
                descriptors.callback(os.close, fd)
        if len(fds) != num_created:
            raise MemoryNotSharedError(f"{len(fds)} descriptors have come, {num_created} allocations need one")
        bases, left = [], iter(fds)
        for one in message.allocations:
            if one.device not in devices:
                raise MemoryNotSharedError(f"this process does not see the GPU with UUID {one.device.hex()}")
            memory = devices[one.device][1]
            base = memory.open(next(left) if one.handle is None else one.handle, one.num_bytes)
            stack.callback(_close, memory, base)
            bases.append(base)
        return bases


def _settle(memory: SharedMemoryDevice) -> None:
    with suppress(MemoryNotSharedError):  # a device that fails here says so to whoever uses it next
        memory.synchronize()


def _close(memory: SharedMemoryDevice, base: int) -> None:
    try:
        memory.close(base)
    except MemoryNotSharedError as error:
        log.warning("memory of another process stays mapped: %s", error)
