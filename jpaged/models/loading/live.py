"""Weights that are on devices already, into a model that is running, and out of it again.

    names and arrays --WeightUpdater.match--> Update --WeightUpdater.apply--> the same parameters with other values

`match` changes nothing and says all that is wrong; `apply` writes in place, one array after the other. Layers that are
quantized while a checkpoint is read are given as a model that is not quantized has them, and rounded here as there, by
the same program:

    array --Scheme.rounded--> values [outputs, inputs], scales [outputs, 1] --written--> two parameters
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import prod
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
from jpaged.models.quantization.layers import RowOrder, derived_piece, row_order, row_order_of_kernel, stored_layer

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
class Rounding:
    """Of an array that is quantized. order: how it becomes [outputs, inputs]. index: of the parameter that its scales
    go to. layout: likewise what they, [outputs, 1], become; they begin where the values do."""

    order: RowOrder
    index: int
    layout: Layout


@dataclass(frozen=True)
class Place:
    """Of an array in a parameter. index: of that. rounding: of an array that is quantized; layout is then that of its
    values, [outputs, inputs]."""

    index: int
    layout: Layout
    offsets: tuple[int, ...]
    rounding: Rounding | None = None


@dataclass(frozen=True)
class Write:
    """An array and its place. name: as it was given."""

    name: str
    array: Any
    place: Place

    def bytes_beside(self, target: Sharding) -> int:
        """Bytes that writing it takes on a device: of its copy, and of its values in 8 bits."""
        return copied_bytes(self.array, target) + (0 if self.place.rounding is None else prod(self.array.shape))

    def parts(self, target: Sharding, shard_axis: int | None) -> Iterator["Write"]:
        """Cuts a large array of numpy, so that the device needs room for a copy of a part only. An array of JAX stays
        whole, as does one that its layout does more with than transpose it, or that is rounded.

        target: where it is copied to. shard_axis: axis of the parameter that is split over devices; the array is cut
        along another one.
        """
        place, shape = self.place, tuple(self.array.shape)
        size, axes = copied_bytes(self.array, target), place.layout.axes
        is_plain = place.layout == Layout(shape, axes) and place.rounding is None
        # The parameter's axis `axes.index(axis)` is the array's `axis`. A vector may have none to be cut along.
        axis = next((axis for axis in sorted(axes) if axes.index(axis) != shard_axis), None)
        if size <= _COPIED_AT_ONCE or not is_plain or axis is None or not isinstance(self.array, np.ndarray):
            yield self
            return
        count = max(1, shape[axis] * _COPIED_AT_ONCE // size)
        for first in range(0, shape[axis], count):
            array = self.array[(slice(None),) * axis + (slice(first, first + count),)]
            offsets = list(place.offsets)
            offsets[axes.index(axis)] += first
            layout = replace(place.layout, split=array.shape)
            yield replace(self, array=array, place=replace(place, layout=layout, offsets=tuple(offsets)))


@dataclass(frozen=True)
class Group:
    """Arrays that one program writes into a parameter. index: of it. places: in it. roundings: of each array, or of
    none."""

    index: int
    arrays: list[Any]
    places: Places
    roundings: tuple[Rounding, ...]


@dataclass(frozen=True)
class Update:
    """What `WeightUpdater.match` found to be in order. is_complete: it fills every parameter."""

    writes: tuple[Write, ...]
    is_complete: bool

    def groups(self, targets: Sequence[Sharding], shard_axes: Sequence[int | None]) -> list[Group]:
        """The arrays, those together that one program writes. In an order that does not depend on the one in which they
        were given.

        targets: of each parameter: where arrays must be to be written into it; those that are not are copied there.
        shard_axes: of each parameter: the axis that is split over devices, or None.
        """
        found = []
        ordered = sorted(self.writes, key=lambda one: (one.place.index, one.place.offsets))
        for index, of_parameter in groupby(ordered, key=lambda one: one.place.index):
            parts = [part for one in of_parameter for part in one.parts(targets[index], shard_axes[index])]
            for some in _together(parts, targets[index]):
                of_some = [one.place for one in some]
                places = Places(tuple(one.layout for one in of_some), tuple(one.offsets for one in of_some))
                roundings = tuple(one.rounding for one in of_some if one.rounding is not None)
                found.append(Group(index, [one.array for one in some], places, roundings))
        return found


def _together(writes: Iterable[Write], target: Sharding) -> Iterator[list[Write]]:
    """Those into one parameter, in their order, as many at a time as one program writes."""
    some: list[Write] = []
    beside = 0
    for one in writes:
        size = one.bytes_beside(target)
        if len(some) == _AT_ONCE or (some and beside and beside + size > _COPIED_AT_ONCE):
            yield some
            some, beside = [], 0
        some.append(one)
        beside += size
    if some:
        yield some


@dataclass(frozen=True)
class _Wanted:
    """An array that a spelling knows by a name. shape: that it must have. places: all that it goes to."""

    shape: tuple[int, ...]
    places: tuple[Place, ...]


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
            least 16 bits. All is as of the model that is not quantized, whether this one is or not.
        partial: what is not given stays as it is, parts of fused parameters included.

        Raises:
            InvalidParameterError: arrays are missing or surplus, of other shapes, types or sorts, or were deleted; or
                one that is to be quantized has NaN or infinity; or the model is of a checkpoint that is quantized.
        """
        self._check_updatable()
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
        if not problems:
            rounded = [name for name in found if any(place.rounding for place in wanted[name].places)]
            finite = _are_finite([found[name] for name in rounded])
            bad = [name for name, is_finite in zip(rounded, finite, strict=True) if not is_finite]
            problems += [f"{names[name]!r} has NaN or infinity, which cannot be quantized" for name in bad]
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
            Write(names[name], array, place) for name, array in found.items() for place in wanted[name].places
        )
        return Update(writes, is_complete=not missing)

    def _check_updatable(self) -> None:
        scheme = self._model.config.quantization
        if scheme is not None and not scheme.online:
            raise InvalidParameterError(
                f"update_weights is not supported for a checkpoint in {scheme.name}; start the engine with the model"
                ' that is not quantized (quantization="fp8" or "int8" rounds its weights, and those that come later).'
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
        where = [targets[group.index] for group in groups]
        with closing(brought([group.arrays for group in groups], where)) as arriving:
            for group in groups:
                index = group.index
                # No name holds the arrays that came: copies are gone once they are written, and others may come.
                if group.roundings:
                    self._write_rounded(updated, group, next(arriving))
                else:
                    updated[index] = self._write(index, updated[index], next(arriving), group.places)
                if any(copied_bytes(one, targets[index]) for one in group.arrays):
                    updated[index].block_until_ready()
        return tuple(updated)

    def _write_rounded(self, updated: list[jax.Array], group: Group, tensors: Sequence[jax.Array]) -> None:
        """Into the parameters of a layer's values and of its scales."""
        scheme, roundings = self._model.config.quantization, group.roundings
        assert scheme is not None
        # By the program that loading runs. Were the writing in it, XLA might divide in another way.
        rounded = [scheme.rounded(one, rounding.order) for one, rounding in zip(tensors, roundings, strict=True)]
        of_scales = Places(tuple(rounding.layout for rounding in roundings), group.places.offsets)
        for part, index, places in ((0, group.index, group.places), (1, roundings[0].index, of_scales)):
            updated[index] = self._write(index, updated[index], [one[part] for one in rounded], places)

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
        if (scheme := self._model.config.quantization) is not None:
            raise InvalidParameterError(
                f"weights_as is not supported for weights in {scheme.name}, of which the engine keeps no others; take"
                " those that it was given, or read the checkpoint (jpaged.models.load)."
            )
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
            names = self._plain.parameter_names
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
    def _plain(self) -> Model:
        """The model that is not quantized, as weights are given."""
        model = self._model
        return Model(replace(model.config, quantization=None), model.dtype) if model.quantized else model

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self._model.parameter_names)}

    @cached_property
    def _by_parameter(self) -> dict[str, _Wanted]:
        return {
            name: _Wanted(leaf.shape, (self._place_of_parameter(name, leaf.shape),))
            for name, leaf in zip(self._plain.parameter_names, self._plain.abstract_weights, strict=True)
        }

    @cached_property
    def _kv_head_copies(self) -> tuple[int, ...]:
        return self._shard.kv_head_copies(self._model)

    def _place_of_parameter(self, name: str, shape: tuple[int, ...]) -> Place:
        """shape: that the parameter has where it is not quantized."""
        index, layout = self._positions[name], self._model.quantized.get(name)
        copies, slots = self._kv_head_copies[index], self._model.kv_slots[index]
        if layout is None:
            return Place(index, Layout.of_parameter(shape, copies, len(shape) - 3, slots), (0,) * len(shape))
        rows = layout.rows
        values, scales = (
            Layout.of_parameter((*rows, size), copies, len(rows) - 3, slots) for size in (layout.input_size, 1)
        )
        rounding = Rounding(row_order_of_kernel(shape, layout), self._positions[f"{name}_scale"], scales)
        return Place(index, values, (0,) * (len(rows) + 1), rounding)

    @cached_property
    def _by_path(self) -> dict[str, _Wanted]:
        paths = [".".join(map(str, path)) for path in self._plain.module_paths]
        return dict(zip(paths, self._by_parameter.values(), strict=True))

    @cached_property
    def _by_tensor(self) -> dict[str, _Wanted]:
        pieces: dict[str, list[Piece]] = {}
        for piece in self._stored.pieces:
            pieces.setdefault(piece.tensor, []).append(piece)
        return {
            tensor: _Wanted(of_tensor[0].shape, tuple(map(self._place_of_piece, of_tensor)))
            for tensor, of_tensor in pieces.items()
        }

    def _place_of_piece(self, piece: Piece) -> Place:
        """piece: of the model as `_stored`."""
        index, layout = self._positions[piece.parameter], self._stored.quantized.get(piece.parameter)
        if layout is None:
            return Place(index, Layout.of_piece(piece), piece.offsets)
        layer = stored_layer(piece, layout)
        values, scales = (
            derived_piece(piece, layout, suffix, (layer.outputs, size))
            for suffix, size in (("", layer.inputs), ("_scale", 1))
        )
        rounding = Rounding(row_order(piece, layout), self._positions[scales.parameter], Layout.of_piece(scales))
        return Place(index, Layout.of_piece(values), values.offsets, rounding)

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


