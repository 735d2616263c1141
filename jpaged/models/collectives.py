"""What the shards of a tensor-parallel model say to each other.

    alone          ALONE: one device holds the whole model; every function here is the identity and traces nothing
    sharded        inside `shard_map` over a mesh axis; each function is one collective of the compiled program
    one-shot       an `Exchange`: sums over shards by the one-shot kernel, through state that the program's caller keeps

All of a model's and a sampler's communication goes through these, so what carries it can be changed here.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.pallas_kernels import all_reduce_add_norm, all_reduce_peers


@dataclass(frozen=True)
class Collectives:
    """size: shards. axis: the mesh axis they lie along; None for one device."""

    size: int = 1
    axis: str | None = None

    def index(self) -> jax.Array | int:
        """Which shard this is: int32 []; 0 for one device."""
        return 0 if self.axis is None else lax.axis_index(self.axis)

    def all_reduce(self, x: jax.Array) -> jax.Array:
        """The sum over shards, on every shard."""
        return x if self.axis is None else lax.psum(x, self.axis)

    def all_max(self, x: jax.Array) -> jax.Array:
        """The elementwise maximum over shards, on every shard."""
        return x if self.axis is None else lax.pmax(x, self.axis)

    def all_gather(self, x: jax.Array) -> jax.Array:
        """[...] -> [shards, ...], in the order of the shards, on every shard. For small arrays."""
        return x[None] if self.axis is None else lax.all_gather(x, self.axis)

    def deal_rows(self, x: jax.Array) -> jax.Array:
        """Columns of all rows for all columns of some rows: [R, width] -> [R / shards, shards * width], R divisible.

        Shard i gets the i-th part of the rows (`own_rows`).
        """
        return x if self.axis is None else lax.all_to_all(x, self.axis, split_axis=0, concat_axis=1, tiled=True)

    def own_rows(self, x: jax.Array) -> jax.Array:
        """[R, ...], the same on every shard -> [R / shards, ...], the rows that `deal_rows` gives to this one."""
        each = x.shape[0] // self.size
        return lax.dynamic_slice_in_dim(x, self.first(each), each)

    def first(self, size: int) -> jax.Array | int:
        """Where this shard's part of an axis begins that is split into parts of `size`."""
        return self.index() * size

    def columns(self, token_ids: jax.Array, width: int) -> jax.Array:
        """Token ids as columns of this shard's `width`; past the end, where scatters drop them, for tokens it has not.

        token_ids: int32, any shape; negative ones are no tokens, and would count from the end instead of being dropped.
        """
        if self.size == 1:
            return jnp.where(token_ids < 0, width, token_ids)
        columns = token_ids - self.first(width)
        return jnp.where((columns < 0) | (columns >= width) | (token_ids < 0), width, columns)


ALONE = Collectives()


class ExchangeState(NamedTuple):
    """What the one-shot all-reduce keeps on each device from call to call: `initial_all_reduce_state`."""

    inbox: Any
    generations: Any


@jax.tree_util.register_dataclass
@dataclass
class Exchange:
    """The one-shot all-reduce within a program. A sum replaces `state` by the written one.

    state: donated to the program, and to be returned by it. peers: `all_reduce_peers`, of this program's own.
    backend: of the op.
    """

    state: ExchangeState
    peers: jax.Array
    collectives: Collectives = field(metadata={"static": True})
    backend: str | None = field(metadata={"static": True})

    @classmethod
    def begin(cls, state: ExchangeState, collectives: Collectives, backend: str | None) -> Self:
        """At the beginning of a program."""
        assert collectives.axis is not None
        peers = all_reduce_peers(state.inbox, axis=collectives.axis, num_devices=collectives.size, backend=backend)
        return cls(state, peers, collectives, backend)

    def takes(self, part: jax.Array) -> bool:
        """Whether it can sum [T, width] over shards: rows of the width it was made for, and no more than it holds."""
        _, _, max_rows, words = self.state.inbox.shape
        rows, width = part.shape
        return rows <= max_rows and width * part.dtype.itemsize == words * 4

    def add(
        self,
        x: jax.Array,
        part: jax.Array,
        bias: jax.Array | None = None,
        scale: jax.Array | None = None,
        norm_eps: float = 0.0,
    ) -> tuple[jax.Array, jax.Array | None]:
        """x [T, hidden], the sum of all shards' parts and the bias together; and their RMS norm, given its scale."""
        assert self.collectives.axis is not None
        inbox, generations, x, normed = all_reduce_add_norm(
            *self.state,
            self.peers,
            part,
            x,
            bias=bias,
            scale=scale,
            norm_eps=norm_eps,
            axis=self.collectives.axis,
            num_devices=self.collectives.size,
            backend=self.backend,
        )
        self.state = ExchangeState(inbox, generations)
        return x, normed

    def become(self, other: "Exchange") -> None:
        """Takes over what a traced function made of this exchange."""
        self.state = other.state
