"""The product with 8-bit integers in plain XLA, which gives products of two int8 operands to cuBLASLt on GPUs."""

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.pallas_kernels.fp8_product.operands import Operands, Options
from jpaged.pallas_kernels.fp8_product.reference import dequantized, product
from jpaged.pallas_kernels.int8_product.rounding import round_to_int8


def int8_product(operands: Operands, options: Options) -> jax.Array:
    """`int8_product` of the package, checked."""
    (x, w, scale, input_scale), group, dtype = operands, options.group, options.dtype
    if options.activations != "none":
        rounded, of_rows = round_to_int8(x, input_scale)
        sums = lax.dot_general(rounded, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
        return (sums.astype(jnp.float32) * of_rows * scale[:, 0]).astype(dtype)
    if scale.shape[1] == 1:
        return (product(x, w.astype(x.dtype)) * scale[:, 0]).astype(dtype)
    return product(x, dequantized(w, scale, group).astype(x.dtype)).astype(dtype)
