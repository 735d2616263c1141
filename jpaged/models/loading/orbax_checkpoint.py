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

Quantized checkpoints are stored as their layers keep them: values, scales and so on, each in its type, under the names
of the quantized model's parameters; config.json has their "quantization_config". Where weights are quantized while they
are read, the checkpoint has those of the plain model, which are read and rounded a few at a time (`_Tree.together`).
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import gcd, prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jpaged.api.errors import CheckpointError, InvalidParameterError, OutputError
from jpaged.models.config_reader import read_json
from jpaged.models.linear import LinearLayout
from jpaged.models.loading.pieces import repeat_kv_heads
from jpaged.models.loading.quantized import repeated_scales
from jpaged.models.loading.runs import MOST_BYTES
from jpaged.models.model import Model, Weights
from jpaged.models.quantization.layers import row_order_of_kernel
from jpaged.models.quantization.mxfp4 import MOST_EXPONENT
from jpaged.models.quantization.scheme import Scheme
from jpaged.pallas_kernels.common.numerics import FP8, LEAST_SCALE, MOST_SCALE

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


def check_stored(model: Model) -> None:
    """Raises InvalidParameterError for a model that is quantized while it is read: no config.json would say so."""
    scheme = model.config.quantization
    if scheme is not None and scheme.online:
        raise InvalidParameterError(
            f"The model is quantized here (quantization={scheme.name!r}), which no config.json says; save it without"
            " quantization, or have `jpaged quantize` write a quantized checkpoint and convert that."
        )


