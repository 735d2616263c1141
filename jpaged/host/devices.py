"""Divides the devices among processes. Environment variables tell each process's JAX which are its own.

    visible            0 1 2 3                   2 processes with 2 devices each
    of process 0       0 1
    of process 1           2 3

Nothing here asks CUDA: that would take memory on every GPU for this process.
"""

import os
from collections.abc import Mapping
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path

from jpaged.api.config import EngineArgs
from jpaged.api.errors import InvalidParameterError

_CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_CPU_PROCESSES = 8
"""This many processes may share a CPU with fewer cores, so that replicas can be tried out anywhere."""


def replica_environments(args: EngineArgs, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment variables of `data_parallel_size` processes, with this package's path and each one's devices.

    Raises:
        InvalidParameterError: as `device_shares`.
    """
    common = package_environment(environment)
    return [common | own for own in device_shares(args.data_parallel_size, args.tensor_parallel_size, environment)]


def package_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a process, with this package's path."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    return {**environment, "PYTHONPATH": path}


def device_shares(num_processes: int, devices_each: int, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Each process's own variables: its GPUs. Empty on a machine without GPUs, where all share the CPU.

    Raises:
        InvalidParameterError: there are fewer GPUs than all processes need, or far fewer cores than processes.
    """
    gpus = visible_gpus(environment)
    if not gpus:
        cores = os.cpu_count() or 1
        if num_processes > max(cores, _CPU_PROCESSES):
            raise InvalidParameterError(
                f"data_parallel_size={num_processes} would start as many processes on {cores} cores of a machine"
                " that has no GPU; lower it."
            )
        return [{} for _ in range(num_processes)]
    if num_processes * devices_each > len(gpus):
        raise InvalidParameterError(
            f"data_parallel_size={num_processes} with tensor_parallel_size={devices_each} needs"
            f" {num_processes * devices_each} GPUs, but {len(gpus)} are visible; lower one of them."
        )
    parts = (gpus[i * devices_each : (i + 1) * devices_each] for i in range(num_processes))
    return [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts]


def missing_for_gpus() -> str:
    """What JAX lacks to use GPUs, as far as can be seen from outside, and what to do about it."""
    if not Path("/dev/nvidiactl").exists() and find_library("cuda") is None:
        return "there is no NVIDIA driver here (no /dev/nvidiactl, no libcuda.so)"
    if not any(find_spec(name) for name in _CUDA_PLUGINS):
        return "JAX's CUDA plugin is not installed; pip install 'jpaged[cuda12]' or 'jpaged[cuda13]', as the driver is"
    return "JAX's CUDA plugin cannot use the driver; JAX_LOGGING_LEVEL=DEBUG says why"


def no_device_message(environment: Mapping[str, str], reason: str) -> str:
    """What to tell a user for whom JAX has found no device. reason: JAX's own."""
    platforms = environment.get("JAX_PLATFORMS", "")
    if {"cuda", "gpu"} & set(platforms.lower().split(",")):
        return (
            f"JAX_PLATFORMS={platforms} asks for a GPU, but JAX finds none: {missing_for_gpus()}. JAX_PLATFORMS=cpu"
            " runs on the CPU."
        )
    asked = f"JAX_PLATFORMS={platforms}" if platforms else "this machine"
    return f"JAX finds no device for {asked}: {' '.join(reason.split()) or 'it does not say why'}."


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that JAX would use, as names for CUDA_VISIBLE_DEVICES. None if it was told to use a CPU."""
    platforms = environment.get("JAX_PLATFORMS", "").lower()
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name.strip() not in ("", "-1")]
    return [str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
