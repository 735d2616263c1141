"""The first half of a gated MLP: two products and the activation between them, in one op.

    x [M, K]    w [K, 2, I]: gate, up     out [M, I] = activation(x @ w[:, 0] + bias[0]) * (x @ w[:, 1] + bias[1])

"mosaic" is one kernel for Hopper (`gated_product_mosaic.py`), worth it for many rows (`LEAST_ROWS`). "xla" is a
product, whose result [M, 2, I] goes to memory and back, and an elementwise kernel; gradients pass through it alone.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels import arguments as check
from jpaged.pallas_kernels.backends import pick
from jpaged.pallas_kernels.reference import precision_of

_MODULE = "jpaged.pallas_kernels.gated_product_mosaic"

LEAST_ROWS = 96
"""From which on the kernel is taken by default. Measured on an H200 at sizes from 128 rows on it wins, 65 us against
XLA's 113 for Llama-3.1-8B and 11.5 against 14.3 for Qwen3-0.6B at the least of them, or loses by little
(`docs/kernels.md`). 96 rows take the same tile as 128, hence the same time; XLA's product alone takes 65 us for them.
"""

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def gated_product(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: str = "silu",
    backend: str | None = None,
) -> jax.Array:
    """activation(x @ w[:, 0] + bias[0]) * (x @ w[:, 1] + bias[1]).

    "mosaic" keeps products, bias and activation in float32 and rounds the result alone; a row's bits do not depend on
    the rows beside it. "xla" rounds the products to x's type first.

    Args:
        x: floats [M, K].
        w: [K, 2, I], of x's dtype; gate, then up.
        bias: None, or [2, I] of x's dtype.
        activation: "silu", "relu", "gelu" (by the error function) or "gelu_tanh".
        backend: "xla"; "mosaic"; or None, which takes the kernel where device and shapes allow, from `LEAST_ROWS` on.
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
    if backend is None and rows < LEAST_ROWS:
        backend = "xla"
    chosen = pick("gated_product", backend, lambda: import_module(_MODULE).unsupported(x, w))
    if rows == 0 or columns == 0:
        return jnp.zeros((rows, columns), x.dtype)
    if chosen == "mosaic":
        return import_module(_MODULE).gated_product(x, w, bias, activation=activation)
    return _in_xla(x, w, bias, activation)


def _in_xla(x: jax.Array, w: jax.Array, bias: jax.Array | None, activation: str) -> jax.Array:
    both = jnp.einsum("mk,kci->mci", x, w, precision=precision_of(x.dtype))
    if bias is not None:
        both = both + bias
    return ACTIVATIONS[activation](both[:, 0]) * both[:, 1]
