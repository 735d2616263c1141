"""Checkpoints that Orbax wrote: by `jpaged convert`, or by a training job that uses these models.

    my-model/
      config.json, tokenizer.json, ...     as in the Hugging Face layout
      params/                              an Orbax checkpoint of the parameters (PyTree or Standard)

Parameters have the names of `Model.parameter_names`, nested at the dots: {"layers": {"0": {"attention": ...}}}. The
names of the Flax module's own tree (`Model.module_paths`) are read too, which a training job writes by
`ocp.StandardCheckpointer().save(path, nnx.state(module, nnx.Param))`, or of `nnx.to_pure_dict` of that. A tree that
holds more, such as an optimizer's state, keeps the parameters under "params" or "model".

A device reads what it needs of each array and no more: `convert` stores arrays in chunks along the axis that tensor
parallelism splits. Padding and copies of key-value heads (`sharding`) are made after reading.
"""

import json
import shutil
from collections.abc import Sequence
from math import gcd
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jpaged.api.errors import CheckpointError, InvalidParameterError, OutputError
from jpaged.models.config_reader import read_json
from jpaged.models.loading.pieces import repeat_kv_heads
from jpaged.models.model import Model, Weights

PARAMS = "params"
"""The folder of the Orbax checkpoint beside config.json."""

_ROOTS = ("params", "model")
_MARKER = "_METADATA"
_CHUNK_BYTES = 2**25
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".index.json")


def find(directory: Path) -> Path | None:
    """The Orbax checkpoint in a model's directory; None where there is none."""
    return next((path for path in (directory / PARAMS, directory) if (path / _MARKER).is_file()), None)


def check_target(directory: Path) -> None:
    """Raises InvalidParameterError unless `save` may write there: a checkpoint is never written over or beside one."""
    if directory.exists() and not directory.is_dir():
        raise InvalidParameterError(f"{directory} is a file; name a directory to write.")
    for name in (PARAMS, "config.json"):
        if (directory / name).exists():
            raise InvalidParameterError(f"{directory / name} exists; choose another directory or remove it.")


def check_plain(model: Model) -> None:
    """Raises InvalidParameterError for a quantized model, whose parameters Orbax checkpoints do not hold."""
    if model.quantized:
        raise InvalidParameterError(
            "Orbax checkpoints of quantized models are not supported; use one in safetensors, or leave quantization"
            " out."
        )


def save(model: Model, weights: Sequence[jax.Array], directory: str | Path) -> None:
    """Writes config.json and the parameters. The directory must not hold a checkpoint yet.

    weights: as `Model.init`, `load` or `Model.flatten` return them.

    Raises:
        InvalidParameterError: something is there already, or the model is quantized.
        OutputError: it cannot be written, for want of space for example. What was begun is removed.
    """
    directory = Path(directory)
    check_target(directory)
    check_plain(model)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _write(model, weights, directory)
    except Exception as error:  # Orbax's storage raises ValueError where the disk is full
        for unfinished in directory.glob(f"{PARAMS}*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        raise OutputError(
            f"{directory} cannot be written ({reason}); make room, or name another directory, and run the same again."
        ) from error


