"""The rows of a step over sequences that keep a state in a slot: what recurrences and the short convolution take.

rows     0        1           2        ..      tokens   0 | 1 1 1 1 | 2 | padding
slots    slots[0] slots[1]    slots[2]
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common.arguments import check_array, check_int32


class Rows(NamedTuple):
    """Which tokens are of which sequence, and where its state is.

    slots: int32 [R]; a row whose slot is out of range computes nothing.
    fresh: bool [R]; rows that begin with a state of zeros.
    query_starts: int32 [R + 1], ascending; row r has the tokens query_starts[r] .. query_starts[r + 1] - 1. None: row r
        has token r, and R is the number of tokens.
    """

    slots: jax.Array
    fresh: jax.Array
    query_starts: jax.Array | None = None

    def check(self, tokens: int) -> None:
        """Raises ValueError, which names the argument, unless these are rows of a batch of so many tokens."""
        check_int32("slots", self.slots, "R", (tokens if self.query_starts is None else None,))
        rows: int = self.slots.shape[0]
        check_array("fresh", self.fresh, jnp.bool_, "R", (rows,))
        if self.query_starts is not None:
            check_int32("query_starts", self.query_starts, "R + 1", (rows + 1,))
