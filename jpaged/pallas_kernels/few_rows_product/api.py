"""The product of few rows, as a decode step of few sequences has: the contract.

    out [M, N] = norm(x) [M, K] @ w [K, N] + residual [M, N]          norm and residual where they are given
    normed [M, K] = norm(x)                                           for who else reads it, if asked for

Such a product takes as long as reading w does. What stands before and behind it is as small as launching a kernel for
it, so "triton" does all in one. On Hopper it runs only where it is forced: what it saves of a step there is not
measured.
"""

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.registry import REFERENCE, Op, canonical

OP = Op("few_rows_product", __package__)


@overload
def few_rows_product(
    x: jax.Array,
    w: jax.Array,
    *,
    norm: jax.Array | None = None,
    norm_eps: float = 0.0,
    residual: jax.Array | None = None,
    dtype: jnp.dtype | None = None,
    gives_normed: Literal[False] = False,
    backend: str | None = None,
) -> jax.Array: ...
@overload
def few_rows_product(
    x: jax.Array,
    w: jax.Array,
    *,
    norm: jax.Array,
    norm_eps: float = 0.0,
    residual: jax.Array | None = None,
    dtype: jnp.dtype | None = None,
    gives_normed: Literal[True],
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]: ...
def few_rows_product(
    x: jax.Array,
    w: jax.Array,
    *,
    norm: jax.Array | None = None,
    norm_eps: float = 0.0,
    residual: jax.Array | None = None,
    dtype: jnp.dtype | None = None,
    gives_normed: bool = False,
    backend: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """norm(x) @ w + residual, summed in float32 and rounded once.

    "triton" multiplies x by the norm's scale, rounds that to x's type, and divides sums by the root mean square, which
    float16 has not the range for: with a norm it is left to "xla", which rounds the norm (`numerics.rms_norm`) and the
    product.

    Args:
        x: floats [M, K].
        w: [K, N], of x's dtype.
        norm: [K], the scale of an RMS norm of x, of x's dtype or float32; None for no norm.
        norm_eps: what is added to the mean square.
        residual: [M, N], of any float dtype; None for nothing.
        dtype: of the result; x's if None.
        gives_normed: also returns the norm [M, K], of x's dtype.
        backend: "triton" or "xla"; None picks by device and shapes.
    Returns:
        [M, N]; with `gives_normed`, and the norm.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_floats("x", x, "M, K")
    check.check_array("w", w, x.dtype, "K, N", (x.shape[1], None))
    if norm is not None:
        check.check_floats("norm", norm, "K")
        if norm.shape != x.shape[1:] or norm.dtype not in (x.dtype, jnp.float32):
            raise ValueError(f"norm must be [{x.shape[1]}] of {x.dtype} or float32, got {norm.dtype} {norm.shape}")
    elif gives_normed:
        raise ValueError("gives_normed=True needs a norm")
    if residual is not None:
        check.check_floats("residual", residual, "M, N")
        if residual.shape != (x.shape[0], w.shape[1]):
            raise ValueError(f"residual must be {(x.shape[0], w.shape[1])}, got shape {residual.shape}")
    run = OP.pick(backend, x, w, norm is not None).run
    if 0 in (*x.shape, w.shape[1]):
        raise ValueError(f"x and w must not be empty, got shapes {x.shape} and {w.shape}")
    out, normed = run(
        x, w, norm, residual, norm_eps=norm_eps, dtype=jnp.dtype(dtype or x.dtype), gives_normed=gives_normed
    )
    return (out, normed) if gives_normed else out


def few_rows_product_backend(x: Any, w: Any, backend: str | None = None, *, normed: bool = False) -> str:
    """The backend to take where other products have `backend`: a kernel's if there is one that is worth it, else "xla".

    x, w: as of `few_rows_product`; shapes and dtypes are enough. normed: the norm is to be computed, too.
    """
    if backend is not None and "," not in backend and OP.unsupported(canonical(backend), x, w, normed) is not None:
        return REFERENCE
    return OP.pick(backend, x, w, normed).backend
