"""The product of a few rounded rows by the kernel of `fp8_product`: every weight is read once, in 8 bits, and scales
multiply what it writes."""

import jax

from jpaged.pallas_kernels.fp8_product.triton import product_of_rounded
from jpaged.pallas_kernels.round_rows.operands import RoundedRows


def worthwhile(x: RoundedRows, w: jax.Array) -> bool:
    """For few rows, where cuBLASLt does not reach the card's bandwidth."""
    del w
    return x.count <= MOST_ROWS


MOST_ROWS = 0


def rounded_product(x: RoundedRows, w: jax.Array, scale: jax.Array) -> jax.Array:
    """`rounded_product` of the package, checked."""
    return product_of_rounded(x.values, x.scales, w, scale[:, None], count=x.count, dtype=x.dtype)
