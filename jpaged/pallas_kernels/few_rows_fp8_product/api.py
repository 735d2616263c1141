"""FP8 products of few rows, which round the rows that they read: the contracts.

    rows [M, K]: x, RMS norm of x where it has one, rounded to e4m3 as `round_rows` rounds
    products [M, N] = rows @ w.T of e4m3 [N, K], still without scales

    sums_of       products and their scales                                     QKV
    added_to      residual + products * scales                                  attention's output, down
    activated     activation(gate) * up, of w [2 N, K]: rows for the next       gate and up

In a decode step of few rows, each kernel between two products takes about as long as its launch. With these products a
layer of Llama is six kernels: four of them, RoPE with the KV write, and attention. Values, scales and sums are rounded
where `round_rows` and the product of its rows round them, so results are equal but for the order of sums.

"triton" is picked for as many rows as `limits` says.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.few_rows_fp8_product.operands import Operands, UnroundedRows
from jpaged.pallas_kernels.gated_product.reference import ACTIVATIONS
from jpaged.pallas_kernels.registry import REFERENCE, Op, is_hopper
from jpaged.pallas_kernels.round_rows.operands import Sums


def _on_hopper(device: Any, *arguments: Any) -> bool:
    """There is no Mosaic kernel, so Hopper may pick Triton's."""
    return is_hopper(device)


OP = Op("few_rows_fp8_product", __package__, also={"triton": _on_hopper})


def sums_of(rows: UnroundedRows, w: jax.Array, scale: jax.Array, *, backend: str | None = None) -> Sums:
    """rows @ w.T without scales, and the scales to multiply it with.

    Args:
        rows: [M, K], which stand for bfloat16, float16 or float32 (`UnroundedRows.dtype`).
        w: float8_e4m3fn [N, K].
        scale: float32 [N], of w's rows.
        backend: "triton" or "xla"; None picks by device and shapes.
    Returns:
        [M, N], with the scales of rows and of w.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    found = _run(rows, w, scale, None, None, backend)
    assert isinstance(found, Sums)
    return found


def added_to(
    residual: jax.Array, rows: UnroundedRows, w: jax.Array, scale: jax.Array, *, backend: str | None = None
) -> jax.Array:
    """residual + rows @ (w * scale).T, added in float32 and rounded once.

    Args:
        residual: [M, N], of the rows' dtype.
        rows, w, scale, backend: as in `sums_of`.
    Returns:
        [M, N], of the rows' dtype.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    found = _run(rows, w, scale, residual, None, backend)
    assert isinstance(found, jax.Array)
    return found


def activated(
    rows: UnroundedRows, w: jax.Array, scale: jax.Array, activation: str, *, backend: str | None = None
) -> UnroundedRows:
    """activation(gate) * up as rows for the next product.

    Args:
        rows, backend: as in `sums_of`.
        w, scale: as in `sums_of`, but [2 N, K] and [2 N]: first all gates, then what they multiply.
        activation: as of `gated_product`.
    Returns:
        [M, N], x in float32; from Triton's kernel with the largest magnitudes of its strips.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if w.shape[0] % 2:
        raise ValueError(f"w must be [2 N, K] with an activation, got shape {w.shape}")
    found = _run(rows, w, scale, None, activation, backend)
    assert isinstance(found, UnroundedRows)
    return found


def takes_rows(count: int, w: jax.Array, dtype: Any, backend: str | None) -> bool:
    """Whether to use a kernel of this op for so many rows of this dtype, instead of `round_rows` and a product.

    w, backend: as in `sums_of`.
    """
    if count == 0:
        return False
    x = jax.ShapeDtypeStruct((count, w.shape[1]), dtype)
    rows = UnroundedRows(x, None, None, None, 0.0, None, jnp.dtype(dtype))  # type: ignore[arg-type]  # its shape
    return OP.pick(backend, rows, w).backend != REFERENCE


def _run(
    rows: UnroundedRows,
    w: jax.Array,
    scale: jax.Array,
    residual: jax.Array | None,
    activation: str | None,
    backend: str | None,
) -> Sums | jax.Array | UnroundedRows:
    """The product, with what comes behind it."""
    check.check_floats("rows.x", rows.x, "M, K")
    count, depth = rows.shape
    if 0 in (count, depth):
        raise ValueError(f"rows must not be empty, got shape {rows.shape}")
    check.check_array("w", w, jnp.float8_e4m3fn, "N, K", (None, depth))
    check.check_array("scale", scale, jnp.float32, "N", (w.shape[0],))
    if rows.norm is not None:
        check.check_like("rows.x", rows.x, "M, K", (count, depth), "rows", rows.dtype)
        kept = rows.norm.dtype if rows.norm.dtype == jnp.float32 else rows.dtype
        check.check_like("rows.norm", rows.norm, "K", (depth,), "rows", kept)
    if rows.largest is not None:
        if rows.norm is not None:
            raise ValueError("rows.largest goes with no norm")
        check.check_array("rows.largest", rows.largest, jnp.int32, "P, M", (None, count))
    if rows.input_scale is not None:
        check.check_array("rows.input_scale", rows.input_scale, jnp.float32, "1", (1,))
    if residual is not None:
        check.check_like("residual", residual, "M, N", (count, w.shape[0]), "rows", rows.dtype)
    rows = replace(rows, norm_eps=check.check_eps("rows.norm_eps", rows.norm_eps))
    found = OP.pick(backend, rows, w).run(Operands(rows, w, scale, residual), activation)
    assert isinstance(found, Sums | jax.Array | UnroundedRows)
    return found
