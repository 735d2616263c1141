"""Whether sums over devices go through the one-shot all-reduce (`pallas_kernels.all_reduce`), and for how many rows."""

import ctypes
from collections.abc import Sequence
from itertools import permutations, product

import jax

from jpaged.api.errors import InvalidParameterError
from jpaged.executor.mesh import DeviceMesh
from jpaged.models import Model
from jpaged.pallas_kernels import all_reduce_unsupported
from jpaged.pallas_kernels.all_reduce.inbox import MIN_MULTIPROCESSORS, most_rows
from jpaged.pallas_kernels.registry import is_reference, kernels_here

MEASURED_ROWS = {2: 8192, 4: 256}
"""By number of devices, the most rows up to which the kernel is known to be the faster one. What a sum adds to residual
and norm on two H200s, rows of 4,096 columns: 1 to 512 of them 0 to 3 us, NCCL 15 to 35; 8,192 some 30, NCCL 252. On
four: 256 of them 14, NCCL as much for one (`docs/kernels.md`)."""

UNMEASURED_ROWS = 64
"""For other numbers of devices. Each sends its rows to every other one, of which NCCL's rings send less the more there
are: where they win is not known."""

_ACCESS, _NATIVE_ATOMICS = 2, 3
"""CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, ..._NATIVE_ATOMIC_SUPPORTED: the latter over NVLink, not over PCIe."""


def one_shot_rows(asked: int | None, kernel_backend: str | None, shard: Model, mesh: DeviceMesh) -> int:
    """Rows up to which a body's sums are one-shot; 0 for none.

    asked: what the user wants, None to leave it to the devices. Where no GPU is, or `kernel_backend` is the reference,
        nothing is one-shot unless asked for, and then it is the op's XLA implementation, which adds in the same order.
    shard: what each device of the mesh runs.
    Raises:
        InvalidParameterError: asked for where the kernel cannot run, or more rows than it can.
    """
    if mesh.size == 1:
        return 0
    if mesh.devices[0].platform != "gpu" or is_reference(kernel_backend):
        return asked or 0
    reason = kernel_missing(kernel_backend, shard, mesh)
    if asked and reason is not None:
        raise InvalidParameterError(f"one_shot_rows={asked} cannot be had: {reason}. Leave it out, or give 0.")
    if reason is not None:
        return 0
    most = most_rows(mesh.size, shard.config.hidden_size)
    if asked is None:
        return min(most, MEASURED_ROWS.get(mesh.size, UNMEASURED_ROWS))
    if asked > most:
        raise InvalidParameterError(
            f"one_shot_rows={asked} exceeds the {most} rows of {shard.config.hidden_size} that the kernel can sum over"
            f" {mesh.size} devices; lower it."
        )
    return asked


def kernel_missing(kernel_backend: str | None, shard: Model, mesh: DeviceMesh) -> str | None:
    """Why the devices of this mesh cannot run the kernel on this model's rows; None if they can.

    kernel_backend: whose kernel it must be; None takes any backend's that is chosen on the device.
    """
    if jax.process_count() > 1:
        return "the model spans several processes"
    if not (kernels := kernels_here(kernel_backend)):
        whose = "" if kernel_backend is None else f" of the backend {kernel_backend!r}"
        return f"the kernels{whose} are not made for {mesh.devices[0].device_kind}"
    if (reason := all_reduce_unsupported(shard.config.hidden_size, shard.dtype, mesh.size, kernels)) is not None:
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
    for (one, other), attribute in product(permutations(handles, 2), (_ACCESS, _NATIVE_ATOMICS)):
        found = ctypes.c_int()
        if cuda.cuDeviceGetP2PAttribute(ctypes.byref(found), attribute, one, other) or not found.value:
            return False
    return True
