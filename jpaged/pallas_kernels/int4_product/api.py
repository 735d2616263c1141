"""A product with weights of 4 bits, in groups of inputs that share a scale (W4A16).

    x [M, K]    w uint8 [N, K / 2]    scale float32 [N, K / group]    zero uint8 [N, K / group], or 8 throughout
    out [M, N] = x @ ((w - zero) * scale).T

Two values share a byte, of the two halves of a group, so that either half lies side by side like the inputs it meets:

    byte j of a group of 32      bits 0-3: the group's value j      bits 4-7: value j + 16
"""

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.registry import Op, is_hopper

OP = Op("int4_product", __package__, also={"triton": is_hopper})

MIDDLE = 8
"""What is taken from values that have no zero points."""


def int4_product(
    x: jax.Array,
    w: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None = None,
    *,
    group: int,
    dtype: jnp.dtype | None = None,
    backend: str | None = None,
) -> jax.Array:
    """x @ ((w - zero) * scale).T. Sums are float32; "xla" rounds weights to x's type first.

    Args:
        x: floats [M, K].
        w: uint8 [N, K / 2], see above.
        scale: float32 [N, K / group].
        zero: uint8 [N, K / group]; None for 8.
        group: inputs that share a scale; even, and a divisor of K.
        dtype: of the result; x's if None.
        backend: "triton" or "xla"; None picks by device and shapes.
    Returns:
        [M, N].
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_floats("x", x, "M, K")
    inputs = x.shape[1]
    if not isinstance(group, int) or group < 2 or group % 2 or inputs % group:
        raise ValueError(f"group must be even and divide K={inputs}, got {group!r}")
    check.check_array("w", w, jnp.uint8, "N, K / 2", (None, inputs // 2))
    check.check_array("scale", scale, jnp.float32, "N, G", (w.shape[0], inputs // group))
    if zero is not None:
        check.check_array("zero", zero, jnp.uint8, "N, G", (w.shape[0], inputs // group))
    run = OP.pick(backend, x, w, group).run
    if 0 in (x.shape[0], w.shape[0]):
        return jnp.zeros((x.shape[0], w.shape[0]), dtype or x.dtype)
    return run(x, w, scale, zero, group=group, dtype=dtype or x.dtype)
