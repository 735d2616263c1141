"""A model split over devices, Megatron style (Shoeybi et al. 2019, "Megatron-LM", section 3).

    parameter        whole                                   shard i of N
    qkv              [hidden, kv_heads, group + 2, dim]      its key-value heads and the queries that read them
    out              [heads, dim, hidden]                    the rows of its heads            } partial sums,
    gate_up, up      [hidden, (2,) inner]                    its columns                      } added by one
    down             [inner, hidden]                         its rows                         } all-reduce each
    embedding, head  [vocab, width]                          its token ids
    norms, positions, biases of sums, projections            all of it

Which axis of a parameter is split is declared where it is made (`parameters.parameter`). A shard is itself a `Model`,
of a configuration with fewer heads and so on (`ModelConfig.shard`), so tracing it needs no second implementation. The
stored parameter is the shards' side by side; it differs from the whole one in two ways:

    few key-value heads   8 shards of 2 key-value heads: each is stored 4 times, with the queries of one shard each
    padding               a vocabulary or an inner width that N does not divide is filled up with zeros; logits of
                          padding are minus infinity, inner padding adds nothing. So is the inner width of quantized
                          experts of which a shard would have parts of groups that share a scale
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from jpaged.models.collectives import Collectives
from jpaged.models.loading import checkpoint, orbax_checkpoint
from jpaged.models.loading.pieces import Piece, repeat_kv_heads
from jpaged.models.loading.placing import empty_parameter
from jpaged.models.loading.quantized import repeated_scales
from jpaged.models.model import Model, Weights, draw, init_key
from jpaged.models.parameters import Start

MODEL_AXIS = "model"
"""The mesh axis that heads, inner columns and token ids are split over."""


def shard_of(model: Model, shards: int, axis: str = MODEL_AXIS) -> Model:
    """What each of `shards` devices runs, inside `shard_map` over the mesh axis; the model itself for one.

    Raises:
        InvalidParameterError: as `ModelConfig.shard`.
    """
    if shards == 1:
        return model
    return Model(model.config.shard(shards), model.dtype, Collectives(shards, axis), model.vocab_size, whole=model)


def stored_weights(shard: Model, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and shardings of the arrays that hold all shards' weights."""
    return tuple(
        split_over_mesh(leaf, axis, mesh) for leaf, axis in zip(shard.abstract_weights, shard.shard_axes, strict=True)
    )


