"""What routing gives: the experts of tokens, and the rows of tokens sorted by expert."""

from typing import NamedTuple

import jax

from jpaged.pallas_kernels.grouped_product.tiles import RowTiles

WEIGHTS_BEHIND = 128
"""Numbers behind the weights of rows, so that kernels may read whole tiles of them."""


class SortedRows(NamedTuple):
    """Rows of tokens, sorted by expert; those of one expert are in the order of their tokens.

    tokens: int32 [A], the token of each row; behind the last expert's rows anything.
    weights: float32 [A + WEIGHTS_BEHIND]; behind the last expert's rows anything.
    places: int32 [T, k], the row of each token and choice; of those that are of no expert here, any row.
    group_sizes: int32 [held].
    tiles: the tiles of these rows, see `grouped_product.tiles`.
    """

    tokens: jax.Array
    weights: jax.Array
    places: jax.Array
    group_sizes: jax.Array
    tiles: RowTiles


class RoutedTokens(NamedTuple):
    """experts: int32 [T, k], the best first; -1 throughout for tokens that are not live. weights: float32 [T, k].
    rows: of the experts that are here; None where they have not been sorted."""

    experts: jax.Array
    weights: jax.Array
    rows: SortedRows | None
