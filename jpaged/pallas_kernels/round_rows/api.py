"""Rows rounded to e4m3, each with a scale of its own, together with what comes before: the contract.

    x [M, K], or the sums of an FP8 product whose scales have still to be multiplied
      --+ residual [M, K]-------> residual'      a second result
      --RMS norm----------------.
    x [M, 2 K]                  |
      --activation(gate) * up---+--> values e4m3 [R, K], scales float32 [R, 1]       R = M, rounded up to 16

A kernel reads its rows once and writes the results once. In XLA each of largest magnitude, division and rounding is a
kernel, or two, of its own, which take longer to start than to run for the few rows of a decode step.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.gated_product.reference import ACTIVATIONS
from jpaged.pallas_kernels.registry import Op, is_hopper
from jpaged.pallas_kernels.round_rows.operands import Operands, Options, RoundedRows, Sums


def _on_hopper(device: Any, *arguments: Any) -> bool:
    """Triton takes the rows whose length the kernel for Hopper does not."""
    return is_hopper(device)


OP = Op("round_rows", __package__, also={"triton": _on_hopper})


def round_rows(
    x: jax.Array | Sums,
    *,
    residual: jax.Array | None = None,
    norm: jax.Array | None = None,
    norm_eps: float = 1e-6,
    activation: str | None = None,
    input_scale: jax.Array | None = None,
    upper_bound: float | None = None,
    backend: str | None = None,
) -> tuple[RoundedRows, jax.Array | None]:
    """Rows in e4m3, of x as it is or of what follows from it, as `fp8_product.rounding.round_to_fp8` rounds them.

    All is computed in float32. The sum with the residual is rounded to its type, the norm as `numerics.rms_norm` does.

    Args:
        x: floats [M, K], or `Sums` of that shape; [M, 2 K] with an activation, gates before what they multiply.
        residual: [M, K], of the result's type; x is added to it before anything else.
        norm: the scale [K] of an RMS norm, of that type or float32; None for no norm.
        norm_eps: added to the norm's mean square.
        activation: "silu", "relu", "gelu" or "gelu_tanh", as of `gated_product`; goes with neither residual nor norm.
        input_scale: float32 [1], the scale of all rows; None: each row's largest magnitude becomes 448. A row of zeros
            has scale 1; NaN and infinity make a row's scale NaN or infinite.
        upper_bound: without `input_scale`, the largest magnitude that counts; what is beyond it is clipped.
        backend: "hopper", "triton" or "xla"; None picks by device and shapes.
    Returns:
        The rounded rows; and residual + x, [M, K], where there is a residual.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    if isinstance(x, Sums):
        kept = jnp.dtype(jnp.bfloat16 if x.products.dtype == jnp.bfloat16 else jnp.float32)
        check.check_array("x.products", x.products, kept, "R, K", (None, None))
        check.check_array("x.of_rows", x.of_rows, jnp.float32, "R, 1", (x.products.shape[0], 1))
        check.check_array("x.of_outputs", x.of_outputs, jnp.float32, "K", (x.products.shape[1],))
    else:
        check.check_floats("x", x, "M, K")
    rows, depth = x.shape
    if activation is not None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        if residual is not None or norm is not None:
            raise ValueError("activation goes with neither residual nor norm")
        if depth % 2:
            raise ValueError(f"x must be [M, 2 K] with an activation, got shape {(rows, depth)}")
        depth //= 2
    if residual is not None:
        check.check_like("residual", residual, "M, K", (rows, depth), "x", x.dtype)
    if norm is not None:
        dtype = norm.dtype if norm.dtype == jnp.float32 else x.dtype
        check.check_like("norm", norm, "K", (depth,), "x", dtype)
    norm_eps = check.check_eps("norm_eps", norm_eps)
    if input_scale is not None:
        check.check_array("input_scale", input_scale, jnp.float32, "1", (1,))
    run = OP.pick(backend, x, depth).run
    if rows == 0:
        nothing = jnp.zeros((0, depth), jnp.float8_e4m3fn), jnp.zeros((0, 1), jnp.float32)
        return RoundedRows(*nothing, 0, x.dtype), residual
    return run(Operands(x, residual, norm, input_scale), Options(norm_eps, activation, upper_bound))
