"""Where an engine's weights come from: a checkpoint, or arrays that the caller has."""

from pathlib import Path

import jax

from jpaged.api.config import EngineArgs
from jpaged.executor.mesh import DeviceMesh
from jpaged.models import Model, Weights, load
from jpaged.models.loading.live import Update, WeightUpdater
from jpaged.models.sharding import load_sharded


def read_weights(
    mesh: DeviceMesh, model: Model, shard: Model, directory: Path, args: EngineArgs, progress: bool
) -> Weights:
    """The weights of a checkpoint on the mesh."""
    if mesh.size == 1:
        device = mesh.devices[0]
        return load(model, directory, args.load_format, device=device, seed=args.seed, progress=progress)
    return load_sharded(model, shard, mesh.mesh, directory, args.load_format, seed=args.seed, progress=progress)


def zero_weights(shard: Model, mesh: DeviceMesh) -> Weights:
    """Weights of zeros, for others to be written into."""
    return tuple(mesh.full(leaf, 0) for leaf in mesh.weights(shard))


def fill_weights(mesh: DeviceMesh, shard: Model, updater: WeightUpdater, update: Update, progress: bool) -> Weights:
    """Weights that the caller has given. progress: as of `read_weights`; there is none to show."""
    with mesh.as_default():
        return jax.block_until_ready(updater.apply(zero_weights(shard, mesh), update))
