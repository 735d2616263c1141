"""Device memory of one process that another process of the same host maps.

    allocation --export--> Exported --to another process, open--> the same memory, at an address there

What is exported is a whole allocation, as the driver gave it; JAX's allocator takes a few large ones and cuts arrays
from them. There are two ways, by the calls that made the allocation:

    cuMemCreate    JAX 0.11 and newer    a file descriptor, which a Unix socket carries
    cuMemAlloc     JAX before it         a handle of CUDA IPC, 64 bytes

It must stay allocated until nobody has it open any more: to free memory of cuMemAlloc before is undefined.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

Exported = bytes | int
"""A handle of CUDA IPC, or a file descriptor of this process, which its holder closes."""

_HANDLE_BYTES, _UUID_BYTES = 64, 16

_LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_FILE_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_IN_DEVICE, _READ = 1, 1  # CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READ


class MemoryNotSharedError(Exception):
    """Another process cannot use this device memory; the message says why. Nothing was changed."""


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * _HANDLE_BYTES),)


class _Access(ctypes.Structure):
    _fields_ = (("location_type", ctypes.c_int), ("location_id", ctypes.c_int), ("flags", ctypes.c_int))


class SharedMemoryDevice:
    """The calls for one GPU, in the context that JAX uses there; JAX must have used the GPU before. From any thread.

    Args:
        cuda: the driver's library.
        ordinal: of the device, among those that this process sees.
    Attributes:
        uuid: the same in all processes, whatever devices they see. 16 bytes.
    Raises:
        MemoryNotSharedError: a call fails; so do all methods.
    """

    def __init__(self, cuda: Any, ordinal: int) -> None:
        self._cuda, self._ordinal = cuda, ordinal
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        uuid = ctypes.create_string_buffer(_UUID_BYTES)
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._call("cuDeviceGetUuid_v2", uuid, device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.uuid = uuid.raw
        self._mapped: dict[int, ExitStack] = {}  # by address: what undoes it

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Where the allocation begins that an address is in, and its bytes."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        with self._current():
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return base.value, size.value

    def export(self, base: int) -> Exported:
        """The allocation that begins at `base`, for other processes. Memory of a pool cannot be exported, nor can
        memory that was created without a type of handle.
        """
        with self._current():
            memory = ctypes.c_uint64()
            if self._code("cuMemRetainAllocationHandle", ctypes.byref(memory), ctypes.c_void_p(base)):
                handle = _Handle()
                self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
                return bytes(handle)
            try:
                fd = ctypes.c_int(-1)
                kind, flags = ctypes.c_int(_FILE_DESCRIPTOR), ctypes.c_uint64(0)
                self._call("cuMemExportToShareableHandle", ctypes.byref(fd), memory, kind, flags)
                os.set_inheritable(fd.value, False)
                return fd.value
            finally:
                self._call("cuMemRelease", memory)

    def open(self, exported: Exported, num_bytes: int) -> int:
        """Maps an allocation of another process, to be read; returns where. A handle cannot be opened in the process
        that exported it, nor in a container without its IPC namespace.

        num_bytes: of the allocation.
        """
        with self._current(), ExitStack() as undo:
            if isinstance(exported, bytes):
                base = self._open_handle(exported, undo)
            else:
                base = self._map_descriptor(exported, num_bytes, undo)
            self._mapped[base] = undo.pop_all()
        return base

    def close(self, base: int) -> None:
        """Unmaps what `open` has mapped at `base`. No program may be reading it."""
        with self._current():
            self._mapped.pop(base).close()

    def synchronize(self) -> None:
        """Waits for all that the device was given to do."""
        with self._current():
            self._call("cuCtxSynchronize")

    def _open_handle(self, handle: bytes, undo: ExitStack) -> int:
        base = ctypes.c_uint64()
        given, flags = _Handle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(base), given, flags)
        undo.callback(self._call, "cuIpcCloseMemHandle", base)
        return base.value

    def _map_descriptor(self, fd: int, num_bytes: int, undo: ExitStack) -> int:
        memory, base = ctypes.c_uint64(), ctypes.c_uint64()
        size, none = ctypes.c_size_t(num_bytes), ctypes.c_uint64(0)
        kind = ctypes.c_int(_FILE_DESCRIPTOR)
        self._call("cuMemImportFromShareableHandle", ctypes.byref(memory), ctypes.c_void_p(fd), kind)
        undo.callback(self._call, "cuMemRelease", memory)
        self._call("cuMemAddressReserve", ctypes.byref(base), size, ctypes.c_size_t(0), none, none)
        undo.callback(self._call, "cuMemAddressFree", base, size)
        self._call("cuMemMap", base, size, ctypes.c_size_t(0), memory, none)
        undo.callback(self._call, "cuMemUnmap", base, size)
        readers = self._readers()
        access = (_Access * len(readers))(*(_Access(_IN_DEVICE, ordinal, _READ) for ordinal in readers))
        self._call("cuMemSetAccess", base, size, access, ctypes.c_size_t(len(access)))
        return base.value

    def _readers(self) -> list[int]:
        """This device and its peers: a copy from one device to another may run on either."""
        count, device, is_peer = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), self._ordinal)
        self._call("cuDeviceGetCount", ctypes.byref(count))
        found = [self._ordinal]
        for ordinal in range(count.value):
            if ordinal == self._ordinal:
                continue
            other = ctypes.c_int()
            self._call("cuDeviceGet", ctypes.byref(other), ordinal)
            self._call("cuDeviceCanAccessPeer", ctypes.byref(is_peer), other, device)
            if is_peer.value:
                found.append(ordinal)
        return found

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Within which calls are for this device."""
        popped = ctypes.c_void_p()
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._cuda.cuCtxPopCurrent_v2(ctypes.byref(popped))

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._code(name, *arguments)
        if code:
            text = ctypes.c_char_p()
            self._code("cuGetErrorName", code, ctypes.byref(text))
            raise MemoryNotSharedError(f"{name} failed: {(text.value or b'error %d' % code).decode()}")

    def _code(self, name: str, *arguments: Any) -> int:
        try:
            call = getattr(self._cuda, name)
        except AttributeError as error:
            raise MemoryNotSharedError(f"the NVIDIA driver is too old: {error}") from error
        return int(call(*arguments))


@cache
def gpu(ordinal: int) -> SharedMemoryDevice:
    """The calls for one of the GPUs that this process sees.

    Raises:
        MemoryNotSharedError: there is no NVIDIA driver, it lacks these calls, or they fail.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise MemoryNotSharedError(f"there is no NVIDIA driver: {error}") from error
    return SharedMemoryDevice(cuda, ordinal)


BY_PLATFORM: dict[str, Callable[[int], SharedMemoryDevice]] = {"gpu": gpu}
"""The calls for a device by its ordinal, by JAX's name of the platform."""


def shared_memory_device(device: Any) -> SharedMemoryDevice:
    """The calls for a device of JAX.

    Raises:
        MemoryNotSharedError: as `gpu`; or processes cannot share the memory of such devices.
    """
    if device.platform not in BY_PLATFORM:
        raise MemoryNotSharedError(f"{device} is no GPU")
    return BY_PLATFORM[device.platform](int(device.local_hardware_id or 0))
