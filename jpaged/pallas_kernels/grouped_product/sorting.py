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
    total = experts.size
    size = min(total, _CHUNK)
    chunks = -(-total // size)
    flat = experts.reshape(-1)
    flat = jnp.where((flat < 0) | (flat >= num_experts), num_experts, flat)
    chunked = jnp.pad(flat, (0, chunks * size - total), constant_values=num_experts).reshape(chunks, size)
    numbers = jnp.arange(num_experts + 1, dtype=jnp.int32)
    counts = jnp.sum(chunked[:, :, None] == numbers, axis=1, dtype=jnp.int32)  # [chunks, E + 1]
    starts = jnp.sum(chunked[:, :, None] < numbers, axis=(0, 1), dtype=jnp.int32)  # of groups
    first = starts + jnp.cumsum(counts, axis=0) - counts  # place of a chunk's first assignment to each expert
    earlier = jnp.tril(jnp.ones((size, size), bool), -1)
    rank = jnp.sum((chunked[:, None, :] == chunked[:, :, None]) & earlier, axis=2, dtype=jnp.int32)
    places = (jnp.take_along_axis(first, chunked, axis=1) + rank).reshape(-1)[:total]
    numbered = jnp.arange(total, dtype=jnp.int32)
    assignments = jnp.zeros(total, jnp.int32).at[places].set(numbered, unique_indices=True)
    return SortedByExpert(assignments, places.reshape(experts.shape), jnp.sum(counts, axis=0)[:num_experts])
