"""Which devices each replica of a model gets: its environment variables say so, and JAX in it needs no telling.

    visible            0 1 2 3                   data_parallel_size 2, tensor_parallel_size 2
    of replica 0       0 1
    of replica 1           2 3

None of this asks CUDA, which would take memory on every GPU for the process that asks.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from jpaged.config import EngineArgs
from jpaged.errors import InvalidParameterError


def replica_environments(args: EngineArgs, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Each replica's environment variables: with GPUs, it sees only its own; on CPUs there is nothing to divide.

    Raises:
        InvalidParameterError: there are fewer GPUs than all replicas need.
    """
    gpus = visible_gpus(environment)
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    common = {**environment, "PYTHONPATH": path}
    if not gpus:
        return [dict(common) for _ in range(args.data_parallel_size)]
    each = args.tensor_parallel_size
    if args.data_parallel_size * each > len(gpus):
        raise InvalidParameterError(
            f"data_parallel_size={args.data_parallel_size} with tensor_parallel_size={each} needs"
            f" {args.data_parallel_size * each} GPUs, but {len(gpus)} are visible; lower one of them."
        )
    return [
        {**common, "CUDA_VISIBLE_DEVICES": ",".join(gpus[i * each : (i + 1) * each])}
        for i in range(args.data_parallel_size)
    ]


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Names for CUDA_VISIBLE_DEVICES of the GPUs that JAX would use; none where it was told to use a CPU.

    Found without CUDA: asking it would take memory on every GPU for this process.
    """
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    if "CUDA_VISIBLE_DEVICES" in environment:
        return [name for name in environment["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
    return [str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
