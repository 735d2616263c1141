"""How the tensors of a Hugging Face checkpoint and the fused parameters of a model correspond.

One declaration serves loading and saving:

    tensor  --(part)--> --reshape--> split  --transpose--> piece  --written at `start`--> parameter
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.models.loading.placing import place, take

Target = TypeVar("Target", jax.Array, np.ndarray)


@dataclass(frozen=True)
class Part:
    """Some of a tensor: of its reshape to `split` the entries first .. first + count - 1 of an axis."""

    split: tuple[int, ...]
    axis: int
    first: int
    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        return (*self.split[: self.axis], self.count, *self.split[self.axis + 1 :])

    def of(self, tensor: Any) -> Any:
        """The part of a numpy or JAX array, of `shape`; a view where numpy can give one."""
        return tensor.reshape(self.split)[(slice(None),) * self.axis + (slice(self.first, self.first + self.count),)]


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor, or a part of one, and its place in a parameter.

    tensor: its name in the checkpoint. shape: its shape there.
    parameter: the name of the parameter it belongs to (`Model.parameter_names`). start: where in it the piece begins;
        () for all zeros.
    split: the shape it is reshaped to first; axes: the transposition then.
    copies: how often each entry of the split's axis `copied_axis` stands in the parameter, side by side
        (`ModelConfig.kv_head_copies`).
    order: where the entries of the split's axis `ordered_axis` come from (`Rope.column_order`); () for all in place.
    part: what of the tensor it is, where several pieces make one tensor; None for all.
    keeps_largest: of several pieces at one place the parameter keeps the largest values.
    """

    tensor: str
    shape: tuple[int, ...]
    parameter: str
    split: tuple[int, ...]
    axes: tuple[int, ...]
    start: tuple[int, ...] = ()
    copies: int = 1
    copied_axis: int = 0
    order: tuple[int, ...] = ()
    ordered_axis: int = 0
    part: Part | None = None
    keeps_largest: bool = False

    @property
    def offsets(self) -> tuple[int, ...]:
        return self.start or (0,) * len(self.axes)

    def place(self, parameter: Target, tensor: np.ndarray | jax.Array, device: jax.Device | None = None) -> Target:
        """The parameter with this tensor (the whole of it) written into it, in the parameter's type. Donates the
        parameter; a numpy array is written to and returned.

        device: where the parameter is; the default device if None.
        """
        found = self._part_of(tensor)
        if not isinstance(parameter, np.ndarray):
            found = jax.device_put(found, device)
        return place(parameter, found, self.split, self.axes, self.offsets, self._order, self.keeps_largest)

    def slice_of(self, tensor: np.ndarray, axis: int | None, start: int, stop: int) -> np.ndarray:
        """What of a tensor of this shape belongs to entries start..stop-1 of the parameter's `axis`, all of the others
        (everything for an `axis` of None), still in the order of the split: for `place_slice`.

        Where the tensor ends before stop (padding), the slice is shorter.
        """
        whole = self._part_of(tensor).reshape(self.split)
        if axis is None:
            return whole
        split_axis = self.axes[axis]
        copies = self.copies if split_axis == self.copied_axis else 1
        first = self.offsets[axis]
        entries = np.arange(max(start, first), min(stop, first + self.split[split_axis] * copies)) - first
        if copies > 1:
            return whole.take(entries // copies, split_axis)
        index = [slice(None)] * whole.ndim
        index[split_axis] = slice(entries[0], entries[-1] + 1) if entries.size else slice(0)
        return whole[tuple(index)]

    def place_slice(self, shard: Target, piece: Target, axis: int | None, start: int) -> Target:
        """A shard of the parameter, which begins at entry `start` of its `axis`, with its slice of this tensor written
        into it. Donates the shard; a numpy array is written to and returned."""
        offsets = tuple(max(0, offset - start) if i == axis else offset for i, offset in enumerate(self.offsets))
        return place(shard, piece, piece.shape, self.axes, offsets, self._order, self.keeps_largest)

    def take(self, parameter: Target) -> Target:
        """This tensor, or the part of it that the piece is, read out of the parameter."""
        shape = self.shape if self.part is None else self.part.shape
        return take(parameter, shape, self.split, self.axes, self.offsets, self._order)

    def _part_of(self, tensor: Any) -> Any:
        return tensor if self.part is None else self.part.of(tensor)

    @property
    def _order(self) -> tuple[int, tuple[int, ...]] | None:
        return (self.ordered_axis, self.order) if self.order else None


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


class MLPShape(Protocol):
    """What of a `ModelConfig` lays out its MLPs' parameters."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...


class HeadShape(Protocol):
    """What of a `ModelConfig` lays out its head."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...


@dataclass(frozen=True)
class ExpertNames:
    """What a checkpoint calls the parts of a sparse layer, behind "model.layers.0."."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    correction: str = "gate.e_score_correction_bias"
    router: str = "gate"


USUAL_NAMES = ExpertNames()
"""Those of most families."""


class SparseShape(Protocol):
    """What of a `SparseConfig` lays out the parameters of its sparse layers."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def expert_size(self) -> int: ...
    @property
    def shared_size(self) -> int: ...
    @property
    def shared_gate(self) -> bool: ...
    @property
    def routing(self) -> Any: ...


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


def separate_qkv(
    prefix: str,
    parameter: str,
    config: AttentionShape,
    *,
    bias: bool,
    order: tuple[int, ...] = (),
    gated: bool = False,
    values: bool = True,
    value_dim: int | None = None,
) -> Iterator[Piece]:
    """q_proj, k_proj and v_proj, torch linear layers, into `Attention`'s qkv.

    order: of the columns of queries and keys (`Rope.column_order`).
    gated: in q_proj each head's query is followed by its gate, for `Attention`'s gate.
    values: there is a v_proj; False where `keys_are_values`.
    value_dim: as of `Attention`, whose values the v_proj then is.
    """
    hidden, heads, dim = config.hidden_size, config.num_heads, config.head_dim
    for name, split, slot, copies in _qkv_parts(config):
        if name == "v" and not values:
            continue
        if name == "v" and value_dim is not None:
            of_values, narrow = f"{parameter}.values", (*split[:2], value_dim)
            yield from _projection(f"{prefix}.v_proj", of_values, hidden, narrow, 0, copies, (), bias=bias)
            continue
        tensor, reorder = f"{prefix}.{name}_proj", () if name == "v" else order
        part = Part((*split[:2], 2, dim), 2, 0, 1) if gated and name == "q" else None
        yield from _projection(tensor, f"{parameter}.qkv", hidden, split, slot, copies, reorder, part, bias=bias)
    if gated:
        rows, gate = 2 * heads * dim, f"{parameter}.gate"
        part = Part((heads, 2, dim, hidden), 1, 1, 1)
        split = (heads, dim, hidden)
        yield Piece(f"{prefix}.q_proj.weight", (rows, hidden), gate, split, (2, 0, 1), part=part)
        if bias:
            of_bias = Part((heads, 2, dim), 1, 1, 1)
            yield Piece(f"{prefix}.q_proj.bias", (rows,), f"{gate}_bias", split[:2], (0, 1), part=of_bias)


def query_projection(
    prefix: str, parameter: str, config: AttentionShape, *, bias: bool, order: tuple[int, ...] = ()
) -> Iterator[Piece]:
    """A torch linear layer of queries into `Attention`'s queries, of a layer that reads keys and values of another.

    order: as of `separate_qkv`.
    """
    hidden, heads, dim = config.hidden_size, config.num_heads, config.head_dim
    name, split = f"{parameter}.queries", (heads, dim)
    options: dict[str, Any] = {"order": order, "ordered_axis": 1}
    yield Piece(f"{prefix}.weight", (heads * dim, hidden), name, (*split, hidden), (2, 0, 1), **options)
    if bias:
        yield Piece(f"{prefix}.bias", (heads * dim,), f"{name}_bias", split, (0, 1), **options)


def joined_qkv(
    prefix: str, parameter: str, config: AttentionShape, *, bias: bool, order: tuple[int, ...] = ()
) -> Iterator[Piece]:
    """One torch linear layer whose rows are all queries, then all keys, then all values, into `Attention`'s qkv.

    order: as of `separate_qkv`.
    """
    total = sum(prod(split) for _, split, _, _ in _qkv_parts(config))
    first = 0
    for name, split, slot, copies in _qkv_parts(config):
        part = Part((total,), 0, first, prod(split))
        first += part.count
        reorder = () if name == "v" else order
        yield from _projection(
            prefix, f"{parameter}.qkv", config.hidden_size, split, slot, copies, reorder, part, bias=bias
        )


def grouped_qkv(
    prefix: str, parameter: str, config: AttentionShape, *, bias: bool, order: tuple[int, ...] = ()
) -> Iterator[Piece]:
    """One torch linear layer whose rows are, as in `Attention`'s qkv, of each key-value head its queries, its key and
    its value.

    order: as of `separate_qkv`.
    """
    kv_heads, dim = config.num_kv_heads // config.kv_head_copies, config.head_dim
    group = config.num_heads // kv_heads
    for name, split, slot, copies in _qkv_parts(config):
        first, count = {"q": (0, group), "k": (group, 1), "v": (group + 1, 1)}[name]
        part = Part((kv_heads, group + 2, dim), 1, first, count)
        reorder = () if name == "v" else order
        yield from _projection(
            prefix, f"{parameter}.qkv", config.hidden_size, split, slot, copies, reorder, part, bias=bias
        )


def gate_and_up(prefix: str, parameter: str, config: MLPShape, *, bias: bool = False) -> Iterator[Piece]:
    """gate_proj and up_proj, torch linear layers, into `GatedMLP`'s gate_up."""
    inner, hidden = config.intermediate_size, config.hidden_size
    for slot, name in enumerate(("gate_proj", "up_proj")):
        weight, fused = f"{prefix}.{name}.weight", f"{parameter}.gate_up"
        yield Piece(weight, (inner, hidden), fused, (1, inner, hidden), (2, 0, 1), (0, slot, 0))
        if bias:
            yield Piece(f"{prefix}.{name}.bias", (inner,), f"{fused}_bias", (1, inner), (0, 1), (slot, 0))


def joined_gate_up(tensor: str, parameter: str, config: MLPShape) -> Piece:
    """One tensor whose rows are those of the gate, then those of up, into `GatedMLP`'s gate_up."""
    inner, hidden = config.intermediate_size, config.hidden_size
    return Piece(tensor, (2 * inner, hidden), f"{parameter}.gate_up", (2, inner, hidden), (2, 0, 1))


def head(tensor: str, embedding: str, config: HeadShape) -> Piece | TiedTensor:
    """The weights of a `Decoder`'s head, which may be those of its embedding."""
    if config.tie_word_embeddings:
        return TiedTensor(tensor, embedding)
    return as_is(tensor, "lm_head", config.vocab_size, config.hidden_size)


def head_bias(tensor: str, config: HeadShape) -> Piece:
    """The bias of a `Decoder`'s head, which is that of its embedding where they are tied."""
    owner = "embedding" if config.tie_word_embeddings else "lm_head"
    return as_is(tensor, f"{owner}_bias", config.vocab_size)


def _qkv_parts(config: AttentionShape) -> Iterator[tuple[str, tuple[int, int, int], int, int]]:
    """Of queries, keys and values: their name, how they are split (key-value heads, heads of each, head_dim), their
    first slot of `Attention`'s qkv, and how often each stands there."""
    kv_heads, dim, group, copies = config.num_kv_heads, config.head_dim, config.group_size, config.kv_head_copies
    yield "q", (kv_heads, group, dim), 0, 1
    yield "k", (kv_heads // copies, 1, dim), group, copies
    yield "v", (kv_heads // copies, 1, dim), group + 1, copies


def _projection(
    prefix: str,
    parameter: str,
    hidden: int,
    split: tuple[int, int, int],
    slot: int,
    copies: int,
    order: tuple[int, ...],
    part: Part | None = None,
    *,
    bias: bool,
) -> Iterator[Piece]:
    """Weight and bias of queries, keys or values. part: of the bias, and with the inputs as last axis of the weight."""
    options: dict[str, Any] = {"copies": copies, "order": order, "ordered_axis": 2}
    start, rows = (0, 0, slot, 0), prod(split if part is None else part.split)
    of_weight = part and replace(part, split=(*part.split, hidden))
    yield Piece(
        f"{prefix}.weight", (rows, hidden), parameter, (*split, hidden), (3, 0, 1, 2), start, part=of_weight, **options
    )
    if bias:
        yield Piece(f"{prefix}.bias", (rows,), f"{parameter}_bias", split, (0, 1, 2), start[1:], part=part, **options)


def output_projection(
    prefix: str, parameter: str, config: AttentionShape, *, bias: bool, value_dim: int | None = None
) -> Iterator[Piece]:
    """The torch linear layer after attention, into `Attention`'s out. value_dim: as of `Attention`."""
    hidden, heads = config.hidden_size, config.num_heads
    dim = config.head_dim if value_dim is None else value_dim
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
            fused, each = f"{parameter}.gate_up", (1, 1, inner, hidden)
            yield Piece(f"{theirs}.{name}.weight", (inner, hidden), fused, each, (0, 3, 1, 2), (expert, 0, slot, 0))
        split = (1, hidden, inner)
        yield Piece(f"{theirs}.{down}.weight", (hidden, inner), f"{parameter}.down", split, (0, 2, 1), (expert, 0, 0))


def joined_experts(prefix: str, parameter: str, hidden: int, inner: int, num_experts: int) -> Iterator[Piece]:
    """A tensor for gate and up of all experts, the gate's outputs first, and one for down, into `GroupedExperts`."""
    both, split = (num_experts, 2 * inner, hidden), (num_experts, 2, inner, hidden)
    yield Piece(f"{prefix}.gate_up_proj", both, f"{parameter}.gate_up", split, (0, 3, 1, 2))
    one = (num_experts, hidden, inner)
    yield Piece(f"{prefix}.down_proj", one, f"{parameter}.down", one, (0, 2, 1))


def sparse_mlp(theirs: str, ours: str, config: SparseShape, names: ExpertNames = USUAL_NAMES) -> Iterator[Piece]:
    """The router, experts and shared experts of a layer, into a `SparseMLP`."""
    hidden = config.hidden_size
    yield transposed(f"{theirs}.{names.router}.weight", f"{ours}.router.gate", hidden, config.num_experts)
    if config.routing.biased:
        correction = f"{theirs}.{names.correction}"
        yield as_is(correction, f"{ours}.router.correction", config.num_experts)
    yield from experts(
        f"{theirs}.experts",
        f"{ours}.experts",
        hidden,
        config.expert_size,
        config.num_experts,
        gate=names.gate,
        up=names.up,
        down=names.down,
    )
    if config.shared_size:
        yield from gated_mlp(f"{theirs}.{names.shared}", f"{ours}.shared", hidden, config.shared_size)
    if config.shared_gate:
        yield transposed(f"{theirs}.{names.shared}_gate.weight", f"{ours}.shared_gate", hidden, 1)


def gated_mlp(theirs: str, ours: str, hidden: int, inner: int, names: ExpertNames = USUAL_NAMES) -> Iterator[Piece]:
    """gate_proj, up_proj and down_proj, torch linear layers, into a `GatedMLP`. names: other ones of the three."""
    for slot, name in enumerate((names.gate, names.up)):
        split, start = (1, inner, hidden), (0, slot, 0)
        yield Piece(f"{theirs}.{name}.weight", (inner, hidden), f"{ours}.gate_up", split, (2, 0, 1), start)
    yield transposed(f"{theirs}.{names.down}.weight", f"{ours}.down", inner, hidden)


def layer_norm(prefix: str, parameter: str, size: int) -> Iterator[Piece]:
    yield norm(prefix, parameter, size)
    yield as_is(f"{prefix}.bias", f"{parameter}.bias", size)


def norm(prefix: str, parameter: str, size: int) -> Piece:
    """The scale of a norm that has nothing else."""
    return as_is(f"{prefix}.weight", f"{parameter}.scale", size)


def head_norms(
    prefixes: tuple[str, str],
    parameter: str,
    config: AttentionShape,
    *,
    flat: bool = False,
    order: tuple[int, ...] = (),
) -> Iterator[Piece]:
    """The scales of all queries and of all keys, into a `HeadNorms`.

    prefixes: of queries and of keys. flat: the tensors are [heads * head_dim], not [heads, head_dim].
    order: as of `separate_qkv`.
    """
    for prefix, (_, split, slot, copies) in zip(prefixes, _qkv_parts(config), strict=False):
        shape = (prod(split),) if flat else (split[0] * split[1], split[2])
        name, start = f"{parameter}.scale", (0, slot, 0)
        yield Piece(f"{prefix}.weight", shape, name, split, (0, 1, 2), start, copies, order=order, ordered_axis=2)


def repeat_kv_heads(qkv: jax.Array, copies: int, axis: int, shared: int = 2) -> jax.Array:
    """[..., kv_heads, group + shared, ...] -> [..., kv_heads * copies, group / copies + shared, ...]; axis: of the
    heads. shared: slots behind those of the queries, of a key and of a value."""
    outer, (kv_heads, slots), inner = qkv.shape[:axis], qkv.shape[axis : axis + 2], qkv.shape[axis + 2 :]
    queries, keys_and_values = jnp.split(qkv, [slots - shared], axis=axis + 1)
    queries = queries.reshape(*outer, kv_heads * copies, (slots - shared) // copies, *inner)
    return jnp.concatenate([queries, jnp.repeat(keys_and_values, copies, axis=axis)], axis=axis + 1)


def single_kv_heads(qkv: jax.Array, copies: int, shared: int = 2) -> jax.Array:
    """What `repeat_kv_heads` was given."""
    *outer, kv_heads, slots, dim = qkv.shape
    group = slots - shared
    queries = qkv[..., :group, :].reshape(*outer, kv_heads // copies, group * copies, dim)
    return jnp.concatenate([queries, qkv[..., ::copies, group:, :]], axis=-2)
