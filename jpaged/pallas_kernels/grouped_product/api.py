"""The two products of a mixture of experts, each over rows sorted by expert (a grouped GEMM).

    rows x [A, K], sorted:     | group 0 | group 1 |   | group 3      | belong to no group |
    group_sizes int32 [E]:         3         3       0       4
    w [E, ...]:                  w[0]      w[1]             w[3]

    gated_grouped_product      [A, K]  w [E, K, 2, I]  ->  [A, I]    activation(x @ w[e, :, 0]) * (x @ w[e, :, 1])
    weighted_grouped_product   [A, I]  w [E, I, H]     ->  [A, H]    weights * (x @ w[e])

Few rows, most of which are alone in their group, need no order: `groups` int32 [A] says whose each is.

`sorting.py` makes the sorted rows of tokens and their experts. Sizes of groups are known to the device alone: no row is
dropped, no group padded, and the host waits for nothing.

"hopper" and "triton" read the matrix of each group that has rows once, while it has few of them, and those of empty
groups never. "xla" is `jax.lax.ragged_dot`; gradients pass through it alone, and on GPUs it computes every row with
every matrix.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels import devices
from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.gated_product.reference import ACTIVATIONS
from jpaged.pallas_kernels.grouped_product.tiles import HOPPER_HEIGHTS, TRITON_HEIGHTS, RowGroups, RowTiles, most_tiles
from jpaged.pallas_kernels.registry import Op, canonical, is_hopper

GATED = Op("gated_grouped_product", __package__)
WEIGHTED = Op("weighted_grouped_product", __package__)


def gated_grouped_product(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array | None,
    *,
    groups: jax.Array | None = None,
    tiles: RowTiles | None = None,
    activation: str = "silu",
    backend: str | None = None,
) -> jax.Array:
    """activation(x @ w[e, :, 0]) * (x @ w[e, :, 1]), with the e of each row's group.

    The kernels keep products and activation in float32 and round the result alone; a row's bits do not depend on the
    rows beside it. "xla" rounds the products to x's type first.

    Args:
        x: floats [A, K], the rows of group 0 first, then those of group 1 and so on.
        w: [E, K, 2, I], of x's dtype; gate, then up.
        group_sizes: int32 [E], rows of each group, none negative, no more than A in all; or None, with
        groups: int32 [A], the group of each row, in any order; others than 0 .. E - 1 are no group. A matrix is then
            read for each row.
        tiles: of the rows of group_sizes, where they are known (`route_tokens`); taken if their height is the kernel's.
        activation: "silu", "relu", "gelu" (by the error function) or "gelu_tanh".
        backend: "hopper", "triton" or "xla"; None picks by device, dtype and shapes.
    Returns:
        [A, I] of x's dtype. Rows of no group hold anything, NaN included.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    _check(x, w, group_sizes, groups, tiles, "E, K, 2, I")
    if w.shape[2] != 2:
        raise ValueError(f"w must be [E, K, 2, I], got shape {tuple(w.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    product = GATED.pick(backend, x, w).run
    if _is_empty(x, w):
        return jnp.zeros((x.shape[0], w.shape[3]), x.dtype)
    return product(x, w, RowGroups(group_sizes, groups, tiles), activation=activation)


def weighted_grouped_product(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array | None,
    weights: jax.Array,
    *,
    groups: jax.Array | None = None,
    tiles: RowTiles | None = None,
    backend: str | None = None,
) -> jax.Array:
    """weights * (x @ w[e]), with the e of each row's group.

    The kernels keep the product in float32 until it is weighted; "xla" rounds it to x's type first.

    Args:
        x, group_sizes, groups, tiles: as of `gated_grouped_product`, x [A, I].
        w: [E, I, H], of x's dtype.
        weights: float32 [A], what each row is multiplied by; more, which nobody looks at, may be behind these.
        backend: likewise.
    Returns:
        [A, H] of x's dtype. Rows of no group hold anything, NaN included.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    _check(x, w, group_sizes, groups, tiles, "E, I, H")
    check.check_array("weights", weights, jnp.float32, "A", (None,))
    if weights.shape[0] < x.shape[0]:
        raise ValueError(f"weights must be one for each of x's {x.shape[0]} rows, got shape {tuple(weights.shape)}")
    product = WEIGHTED.pick(backend, x, w).run
    if _is_empty(x, w):
        return jnp.zeros((x.shape[0], w.shape[2]), x.dtype)
    return product(x, w, RowGroups(group_sizes, groups, tiles), weights)


def tile_height(rows: int, groups: int, backend: str | None = None) -> int:
    """Rows of a tile, at most, in which the kernels take so many rows of so many groups: what `tiles` are best made of.

    backend: as of the products; of several names the first counts.
    """
    name = None if backend is None else backend.split(",")[0]
    if (name is None and is_hopper(devices.default_device())) or (name is not None and canonical(name) == "hopper"):
        return HOPPER_HEIGHTS[2 * rows > HOPPER_HEIGHTS[0] * groups]
    return next((height for height in TRITON_HEIGHTS if height * groups >= rows), TRITON_HEIGHTS[-1])


def _check(x: Any, w: Any, group_sizes: Any, groups: Any, tiles: RowTiles | None, axes: str) -> None:
    check.check_rank("x", x, "A, K")
    check.check_rank("w", w, axes)
    check.check_like("w", w, axes, (w.shape[0], x.shape[1], *w.shape[2:]), "x", x.dtype)
    if (group_sizes is None) == (groups is None):
        raise ValueError("one of group_sizes and groups must be given, and not both")
    if groups is None:
        check.check_int32("group_sizes", group_sizes, "E", (w.shape[0],))
    else:
        check.check_int32("groups", groups, "A", (x.shape[0],))
    check_tiles(tiles, group_sizes, x.shape[0], w.shape[0])


def check_tiles(tiles: RowTiles | None, group_sizes: Any, rows: int, groups: int) -> None:
    """Raises ValueError if tiles are not of so many rows in so many groups."""
    if tiles is None:
        return
    if group_sizes is None:
        raise ValueError("tiles go with group_sizes, not with groups")
    check.check_int32("tiles.listed", tiles.listed, "tiles, 3", (most_tiles(rows, groups, tiles.height), 3))
    check.check_int32("tiles.ends", tiles.ends, "E", (groups,))


def _is_empty(x: Any, w: Any) -> bool:
    """Whether there is nothing to compute."""
    return 0 in x.shape or 0 in w.shape
