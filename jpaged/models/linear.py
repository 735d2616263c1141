"""Linear layers: values, how tensor parallelism splits them, and the product, in one object.

kind of split    kernel                      each shard computes        what joins the shards
columns          axis among the outputs      its own outputs            nothing: `layer(x)`
rows             axis among the inputs       a term of every output     a sum: `layer.partial_sum(x)`
none             all of it on every shard    everything                 nothing: `layer(x)`
"""

from dataclasses import dataclass
from math import prod
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from jpaged.models.collectives import Collectives
from jpaged.models.parameters import Constant, Normal, parameter
from jpaged.pallas_kernels import RoundedRows, Sums, gated_product, round_rows
from jpaged.pallas_kernels.common.numerics import precision_of

Rows = jax.Array | RoundedRows
"""What layers read: [T, *inputs], or what the layer's `Rounding` made of such rows."""


def count_rows(x: Rows) -> int:
    """T, without the padding of `RoundedRows`."""
    return x.count if isinstance(x, RoundedRows) else x.shape[0]


@dataclass(frozen=True)
class Rounding:
    """How a layer rounds the rows that it reads, so that who makes them can do it in the same kernel.

    input_scale, upper_bound, backend: as of `pallas_kernels.round_rows`.
    """

    input_scale: jax.Array | None
    upper_bound: float | None
    backend: str | None

    def __call__(self, x: jax.Array | Sums, **before: Any) -> tuple[RoundedRows, jax.Array | None]:
        """What the layer reads of x [T, inputs]: `pallas_kernels.round_rows` of it.

        before: residual, norm and its epsilon, or activation.
        """
        options: dict[str, Any] = {"input_scale": self.input_scale, "upper_bound": self.upper_bound}
        return round_rows(x, **options, **before, backend=self.backend)


Term = jax.Array | Sums
"""[T, hidden], or such a product whose scales are still to be multiplied."""


@jax.tree_util.register_dataclass
@dataclass
class PartialSum:
    """A shard's term of a sum over all shards, and what is added once to the whole. `residual.Stream.add` takes it.

    term: of a product whose inputs are split over shards. If it is `Sums`, whoever adds it multiplies its scales in the
        same kernel.
    bias: [hidden], equal on every shard; or None.
    """

    term: Term
    bias: jax.Array | None = None

    @property
    def array(self) -> jax.Array:
        """The term [T, hidden]."""
        return self.term.array() if isinstance(self.term, Sums) else self.term

    def __add__(self, other: "PartialSum") -> "PartialSum":
        """Both sums as one, so that shards exchange one array: for attention and MLP that read the same input."""
        bias = self.bias if other.bias is None else other.bias if self.bias is None else self.bias + other.bias
        return PartialSum(self.array + other.array, bias)

    def times(self, factor: float) -> "PartialSum":
        """The sum times a number, which is not rounded to the terms' type."""
        if factor == 1.0:
            return self
        return PartialSum(times(self.array, factor), None if self.bias is None else times(self.bias, factor))


def times(x: jax.Array, factor: float) -> jax.Array:
    """x times a number, in float32, rounded to x's type."""
    return x if factor == 1.0 else (x.astype(jnp.float32) * factor).astype(x.dtype)


