"""The residual stream of a model's tokens, and the sums over shards that are added to it.

    stream = begin_stream(embedding.lookup(...), ...)
    layer:  stream.add(attention(stream.normed(attention_norm), ...))      `add` takes a shard's term of a sum
            stream.add(mlp(stream.normed(mlp_norm), stream.backend))       `normed` is what the next layer reads
    stream.normed(norm)

With an `Exchange`, a sum waits until the next norm is known, and both are one kernel. Without one, each sum is an
all-reduce of the compiler's, and on one device there is nothing to sum. There a product of FP8 waits for the next norm
too, if its scales have still to be multiplied, and the kernel that does all this rounds the result to FP8 as well.
"""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp

from jpaged.api.errors import UnsupportedModelError
from jpaged.models.collectives import Collectives, Exchange
from jpaged.models.linear import PartialSum, Rounding, Rows
from jpaged.models.norms import Norm
from jpaged.pallas_kernels import Sums


@partial(jax.tree_util.register_dataclass, data_fields=("of_layer",), meta_fields=("num_experts",))
@dataclass
class ExpertCounts:
    """Counts the tokens that a forward pass gives each expert of each layer.

    of_layer: int32 [E], of the layer that runs; None where it has no experts.
    ended: those of the layers before it. Only the object that a forward pass is given has them: within a layer that is
        traced by itself there is another one.
    """

    num_experts: int
    of_layer: jax.Array | None = None
    ended: list[jax.Array] = field(default_factory=list, init=False)

    def count(self, experts: jax.Array) -> None:
        """experts: int32 [T, k], of all shards; others than 0 .. E - 1 count for nothing."""
        numbers = jnp.arange(self.num_experts, dtype=experts.dtype)
        self.of_layer = jnp.sum(experts.reshape(-1, 1) == numbers, axis=0, dtype=jnp.int32)

    def end_layer(self) -> None:
        """What comes next is another layer's."""
        if self.of_layer is not None:
            self.ended.append(self.of_layer)
        self.of_layer = None

    def by_layer(self, layers: int) -> jax.Array:
        """int32 [layers, E], of so many layers with experts.

        Raises:
            UnsupportedModelError: there were not as many.
        """
        if len(self.ended) != layers:
            raise UnsupportedModelError(
                f"expert_load=True: {len(self.ended)} of {layers} layers with experts counted their tokens; the model's"
                " blocks must give `stream.counts` to `SparseMLP`, or leave the option out."
            )
        return jnp.stack(self.ended)


@dataclass(frozen=True)
class Kernels:
    """What a forward pass may use beside XLA.

    exchange: of shards, for sums by the one-shot kernel, which update its state; all-reduces of XLA without one.
    backend: of products that have kernels (`Linear.gated`): "xla", through which gradients pass, or None to pick by
        device and shapes.
    live: bool [T], False for tokens that are padding, on which nothing need be spent; None where all count.
    counts: of the tokens of each expert; None where nobody asks.
    """

    exchange: Exchange | None = None
    backend: str | None = "xla"
    live: jax.Array | None = None
    counts: ExpertCounts | None = None


PLAIN_XLA = Kernels()


