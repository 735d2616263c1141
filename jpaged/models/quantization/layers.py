"""What quantized layers of all kinds have in common: here, and in a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.models.grouped_linear import GroupedLinear
from jpaged.models.linear import Linear, LinearLayout
from jpaged.models.loading.pieces import Part, Piece
from jpaged.models.parameters import Start, parameter
from jpaged.pallas_kernels.gated_product.reference import ACTIVATIONS

SUFFIXES = ("_scale", "_input_scale", "_zero", "_order", "_outer")
"""What the names of a quantized layer's further parameters end with, beside its values'."""


class QuantizedLinear(Linear):
    """A `Linear` in another form, made of a plain one and put in its place.

    Parameters that have rows are [*outputs, n]: all inputs, or groups of them, are their last axis.
    """

    def __init__(self, plain: Linear) -> None:
        self.layout, self.dtype, self.bias = plain.layout, plain.dtype, plain.bias

    def _gated(self, x: Any, activation: str, backend: str | None) -> jax.Array:
        both = self(x, backend=backend)
        return ACTIVATIONS[activation](both[..., 0, :]) * both[..., 1, :]

    def _product(self, x: Any, dtype: jnp.dtype | None, backend: str | None) -> jax.Array:
        layout = self.layout
        outer = x.shape[: x.ndim - len(layout.inputs)]
        y = self._multiply(x.reshape(-1, layout.input_size), dtype or x.dtype, backend)
        return y.reshape(*outer, *layout.outputs)

    def _multiply(self, x: jax.Array, dtype: Any, backend: str | None) -> jax.Array:
        """[M, all inputs] -> [M, all outputs]. backend: as of `Linear`'s call."""
        raise NotImplementedError


def rows_parameter(
    layout: LinearLayout,
    rngs: nnx.Rngs,
    start: Start,
    size: int,
    dtype: Any,
    suffix: str,
    *,
    by_input: bool,
    weights_each: int = 0,
) -> nnx.Param:
    """A parameter [*rows, size] of a quantized layer.

    by_input: its last axis is split where the inputs are; otherwise every shard then has all of it.
    """
    axis = layout.split_row
    if layout.splits_inputs and by_input:
        axis = len(layout.rows)
    options: dict[str, Any] = {"kv_slots": layout.kv_slots, "suffix": suffix, "weights_each": weights_each}
    return parameter(rngs, start, (*layout.rows, size), jnp.dtype(dtype), axis, **options)


class Kind(Protocol):
    """What layers keep. A kind is hashable, and its repr tells it from others.

    group: inputs that share a scale; None if all do. least_group: those that a device should have whole numbers of,
        where the columns of experts are filled up; fewer than a group where `in_groups_of` divides it.
    reorders_inputs: inputs that share a scale do not follow each other in a checkpoint.
    """

    @property
    def group(self) -> int | None: ...
    @property
    def least_group(self) -> int | None: ...
    @property
    def reorders_inputs(self) -> bool: ...

    def in_groups_of(self, group: int) -> "Kind | None":
        """The same with fewer inputs that share a scale, a divisor of `group`, for shards that do not have whole ones;
        the scale of each is that of those which it is among. None where groups cannot be divided."""

    def linear(self, plain: Linear, rngs: nnx.Rngs) -> QuantizedLinear:
        """A layer of this kind in place of the plain one."""

    def grouped(self, plain: GroupedLinear, rngs: nnx.Rngs) -> GroupedLinear:
        """Likewise, of experts. Raises UnsupportedModelError where they cannot be of this kind."""


class WholeGroups:
    """What kinds have in common whose groups cannot be divided."""

    group: int | None

    @property
    def least_group(self) -> int | None:
        return self.group

    def in_groups_of(self, group: int) -> Kind | None:
        del group
        return None


@dataclass(frozen=True)
class StoredLayer:
    """A linear layer of a checkpoint. name: what its tensors' names begin with. outputs, inputs: its sizes; where one
    tensor has all experts, outputs are those of all."""

    name: str
    outputs: int
    inputs: int