def split_over_mesh(part: jax.ShapeDtypeStruct, axis: int | None, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """The array whose shards, one for each device of the mesh along `axis`, look like `part`; None: whole on each."""
    shape = list(part.shape)
    spec: list[str | None] = [None] * len(shape)
    if axis is not None:
        shape[axis] *= mesh.shape[MODEL_AXIS]
        spec[axis] = MODEL_AXIS
    sharding = NamedSharding(mesh, PartitionSpec(*spec) if axis is not None else PartitionSpec())
    return jax.ShapeDtypeStruct(tuple(shape), part.dtype, sharding=sharding)


def load_sharded(
    model: Model,
    shard: Model,
    mesh: Mesh,
    directory: str | Path | None,
    load_format: str = "auto",
    *,
    seed: int = 0,
    progress: bool = False,
    sized: Callable[[int], None] = lambda _: None,
) -> Weights:
    """`checkpoint.load` straight into shards: each device receives its part of each tensor and nothing else.

    The host holds one tensor at a time of a safetensors checkpoint, or some rows of a large one. In a mesh of several
    processes each reads the files and fills its own devices.

    model, shard: the whole, and `shard_of` it.
    seed: of random weights (load_format "dummy"), which are those that one device would draw.
    sized: as of `checkpoint.load`.

    Raises:
        CheckpointError, InvalidParameterError: as `checkpoint.load`.
    """
    checkpoint.check_load_format(load_format, directory)
    stored = stored_weights(shard, mesh)
    if load_format == "dummy":
        return tuple(_init_stored(model, shard, index, leaf, seed) for index, leaf in enumerate(stored))
    assert directory is not None
    if checkpoint.is_orbax(load_format, directory):
        return orbax_checkpoint.load_sharded(model, shard, stored, mesh, Path(directory))
    widened = Model(model.config.with_kv_heads_for(shard.collectives.size), model.dtype)
    found = checkpoint.match(widened, checkpoint.find_tensors(Path(directory)))
    total = checkpoint.num_bytes(found)
    sized(total)
    position = {name: i for i, name in enumerate(shard.parameter_names)}
    devices = [device for _, device in _local_shards(mesh)]
    shards: dict[int, list[Any]] = {}
    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", disable=not progress) as bar:
        for piece, tensor, read in checkpoint.read_each(widened, found, mesh.local_devices[0], shard):
            i = position[piece.parameter]
            if i not in shards:
                shards[i] = [empty_parameter(shard.abstract_weights[i], device) for device in devices]
            shards[i] = _place(piece, tensor, shard.shard_axes[i], shards[i], mesh)
            del tensor  # before the next one is read
            bar.update(read)
    return tuple(
        jax.make_array_from_single_device_arrays(
            leaf.shape, leaf.sharding, [jax.device_put(*placed) for placed in zip(shards[i], devices, strict=True)]
        )
        for i, leaf in enumerate(stored)
    )


def _local_shards(mesh: Mesh) -> list[tuple[int, jax.Device]]:
    """This process's devices and the index of the shard each holds."""
    return [(i, device) for i, device in enumerate(mesh.devices.flat) if device in mesh.local_devices]


def _place(piece: Piece, tensor: Any, axis: int | None, shards: list[Any], mesh: Mesh) -> list[Any]:
    """Writes each local shard's slice of a checkpoint tensor; waits, so that one tensor at a time is on its way."""
    placed = []
    for (i, device), shard in zip(_local_shards(mesh), shards, strict=True):
        size = 0 if axis is None else shard.shape[axis]
        found = piece.slice_of(tensor, axis, i * size, (i + 1) * size)
        if not isinstance(shard, np.ndarray):
            found = jax.device_put(found, device)
        placed.append(piece.place_slice(shard, found, axis, i * size) if found.size else shard)
    return jax.block_until_ready(placed)


def _init_stored(model: Model, shard: Model, index: int, leaf: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
    """A random weight, drawn as for one device and spread over the mesh."""
    whole = model.abstract_weights[index]
    copies, slots = shard.kv_head_copies(model)[index], shard.kv_slots[index]
    axis = shard.shard_axes[index]
    times = repeated_scales(model, shard).get(model.parameter_names[index], 1)
    drawing = _drawing(
        model.starts[index], whole.shape, whole.dtype, (copies, slots), times, axis, leaf.shape, leaf.sharding
    )
    return drawing(init_key(seed, index))


@cache  # one program for all layers
def _drawing(
    start: Start,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    kv_heads: tuple[int, int],
    scale_times: int,
    shard_axis: int | None,
    stored_shape: tuple[int, ...],
    sharding: NamedSharding,
) -> Callable[[np.ndarray], jax.Array]:
    """kv_heads: how often each is stored, and `Model.kv_slots`."""

    def drawn(key: jax.Array) -> jax.Array:
        weight = draw(key, start, shape, dtype)
        copies, slots = kv_heads
        if copies > 1:
            assert shard_axis is not None
            return repeat_kv_heads(weight, copies, shard_axis, slots)
        if scale_times > 1:  # the last group may have fewer inputs
            weight = jnp.repeat(weight, scale_times, axis=-1)[..., : stored_shape[-1]]
        return _pad(weight, stored_shape)

    return jax.jit(drawn, out_shardings=sharding)


def _pad(weight: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.pad(weight, [(0, wanted - size) for size, wanted in zip(weight.shape, shape, strict=True)])