@jax.tree_util.register_dataclass
@dataclass
class Stream:
    """What layers pass on.

    x: [T, hidden], without what is `pending`. Between the blocks of a model with several streams (`altup`),
        [T, streams, hidden].
    pending: a sum that has still to be added.
    exchange, backend, live, counts: see `Kernels`; no exchange where it has no room for as many rows.
    """

    x: jax.Array
    pending: PartialSum | None
    exchange: Exchange | None
    collectives: Collectives = field(metadata={"static": True})
    backend: str | None = field(metadata={"static": True})
    live: jax.Array | None = None
    counts: ExpertCounts | None = None

    @property
    def num_rows(self) -> int:
        """T."""
        return self.x.shape[0]

    def add(self, part: PartialSum) -> None:
        """Adds the sum of all shards' terms, and the bias once."""
        self.value()
        if self.exchange is not None:
            self.pending = PartialSum(part.array, part.bias)
            return
        if isinstance(part.term, Sums) and part.bias is None and self.collectives.size == 1:
            self.pending = part
            return
        total = self.collectives.all_reduce(part.array)
        self.x = self.x + (total if part.bias is None else total + part.bias)

    def add_normed(self, part: PartialSum, norm: Norm) -> None:
        """Adds the norm of the sum of all shards' terms and the bias, for norms that stand after attention or MLP."""
        x = self.value()
        if self.exchange is None:
            total = self.collectives.all_reduce(part.array)
            self.x = x + norm(total if part.bias is None else total + part.bias)
            return
        scale = self._kernel_scale(norm)
        total, normed = self.exchange.add(jnp.zeros_like(x), part.array, part.bias, scale, norm.eps)
        self.x = x + (norm(total) if normed is None else normed)

    def _kernel_scale(self, norm: Norm) -> jax.Array | None:
        """The scale with which the exchange's kernel computes a norm; None if it cannot, as with a scale of another
        type than the stream's."""
        scale = norm.kernel_scale()
        return scale if scale is not None and scale.dtype == self.x.dtype else None

    def value(self) -> jax.Array:
        """The stream [T, hidden], everything added."""
        if self.pending is not None and isinstance(self.pending.term, Sums):
            self.x, self.pending = self.pending.term.added_to(self.x), None
        elif self.exchange is not None and self.pending is not None:
            self.x, _ = self.exchange.add(self.x, self.pending.array, self.pending.bias)
            self.pending = None
        return self.x

    def replace(self, x: jax.Array) -> None:
        """Makes x the stream, whatever it was: for norms that stand after the residual sums, and several streams."""
        self.x, self.pending = x, None

    def normed(self, norm: Norm) -> jax.Array:
        """The norm of the stream, [T, hidden]; where the exchange's kernel can do it, together with the pending sum."""
        if self.exchange is not None and self.pending is not None and (scale := self._kernel_scale(norm)) is not None:
            self.x, normed = self.exchange.add(self.x, self.pending.array, self.pending.bias, scale, norm.eps)
            self.pending = None
            assert normed is not None
            return normed
        return norm(self.value())

    def normed_for(self, rounding: Rounding | None, norm: Norm) -> Rows:
        """The norm of the stream as a layer reads it: rounded, where it says how, together with the pending sum."""
        if rounding is None or self.exchange is not None or (scale := norm.kernel_scale()) is None:
            return self.normed(norm)
        if self.pending is None:
            return rounding(self.x, norm=scale, norm_eps=norm.eps)[0]
        rows, x = rounding(self.pending.term, residual=self.x, norm=scale, norm_eps=norm.eps)
        assert x is not None
        self.x, self.pending = x, None
        return rows

    def become(self, other: "Stream") -> None:
        """Takes over what a traced function made of this stream; its exchange stays the same object."""
        self.x, self.pending = other.x, other.pending
        if self.exchange is not None and other.exchange is not None:
            self.exchange.become(other.exchange)
        if self.counts is not None and other.counts is not None:
            self.counts.of_layer = other.counts.of_layer


def begin_stream(
    rows: jax.Array, collectives: Collectives, kernels: Kernels, positions: jax.Array | None = None
) -> Stream:
    """The stream of tokens [T].

    rows: [T, hidden], of the embedding: a shard's term of their sum (`Embedding.lookup`).
    kernels: its exchange is taken if it has room for as many rows.
    positions: [T, hidden], where embeddings of positions are added.
    """
    exchange, rest = kernels.exchange, (collectives, kernels.backend, kernels.live, kernels.counts)
    if exchange is None or not exchange.takes(rows):
        x = collectives.all_reduce(rows)
        return Stream(x if positions is None else x + positions, None, None, *rest)
    x = jnp.zeros_like(rows) if positions is None else positions
    return Stream(x, PartialSum(rows), exchange, *rest)
