"""How much of an NVIDIA GPU's memory anybody has, as the driver says: JAX knows only what it took itself."""

import ctypes


def free_and_total(ordinal: int) -> tuple[int, int] | None:
    """Bytes of a GPU that nobody has, and bytes of all of it; None where the driver does not say.

    ordinal: among those that this process sees. JAX must have touched it before: its context is used.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, context, popped = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), ordinal):
        return None
    if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return None
    try:
        if cuda.cuCtxPushCurrent_v2(context):
            return None
        failed = cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        cuda.cuCtxPopCurrent_v2(ctypes.byref(popped))
        return None if failed else (free.value, total.value)
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(device)