def save(model: Model, weights: Sequence[jax.Array], directory: str | Path) -> None:
    """Writes config.json and the parameters. The directory must not hold a checkpoint yet.

    weights: as `Model.init`, `load` or `Model.flatten` return them.

    Raises:
        InvalidParameterError: something is there already, or the model is quantized while it is read.
        OutputError: it cannot be written, for want of space for example. What was begun is removed.
    """
    directory = Path(directory)
    check_target(directory)
    check_stored(model)
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
    config = model.config.saved_as(model.dtype.name, quantized=bool(model.quantized))
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def copy_companions(source: Path, target: Path) -> None:
    """Copies what belongs to a model beside its weights: tokenizer, chat template, generation_config.json."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHT_FILES) and path.name != "config.json":
            shutil.copyfile(path, target / path.name)
    read_json(target / "config.json")


def load(model: Model, directory: Path, device: jax.Device | None = None) -> Weights:
    """The weights on one device, in the model's types; as `checkpoint.load`.

    Raises:
        CheckpointError: a parameter is missing, of another shape or type, or cannot be served, or there is no Orbax
            checkpoint.
    """
    sharding = SingleDeviceSharding(device or jax.local_devices()[0])
    leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for leaf in model.abstract_weights]
    return _load(model, model, leaves, None, directory)


def load_sharded(
    model: Model, shard: Model, stored: Sequence[jax.ShapeDtypeStruct], mesh: Mesh, directory: Path
) -> Weights:
    """The weights over a mesh; as `sharding.load_sharded`.

    stored: shapes and shardings of the shards' weights (`sharding.stored_weights`).
    """
    return _load(model, shard, stored, mesh, directory)


def _load(
    model: Model, shard: Model, stored: Sequence[jax.ShapeDtypeStruct], mesh: Mesh | None, directory: Path
) -> Weights:
    """mesh: None for one device, where the shard is the model itself."""
    scheme = model.config.quantization
    is_online = scheme is not None and scheme.online
    plain = Model(replace(model.config, quantization=None), model.dtype) if is_online else model
    by_name = dict(zip(model.parameter_names, stored, strict=True))
    found: dict[str, jax.Array] = {}
    with _Tree(plain, directory) as tree:
        kept = {name: leaf for name, leaf in by_name.items() if name in tree.names}
        if is_online:
            kept = {name: leaf for name, leaf in kept.items() if name not in model.quantized}
        repeated = {} if mesh is None else repeated_scales(model, shard)
        copies = dict(zip(model.parameter_names, shard.kv_head_copies(model), strict=True))
        targets = {
            name: _target(model, name, leaf, copies[name], repeated.get(name, 1), mesh) for name, leaf in kept.items()
        }
        for name, array in tree.read(targets).items():
            if model.quantized and not is_online:
                _check_quantized(tree, name, array)
            found[name] = targets[name].finish(array)
        for names in tree.together(model.quantized) if is_online else ():
            leaves = {name: (by_name[name], by_name[f"{name}_scale"]) for name in names}
            targets = {
                name: _plain_target(tree, model, shard, name, leaves[name], copies[name], mesh) for name in names
            }
            for name, array in tree.read(targets).items():
                found[name], found[f"{name}_scale"] = targets[name].finish(array)
                if not bool(jnp.all(jnp.isfinite(found[f"{name}_scale"]))):
                    raise CheckpointError(f"{tree.path}: parameter {name!r} has NaN or infinity; save it again.")
                del array
    return tuple(found[name] for name in model.parameter_names)


@dataclass(frozen=True)
class _Target:
    """How a parameter is read. sharding: at first. shape: that it is filled up to with zeros; None for its own. dtype:
    that it is converted to. finish: makes of it what is wanted: of one that is quantized then, values and scales."""

    sharding: Any
    shape: tuple[int, ...] | None
    dtype: Any
    finish: Callable[[jax.Array], Any] = lambda array: array


def _target(
    model: Model, name: str, leaf: jax.ShapeDtypeStruct, kv_head_copies: int, scale_times: int, mesh: Mesh | None
) -> _Target:
    """leaf: as it is wanted. kv_head_copies: as of `Model`. scale_times: as of `repeated_scales`."""
    index = model.parameter_names.index(name)
    whole, axis, slots = model.abstract_weights[index], model.shard_axes[index], model.kv_slots[index]
    if mesh is None:
        return _Target(leaf.sharding, None, leaf.dtype)
    if kv_head_copies > 1:
        assert axis is not None  # what is laid out by key-value head is split by it
        # Shards that share key-value heads read them together; who gets which is settled below.
        repeated = partial(repeat_kv_heads, copies=kv_head_copies, axis=axis, shared=slots)
        repeat = jax.jit(repeated, out_shardings=leaf.sharding)
        return _Target(_grouped(mesh, whole.shape, axis), None, leaf.dtype, repeat)
    if scale_times > 1:
        repeat = jax.jit(partial(_repeated, times=scale_times, shape=leaf.shape), out_shardings=leaf.sharding)
        return _Target(NamedSharding(mesh, PartitionSpec()), None, leaf.dtype, repeat)
    return _Target(leaf.sharding, None if leaf.shape == whole.shape else leaf.shape, leaf.dtype)


def _repeated(scales: jax.Array, times: int, shape: tuple[int, ...]) -> jax.Array:
    repeated = jnp.repeat(scales, times, axis=-1)[..., : shape[-1]]
    return jnp.pad(repeated, [(0, wanted - size) for size, wanted in zip(repeated.shape, shape, strict=True)])


def _plain_target(
    tree: "_Tree",
    model: Model,
    shard: Model,
    name: str,
    leaves: tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct],
    kv_head_copies: int,
    mesh: Mesh | None,
) -> _Target:
    """How a parameter is read that is quantized then. leaves: what is wanted, values and scales. kv_head_copies: as of
    `Model`."""
    scheme, layout = model.config.quantization, model.quantized[name]
    assert scheme is not None
    shape, sharding, padded, axis = tree.shapes[name], leaves[0].sharding, None, layout.shard_axis
    if mesh is not None:
        part = shard.quantized[name].kernel_shape
        wanted = tuple(size * (mesh.size if i == axis else 1) for i, size in enumerate(part))
        (over,) = mesh.axis_names
        sharding = NamedSharding(mesh, PartitionSpec(*(over if i == axis else None for i in range(len(part)))))
        if kv_head_copies > 1:
            assert axis is not None  # as above
            sharding = _grouped(mesh, shape, axis)
        elif wanted != shape:
            padded = wanted
    return _Target(sharding, padded, tree.float_type(name), _rounding(scheme, layout, kv_head_copies, leaves))


@cache  # one program for all layers
def _rounding(
    scheme: Scheme, layout: LinearLayout, kv_head_copies: int, leaves: tuple[jax.ShapeDtypeStruct, ...]
) -> Callable[[jax.Array], list[jax.Array]]:
    """What makes values and scales, as `leaves`, of a plain parameter."""

    def rounded(weight: jax.Array) -> list[jax.Array]:
        if kv_head_copies > 1:
            assert layout.shard_axis is not None
            weight = repeat_kv_heads(weight, kv_head_copies, layout.shard_axis, layout.kv_slots)
        parts = scheme.rounded(weight, row_order_of_kernel(weight.shape, layout))
        return [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]

    return jax.jit(rounded, out_shardings=[leaf.sharding for leaf in leaves])


_SCALES = ("_scale", "_input_scale", "_outer")
"""What the names of parameters end with that hold scales."""


@jax.jit
def _has_nan(array: jax.Array) -> jax.Array:
    return jnp.any(jnp.isnan(array))


def _check_quantized(tree: "_Tree", name: str, array: jax.Array) -> None:
    """Raises CheckpointError for scales, or values in FP8, that cannot be served. array: as read, maybe with padding,
    which is zeros."""
    if not name.endswith(_SCALES):
        if array.dtype == FP8 and bool(_has_nan(array)):
            raise CheckpointError(f"{tree.path}: parameter {name!r} has NaN; save or convert it again.")
        return
    own = array[tuple(slice(size) for size in tree.shapes[name])]
    if own.dtype == jnp.float32:
        good = (own >= LEAST_SCALE) & (own <= MOST_SCALE)
    elif own.dtype == jnp.uint8:
        good = own <= MOST_EXPONENT
    else:  # of NVFP4, of which some may be zero
        good = jnp.isfinite(own.astype(jnp.float32)) & (own >= 0)
    if not bool(jnp.all(good)):
        raise CheckpointError(f"{tree.path}: parameter {name!r} has a scale that cannot be; save or convert it again.")


class _Tree:
    """An Orbax checkpoint that is open, and where a model's parameters are in it.

    path: of it. names, shapes: of the parameters.

    Raises:
        CheckpointError: there is none, or a parameter is missing, or of another shape or type.
    """

    def __init__(self, model: Model, directory: Path) -> None:
        import orbax.checkpoint as ocp

        path = find(directory)
        if path is None:
            raise CheckpointError(
                f"{directory} holds no Orbax checkpoint (nor does its folder {PARAMS}/); `jpaged convert` writes one."
            )
        self.path = path
        self.names = frozenset(model.parameter_names)
        self.shapes = {
            name: leaf.shape for name, leaf in zip(model.parameter_names, model.abstract_weights, strict=True)
        }
        self._checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        try:
            leaves = _leaves(self._checkpointer.metadata(path.absolute()))
            self._keys = dict(zip(model.parameter_names, _keys(model, path, leaves), strict=True))
        except BaseException:
            self._checkpointer.close()
            raise
        self._types = {name: jnp.dtype(leaves[key].dtype) for name, key in self._keys.items()}

    def __enter__(self) -> "_Tree":
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()

    def float_type(self, name: str) -> jnp.dtype:
        """That a parameter is stored in; float32 for a wider one."""
        dtype = self._types[name]
        return dtype if dtype.itemsize <= 4 else jnp.dtype(jnp.float32)

    def together(self, names: Iterable[str]) -> Iterator[list[str]]:
        """Parameters that are read at once: as few as take `MOST_BYTES`, for each reading takes a tenth of a second."""
        some: list[str] = []
        size = 0
        for name in names:
            own = prod(self.shapes[name]) * self._types[name].itemsize
            if some and size + own > MOST_BYTES:
                yield some
                some, size = [], 0
            some.append(name)
            size += own
        if some:
            yield some

    def read(self, targets: Mapping[str, _Target]) -> dict[str, jax.Array]:
        """Parameters by name; `_Target.finish` is still to be called."""
        import orbax.checkpoint as ocp

        arguments, wanted = {}, {}
        for name, target in targets.items():
            key = self._keys[name]
            arguments[key] = ocp.ArrayRestoreArgs(
                dtype=target.dtype,
                sharding=target.sharding,
                global_shape=target.shape,
                strict=target.shape is None,
            )
            wanted[key] = jax.ShapeDtypeStruct(self.shapes[name], target.dtype)
        restored = self._checkpointer.restore(
            self.path.absolute(),
            args=ocp.args.PyTreeRestore(
                item=_from_keys(wanted), restore_args=_from_keys(arguments), partial_restore=True
            ),
        )
        found = {_key(place): leaf for place, leaf in jax.tree_util.tree_flatten_with_path(restored)[0]}
        return {name: found[self._keys[name]] for name in targets}


def _leaves(metadata: Any) -> dict[tuple[str, ...], Any]:
    """What a checkpoint's tree has of each array."""
    item = getattr(metadata, "item_metadata", metadata)
    leaves = jax.tree_util.tree_flatten_with_path(getattr(item, "tree", item))[0]
    return {_key(place): leaf for place, leaf in leaves if hasattr(leaf, "shape")}


def _keys(model: Model, path: Path, leaves: Mapping[tuple[str, ...], Any]) -> list[tuple[str, ...]]:
    """Where each parameter is in the checkpoint's tree."""
    found: dict[str, tuple[str, ...]] = {}
    for place in leaves:
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
        shape, dtype = tuple(leaves[key].shape), jnp.dtype(leaves[key].dtype)
        if shape != leaf.shape:
            raise CheckpointError(
                f"{path}: parameter {name!r} has shape {shape}, config.json implies {leaf.shape}; one of the two is of"
                " another model."
            )
        if dtype != leaf.dtype and not (_is_rounded_freely(dtype) and _is_rounded_freely(leaf.dtype)):
            raise CheckpointError(
                f"{path}: parameter {name!r} has type {dtype}, config.json implies {leaf.dtype}; one of the two is of"
                " another model."
            )
    return keys


def _is_rounded_freely(dtype: Any) -> bool:
    """Whether it is a type of floats that are converted to another such type as a user asks."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize >= 2


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