_CHECKED_AT_ONCE = 1 << 18
"""Numbers of an array of numpy, so that what is computed of them stays in the cache of a core."""


def _are_finite(arrays: Sequence[Any]) -> list[bool]:
    """Of each whether it has neither NaN nor infinity, in float32."""
    found = [_is_finite(one) if isinstance(one, jax.Array) else _is_finite_on_host(one) for one in arrays]
    return [bool(one) for one in jax.device_get(found)]


@jax.jit
def _is_finite(array: jax.Array) -> jax.Array:
    return jnp.all(jnp.isfinite(array))


def _is_finite_on_host(array: np.ndarray) -> bool:
    flat = array.reshape(-1)
    parts = (flat[start : start + _CHECKED_AT_ONCE] for start in range(0, flat.size, _CHECKED_AT_ONCE))
    return all(map(_is_finite_part, parts))


def _is_finite_part(part: np.ndarray) -> bool:
    """By the bits of the exponent: numpy's own test takes three to seven times as long for types of 16 bits."""
    if part.dtype.itemsize > 4:
        with np.errstate(over="ignore"):
            part = part.astype(np.float32)
    integers = np.dtype(f"u{part.dtype.itemsize}")
    exponent = np.array(np.inf, part.dtype).view(integers)
    return bool(((part.view(integers) & exponent) != exponent).all())


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
