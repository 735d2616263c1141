"""The product of rounded rows in plain XLA, which gives it to cuBLASLt on GPUs that multiply FP8."""

import jax

from jpaged.pallas_kernels.fp8_product.reference import product
from jpaged.pallas_kernels.round_rows.operands import RoundedRows, Sums, type_of_sums


def rounded_product(x: RoundedRows, w: jax.Array, scale: jax.Array) -> Sums:
    """`rounded_product` of the package, checked."""
    return Sums(product(x.values, w, type_of_sums(x.dtype)), x.scales, scale, x.count, x.dtype)
