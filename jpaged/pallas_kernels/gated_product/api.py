"""The first half of a gated MLP: two products and the activation between them, in one op.

    x [M, K]    w [K, 2, I]: gate, up     out [M, I] = activation(x @ w[:, 0] + bias[0]) * (x @ w[:, 1] + bias[1])

"hopper" is one kernel, worth it for many rows (`LEAST_ROWS`). "xla" is a
product, whose result [M, 2, I] goes to memory and back, and an elementwise kernel; gradients pass through it alone.
"""

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.gated_product.reference import ACTIVATIONS
from jpaged.pallas_kernels.registry import Op

OP = Op("gated_product", __package__)


def gated_product(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: str = "silu",
    backend: str | None = None,
) -> jax.Array:
    """activation(x @ w[:, 0] + bias[0]) * (x @ w[:, 1] + bias[1]).

    "hopper" keeps products, bias and activation in float32 and rounds the result alone; a row's bits do not depend on
    the rows beside it. "xla" rounds the products to x's type first.

    Args:
        x: floats [M, K].
        w: [K, 2, I], of x's dtype; gate, then up.
        bias: None, or [2, I] of x's dtype.
        activation: "silu", "relu", "gelu" (by the error function) or "gelu_tanh".
        backend: "hopper" or "xla"; None takes the kernel where device and shapes allow and it is worth it.
    Returns:
        [M, I] of x's dtype.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_rank("x", x, "M, K")
    check.check_rank("w", w, "K, 2, I")
    rows, depth = x.shape
    columns = w.shape[2]
    check.check_like("w", w, "K, 2, I", (depth, 2, columns), "x", x.dtype)
    if bias is not None:
        check.check_like("bias", bias, "2, I", (2, columns), "w", w.dtype)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    product = OP.pick(backend, x, w).run
    if rows == 0 or columns == 0:
        return jnp.zeros((rows, columns), x.dtype)
    return product(x, w, bias, activation=activation)
