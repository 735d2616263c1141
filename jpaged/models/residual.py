"""The residual stream of a model's tokens, and the sums over shards that are added to it.

    stream = begin_stream(embedding.lookup(...), ...)
    layer:  stream.add(attention(stream.normed(attention_norm), ...))      `add` takes a shard's term of a sum
            stream.add(mlp(stream.normed(mlp_norm), stream.backend))       `normed` is what the next layer reads
    stream.normed(norm)

With an `Exchange`, a sum waits until the next norm is known, and both are one kernel. Without one, each sum is an
all-reduce of the compiler's, and on one device there is nothing to sum.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jpaged.models.collectives import Collectives, Exchange
from jpaged.models.linear import PartialSum
from jpaged.models.norms import Norm


@dataclass(frozen=True)
class Kernels:
    """What a forward pass may use beside XLA.

    exchange: of shards, for sums by the one-shot kernel, which update its state; all-reduces of XLA without one.
    backend: of products that have kernels (`Linear.gated`): "xla", through which gradients pass, or None to pick by
        device and shapes.
    """

    exchange: Exchange | None = None
    backend: str | None = "xla"


PLAIN_XLA = Kernels()


@jax.tree_util.register_dataclass
@dataclass
class Stream:
    """What layers pass on.

    x: [T, hidden], without what is `pending`.
    pending: a sum that has still to be added.
    exchange, backend: see `Kernels`; no exchange where it has no room for as many rows.
    """

    x: jax.Array
    pending: PartialSum | None
    exchange: Exchange | None
    collectives: Collectives = field(metadata={"static": True})
    backend: str | None = field(metadata={"static": True})

    def add(self, part: PartialSum) -> None:
        """Adds the sum of all shards' terms, and the bias once."""
        if self.exchange is not None:
            self.value()
            self.pending = part
            return
        total = self.collectives.all_reduce(part.term)
        self.x = self.x + (total if part.bias is None else total + part.bias)

    def add_normed(self, part: PartialSum, norm: Norm) -> None:
        """Adds the norm of the sum of all shards' terms and the bias, for norms that stand after attention or MLP."""
        x = self.value()
        if self.exchange is None:
            total = self.collectives.all_reduce(part.term)
            self.x = x + norm(total if part.bias is None else total + part.bias)
            return
        scale = self._kernel_scale(norm)
        total, normed = self.exchange.add(jnp.zeros_like(x), part.term, part.bias, scale, norm.eps)
        self.x = x + (norm(total) if normed is None else normed)

    def _kernel_scale(self, norm: Norm) -> jax.Array | None:
        """The scale with which the exchange's kernel computes a norm; None if it cannot, as with a scale of another
        type than the stream's."""
        scale = norm.kernel_scale()
        return scale if scale is not None and scale.dtype == self.x.dtype else None

    def value(self) -> jax.Array:
        """The stream [T, hidden], everything added."""
        if self.exchange is not None and self.pending is not None:
            self.x, _ = self.exchange.add(self.x, self.pending.term, self.pending.bias)
            self.pending = None
        return self.x

    def replace(self, x: jax.Array) -> None:
        """Makes x [T, hidden] the stream, whatever it was: for norms that stand after the residual sums."""
        self.x, self.pending = x, None

    def normed(self, norm: Norm) -> jax.Array:
        """The norm of the stream, [T, hidden]; where the exchange's kernel can do it, together with the pending sum."""
        if self.exchange is not None and self.pending is not None and (scale := self._kernel_scale(norm)) is not None:
            self.x, normed = self.exchange.add(self.x, self.pending.term, self.pending.bias, scale, norm.eps)
            self.pending = None
            assert normed is not None
            return normed
        return norm(self.value())

    def become(self, other: "Stream") -> None:
        """Takes over what a traced function made of this stream; its exchange stays the same object."""
        self.x, self.pending = other.x, other.pending
        if self.exchange is not None and other.exchange is not None:
            self.exchange.become(other.exchange)


def begin_stream(
    rows: jax.Array, collectives: Collectives, kernels: Kernels, positions: jax.Array | None = None
) -> Stream:
    """The stream of tokens [T].

    rows: [T, hidden], of the embedding: a shard's term of their sum (`Embedding.lookup`).
    kernels: its exchange is taken if it has room for as many rows.
    positions: [T, hidden], where embeddings of positions are added.
    """
    exchange, backend = kernels.exchange, kernels.backend
    if exchange is None or not exchange.takes(rows):
        x = collectives.all_reduce(rows)
        return Stream(x if positions is None else x + positions, None, None, collectives, backend)
    x = jnp.zeros_like(rows) if positions is None else positions
    return Stream(x, PartialSum(rows), exchange, collectives, backend)
