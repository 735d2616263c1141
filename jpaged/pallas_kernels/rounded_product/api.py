"""A product of rows that are rounded to e4m3, with weights in e4m3 and a scale for each output: the contract.

    x.values e4m3 [R, K], x.scales [R, 1]     w e4m3 [N, K], scale [N]     (x.values @ w.T) * x.scales * scale    [M, N]

XLA's product leaves the scales to who reads it, `round_rows` most often; a kernel for few rows multiplies them itself.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.registry import Op, is_hopper
from jpaged.pallas_kernels.round_rows.operands import RoundedRows, Sums


def _on_hopper(device: Any, *arguments: Any) -> bool:
    del arguments
    return is_hopper(device)


OP = Op("rounded_product", __package__, also={"triton": _on_hopper})


def rounded_product(x: RoundedRows, w: jax.Array, scale: jax.Array, *, backend: str | None = None) -> jax.Array | Sums:
    """The product of rounded rows with weights in FP8, accumulated in float32.

    Args:
        x: rows, rounded with one scale each.
        w: float8_e4m3fn [N, K].
        scale: float32 [N], of w's rows.
        backend: "triton" or "xla"; None picks by device and shapes.
    Returns:
        [M, N] of x's dtype; or its sums, whose scales are still to be multiplied.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_array("x.values", x.values, jnp.float8_e4m3fn, "R, K", (None, None))
    check.check_array("x.scales", x.scales, jnp.float32, "R, 1", (x.values.shape[0], 1))
    check.check_array("w", w, jnp.float8_e4m3fn, "N, K", (None, x.values.shape[1]))
    check.check_array("scale", scale, jnp.float32, "N", (w.shape[0],))
    return OP.pick(backend, x, w).run(x, w, scale)
