"""Over which GPUs the one-shot kernel can sum, and up to how many rows it pays."""

import ctypes
from collections.abc import Sequence
from itertools import permutations, product

import jax

from jpaged.pallas_kernels.all_reduce.inbox import MIN_MULTIPROCESSORS, most_rows

MEASURED_ROWS = {2: 8192, 4: 256}
"""By number of devices, the most rows up to which the kernel is known to be the faster one. What a sum adds to residual
and norm on two H200s, rows of 4,096 columns: 1 to 512 of them 0 to 3 us, NCCL 15 to 35; 8,192 some 30, NCCL 252. On
four: 256 of them 14, NCCL as much for one (`docs/kernels_steps.md`)."""

UNMEASURED_ROWS = 64
"""For other numbers of devices. Each sends its rows to every other one, of which NCCL's rings send less the more there
are: where they win is not known."""

_ACCESS, _NATIVE_ATOMICS = 2, 3
"""CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, ..._NATIVE_ATOMIC_SUPPORTED: the latter over NVLink, not over PCIe."""


def worthwhile_rows(num_devices: int, hidden: int) -> int:
    """Rows of 16-bit floats up to which the kernel is used over this many devices, two or more, unless more are asked
    for.
    """
    return min(most_rows(num_devices, hidden), MEASURED_ROWS.get(num_devices, UNMEASURED_ROWS))


def devices_unsupported(devices: Sequence[jax.Device]) -> str | None:
    """Why the kernel cannot sum over these GPUs of one process; None if it can. `all_reduce_unsupported` says so of the
    rows.
    """
    fewest = min(getattr(device, "core_count", 0) for device in devices)
    if fewest < MIN_MULTIPROCESSORS:
        return f"{devices[0].device_kind} has {fewest} multiprocessors, fewer than {MIN_MULTIPROCESSORS}"
    if not _are_linked([device.local_hardware_id for device in devices]):
        return "NVLink does not join each of the GPUs with each other"
    return None


def _are_linked(gpus: Sequence[int]) -> bool:
    """Whether each of the GPUs, by CUDA's numbers, reaches each other's memory over NVLink."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    handles = [ctypes.c_int() for _ in gpus]
    for handle, gpu in zip(handles, gpus, strict=True):
        if cuda.cuDeviceGet(ctypes.byref(handle), gpu):
            return False
    for (one, other), attribute in product(permutations(handles, 2), (_ACCESS, _NATIVE_ATOMICS)):
        found = ctypes.c_int()
        if cuda.cuDeviceGetP2PAttribute(ctypes.byref(found), attribute, one, other) or not found.value:
            return False
    return True