def stored_layer(piece: Piece, layout: LinearLayout) -> StoredLayer:
    """The layer whose "weight", or a part of it, a piece of a plain layer's kernel is."""
    if is_fused(piece, layout):
        inputs = prod(piece.split[piece.axes[axis]] for axis in layout.input_axes)
        return StoredLayer(piece.tensor, prod(piece.shape) // inputs, inputs)
    outputs, inputs = piece.shape if _is_torch(piece, layout) else piece.shape[::-1]
    return StoredLayer(piece.tensor.removesuffix(".weight"), outputs, inputs)


def is_fused(piece: Piece, layout: LinearLayout) -> bool:
    """Whether one tensor of the checkpoint has several experts, one behind the other: all, or a run of them."""
    return layout.experts > 0 and (len(piece.shape) > 2 or piece.split[piece.axes[0]] > 1)


def is_transposed(piece: Piece, layout: LinearLayout) -> bool:
    """Whether the checkpoint has the weight as [inputs, outputs], which torch's linear layers never do (GPT-2)."""
    return not _is_torch(piece, layout)


def derived_piece(piece: Piece, layout: LinearLayout, suffix: str, shape: Sequence[int]) -> Piece:
    """Where an array belongs that was made of a stored layer's tensors.

    piece: of a plain layer's kernel.
    suffix: of the parameter's name. shape: [outputs, n] as the rows of torch's weight (`RowOrder`); or [n], for all
        outputs at once, of experts for all of one's.
    """
    name = piece.parameter + suffix
    if len(shape) == 1 and layout.experts:
        return Piece(piece.tensor, (shape[0],), name, (1, shape[0]), (0, 1), (piece.offsets[0], 0))
    if len(shape) == 1:
        return Piece(piece.tensor, (shape[0],), name, (shape[0],), (0,), keeps_largest=True)
    last, places = shape[1], [piece.axes[axis] for axis in layout.row_axes]
    outer = sorted(places)  # the split's axes that are rows
    rank = {axis: i for i, axis in enumerate(outer)}
    part = piece.part and Part((*piece.part.split[:-1], last), piece.part.axis, piece.part.first, piece.part.count)
    return replace(
        piece,
        shape=(shape[0], last),
        parameter=name,
        split=(*(piece.split[axis] for axis in outer), last),
        axes=(*(rank[axis] for axis in places), len(outer)),
        start=(*(piece.offsets[axis] for axis in layout.row_axes), 0),
        copied_axis=rank.get(piece.copied_axis, 0),
        ordered_axis=rank.get(piece.ordered_axis, 0),
        part=part,
    )


@dataclass(frozen=True)
class RowOrder:
    """How an array becomes [outputs, inputs]. split: its shape first. order: the transposition then, after which the
    last axes, so many as input_axes says, are the inputs."""

    split: tuple[int, ...]
    order: tuple[int, ...]
    input_axes: int = 1

    def rows(self, tensor: Any) -> Any:
        """Of numpy or JAX."""
        inputs = prod(self.split[axis] for axis in self.order[-self.input_axes :])
        return tensor.reshape(self.split).transpose(self.order).reshape(-1, inputs)


def row_order_of_kernel(shape: tuple[int, ...], layout: LinearLayout) -> RowOrder:
    """Of a plain layer's whole kernel."""
    return RowOrder(shape, (*layout.row_axes, *layout.input_axes), len(layout.inputs))


def row_order(piece: Piece, layout: LinearLayout) -> RowOrder:
    """Of the tensor that a piece of a plain layer's kernel is."""
    if not is_fused(piece, layout):
        return RowOrder(piece.shape, (0, 1) if _is_torch(piece, layout) else (1, 0))
    (axis,) = layout.input_axes
    inputs = piece.axes[axis]
    return RowOrder(piece.split, (*(i for i in range(len(piece.split)) if i != inputs), inputs))


def _is_torch(piece: Piece, layout: LinearLayout) -> bool:
    return max(piece.axes[axis] for axis in layout.input_axes) == len(piece.split) - 1