@dataclass(frozen=True)
class LinearLayout:
    """What a `Linear` maps to what, and which axis of its kernel tensor parallelism splits; see there.

    experts: matrices of a `GroupedLinear`, whose kernel is [experts, *inputs, *outputs]; 0 for a `Linear`.
    joined: see `Linear`.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    std: float
    shard_axis: int | None
    kv_slots: int
    outputs_first: bool
    experts: int = 0
    joined: bool = False

    @property
    def input_size(self) -> int:
        return prod(self.inputs)

    @property
    def output_size(self) -> int:
        return prod(self.outputs)

    @property
    def rows(self) -> tuple[int, ...]:
        """Axes of what has something for each output: those of the outputs, behind that of the experts."""
        return (self.experts, *self.outputs) if self.experts else self.outputs

    @property
    def input_axes(self) -> tuple[int, ...]:
        """Which of the kernel's axes are inputs."""
        first = len(self.outputs) if self.outputs_first else min(self.experts, 1)
        return tuple(range(first, first + len(self.inputs)))

    @property
    def row_axes(self) -> tuple[int, ...]:
        """Which of the kernel's axes are `rows`."""
        inputs = self.input_axes
        return tuple(axis for axis in range(len(self.rows) + len(inputs)) if axis not in inputs)

    @property
    def kernel_shape(self) -> tuple[int, ...]:
        """Of the plain kernel."""
        sizes = dict(zip((*self.row_axes, *self.input_axes), (*self.rows, *self.inputs), strict=True))
        return tuple(sizes[axis] for axis in range(len(sizes)))

    @property
    def split_row(self) -> int | None:
        """Which of `rows` is split; None if none is."""
        return self.row_axes.index(self.shard_axis) if self.shard_axis in self.row_axes else None

    @property
    def splits_inputs(self) -> bool:
        return self.shard_axis in self.input_axes


class Linear(nnx.Module):
    """y = x @ kernel + bias.

    Layers construct it, call its methods, and reach into nothing of it. One that keeps its values in another form (FP8
    with scales, 4 bits in groups) is a subclass, which `models.quantization` puts in its place once the module stands:
    it makes its own parameters with `parameter`, each with its own `shard_axis`, and computes its own products. Layers
    have no branches for kinds.

    inputs, outputs: the axes that x ends with, and those that y ends with instead.
    std: of the normal distribution that the kernel starts from; the bias starts from zero.
    shard_axis: the axis of the kernel that tensor parallelism splits; None for none.
    kv_slots: outputs are (kv_heads, group + kv_slots, head_dim): see `parameter`.
    outputs_first: the kernel is [*outputs, *inputs] instead of [*inputs, *outputs].
    joined: in checkpoints it is one layer with others, so that it is quantized where they are. Without this, none is
        quantized while it is read that every shard has all of.
    """

    def __init__(
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        std: float,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        *,
        shard_axis: int | None = None,
        bias: bool = False,
        kv_slots: int = 0,
        outputs_first: bool = False,
        joined: bool = False,
    ) -> None:
        self.layout = LinearLayout(inputs, outputs, std, shard_axis, kv_slots, outputs_first, joined=joined)
        self.dtype = dtype
        shape = outputs + inputs if outputs_first else inputs + outputs
        self.kernel = parameter(rngs, Normal(std), shape, dtype, shard_axis, kv_slots=kv_slots, suffix="")
        bias_options: dict[str, Any] = {"kv_slots": kv_slots, "suffix": "_bias"}
        axis = self.layout.split_row
        self.bias = parameter(rngs, Constant(0.0), outputs, dtype, axis, **bias_options) if bias else None

    def rounding(self, num_rows: int, backend: str | None) -> Rounding | None:
        """How to round what this layer reads before it is called; None if it must be an array.

        num_rows: of what it reads, since few rows may stay in 16 bits. backend: of the calls that read it.
        """
        del num_rows, backend
        return None

    def __call__(self, x: Rows, dtype: jnp.dtype | None = None, backend: str | None = "xla") -> jax.Array:
        """[T, *inputs] -> [T, *outputs], of x's type, or of `dtype`, in which sums are then accumulated.

        backend: of products that have kernels, which some quantized ones do; None picks by device.

        Raises:
            ValueError: the inputs are split over shards, so that each has a term of the sum alone.
        """
        if self.layout.splits_inputs:
            raise ValueError("A Linear whose inputs are split over shards gives a partial sum: call partial_sum.")
        y = self._product(x, dtype, backend)
        return y if self.bias is None else y + self.bias[...]

    def sums(self, x: Rows, backend: str | None = "xla") -> jax.Array | Sums:
        """What a call gives; or [T, all outputs], for who multiplies its scales on the way."""
        return self(x, backend=backend)

    def partial_sum(self, x: Rows, backend: str | None = "xla") -> PartialSum:
        """[T, *inputs of this shard] -> this shard's term of [T, *outputs], and the bias.

        backend: as of a call.

        Raises:
            ValueError: the inputs are not split, so that the sum over shards would count each term once a shard.
        """
        if not self.layout.splits_inputs:
            raise ValueError("A Linear whose inputs are whole on every shard gives no partial sum: call it.")
        return PartialSum(self._term(x, backend), None if self.bias is None else self.bias[...])

    def gated(self, x: Rows, activation: str, backend: str | None, rounding: Rounding | None = None) -> Rows:
        """activation(gate) * up, of outputs (2, inner), which are gate and up: [T, inputs] -> [T, inner].

        activation, backend: as of `pallas_kernels.gated_product`; gradients need the backend "xla".
        rounding: of the layer that reads the result, which is rounded so.
        """
        gated = self._gated(x, activation, backend)
        return gated if rounding is None else rounding(gated)[0]

    def _gated(self, x: Any, activation: str, backend: str | None) -> jax.Array:
        bias = None if self.bias is None else self.bias[...]
        operands = promote_dtype((x, self.kernel[...], bias))  # who trains a model may keep some weights in float32
        return gated_product(*operands, activation=activation, backend=backend)

    def _term(self, x: Any, backend: str | None) -> Term:
        return self._product(x, None, backend)

    def _product(self, x: Any, dtype: jnp.dtype | None, backend: str | None) -> jax.Array:
        del backend
        # einsum contracts axes in the order of their letters: the innermost first.
        inner, outer = ascii_lowercase[: len(self.layout.inputs)][::-1], ascii_uppercase[: len(self.layout.outputs)]
        pattern = f"...{inner},{outer + inner if self.layout.outputs_first else inner + outer}->...{outer}"
        precision = precision_of(x.dtype)
        return jnp.einsum(pattern, x, self.kernel[...], precision=precision, preferred_element_type=dtype)


