"""What implementations of `quantized_grouped_product` take."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.grouped_product.tiles import RowGroups


class Experts(NamedTuple):
    """Their matrices, and what widens them: `api.py` says what each array is. None for none."""

    w: jax.Array
    scale: jax.Array
    zero: jax.Array | None
    outer: jax.Array | None


class Operands(NamedTuple):
    """The arrays of one product, likewise."""

    x: jax.Array
    experts: Experts
    groups: RowGroups
    weights: jax.Array | None
    row_indices: jax.Array | None = None

    def gathered(self) -> "Operands":
        """With the rows of row_indices as rows of their own."""
        if self.row_indices is None:
            return self
        return self._replace(x=jnp.take(self.x, self.row_indices, axis=0, mode="clip"), row_indices=None)


@dataclass(frozen=True)
class Options:
    """What is known of one while tracing; hashable, so one static argument of a jit."""

    form: str
    group: int | None
    activation: str | None
