"""Weights that are on devices already, into a model that is running, and out of it again.

    names and arrays --WeightUpdater.match--> Update --WeightUpdater.apply--> the same parameters with other values

`match` changes nothing and says all that is wrong; `apply` writes in place, one array after the other.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jpaged.api.errors import InvalidParameterError, shown
from jpaged.api.weights import flat_weights
from jpaged.models.loading.checkpoint import full_names
from jpaged.models.loading.layouts import COPIED_BYTES, Layout, Places, brought, copied_bytes, write, write_sharded
from jpaged.models.loading.pieces import Piece, single_kv_heads
from jpaged.models.model import Model, Weights

WeightsForm = Literal["huggingface", "parameters", "state", "module"]

_SHOWN = 5
"""Problems, and names, that a message has at most."""

_AT_ONCE = 16
"""Arrays that one program writes into a parameter: it takes longer to start than to write an expert's tensor, of which
mixtures have thousands."""

_COPIED_AT_ONCE = COPIED_BYTES // 4
"""Bytes of copies that one program writes, so that copies for others are on their way while it runs. Larger arrays are
cut, if they can be."""


@dataclass(frozen=True)
class Write:
    """An array and its place. name: as it was given. index: of the parameter."""

    name: str
    array: Any
    index: int
    layout: Layout
    offsets: tuple[int, ...]

    def parts(self, target: Sharding, shard_axis: int | None) -> Iterator["Write"]:
        """Cuts a large array of numpy, so that the device needs room for a copy of a part only. An array of JAX stays
        whole, as does one that its layout does more with than transpose it.

        target: where it is copied to. shard_axis: axis of the parameter that is split over devices; the array is cut
        along another one.
        """
        size, shape, axes = copied_bytes(self.array, target), tuple(self.array.shape), self.layout.axes
        is_plain = self.layout == Layout(shape, axes)
        # The parameter's axis `axes.index(axis)` is the array's `axis`. A vector may have none to be cut along.
        axis = next((axis for axis in sorted(axes) if axes.index(axis) != shard_axis), None)
        if size <= _COPIED_AT_ONCE or not is_plain or axis is None or not isinstance(self.array, np.ndarray):
            yield self
            return
        count = max(1, shape[axis] * _COPIED_AT_ONCE // size)
        for first in range(0, shape[axis], count):
            array = self.array[(slice(None),) * axis + (slice(first, first + count),)]
            offsets = list(self.offsets)
            offsets[axes.index(axis)] += first
            yield replace(self, array=array, layout=replace(self.layout, split=array.shape), offsets=tuple(offsets))


@dataclass(frozen=True)
class Update:
    """What `WeightUpdater.match` found to be in order. is_complete: it fills every parameter."""

    writes: tuple[Write, ...]
    is_complete: bool

    def groups(
        self, targets: Sequence[Sharding], shard_axes: Sequence[int | None]
    ) -> list[tuple[int, list[Any], Places]]:
        """Arrays that one program writes: the index of their parameter, the arrays, and their places in it. In an order
        that does not depend on the one in which they were given.

        targets: of each parameter: where arrays must be to be written into it; those that are not are copied there.
        shard_axes: of each parameter: the axis that is split over devices, or None.
        """
        found = []
        ordered = sorted(self.writes, key=lambda one: (one.index, one.offsets))
        for index, of_parameter in groupby(ordered, key=lambda one: one.index):
            parts = [part for one in of_parameter for part in one.parts(targets[index], shard_axes[index])]
            for some in _together(parts, targets[index]):
                places = Places(tuple(one.layout for one in some), tuple(one.offsets for one in some))
                found.append((index, [one.array for one in some], places))
        return found


def _together(writes: Iterable[Write], target: Sharding) -> Iterator[list[Write]]:
    """Those into one parameter, in their order, as many at a time as one program writes."""
    some: list[Write] = []
    copied = 0
    for one in writes:
        size = copied_bytes(one.array, target)
        if len(some) == _AT_ONCE or (some and copied and copied + size > _COPIED_AT_ONCE):
            yield some
            some, copied = [], 0
        some.append(one)
        copied += size
    if some:
        yield some


@dataclass(frozen=True)
class _Wanted:
    """An array that a spelling knows by a name. shape: that it must have. writes: index of a parameter, layout and
    offsets of each place that it goes to."""

    shape: tuple[int, ...]
    writes: tuple[tuple[int, Layout, tuple[int, ...]], ...]


class WeightUpdater:
    """Knows the places of a model's weights by all names that they have.

    model, shard: the whole, and `sharding.shard_of` it. mesh: that the shards lie on; None for one device.
    """

    def __init__(self, model: Model, shard: Model, mesh: Mesh | None) -> None:
        self._model = model
        self._shard = shard
        self._mesh = mesh

    def match(self, weights: Any, *, partial: bool = False) -> Update:
        """Finds the place of each array. Changes nothing.

        weights: a module of this model (`Model.module`), an `nnx.State` of one, the flat tuple that `Model.init` makes,
            or a mapping, nested or flat, whose names are those of a Hugging Face checkpoint, of `Model.parameter_names`
            or of the module's own tree. Arrays of JAX, on any devices, or of numpy, of any floating-point type of at
            least 16 bits.
        partial: what is not given stays as it is, parts of fused parameters included.

        Raises:
            InvalidParameterError: arrays are missing or surplus, of other shapes, types or sorts, or were deleted; or
                the model's own are quantized.
        """
        self._check_plain("update_weights")
        given = self._named(weights)
        wanted, names = self._best_spelling(given)
        if wanted is self._by_tensor and len(full_names(self._model, given)) < len(given):
            raise InvalidParameterError("weights holds tensors of one name with and without a prefix; give each once.")
        problems = _surplus([given_name for name, given_name in names.items() if name not in wanted], self._model)
        found = {name: given[given_name] for name, given_name in names.items() if name in wanted}
        for name, array in found.items():
            problem = _wrong(array, wanted[name].shape)
            if problem is not None:
                problems.append(f"{names[name]!r} {problem}")
        missing = [name for name in wanted if name not in found]
        if missing and not partial:
            problems.append(
                f"missing are {_listed(missing)}; give them, or partial=True to keep what the engine has in their place"
            )
        if problems:
            shown_problems = "; ".join(problems[:_SHOWN])
            more = f"; and {len(problems) - _SHOWN} more like these" if len(problems) > _SHOWN else ""
            raise InvalidParameterError(
                f"weights do not fit this {self._model.config.architecture}: {shown_problems}{more}. Nothing was"
                " changed."
            )
        self._check_tied(given, names)
        writes = tuple(
            Write(names[name], array, index, layout, offsets)
            for name, array in found.items()
            for index, layout, offsets in wanted[name].writes
        )
        return Update(writes, is_complete=not missing)

    def _check_plain(self, what: str) -> None:
        scheme = self._model.config.quantization
        if scheme is not None:
            raise InvalidParameterError(
                f"{what} is not supported for weights in {scheme.name}; start the engine with the model that is not"
                " quantized, and without quantization."
            )

    def apply(self, weights: Sequence[jax.Array], update: Update) -> Weights:
        """The weights with the update written into them. They are donated, and keep their buffers; the arrays of the
        update are copied, and whoever gave them keeps them.

        Raises:
            JaxRuntimeError: an array cannot be brought to the devices, for want of memory say. Some of the weights are
                then new and some old, and some may be gone.
        """
        updated = list(weights)
        targets = [_sharding_of_tensors(parameter, self._mesh) for parameter in weights]
        groups = update.groups(targets, self._shard.shard_axes)
        where = [targets[index] for index, _, _ in groups]
        with closing(brought([given for _, given, _ in groups], where)) as arriving:
            for index, given, places in groups:
                # No name holds the arrays that came: copies are gone once they are written, and others may come.
                updated[index] = self._write(index, updated[index], next(arriving), places)
                if any(copied_bytes(one, targets[index]) for one in given):
                    updated[index].block_until_ready()
        return tuple(updated)

    def _write(self, index: int, parameter: jax.Array, tensors: Sequence[jax.Array], places: Places) -> jax.Array:
        if self._mesh is None:
            return write(parameter, tensors, places)
        return write_sharded(parameter, tensors, places, self._shard.shard_axes[index], self._mesh)

    def read(self, weights: Sequence[jax.Array], form: WeightsForm) -> Any:
        """The weights as others hold them, in arrays of their own: copies.

        form: "huggingface": a dictionary by the checkpoint's names, in its shapes; "parameters": by
            `Model.parameter_names`; "state": the `nnx.State` of the module; "module": the module (`Model.module`).

        Raises:
            InvalidParameterError: there is no such form; or the weights are quantized.
        """
        self._check_plain("weights_as")
        if form not in ("huggingface", "parameters", "state", "module"):
            raise InvalidParameterError(
                f"form must be 'huggingface', 'parameters', 'state' or 'module', got {shown(form)}."
            )
        copies = self._shard.kv_head_copies(self._model)
        weights = [
            _whole(array, leaf.shape, times, slots)
            for array, leaf, times, slots in zip(
                weights, self._model.abstract_weights, copies, self._model.kv_slots, strict=True
            )
        ]
        if form == "huggingface":
            return self._as_tensors(weights)
        own = tuple(jnp.copy(array) for array in weights)
        if form == "parameters":
            return dict(zip(self._model.parameter_names, own, strict=True))
        module = self._model.module(own)
        return module if form == "module" else nnx.state(module, nnx.Param)

    def _as_tensors(self, weights: Sequence[jax.Array]) -> dict[str, jax.Array]:
        by_name = dict(zip(self._model.parameter_names, weights, strict=True))
        tensors: dict[str, jax.Array] = {}
        for piece in self._model.pieces:
            taken = piece.take(by_name[piece.parameter])
            if piece.part is not None:
                part, whole = piece.part, tensors.get(piece.tensor)
                whole = jnp.zeros(piece.shape, taken.dtype) if whole is None else whole
                place = (slice(None),) * part.axis + (slice(part.first, part.first + part.count),)
                taken = whole.reshape(part.split).at[place].set(taken).reshape(piece.shape)
            tensors[piece.tensor] = jnp.copy(taken)
        return tensors

    def _named(self, weights: Any) -> dict[str, Any]:
        if isinstance(weights, nnx.Module):
            weights = nnx.state(weights, nnx.Param)
        if isinstance(weights, nnx.State):
            found = nnx.to_flat_state(weights)
            leaves = [(path, leaf) for path, leaf in found if not _is_other_variable(leaf)]
            return flat_weights({".".join(map(str, path)): leaf for path, leaf in leaves})
        if isinstance(weights, Sequence) and not isinstance(weights, str | bytes):
            names = self._model.parameter_names
            if len(weights) != len(names):
                raise InvalidParameterError(
                    f"weights is a sequence of {len(weights)} arrays, but the model has {len(names)} parameters; give"
                    f" them all in the order of Model.parameter_names, or by name."
                )
            return dict(zip(names, weights, strict=True))
        return flat_weights(weights)

    def _best_spelling(self, given: Mapping[str, Any]) -> tuple[dict[str, _Wanted], dict[str, str]]:
        """The spelling that knows most of the names, and by its names those that were given."""
        own = {name: name for name in given}
        candidates = [(self._by_tensor, self._tensor_names(given)), (self._by_parameter, own), (self._by_path, own)]
        return max(candidates, key=lambda candidate: sum(name in candidate[0] for name in candidate[1]))

    def _tensor_names(self, given: Mapping[str, Any]) -> dict[str, str]:
        """Names that were given, by the names of tensors that they mean; without those that mean no weights."""
        tied, derived = {tensor.tensor for tensor in self._model.tied_tensors}, self._model.derived_tensors
        names = full_names(self._model, given)
        return {
            full: name
            for full, name in names.items()
            if full not in tied and not (derived and full not in self._by_tensor and re.search(derived, full))
        }

    @cached_property
    def _by_parameter(self) -> dict[str, _Wanted]:
        copies = self._shard.kv_head_copies(self._model)
        found = {}
        for index, (name, leaf) in enumerate(
            zip(self._model.parameter_names, self._model.abstract_weights, strict=True)
        ):
            layout = Layout.of_parameter(leaf.shape, copies[index], self._model.kv_slots[index])
            found[name] = _Wanted(leaf.shape, ((index, layout, (0,) * leaf.ndim),))
        return found

    @cached_property
    def _by_path(self) -> dict[str, _Wanted]:
        paths = [".".join(map(str, path)) for path in self._model.module_paths]
        return dict(zip(paths, self._by_parameter.values(), strict=True))

    @cached_property
    def _by_tensor(self) -> dict[str, _Wanted]:
        position = {name: i for i, name in enumerate(self._model.parameter_names)}
        pieces: dict[str, list[Piece]] = {}
        for piece in self._stored.pieces:
            pieces.setdefault(piece.tensor, []).append(piece)
        return {
            tensor: _Wanted(
                of_tensor[0].shape,
                tuple((position[piece.parameter], Layout.of_piece(piece), piece.offsets) for piece in of_tensor),
            )
            for tensor, of_tensor in pieces.items()
        }

    @cached_property
    def _stored(self) -> Model:
        """The model with as many key-value heads as the shards store."""
        shards = self._shard.collectives.size
        if shards == 1:
            return self._model
        return Model(self._model.config.with_kv_heads_for(shards), self._model.dtype)

    def _check_tied(self, given: Mapping[str, Any], names: Mapping[str, str]) -> None:
        """A head of a tied model must be its embedding, which a trainer that unties them would not see otherwise."""
        full = full_names(self._model, given)
        for tied in self._model.tied_tensors:
            head, embedding = full.get(tied.tensor), names.get(tied.equals)
            if head is None or head in names.values():
                continue
            if embedding is None:
                raise InvalidParameterError(
                    f"weights holds {head!r} without {tied.equals!r}, which is the head of this model, whose"
                    ' config.json says "tie_word_embeddings": true; give that. Nothing was changed.'
                )
            if (problem := _wrong(given[head], given[embedding].shape)) is not None:
                raise InvalidParameterError(f"weights: {head!r} {problem}. Nothing was changed.")
            if not _are_equal(given[head], given[embedding]):
                raise InvalidParameterError(
                    f'weights: {head!r} differs from {embedding!r}, but config.json says "tie_word_embeddings": true;'
                    " leave it out, or start the engine with a config.json that says false. Nothing was changed."
                )


def _sharding_of_tensors(parameter: jax.Array, mesh: Mesh | None) -> Sharding:
    """Where tensors must be to be written into a parameter."""
    return parameter.sharding if mesh is None else NamedSharding(mesh, PartitionSpec())


def _whole(array: jax.Array, shape: tuple[int, ...], kv_head_copies: int, kv_slots: int) -> jax.Array:
    """A parameter without the padding and the copies of key-value heads that shards have."""
    if kv_head_copies > 1:
        return single_kv_heads(array, kv_head_copies, kv_slots)
    return array if array.shape == shape else array[tuple(slice(0, size) for size in shape)]


def _are_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if not isinstance(one, jax.Array | np.ndarray) or one.shape != other.shape:
        return False
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return bool(jnp.array_equal(jax.device_put(one, getattr(other, "sharding", None)), other))


def _is_other_variable(leaf: Any) -> bool:
    """Whether a leaf of an `nnx.State` is a variable that is no parameter, such as a counter of random keys."""
    return isinstance(leaf, nnx.Variable) and not isinstance(leaf, nnx.Param)


def _wrong(array: Any, shape: tuple[int, ...]) -> str | None:
    """What is wrong with an array that should have this shape; None if nothing is."""
    if isinstance(array, jax.core.Tracer):
        return "is being traced; call update_weights outside of jit"
    if not isinstance(array, jax.Array | np.ndarray):
        return f"is a {type(array).__name__}, not an array of JAX or numpy; convert it (jax.dlpack.from_dlpack)"
    if isinstance(array, jax.Array) and array.is_deleted():
        return "was deleted or donated; give the array that took its place"
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize < 2:
        return f"has type {array.dtype}, not a floating-point type of at least 16 bits; convert it"
    if isinstance(array, np.ndarray) and (problem := _unknown_to_jax(array)):
        return f"cannot become an array of JAX: {problem}"
    if tuple(array.shape) != shape:
        return f"has shape {tuple(array.shape)}, the model implies {shape}"
    return None


def _unknown_to_jax(array: np.ndarray) -> str:
    """Why JAX does not take an array of numpy: the bytes of its numbers stand in the other order, say, or it is masked.
    Empty if it does."""
    try:
        jax.typeof(array)
    except (TypeError, ValueError) as error:
        return str(error).rstrip(".")
    return ""


def _surplus(names: Sequence[str], model: Model) -> list[str]:
    if not names:
        return []
    example = model.pieces[0].tensor if model.pieces else model.parameter_names[0]
    return [
        f"there is no place for {_listed(names)}; leave them out, or name them as the checkpoint does (as {example!r})"
    ]


def _listed(names: Sequence[str]) -> str:
    shown_names = ", ".join(map(repr, names[:_SHOWN]))
    return f"{shown_names}{', ...' if len(names) > _SHOWN else ''}{f' ({len(names)} in all)' if len(names) > 1 else ''}"
