"""FP8 products of few rows in plain XLA: rows are rounded, multiplied, and what comes behind follows."""

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.few_rows_fp8_product.operands import Operands, UnroundedRows
from jpaged.pallas_kernels.fp8_product.reference import product
from jpaged.pallas_kernels.gated_product.reference import ACTIVATIONS
from jpaged.pallas_kernels.round_rows import operands as rounding
from jpaged.pallas_kernels.round_rows.reference import round_rows


def few_rows_fp8_product(operands: Operands, activation: str | None) -> rounding.Sums | jax.Array | UnroundedRows:
    """`few_rows_fp8_product` of the package, checked. What is known of the rows' largest magnitudes is found anew."""
    (rows, w, scale, residual), dtype = operands, operands.rows.dtype
    options = rounding.Options(rows.norm_eps, None, rows.upper_bound)
    rounded, _ = round_rows(rounding.Operands(rows.x, None, rows.norm, rows.input_scale), options)
    products = product(rounded.values, w, rounding.type_of_sums(dtype))
    sums = rounding.Sums(products, rounded.scales, scale, rounded.count, dtype)
    if activation is None:
        return sums if residual is None else sums.added_to(residual)
    gate, up = jnp.split(sums.wide(), 2, axis=1)
    wide = ACTIVATIONS[activation](gate) * up
    return UnroundedRows(wide, None, None, None, 0.0, None, dtype)
