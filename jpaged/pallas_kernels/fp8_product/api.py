"""A product with weights in FP8 (e4m3) and their scales.

    x [M, K]    w e4m3 [N, K]    scale float32 [N, G], of G groups of inputs    out [M, N] = x @ (w * scale).T

Rows of w are outputs, so that both operands run along K: the one order that FP8 tensor cores take on Ada and Hopper.

With activations "dynamic" or "static", x is rounded to e4m3 and the tensor cores multiply in 8 bits. x stays as it is,
and w is widened to its type, with "none", on GPUs before 8.9, by "hopper", which is picked for up to 16 rows, and by
"xla" where inputs are in groups. Ada and Hopper accumulate products of two e4m3 operands in 14 bits, so "triton" sums
at most 128 inputs there and adds these sums in float32. A NaN among weights counts as 480 where a kernel widens them.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels import devices
from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.fp8_product import reference
from jpaged.pallas_kernels.fp8_product.operands import Operands, Options, check_operands
from jpaged.pallas_kernels.fp8_product.rounding import rounds_activations
from jpaged.pallas_kernels.registry import REFERENCE, Op, is_hopper

OP = Op("fp8_product", __package__, also={"triton": is_hopper})

Activations = Literal["none", "dynamic", "static"]
"""Whether x may be rounded to FP8: never, with a scale for each row and group of inputs, or with one that is given."""


def fp8_product(
    x: jax.Array,
    w: jax.Array,
    scale: jax.Array,
    input_scale: jax.Array | None = None,
    *,
    group: int | None = None,
    activations: Activations = "none",
    upper_bound: float | None = None,
    dtype: jnp.dtype | None = None,
    backend: str | None = None,
) -> jax.Array:
    """x @ (w * scale).T, summed in float32.

    Args:
        x: floats [M, K].
        w: float8_e4m3fn [N, K].
        scale: float32 [N, G]: of each row, of each group of inputs.
        input_scale: float32 [1], of x where it is rounded, with activations "static"; None otherwise.
        group: inputs of a group, which follow each other; of the last it may be fewer. None: one group has all.
        activations: see `Activations`; "static" needs one group.
        upper_bound: with "dynamic", the largest magnitude that counts of x where it is rounded; what is beyond it is
            clipped.
        dtype: of the result; x's if None.
        backend: "hopper", "triton" or "xla"; None picks by device and shapes.
    Returns:
        [M, N].
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    operands = Operands(x, w, scale, input_scale)
    check_operands(operands, jnp.float8_e4m3fn, group, activations, Activations, ungrouped=("static",))
    run = OP.pick(backend, x, w, scale, group, activations).run
    if 0 in (x.shape[0], w.shape[0]):
        return jnp.zeros((x.shape[0], w.shape[0]), dtype or x.dtype)
    options = Options(group, activations, upper_bound, jnp.dtype(dtype or x.dtype))
    return run(operands, options)


def takes_rounded_rows(
    num_rows: int,
    w: jax.Array,
    scale: jax.Array,
    dtype: jnp.dtype,
    group: int | None,
    activations: Activations,
    backend: str | None,
) -> bool:
    """Whether `fp8_product` of so many rows of this dtype would round each with one scale and leave the product to XLA,
    so that `product_of_rounded` does the same for rows that are rounded. The arguments are those of `fp8_product`."""
    if group is not None or activations == "none" or not rounds_activations(devices.default_device()):
        return False
    x = jax.ShapeDtypeStruct((num_rows, w.shape[1]), dtype)
    return OP.pick(backend, x, w, scale, group, activations).backend == REFERENCE


def product_of_rounded(x: jax.Array, w: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """x @ w.T of two e4m3 operands in XLA, without any scales.

    Args:
        x: float8_e4m3fn [M, K]. w: float8_e4m3fn [N, K].
        dtype: of the result; sums are accumulated in float32, and rounded to it once.
    Returns:
        [M, N].
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_array("x", x, jnp.float8_e4m3fn, "M, K", (None, None))
    check.check_array("w", w, jnp.float8_e4m3fn, "N, K", (None, x.shape[1]))
    return reference.product(x, w, dtype)
