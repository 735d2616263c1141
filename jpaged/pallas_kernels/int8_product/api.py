"""A product with weights in 8-bit integers and their scales.

    x [M, K]    w int8 [N, K]    scale float32 [N, G], of G groups of inputs    out [M, N] = x @ (w * scale).T

Rows of w are outputs, so that both operands run along K: the one order that cuBLASLt multiplies two int8 operands in.
XLA would write a transposed copy of weights that lie otherwise, in every step.

With activations "dynamic" or "static", x is rounded to int8 too, and sums are int32: exact, however long (W8A8). With
"none" x stays as it is, and w is widened to its type (W8A16).
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.fp8_product.operands import Operands, Options, check_operands
from jpaged.pallas_kernels.registry import Op, is_hopper

OP = Op("int8_product", __package__, also={"triton": is_hopper})

Activations = Literal["none", "dynamic", "static"]
"""Whether x is rounded to int8: not at all, with a scale for each row, or with one that is given."""

MOST_INPUTS = (2**31 - 1) // 128**2
"""Of a product of two int8 operands, the sum of which always fits int32."""


def int8_product(
    x: jax.Array,
    w: jax.Array,
    scale: jax.Array,
    input_scale: jax.Array | None = None,
    *,
    group: int | None = None,
    activations: Activations = "none",
    dtype: jnp.dtype | None = None,
    backend: str | None = None,
) -> jax.Array:
    """x @ (w * scale).T, summed in float32; in int32 where x is rounded.

    Args:
        x: floats [M, K].
        w: int8 [N, K].
        scale: float32 [N, G]: of each row, of each group of inputs.
        input_scale: float32 [1], of x, with activations "static"; None otherwise.
        group: inputs of a group, which follow each other; of the last it may be fewer. None: one group has all.
        activations: see `Activations`; "dynamic" and "static" need one group, and at most 131,071 inputs.
        dtype: of the result; x's if None.
        backend: "triton" or "xla"; None picks by device and shapes.
    Returns:
        [M, N].
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    operands = Operands(x, w, scale, input_scale)
    check_operands(operands, jnp.int8, group, activations, Activations, ungrouped=("dynamic", "static"))
    if activations != "none" and x.shape[1] > MOST_INPUTS:
        raise ValueError(f"activations={activations!r} takes at most {MOST_INPUTS:,} inputs, got {x.shape[1]:,}")
    run = OP.pick(backend, x, w, scale, group, activations).run
    if 0 in (x.shape[0], w.shape[0]):
        return jnp.zeros((x.shape[0], w.shape[0]), dtype or x.dtype)
    options = Options(group, activations, None, jnp.dtype(dtype or x.dtype))
    return run(operands, options)
