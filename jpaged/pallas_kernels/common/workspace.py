"""A pool that a call makes for itself: blocks of its rows, one row's behind the other's.

rows         | row 0, 2 blocks | row 1, none | row 2, 3 blocks |
workspace    | 0        1      |             | 2      3      4 | ..      places, as many as there is room for
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Layout(NamedTuple):
    """Where blocks lie in a workspace.

    ends: int32 [R]; behind which place a row's blocks end.
    row: int32 [places]; whose block a place has. nth: int32 [places]; which of that row's. Behind all blocks, the last
        row's, counted on.
    table: int32 [R, M]; a block table of each row. Entries past a row's blocks are within the workspace.
    """

    ends: jax.Array
    row: jax.Array
    nth: jax.Array
    table: jax.Array


def lay_out(blocks: jax.Array, places: int, width: int) -> Layout:
    """blocks: int32 [R], of each row. places: of the workspace. width: M, blocks of a row in its table."""
    ends = jnp.cumsum(blocks, dtype=jnp.int32)
    begins = ends - blocks
    place = jnp.arange(places, dtype=jnp.int32)
    row = jnp.sum(place[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, blocks.shape[0] - 1)
    table = jnp.minimum(begins[:, None] + jnp.arange(width, dtype=jnp.int32), places - 1)
    return Layout(ends, row, place - begins[row], table)
