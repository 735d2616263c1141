"""Whether sums over devices go through the one-shot all-reduce (`pallas_kernels.all_reduce`), and for how many rows."""

import jax

from jpaged.api.errors import InvalidParameterError
from jpaged.executor.mesh import DeviceMesh
from jpaged.models import Model
from jpaged.pallas_kernels import all_reduce_unsupported
from jpaged.pallas_kernels.all_reduce.inbox import most_rows
from jpaged.pallas_kernels.all_reduce.limits import devices_unsupported, worthwhile_rows
from jpaged.pallas_kernels.registry import is_reference, kernels_here


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
    if asked is None:
        return worthwhile_rows(mesh.size, shard.config.hidden_size)
    most = most_rows(mesh.size, shard.config.hidden_size)
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
    return devices_unsupported(mesh.devices)
