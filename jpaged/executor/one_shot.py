"""Whether sums over devices go through the one-shot all-reduce (`pallas_kernels.all_reduce`), and for how many rows."""

import ctypes
from collections.abc import Sequence
from itertools import permutations

import jax

from jpaged.errors import InvalidParameterError
from jpaged.executor.mesh import DeviceMesh
from jpaged.models import Model
from jpaged.pallas_kernels import all_reduce_unsupported
from jpaged.pallas_kernels.all_reduce import MIN_MULTIPROCESSORS
from jpaged.pallas_kernels.backends import device_runs_mosaic

DEFAULT_ROWS = 64
"""On two H200s the kernel took 6 to 10 us for up to 64 rows of 4,096 columns, NCCL 11 to 18."""

_NATIVE_ATOMICS = 3
"""CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED: over NVLink, not over PCIe."""


def one_shot_rows(asked: int | None, kernel_backend: str | None, shard: Model, mesh: DeviceMesh) -> int:
    """Rows up to which a body's sums are one-shot; 0 for none.

    asked: what the user wants, None to leave it to the devices. Where no GPU is, or `kernel_backend` is "xla", nothing
        is one-shot unless asked for, and then it is the op's XLA implementation, which adds in the same order.
    shard: what each device of the mesh runs.
    Raises:
        InvalidParameterError: asked for where the kernel cannot run.
    """
    if mesh.size == 1:
        return 0
    if mesh.devices[0].platform != "gpu" or kernel_backend == "xla":
        return asked or 0
    reason = kernel_missing(shard, mesh)
    if asked and reason is not None:
        raise InvalidParameterError(f"one_shot_rows={asked} cannot be had: {reason}. Leave it out, or give 0.")
    if asked is not None:
        return asked
    return DEFAULT_ROWS if reason is None else 0


def kernel_missing(shard: Model, mesh: DeviceMesh) -> str | None:
    """Why the devices of this mesh cannot run the kernel on this model's rows; None if they can."""
    if jax.process_count() > 1:
        return "the model spans several processes"
    if not device_runs_mosaic():
        return f"{mesh.devices[0].device_kind} is not of the Hopper generation"
    if (reason := all_reduce_unsupported(shard.config.hidden_size, shard.dtype, mesh.size)) is not None:
        return reason
    fewest = min(getattr(device, "core_count", 0) for device in mesh.devices)
    if fewest < MIN_MULTIPROCESSORS:
        return f"{mesh.devices[0].device_kind} has {fewest} multiprocessors, fewer than {MIN_MULTIPROCESSORS}"
    if not _are_linked([device.local_hardware_id for device in mesh.devices]):
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
    for one, other in permutations(handles, 2):
        found = ctypes.c_int()
        if cuda.cuDeviceGetP2PAttribute(ctypes.byref(found), _NATIVE_ATOMICS, one, other) or not found.value:
            return False
    return True
