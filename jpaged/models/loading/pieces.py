"""How the tensors of a Hugging Face checkpoint and the fused parameters of a model correspond.

One declaration serves loading and saving:

    tensor  --reshape--> split  --transpose--> piece  --written at `start`--> parameter
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor and its place in a parameter.

    tensor: its name in the checkpoint. shape: its shape there.
    parameter: the name of the parameter it belongs to (`Model.parameter_names`). start: where in it the piece begins;
        () for all zeros.
    split: the shape it is reshaped to first; axes: the transposition then.
    copies: how often each entry of the split's axis `copied_axis` stands in the parameter, side by side
        (`ModelConfig.kv_head_copies`).
    """

    tensor: str
    shape: tuple[int, ...]
    parameter: str
    split: tuple[int, ...]
    axes: tuple[int, ...]
    start: tuple[int, ...] = ()
    copies: int = 1
    copied_axis: int = 0

    @property
    def offsets(self) -> tuple[int, ...]:
        return self.start or (0,) * len(self.axes)

    def place(self, parameter: jax.Array, tensor: jax.Array) -> jax.Array:
        """The parameter with this tensor written into it, in the parameter's type. Donates the parameter."""
        return _place(parameter, tensor, self.split, self.axes, self.offsets)

    def slice_of(self, tensor: np.ndarray, axis: int | None, start: int, stop: int) -> np.ndarray:
        """What of a tensor of this shape belongs to entries start..stop-1 of the parameter's `axis`, all of the others
        (everything for an `axis` of None), still in the order of the split: for `place_slice`.

        Where the tensor ends before stop (padding), the slice is shorter.
        """
        whole = tensor.reshape(self.split)
        if axis is None:
            return whole
        split_axis = self.axes[axis]
        if self.copies > 1 and split_axis == self.copied_axis:
            return whole.take(np.arange(start, stop) // self.copies, split_axis)
        index = [slice(None)] * whole.ndim
        begin = self.offsets[axis]
        index[split_axis] = slice(max(start - begin, 0), max(stop - begin, 0))
        return whole[tuple(index)]

    def place_slice(self, shard: jax.Array, piece: jax.Array, axis: int | None, start: int) -> jax.Array:
        """A shard of the parameter, which begins at entry `start` of its `axis`, with its slice of this tensor written
        into it. Donates the shard.
        """
        offsets = list(self.offsets)
        if axis is not None:
            offsets[axis] = max(offsets[axis] - start, 0)
        return _place(shard, piece, piece.shape, self.axes, tuple(offsets))

    def take(self, parameter: jax.Array) -> jax.Array:
        """This tensor, read out of the parameter."""
        return _take(parameter, self.shape, self.split, self.axes, self.offsets)


@dataclass(frozen=True)
class TiedTensor:
    """A tensor that a checkpoint may hold and need not, because it must equal another one: the head of a model whose
    embedding is its head.

    tensor, equals: names in the checkpoint.
    """

    tensor: str
    equals: str


class AttentionShape(Protocol):
    """What of a `ModelConfig` lays out its attention's parameters."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def kv_head_copies(self) -> int: ...


def as_is(tensor: str, parameter: str, *shape: int) -> Piece:
    return Piece(tensor, shape, parameter, shape, tuple(range(len(shape))))


def transposed(tensor: str, parameter: str, inputs: int, outputs: int) -> Piece:
    """A torch linear layer keeps [outputs, inputs]; the kernel is [inputs, outputs]."""
    return Piece(tensor, (outputs, inputs), parameter, (outputs, inputs), (1, 0))


def linear(prefix: str, parameter: str, inputs: int, outputs: int, *, bias: bool) -> Iterator[Piece]:
    """A torch linear layer, its bias included, into a `Linear` of one axis of inputs and one of outputs."""
    yield transposed(f"{prefix}.weight", parameter, inputs, outputs)
    if bias:
        yield as_is(f"{prefix}.bias", f"{parameter}_bias", outputs)


def separate_qkv(prefix: str, parameter: str, config: AttentionShape, *, bias: bool) -> Iterator[Piece]:
    """q_proj, k_proj and v_proj, torch linear layers, into `Attention`'s qkv."""
    hidden, kv_heads, dim, group = config.hidden_size, config.num_kv_heads, config.head_dim, config.group_size
    for name, heads, slot in (("q", group, 0), ("k", 1, group), ("v", 1, group + 1)):
        copies = 1 if name == "q" else config.kv_head_copies
        split = (kv_heads // copies, heads, dim)
        rows = split[0] * heads * dim
        yield Piece(
            f"{prefix}.{name}_proj.weight",
            (rows, hidden),
            f"{parameter}.qkv",
            (*split, hidden),
            (3, 0, 1, 2),
            (0, 0, slot, 0),
            copies,
        )
        if bias:
            name = f"{prefix}.{name}_proj.bias"
            yield Piece(name, (rows,), f"{parameter}.qkv_bias", split, (0, 1, 2), (0, slot, 0), copies)


def output_projection(prefix: str, parameter: str, config: AttentionShape, *, bias: bool) -> Iterator[Piece]:
    """The torch linear layer after attention, into `Attention`'s out."""
    hidden, heads, dim = config.hidden_size, config.num_heads, config.head_dim
    yield Piece(f"{prefix}.weight", (hidden, heads * dim), f"{parameter}.out", (hidden, heads, dim), (1, 2, 0))
    if bias:
        yield as_is(f"{prefix}.bias", f"{parameter}.out_bias", hidden)


def experts(
    prefix: str, parameter: str, hidden: int, inner: int, num_experts: int, *, gate: str, up: str, down: str
) -> Iterator[Piece]:
    """The torch linear layers of each expert, without biases, into `GroupedExperts`.

    prefix: what the expert's number follows. gate, up, down: what the products are called.
    """
    for expert in range(num_experts):
        theirs = f"{prefix}.{expert}"
        for slot, name in enumerate((gate, up)):
            fused, split = f"{parameter}.gate_up", (1, 1, inner, hidden)
            yield Piece(f"{theirs}.{name}.weight", (inner, hidden), fused, split, (0, 3, 1, 2), (expert, 0, slot, 0))
        place = ((1, hidden, inner), (0, 2, 1), (expert, 0, 0))
        yield Piece(f"{theirs}.{down}.weight", (hidden, inner), f"{parameter}.down", *place)


def layer_norm(prefix: str, parameter: str, size: int) -> Iterator[Piece]:
    yield as_is(f"{prefix}.weight", f"{parameter}.scale", size)
    yield as_is(f"{prefix}.bias", f"{parameter}.bias", size)


def repeat_kv_heads(qkv: jax.Array, copies: int) -> jax.Array:
    """[..., kv_heads, group + 2, dim] -> [..., kv_heads * copies, group / copies + 2, dim]."""
    *outer, kv_heads, slots, dim = qkv.shape
    group = slots - 2
    queries = qkv[..., :group, :].reshape(*outer, kv_heads * copies, group // copies, dim)
    keys_and_values = jnp.repeat(qkv[..., group:, :], copies, axis=-3)
    return jnp.concatenate([queries, keys_and_values], axis=-2)


def _place(
    parameter: jax.Array,
    tensor: jax.Array,
    split: tuple[int, ...],
    axes: tuple[int, ...],
    offsets: tuple[int, ...],
) -> jax.Array:
    return _place_at(parameter, tensor, split, axes, np.asarray(offsets, np.int32))


def _take(
    parameter: jax.Array,
    shape: tuple[int, ...],
    split: tuple[int, ...],
    axes: tuple[int, ...],
    offsets: tuple[int, ...],
) -> jax.Array:
    return _take_at(parameter, shape, split, axes, np.asarray(offsets, np.int32))


# Compiled once for each kind of tensor, not for each tensor: neither names nor places are static.
@partial(jax.jit, static_argnums=(2, 3), donate_argnums=0)
def _place_at(
    parameter: jax.Array, tensor: jax.Array, split: tuple[int, ...], axes: tuple[int, ...], offsets: jax.Array
) -> jax.Array:
    piece = tensor.reshape(split).transpose(axes).astype(parameter.dtype)
    return jax.lax.dynamic_update_slice(parameter, piece, list(offsets))


@partial(jax.jit, static_argnums=(1, 2, 3))
def _take_at(
    parameter: jax.Array,
    shape: tuple[int, ...],
    split: tuple[int, ...],
    axes: tuple[int, ...],
    offsets: jax.Array,
) -> jax.Array:
    piece = jax.lax.dynamic_slice(parameter, list(offsets), tuple(split[axis] for axis in axes))
    inverse = sorted(range(len(axes)), key=axes.__getitem__)
    return jnp.transpose(piece, inverse).reshape(shape)
