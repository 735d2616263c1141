"""What recurrences over a batch of ragged rows share: chunks of tokens, decays within a chunk, and states passed from
chunk to chunk.

    tokens      0 1 2 3 4 5 6 7 | 8 9 ..          chunks of 8 consecutive tokens
    rows        0 0 0 1 1 1 1 1 | 1 1 2 2 2 - -   -: of no row
    segments    0---- 1-------- | 1-- 2----       what of a row lies in one chunk

What needs no state is computed for all chunks at once; states then pass from segment to segment, one after the other.
Arrays have their heads split into (groups, group): a group shares what its recurrence shares.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.pallas_kernels.common.rows import Rows

CHUNK = 64
"""Tokens of a chunk."""


@dataclass(frozen=True)
class Chunks:
    """What a recurrence computes of all chunks of a step before any state is known: a pytree, with the axis of chunks
    before those that are named here. A recurrence adds its own arrays (`jax.tree_util.register_dataclass`).

    row: int32 [C]; of each token, -1 for none.
    since, decay: [groups, group, C]; as of `Decays`, whose `whole` the latter is.
    precision: of products.
    """

    row: jax.Array
    since: jax.Array
    decay: jax.Array
    precision: Any = field(metadata={"static": True})

    def product(self, equation: str, *operands: jax.Array) -> jax.Array:
        """`jnp.einsum` in float32."""
        precision = self.precision
        return jnp.einsum(equation, *operands, precision=precision, preferred_element_type=jnp.float32)

    def advance(
        self, held: jax.Array, reads: jax.Array, stays: jax.Array, decay: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """One chunk, without the axis of chunks.

        held: float32 [groups, group, ...], the state before. reads: bool [C]; tokens that follow it. stays: tokens that
        the next state is of. decay: [groups, group]; what of `held` the next state has.
        Returns out [groups, group, C, width], and the next state.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Cut:
    """How tokens are cut into `count` chunks of `size` consecutive ones, the last one padded."""

    tokens: int
    size: int
    count: int

    @classmethod
    def of(cls, tokens: int) -> Self:
        size = min(CHUNK, 1 << (tokens - 1).bit_length())
        return cls(tokens, size, -(-tokens // size))

    def rows(self, row: jax.Array) -> jax.Array:
        """int32 [T] -> [chunks, C]; -1 for padding."""
        padding = self.count * self.size - self.tokens
        return jnp.pad(row, (0, padding), constant_values=-1).reshape(self.count, self.size)

    def apply(self, x: jax.Array, *axes: int) -> jax.Array:
        """[T, heads, ...] -> float32 [chunks, *axes, C, ...]. axes: their product is heads."""
        padding = [(0, self.count * self.size - self.tokens)] + [(0, 0)] * (x.ndim - 1)
        x = jnp.pad(x.astype(jnp.float32), padding).reshape(self.count, self.size, *axes, *x.shape[2:])
        return jnp.moveaxis(x, 1, 1 + len(axes))

    def flat(self, out: jax.Array) -> jax.Array:
        """[chunks, groups, group, C, width] -> [T, heads, width]."""
        count, groups, group, size, width = out.shape
        return jnp.moveaxis(out, 3, 1).reshape(count * size, groups * group, width)[: self.tokens]


@dataclass(frozen=True)
class Decays:
    """Products of decays within chunks.

    between: [chunks, groups, group, C, C]; from a token of the last axis to one of the axis before, itself or a later
        one of its segment; 0 for other pairs.
    since: [chunks, groups, group, C]; from the segment's beginning to the token. until: from the token to the
        segment's end. whole: of the token's whole segment.
    """

    between: jax.Array
    since: jax.Array
    until: jax.Array
    whole: jax.Array

    @classmethod
    def of(cls, row: jax.Array, log_decay: jax.Array) -> Self:
        """row: int32 [chunks, C]. log_decay: [chunks, groups, group, C]; of tokens of no row it counts for nothing."""
        size = row.shape[1]
        total = jnp.cumsum(jnp.where((row >= 0)[:, None, None, :], log_decay, 0.0), axis=-1)
        index = jnp.arange(size)
        same = (row[:, :, None] == row[:, None, :]) & (row >= 0)[:, :, None]
        upto = (same & (index[:, None] >= index))[:, None, None]
        first = jnp.argmax(same, axis=-1)[:, None, None, :]  # of the token's segment
        last = size - 1 - jnp.argmax(same[..., ::-1], axis=-1)[:, None, None, :]
        earlier, last = (jnp.broadcast_to(x, total.shape) for x in (jnp.maximum(first - 1, 0), last))
        before = jnp.where(first > 0, jnp.take_along_axis(total, earlier, axis=-1), 0.0)
        end = jnp.take_along_axis(total, last, axis=-1)
        return cls(
            between=jnp.exp(jnp.where(upto, total[..., :, None] - total[..., None, :], -jnp.inf)),
            since=jnp.exp(total - before),
            until=jnp.exp(end - total),
            whole=jnp.exp(end - before),
        )


def rows_of_tokens(rows: Rows, num_slots: int, tokens: int) -> jax.Array:
    """int32 [T]: the row of each token; -1 for tokens of no row, and of rows whose slot is out of range."""
    slots, _, query_starts = rows
    assert query_starts is not None
    starts, ends = query_starts[:-1], query_starts[1:]
    live = (slots >= 0) & (slots < num_slots)
    token = jnp.arange(tokens, dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(token[:, None] >= ends[None, :], axis=1, dtype=jnp.int32), slots.shape[0] - 1)
    return jnp.where((token >= starts[row]) & (token < ends[row]) & live[row], row, -1)


def advance_rows(
    chunks: Chunks, states: jax.Array, row: jax.Array, rows: Rows, groups: int, width: int
) -> tuple[jax.Array, jax.Array]:
    """Passes the states of rows through their segments, as many as there are.

    states: float32 [num_slots, heads, ...], updated. row: `rows_of_tokens`. groups: of heads. width: of what a head
    gives.
    Returns out [chunks, groups, group, C, width], zeros for tokens of no row; and the states.
    """
    slots, fresh, starts = rows
    assert starts is not None
    (count, size), tokens, num_rows = chunks.row.shape, row.shape[0], slots.shape[0]
    token = jnp.arange(tokens, dtype=jnp.int32)
    begins = (row >= 0) & ((token % size == 0) | (token == starts[row]))
    (firsts,) = jnp.nonzero(begins, size=count + min(num_rows, tokens), fill_value=0)
    by_group = (groups, states.shape[1] // groups, *states.shape[2:])

    def first_state(states: jax.Array, its: jax.Array) -> jax.Array:
        held = lax.dynamic_index_in_dim(states, slots[its], keepdims=False)
        return jnp.where(fresh[its], 0.0, held).reshape(by_group)

    def compute(i: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        states, out, held = carry
        first, following = firsts[i], row[firsts[jnp.minimum(i + 1, firsts.shape[0] - 1)]]
        its, here = row[first], first // size
        chunk = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, here, keepdims=False), chunks)
        mine = chunk.row == its
        given, held = chunk.advance(held, mine, mine, chunk.decay[..., first % size])
        given = jnp.where(mine[:, None], given, lax.dynamic_index_in_dim(out, here, keepdims=False))
        out = lax.dynamic_update_index_in_dim(out, given, here, 0)
        # Written, then read: were the state read where it is updated, XLA would copy all states in each iteration.
        states = lax.dynamic_update_index_in_dim(states, held.reshape(states.shape[1:]), slots[its], 0)
        return states, out, jnp.where(following == its, held, first_state(states, following))

    zeros = jnp.zeros((count, *by_group[:2], size, width), jnp.float32)
    start = states, zeros, first_state(states, row[firsts[0]])
    states, out, _ = lax.fori_loop(0, jnp.sum(begins, dtype=jnp.int32), compute, start)
    return out, states


def advance_sequences(chunks: Chunks, start: jax.Array) -> jax.Array:
    """Whole sequences, each from the state `start`; differentiable. Returns out [chunks, groups, group, C, width]."""
    last = chunks.row[:, -1]
    before = jnp.concatenate([last[:1] - 1, last[:-1]])

    def compute(held: jax.Array, of: tuple[Any, jax.Array]) -> tuple[jax.Array, jax.Array]:
        chunk, before = of
        goes_on = chunk.row[-1] == before
        decay = jnp.where(goes_on, chunk.decay[..., -1], 0.0)
        given, held = chunk.advance(held, chunk.row == before, chunk.row == chunk.row[-1], decay)
        return held, given

    _, out = lax.scan(compute, start, (chunks, before))
    return out


Operands = TypeVar("Operands")
"""A tuple of arrays [T, ...] of tokens, or [R, ...] of rows of one token."""


def by_length(
    chunks: Callable[[jax.Array, Operands, Rows], tuple[jax.Array, jax.Array]],
    step: Callable[[jax.Array, Operands, Rows], tuple[jax.Array, jax.Array]],
    states: jax.Array,
    operands: Operands,
    rows: Rows,
    tokens: int,
) -> tuple[jax.Array, jax.Array]:
    """Computes rows of one token by `step` and longer ones by `chunks`: functions of states, operands and rows.

    operands: each [T, ...]; `step` gets those of a token a row. tokens: T.
    Returns out [T, ...], and the states.
    """
    slots, fresh, query_starts = rows
    assert query_starts is not None
    num_slots, starts, lengths = states.shape[0], query_starts[:-1], query_starts[1:] - query_starts[:-1]
    out, states = chunks(states, operands, rows._replace(slots=jnp.where(lengths > 1, slots, num_slots)))
    alone = lengths == 1
    of_rows = jax.tree.map(lambda x: x[jnp.minimum(starts, tokens - 1)], operands)
    stepped, states = step(states, of_rows, Rows(jnp.where(alone, slots, num_slots), fresh))
    return out.at[jnp.where(alone, starts, tokens)].set(stepped, mode="drop"), states
