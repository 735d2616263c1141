"""Tokens sorted by expert, on the device: which rows the grouped products take, and where each result goes.

    experts of tokens [T, k]     assignment i is choice i % k of token i // k
    assignments [A]              which of them is at place p, when they are sorted by expert
    places [T, k]                the inverse: where the results for a token are

Ranks are counted by comparisons, a few small kernels that XLA fuses, where a sort would be many.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_CHUNK = 1024
"""Assignments that are compared with one another; of earlier chunks only counts are read."""


class SortedByExpert(NamedTuple):
    """The assignments of T tokens to k experts each, A = T * k of them, sorted.

    assignments: int32 [A], the number of the assignment at each place: token * k + choice.
    places: int32 [T, k], the place of each assignment.
    group_sizes: int32 [E].
    """

    assignments: jax.Array
    places: jax.Array
    group_sizes: jax.Array


def sort_by_expert(experts: jax.Array, num_experts: int) -> SortedByExpert:
    """Sorts assignments by expert; those of one expert stay in their order.

    Args:
        experts: int32 [T, k]; others than 0 .. num_experts - 1 belong to no group and go behind all groups.
        num_experts: E.
    """
    flat = experts.reshape(-1)
    flat = jnp.where((flat < 0) | (flat >= num_experts), num_experts, flat)
    numbers = jnp.arange(num_experts + 1, dtype=jnp.int32)
    if flat.size <= _CHUNK:
        places = _ranks(flat)
        of_all = jnp.arange(flat.size, dtype=jnp.int32)
        assignments = jnp.sum(jnp.where(places == of_all[:, None], of_all, 0), axis=1, dtype=jnp.int32)
        sizes = jnp.sum(flat == numbers[:, None], axis=1, dtype=jnp.int32)
    else:
        assignments, places, sizes = _sort_by_chunks(flat, numbers)
    return SortedByExpert(assignments, places.reshape(experts.shape), sizes[:num_experts])


def _ranks(x: jax.Array) -> jax.Array:
    """int32: how many along the last axis are less, or equal and before it."""
    mine, other = x[..., :, None], x[..., None, :]
    before = jnp.tril(jnp.ones((x.shape[-1],) * 2, bool), -1)
    return jnp.sum((other < mine) | ((other == mine) & before), axis=-1, dtype=jnp.int32)


def _sort_by_chunks(flat: jax.Array, numbers: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(assignments, places, how many there are of each of `numbers`), of more than a chunk.

    A place is that within the chunk's own assignments to the expert, behind those of the chunks before it.
    """
    total = flat.size
    chunks = -(-total // _CHUNK)
    chunked = jnp.pad(flat, (0, chunks * _CHUNK - total), constant_values=len(numbers) - 1).reshape(chunks, _CHUNK)
    counts = jnp.sum(chunked[:, :, None] == numbers, axis=1, dtype=jnp.int32)  # [chunks, numbers]
    less = jnp.sum(chunked[:, :, None] < numbers, axis=1, dtype=jnp.int32)
    first = jnp.sum(less, axis=0) + jnp.cumsum(counts, axis=0) - counts
    within = _ranks(chunked) - jnp.take_along_axis(less, chunked, axis=1)
    places = (jnp.take_along_axis(first, chunked, axis=1) + within).reshape(-1)[:total]
    numbered = jnp.arange(total, dtype=jnp.int32)
    assignments = jnp.zeros(total, jnp.int32).at[places].set(numbered, unique_indices=True)
    return assignments, places, jnp.sum(counts, axis=0)
