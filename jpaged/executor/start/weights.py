"""Where an engine's weights come from: a checkpoint, or arrays that the caller has."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax

from jpaged.api.config import EngineArgs
from jpaged.executor.mesh import DeviceMesh
from jpaged.models import Model, Weights, load
from jpaged.models.loading.live import Update, WeightUpdater
from jpaged.models.sharding import load_sharded


@dataclass
class CheckpointReader:
    """Reads the weights of a checkpoint onto a mesh; a call does.

    seconds: that the last call took, programs being compiled beside it. num_bytes: of the tensors that it read, of all
        shards together; 0 for random weights and Orbax checkpoints.
    """

    mesh: DeviceMesh
    model: Model
    shard: Model
    directory: Path
    args: EngineArgs
    seconds: float = 0.0
    num_bytes: int = 0

    def __call__(self, progress: bool = False) -> Weights:
        begun = time.perf_counter()
        weights = jax.block_until_ready(self._read(progress))
        self.seconds = time.perf_counter() - begun
        return weights

    def _read(self, progress: bool) -> Weights:
        read = partial(load, self.model, device=self.mesh.devices[0])
        if self.mesh.size > 1:
            read = partial(load_sharded, self.model, self.shard, self.mesh.mesh)
        args = self.args
        return read(self.directory, args.load_format, seed=args.seed, progress=progress, sized=self._take_size)

    def _take_size(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


def zero_weights(shard: Model, mesh: DeviceMesh) -> Weights:
    """Weights of zeros, for others to be written into."""
    return tuple(mesh.full(leaf, 0) for leaf in mesh.weights(shard))


def fill_weights(mesh: DeviceMesh, shard: Model, updater: WeightUpdater, update: Update, progress: bool) -> Weights:
    """Weights that the caller has given. progress: as of `CheckpointReader`; there is none to show."""
    with mesh.as_default():
        return jax.block_until_ready(updater.apply(zero_weights(shard, mesh), update))
