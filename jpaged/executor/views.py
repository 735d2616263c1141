"""Arrays of JAX over memory that JAX has not allocated: addresses of a device, through DLPack, without a copy."""

import ctypes
from typing import Any

import jax
import numpy as np


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


CODES = {"bfloat16": 4, "float16": 2, "float32": 2}
"""DLPack's codes of the types that views may have, by name."""

_DEVICE_TYPES = {"cpu": 1, "gpu": 2}
"""DLPack's, by JAX's name of the platform."""

_NAME = b"dltensor"

_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_FREE = ctypes.cast(_libc.free, ctypes.c_void_p).value


class _Export:
    """Addresses of a device, as DLPack wants them.

    What describes them lies in one piece of C's heap, whose deleter is C's `free`: XLA may call that at any time, from
    any thread, and it needs no interpreter.
    """

    def __init__(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: jax.Device) -> None:
        self._address, self._shape, self._dtype = address, shape, dtype
        self._device = (_DEVICE_TYPES[device.platform], int(device.local_hardware_id or 0))

    def __dlpack__(self, **_: Any) -> Any:
        ndim = len(self._shape)
        block = _libc.malloc(ctypes.sizeof(_ManagedTensor) + ndim * ctypes.sizeof(ctypes.c_int64))
        if not block:
            raise MemoryError
        extent = (ctypes.c_int64 * ndim).from_address(block + ctypes.sizeof(_ManagedTensor))
        extent[:] = list(self._shape)
        managed = _ManagedTensor.from_address(block)
        managed.tensor = _Tensor(
            self._address,
            *self._device,
            ndim,
            CODES[self._dtype.name],
            8 * self._dtype.itemsize,
            1,
            ctypes.cast(extent, ctypes.POINTER(ctypes.c_int64)),
            None,
            0,
        )
        managed.context, managed.deleter = None, _FREE
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(block, _NAME, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def view(address: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: jax.Device) -> jax.Array:
    """An array of memory that begins at `address`, in C order. The array does not own the memory, which must stay until
    no program reads the array any more.

    address: of the GPU, or of this process where the device is a CPU. dtype: one of `CODES`.
    """
    return jax.dlpack.from_dlpack(_Export(address, shape, dtype, device), copy=False)
