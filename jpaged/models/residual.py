"""The residual stream of a model's tokens, and the sums over shards that are added to it.

    stream = begin(embedding_part(...), ...)
    layer:  stream.add(*attention(stream.normed(attention_norm), ...))      `add` takes a shard's part of a sum
            stream.add(*mlp(stream.normed(mlp_norm)))                       `normed` is what the next layer reads
    stream.normed(norm)

With an `Exchange`, a sum waits until the next norm is known, and both are one kernel. Without one, each sum is an
all-reduce of the compiler's, and on one device there is nothing to sum.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jpaged.models.collectives import Collectives, Exchange
from jpaged.models.layers import LayerNorm, RMSNorm


@jax.tree_util.register_dataclass
@dataclass
class Stream:
    """x: [T, hidden], without what is `pending`: a shard's part of a sum, [T, hidden], and a bias [hidden] or None."""

    x: jax.Array
    pending: tuple[jax.Array, jax.Array | None] | None
    exchange: Exchange | None
    collectives: Collectives = field(metadata={"static": True})

    def add(self, part: jax.Array, bias: jax.Array | None) -> None:
        """Adds the sum of all shards' parts, and a bias once."""
        if self.exchange is not None:
            self.value()
            self.pending = part, bias
            return
        total = self.collectives.all_reduce(part)
        self.x = self.x + (total if bias is None else total + bias)

    def value(self) -> jax.Array:
        """The stream [T, hidden], everything added."""
        if self.exchange is not None and self.pending is not None:
            self.x, _ = self.exchange.add(self.x, *self.pending)
            self.pending = None
        return self.x

    def normed(self, norm: RMSNorm | LayerNorm) -> jax.Array:
        """The norm of the stream, [T, hidden]."""
        if self.exchange is None or self.pending is None or not isinstance(norm, RMSNorm):
            return norm(self.value())
        self.x, normed = self.exchange.add(self.x, *self.pending, norm.scale[...], norm.eps)
        self.pending = None
        assert normed is not None
        return normed

    def become(self, other: "Stream") -> None:
        """Takes over what a traced function made of this stream; its exchange stays the same object."""
        self.x, self.pending = other.x, other.pending
        if self.exchange is not None and other.exchange is not None:
            self.exchange.become(other.exchange)


def begin(
    part: jax.Array, collectives: Collectives, exchange: Exchange | None, positions: jax.Array | None = None
) -> Stream:
    """The stream of tokens [T], whose embeddings are the sum of the shards' parts [T, hidden], and of their positions
    where these are learned [T, hidden]. The exchange is taken if it has room for as many rows.
    """
    if exchange is None or not exchange.takes(part):
        x = collectives.all_reduce(part)
        return Stream(x if positions is None else x + positions, None, None, collectives)
    return Stream(jnp.zeros_like(part) if positions is None else positions, (part, None), exchange, collectives)
