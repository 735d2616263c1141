"""The tiles of rows that a grouped product has, as a list that plain XLA operations make on the device.

    sorted rows      | group 0        | group 2 |   group 3                | no group |
    tiles            |t0      |t1     |t2       |t3      |t4      |t5      |

A tile's rows are one range, of one group alone.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

GROUP, FIRST, END = range(3)
"""Columns of the list: the group, its first row in the tile, and the row behind its last one there."""

HOPPER_HEIGHTS, TRITON_HEIGHTS = (64, 128), (16, 32, 64, 128)
"""Of tiles, at most: what the backends' kernels take."""


@partial(jax.tree_util.register_dataclass, data_fields=("listed", "ends"), meta_fields=("height",))
@dataclass(frozen=True)
class RowTiles:
    """The tiles of sorted rows, of `height` rows at most.

    listed: int32 [most_tiles(..), 3]. ends: int32 [E], how many of them each group and those before it have: the last
        says how many there are. What follows these in the list may be anything.
    """

    listed: jax.Array
    ends: jax.Array
    height: int


class RowGroups(NamedTuple):
    """The group of each row, as of `api.py`: one of the first two, and None for the other.

    sizes: int32 [E], of sorted rows. of_rows: int32 [A]. tiles: of sorted rows, where they are known.
    """

    sizes: jax.Array | None
    of_rows: jax.Array | None
    tiles: RowTiles | None = None


def most_tiles(rows: int, groups: int, height: int) -> int:
    """The most tiles that so many rows in so many groups can have."""
    return rows // height + min(rows, groups)


def plan_rows(groups: jax.Array, num_groups: int) -> tuple[jax.Array, jax.Array]:
    """A tile for each row; one without rows for a row of no group.

    Args:
        groups: int32 [A].
    Returns:
        As `plan_tiles`: int32 [A, 3], and how many there are.
    """
    rows = groups.shape[0]
    row = jnp.arange(rows, dtype=jnp.int32)
    exists = (groups >= 0) & (groups < num_groups)
    return jnp.stack([jnp.where(exists, groups, 0), row, row + exists], axis=1), jnp.array([rows], jnp.int32)


def plan(groups: RowGroups, num_groups: int, *, rows: int, height: int) -> tuple[jax.Array, jax.Array]:
    """The tiles that are known, if they are of this height; else `plan_tiles` or `plan_rows`."""
    if groups.tiles is not None and groups.tiles.height == height:
        return groups.tiles.listed, groups.tiles.ends
    if groups.of_rows is not None:
        return plan_rows(groups.of_rows, num_groups)
    assert groups.sizes is not None
    return plan_tiles(groups.sizes, rows=rows, height=height)


def plan_tiles(group_sizes: jax.Array, *, rows: int, height: int) -> tuple[jax.Array, jax.Array]:
    """The tiles, in the order of rows.

    Args:
        group_sizes: int32 [E]. rows: A, the static number of rows. height: rows of a tile, at most.
    Returns:
        int32 [tiles, 3], and int32 [E], how many of them each group and those before it have: the last says how many
        there are. What follows these in the list is valid, and of no use.
    """
    groups = group_sizes.shape[0]
    up_to = jnp.tril(jnp.ones((groups, groups), bool))  # sums by comparison: a kernel, where a scan would be several
    row_ends = jnp.sum(jnp.where(up_to, group_sizes, 0), axis=1, dtype=jnp.int32)
    tiles = (group_sizes + (height - 1)) // height
    tile_ends = jnp.sum(jnp.where(up_to, tiles, 0), axis=1, dtype=jnp.int32)
    number = jnp.arange(most_tiles(rows, groups, height), dtype=jnp.int32)
    group = jnp.sum(tile_ends <= number[:, None], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, groups - 1)
    row_end, within = row_ends[group], number - (tile_ends - tiles)[group]
    first = row_end - group_sizes[group] + within * height
    return jnp.stack([group, first, jnp.minimum(first + height, row_end)], axis=1), tile_ends
