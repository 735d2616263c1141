"""`hopper_primitives.py` in words that Pallas' GPU interpreter knows. Products are computed at once."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.common.hopper_interpreted import in_warps, set_registers  # noqa: F401  (kernels call them through this module)
from jpaged.pallas_kernels.gated_product.hopper_interpreted import await_products_before  # noqa: F401
from jpaged.pallas_kernels.gated_product.hopper_tiling import DEPTH, ROWS
from jpaged.pallas_kernels.grouped_product.hopper_interpreted import store_tile

store_wide = store_tile


def zeros(columns: int) -> jax.Array:
    """An array [64, columns] that products may be added to."""
    return jnp.zeros((ROWS, columns), jnp.float32)


def add_product(sums: jax.Array, x_ref: Any, w_ref: Any, outputs_first: bool) -> jax.Array:
    """sums + x @ w. x_ref [64, 64], w_ref [n, 64, 64] in shared memory, as of `hopper_primitives`."""

    def product(block: int) -> jax.Array:
        def multiply(acc_ref: Any) -> jax.Array:
            w = w_ref.at[block]
            plgpu.wgmma(acc_ref, x_ref, plgpu.transpose_ref(w, (1, 0)) if outputs_first else w)
            return acc_ref[...]

        return pl.run_scoped(multiply, plgpu.ACC((ROWS, DEPTH), jnp.float32))

    return sums + jnp.concatenate([product(i) for i in range(sums.shape[1] // DEPTH)], axis=1)


def await_product(sums: jax.Array) -> jax.Array:
    """The sums."""
    return sums
