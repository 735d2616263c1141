"""What quantized layers of all kinds have in common: here, and in a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.models.linear import Linear, LinearLayout
from jpaged.models.loading.pieces import Part, Piece
from jpaged.models.parameters import Start, parameter
from jpaged.pallas_kernels.gated_product.reference import ACTIVATIONS

SUFFIXES = ("_scale", "_input_scale", "_zero", "_order")
"""What the names of a quantized layer's further parameters end with, beside its values'."""


class QuantizedLinear(Linear):
    """A `Linear` in another form, made of a plain one and put in its place.

    Parameters that have rows are [*outputs, n]: all inputs, or groups of them, are their last axis.
    """

    def __init__(self, plain: Linear) -> None:
        self.layout, self.dtype, self.bias = plain.layout, plain.dtype, plain.bias

    def gated(self, x: jax.Array, activation: str, backend: str | None) -> jax.Array:
        both = self(x, backend=backend)
        return ACTIVATIONS[activation](both[..., 0, :]) * both[..., 1, :]

    def _rows(
        self,
        rngs: nnx.Rngs,
        start: Start,
        size: int,
        dtype: Any,
        suffix: str,
        *,
        by_input: bool,
        weights_each: int = 0,
    ) -> nnx.Param:
        """A parameter [*outputs, size].

        by_input: its last axis is split where the inputs are; otherwise every shard then has all of it.
        """
        layout = self.layout
        axis = layout.output_axis
        if layout.splits_inputs and by_input:
            axis = len(layout.outputs)
        options: dict[str, Any] = {"kv_heads": layout.kv_heads, "suffix": suffix, "weights_each": weights_each}
        return parameter(rngs, start, (*layout.outputs, size), jnp.dtype(dtype), axis, **options)

    def _product(self, x: jax.Array, dtype: jnp.dtype | None, backend: str | None) -> jax.Array:
        layout = self.layout
        outer = x.shape[: x.ndim - len(layout.inputs)]
        y = self._multiply(x.reshape(-1, layout.input_size), dtype or x.dtype, backend)
        return y.reshape(*outer, *layout.outputs)

    def _multiply(self, x: jax.Array, dtype: Any, backend: str | None) -> jax.Array:
        """[M, all inputs] -> [M, all outputs]. backend: as of `Linear`'s call."""
        raise NotImplementedError


class Kind(Protocol):
    """What layers keep. A kind is hashable, and its repr tells it from others.

    group: inputs that share a scale; None if all do.
    reorders_inputs: inputs that share a scale do not follow each other in a checkpoint.
    """

    @property
    def group(self) -> int | None: ...
    @property
    def reorders_inputs(self) -> bool: ...

    def linear(self, plain: Linear, rngs: nnx.Rngs) -> QuantizedLinear:
        """A layer of this kind in place of the plain one."""


@dataclass(frozen=True)
class StoredLayer:
    """A linear layer of a checkpoint. name: what its tensors' names begin with. outputs, inputs: its sizes."""

    name: str
    outputs: int
    inputs: int


def stored_layer(piece: Piece, layout: LinearLayout) -> StoredLayer:
    """The layer whose "weight", or a part of it, a piece of a plain `Linear`'s kernel is."""
    outputs, inputs = piece.shape if _is_torch(piece, layout) else piece.shape[::-1]
    return StoredLayer(piece.tensor.removesuffix(".weight"), outputs, inputs)


def is_transposed(piece: Piece, layout: LinearLayout) -> bool:
    """Whether the checkpoint has the weight as [inputs, outputs], which torch's linear layers never do (GPT-2)."""
    return not _is_torch(piece, layout)


def derived_piece(piece: Piece, layout: LinearLayout, suffix: str, shape: Sequence[int]) -> Piece:
    """Where an array belongs that was made of a stored layer's tensors.

    piece: of a plain `Linear`'s kernel.
    suffix: of the parameter's name. shape: [outputs, n] as the rows of torch's weight; or [n], for all outputs at once.
    """
    name = piece.parameter + suffix
    if len(shape) == 1:
        return Piece(piece.tensor, (shape[0],), name, (shape[0],), (0,), keeps_largest=True)
    num_inputs, last = len(layout.inputs), shape[1]
    outer = sorted(piece.axes[num_inputs:])  # the split's axes that are outputs
    rank = {axis: i for i, axis in enumerate(outer)}
    part = piece.part and Part((*piece.part.split[:-1], last), piece.part.axis, piece.part.first, piece.part.count)
    return replace(
        piece,
        shape=(shape[0], last),
        parameter=name,
        split=(*(piece.split[axis] for axis in outer), last),
        axes=(*(rank[axis] for axis in piece.axes[num_inputs:]), len(outer)),
        start=(*piece.offsets[num_inputs:], 0),
        copied_axis=rank.get(piece.copied_axis, 0),
        ordered_axis=rank.get(piece.ordered_axis, 0),
        part=part,
    )


def _is_torch(piece: Piece, layout: LinearLayout) -> bool:
    return min(piece.axes[: len(layout.inputs)]) > 0
