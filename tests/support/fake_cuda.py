"""libcuda, as far as `jpaged.host.device_memory` calls it, on a machine without a GPU: the device's memory is memory of
the host that processes share (memfd), so that what one process exports, another one reads.

    JPAGED_FAKE_CUDA=UUID    for `fragile_engine`: 16 bytes in hexadecimal; its CPU is the device with this UUID

A fake refuses what the driver refuses: calls without a context, handles of its own process, addresses that it does not
know. Reads before `cuMemSetAccess` fault.
"""

import ctypes
import mmap
import os
import threading
from typing import Any

import jax
import numpy as np

from jpaged.executor.views import view
from jpaged.host import device_memory
from jpaged.host.device_memory import SharedMemoryDevice

VARIABLE = "JPAGED_FAKE_CUDA"

INVALID_VALUE, INVALID_CONTEXT, OUT_OF_MEMORY = 1, 201, 2
_NAMES = {1: b"CUDA_ERROR_INVALID_VALUE", 2: b"CUDA_ERROR_OUT_OF_MEMORY", 201: b"CUDA_ERROR_INVALID_CONTEXT"}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FIXED, _PROT_NONE = 0x10, 0


class FakeCuda:
    """The driver as one process has it.

    uuid: of its only device. failing: names of calls that fail; may change. is_other_process: it opens handles that
    this process has exported, as if it were another one's.

    Attributes:
        mapped: bytes that it has opened, by address; handles: memory that it knows by a number. Both are empty when all
        was given back. num_current: contexts that were pushed and not popped. calls: the names of those that were made.
    """

    def __init__(self, uuid: bytes, is_other_process: bool = False) -> None:
        self.uuid = uuid
        self.failing: set[str] = set()
        self.is_other_process = is_other_process
        self.mapped: dict[int, int] = {}
        self.handles: dict[int, int] = {}  # descriptors
        self.num_current = 0
        self.calls: list[str] = []
        self.peers = {0: True}  # by ordinal: whether it reads memory of device 0, which is the one with memory
        self._allocations: dict[int, tuple[int, int, bool]] = {}  # bytes, descriptor, by cuMemCreate
        self._next = 1
        self._lock = threading.Lock()

    def allocate(self, num_bytes: int, created: bool) -> int:
        """Memory of the device; returns where. created: by cuMemCreate, not cuMemAlloc."""
        fd = os.memfd_create("fake")
        os.ftruncate(fd, num_bytes)
        address = _libc.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        self._allocations[address] = num_bytes, fd, created
        return address

    def free(self) -> None:
        """All that was allocated."""
        for address, (num_bytes, fd, _) in self._allocations.items():
            _libc.munmap(address, num_bytes)
            os.close(fd)
        self._allocations.clear()

    def __getattr__(self, name: str) -> Any:
        call = getattr(type(self), f"_{name}", None)
        if call is None:
            raise AttributeError(f"undefined symbol: {name}")

        def run(*arguments: Any) -> int:
            if name in self.failing:
                return OUT_OF_MEMORY
            with self._lock:
                self.calls.append(name)
                if not self.num_current and not name.startswith(("cuInit", "cuDevice", "cuCtxPush", "cuGetError")):
                    return INVALID_CONTEXT
                return call(self, *(getattr(one, "_obj", one) for one in arguments)) or 0

        return run

    def _cuInit(self, flags: int) -> None: ...

    def _cuDeviceGetCount(self, count: Any) -> None:
        count.value = len(self.peers)

    def _cuDeviceGet(self, device: Any, ordinal: int) -> int | None:
        device.value = ordinal
        return None if ordinal in self.peers else INVALID_VALUE

    def _cuDeviceCanAccessPeer(self, can: Any, device: Any, peer: Any) -> int | None:
        can.value = self.peers[device.value]
        return None if device.value != peer.value == 0 else INVALID_VALUE

    def _cuDeviceGetUuid_v2(self, uuid: Any, device: Any) -> None:
        uuid.raw = self.uuid

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> None:
        context.value = 7

    def _cuCtxPushCurrent_v2(self, context: Any) -> int | None:
        self.num_current += 1
        return None if context.value == 7 else INVALID_CONTEXT

    def _cuCtxPopCurrent_v2(self, context: Any) -> None:
        self.num_current -= 1

    def _cuCtxSynchronize(self) -> None: ...

    def _cuGetErrorName(self, code: int, text: Any) -> None:
        text.value = _NAMES[code]

    def _cuMemGetAddressRange_v2(self, base: Any, size: Any, address: Any) -> int | None:
        for begin, (num_bytes, _, _) in self._allocations.items():
            if begin <= address.value < begin + num_bytes:
                base.value, size.value = begin, num_bytes
                return None
        return INVALID_VALUE

    def _cuMemRetainAllocationHandle(self, handle: Any, address: Any) -> int | None:
        _, fd, created = self._allocations[address.value]
        if not created:
            return INVALID_VALUE
        handle.value = self._new(os.dup(fd))
        return None

    def _cuMemExportToShareableHandle(self, fd: Any, handle: Any, kind: Any, flags: Any) -> None:
        assert (kind.value, flags.value) == (1, 0)
        fd.value = os.dup(self.handles[handle.value])
        os.set_inheritable(fd.value, True)  # as far as anybody knows

    def _cuMemRelease(self, handle: Any) -> None:
        os.close(self.handles.pop(handle.value))

    def _cuIpcGetMemHandle(self, handle: Any, base: Any) -> int | None:
        _, fd, created = self._allocations[base.value]
        if created:
            return INVALID_VALUE
        data = f"{os.getpid()}/fd/{fd}".encode().ljust(64)
        handle.data = type(handle.data)(*data)
        return None

    def _cuIpcOpenMemHandle_v2(self, base: Any, handle: Any, flags: Any) -> int | None:
        assert flags.value == 1
        path = bytes(handle).decode().strip()
        if path.split("/")[0] == str(os.getpid()) and not self.is_other_process:
            return INVALID_CONTEXT
        try:
            fd = os.open(f"/proc/{path}", os.O_RDONLY)
        except OSError:
            return INVALID_VALUE
        size = os.fstat(fd).st_size
        base.value = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        os.close(fd)
        self.mapped[base.value] = size
        return None

    def _cuIpcCloseMemHandle(self, base: Any) -> None:
        _libc.munmap(base.value, self.mapped.pop(base.value))

    def _cuMemImportFromShareableHandle(self, handle: Any, fd: Any, kind: Any) -> None:
        assert kind.value == 1
        handle.value = self._new(os.dup(fd.value))

    def _cuMemAddressReserve(self, base: Any, size: Any, alignment: Any, hint: Any, flags: Any) -> None:
        base.value = _libc.mmap(None, size.value, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self.mapped[base.value] = size.value

    def _cuMemAddressFree(self, base: Any, size: Any) -> None:
        assert self.mapped.pop(base.value) == size.value
        _libc.munmap(base.value, size.value)

    def _cuMemMap(self, base: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int | None:
        fd = self.handles[handle.value]
        if size.value != os.fstat(fd).st_size or offset.value:
            return INVALID_VALUE
        _libc.mmap(base.value, size.value, _PROT_NONE, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
        return None

    def _cuMemUnmap(self, base: Any, size: Any) -> None:
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _libc.mmap(base.value, size.value, _PROT_NONE, kind, -1, 0)

    def _cuMemSetAccess(self, base: Any, size: Any, access: Any, count: Any) -> None:
        found = [(one.location_type, one.location_id, one.flags) for one in access]
        assert found == [(1, ordinal, 1) for ordinal, can in self.peers.items() if can]
        assert count.value == len(found)
        _libc.mprotect(base.value, size.value, mmap.PROT_READ)

    def _new(self, fd: int) -> int:
        self._next += 1
        self.handles[self._next] = fd
        return self._next


def on_device(cuda: FakeCuda, given: dict[str, Any], created: bool = True) -> dict[str, jax.Array]:
    """The arrays on the fake's device, one behind the other in one allocation as JAX's allocator puts them."""
    arrays = {name: np.asarray(array) for name, array in given.items()}
    places, end = {}, 0
    for name, array in arrays.items():
        places[name] = end
        end += -(-array.nbytes // 256) * 256
    base = cuda.allocate(end, created)
    for name, array in arrays.items():
        ctypes.memmove(base + places[name], np.ascontiguousarray(array).ctypes.data, array.nbytes)
    device = jax.devices()[0]
    return {name: view(base + places[name], array.shape, array.dtype, device) for name, array in arrays.items()}


def install(cuda: FakeCuda) -> None:
    """This process's CPU is the fake's device from here on."""
    device = SharedMemoryDevice(cuda, 0)
    device_memory.BY_PLATFORM["cpu"] = lambda ordinal: device