def _write(model: Model, weights: Sequence[jax.Array], directory: Path) -> None:
    import orbax.checkpoint as ocp  # takes seconds, which those who have no Orbax checkpoint need not wait

    named = dict(zip(model.parameter_names, weights, strict=True))
    chunks = {
        name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES, shard_axes=() if axis is None else (axis,))
        for name, axis in zip(model.parameter_names, model.shard_axes, strict=True)
    }
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save((directory / PARAMS).absolute(), _nested(named), save_args=_nested(chunks))
    config = model.config.saved_as(model.dtype.name)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def copy_companions(source: Path, target: Path) -> None:
    """Copies what belongs to a model beside its weights: tokenizer, chat template, generation_config.json."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHT_FILES) and path.name != "config.json":
            shutil.copyfile(path, target / path.name)
    read_json(target / "config.json")


def load(model: Model, directory: Path, device: jax.Device | None = None) -> Weights:
    """The weights on one device, in the model's type; as `checkpoint.load`.

    Raises:
        CheckpointError: a parameter is missing or of another shape, or there is no Orbax checkpoint.
    """
    sharding = SingleDeviceSharding(device or jax.local_devices()[0])
    return _restore(model, directory, [sharding] * len(model.abstract_weights), [None] * len(model.abstract_weights))


def load_sharded(
    model: Model, shard: Model, stored: Sequence[jax.ShapeDtypeStruct], mesh: Mesh, directory: Path
) -> Weights:
    """The weights over a mesh; as `sharding.load_sharded`.

    stored: shapes and shardings of the shards' weights (`sharding.stored_weights`).
    """
    copies = shard.kv_head_copies(model)
    shardings, shapes = [], []
    for whole, leaf, axis, times in zip(model.abstract_weights, stored, model.shard_axes, copies, strict=True):
        repeated = times > 1
        # Shards that share key-value heads read them together; who gets which is settled below.
        shardings.append(_grouped(mesh, whole.shape, axis) if repeated and axis is not None else leaf.sharding)
        shapes.append(None if repeated or leaf.shape == whole.shape else leaf.shape)
    weights = _restore(model, directory, shardings, shapes)
    return tuple(
        jax.jit(_repeat(times, axis, slots), out_shardings=leaf.sharding)(weight) if times > 1 else weight
        for weight, leaf, axis, times, slots in zip(
            weights, stored, model.shard_axes, copies, model.kv_slots, strict=True
        )
    )


def _restore(model: Model, directory: Path, shardings: Sequence[Any], shapes: Sequence[Any]) -> Weights:
    """Reads each parameter into its sharding, padded with zeros to its shape where one is given."""
    import orbax.checkpoint as ocp

    check_plain(model)
    path = find(directory)
    if path is None:
        raise CheckpointError(
            f"{directory} holds no Orbax checkpoint (nor does its folder {PARAMS}/); `jpaged convert` writes one."
        )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        keys = _keys(model, path, checkpointer.metadata(path.absolute()))
        restore_args = {
            key: ocp.ArrayRestoreArgs(dtype=model.dtype, sharding=sharding, global_shape=shape, strict=shape is None)
            for key, sharding, shape in zip(keys, shardings, shapes, strict=True)
        }
        wanted = dict(zip(keys, model.abstract_weights, strict=True))
        restored = checkpointer.restore(
            path.absolute(),
            args=ocp.args.PyTreeRestore(
                item=_from_keys(wanted), restore_args=_from_keys(restore_args), partial_restore=True
            ),
        )
    found = {_key(place): leaf for place, leaf in jax.tree_util.tree_flatten_with_path(restored)[0]}
    return tuple(found[key] for key in keys)


def _keys(model: Model, path: Path, metadata: Any) -> list[tuple[str, ...]]:
    """Where each parameter is in the checkpoint's tree."""
    item = getattr(metadata, "item_metadata", metadata)
    leaves = jax.tree_util.tree_flatten_with_path(getattr(item, "tree", item))[0]
    shapes = {_key(place): tuple(leaf.shape) for place, leaf in leaves if hasattr(leaf, "shape")}
    found: dict[str, tuple[str, ...]] = {}
    for place in shapes:
        found[".".join(place[:-1] if place[-1] == "value" else place)] = place
    spellings = [model.parameter_names, tuple(".".join(map(str, path)) for path in model.module_paths)]
    roots = ("", *(f"{root}." for root in _ROOTS))
    candidates = [tuple(root + name for name in names) for names in spellings for root in roots]
    names = max(candidates, key=lambda names: sum(name in found for name in names))
    missing = [name for name, there in zip(model.parameter_names, names, strict=True) if there not in found]
    if missing:
        raise CheckpointError(
            f"{path} lacks parameter {missing[0]!r} ({len(missing)} in all) of a {model.config.architecture} with this"
            f" config.json; it has {', '.join(list(found)[:3])}, ... See `Model.parameter_names`."
        )
    keys = [found[name] for name in names]
    for name, leaf, key in zip(model.parameter_names, model.abstract_weights, keys, strict=True):
        shape = shapes[key]
        if shape != leaf.shape:
            raise CheckpointError(
                f"{path}: parameter {name!r} has shape {shape}, config.json implies {leaf.shape}; one of the two is of"
                " another model."
            )
    return keys


def _key(path: Sequence[Any]) -> tuple[str, ...]:
    return tuple(str(getattr(part, "key", getattr(part, "idx", getattr(part, "name", part)))) for part in path)


def _nested(named: dict[str, Any]) -> dict[str, Any]:
    return _from_keys({tuple(name.split(".")): value for name, value in named.items()})


def _from_keys(flat: dict[tuple[str, ...], Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        node = tree
        for part in key[:-1]:
            node = node.setdefault(part, {})
        node[key[-1]] = value
    return tree


def _grouped(mesh: Mesh, shape: tuple[int, ...], axis: int) -> NamedSharding:
    """The key-value heads, which are along this axis, over as many groups of devices as divide them."""
    groups = gcd(shape[axis], mesh.size)
    grouped = Mesh(np.asarray(mesh.devices).reshape(groups, -1), ("group", "member"))
    spec: list[str | None] = [None] * len(shape)
    spec[axis] = "group"
    return NamedSharding(grouped, PartitionSpec(*spec))


def _repeat(copies: int, axis: int | None, shared: int) -> Any:
    assert axis is not None  # what is laid out by key-value head is split by it
    return lambda qkv: repeat_kv_heads(qkv, copies, axis, shared)
