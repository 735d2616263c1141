"""What the grouped products ask of a GPU: the gated product's words, and stores of the rows of one group alone.
`hopper_interpreted.py` has the same for a CPU."""

from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.gated_product.hopper_primitives import *  # noqa: F403  (kernels call them through this module)
from jpaged.pallas_kernels.gated_product.hopper_primitives import ACCUMULATOR


def load_for_all_columns(rows_ref: Any, columns: int) -> jax.Array:
    """Numbers [rows] in global memory as an array [rows, columns], the same in each column."""
    column = plgpu.load(rows_ref, layout=ACCUMULATOR.reduce(1), optimized=False)
    return plgpu.layout_cast(lax.broadcast_in_dim(column, (*column.shape, columns), [0]), ACCUMULATOR)