class Reader(nnx.Module):
    """A part of a layer that reads arrays alone, until it overrides `rounding`."""

    def rounding(self, num_rows: int, backend: str | None) -> Rounding | None:
        """How what a call reads may be rounded before, as of `Linear`; None if it must be an array."""
        del num_rows, backend
        return None


class PlainLinear(Linear):
    """A `Linear` that no scheme quantizes: small, and what follows depends on close decisions, as in routers."""


class DelicateLinear(Linear):
    """A `Linear` that is quantized where a checkpoint has it so, and is left as it is where weights are rounded here:
    small, and its errors add up over a sequence."""


class Embedding(Linear):
    """A table [vocab, width], split over shards by token id. Called, it is the head: hidden states to logits.

    std, bias: as of `Linear`; the bias is of the head.
    """

    def __init__(
        self, vocab_size: int, width: int, std: float, dtype: jnp.dtype, rngs: nnx.Rngs, *, bias: bool = False
    ) -> None:
        super().__init__((width,), (vocab_size,), std, dtype, rngs, shard_axis=0, bias=bias, outputs_first=True)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [R, width] -> float32 [R, vocab of this shard]."""
        return self(hidden, jnp.dtype(jnp.float32))

    def lookup(self, tokens: jax.Array, collectives: Collectives) -> jax.Array:
        """int32 tokens [T] -> [T, width]: their rows, or a shard's term of the sum over shards that gives their rows.

        A shard gives zeros for tokens that it does not have, so the sum is exact.
        """
        table = self.kernel[...]
        if collectives.size == 1:
            return table[tokens]
        rows = tokens - collectives.first(table.shape[0])
        own = (rows >= 0) & (rows < table.shape[0])
        found = table[jnp.where(own, rows, 0)]
        return jnp.where(own[:, None], found, jnp.zeros_like(found))
