"""The product with weights alone in 8-bit integers, for GPUs from Ampere on: the kernel of `fp8_product`, which then
widens integers. Products of two int8 operands are XLA's, which gives them to cuBLASLt."""

import jax

from jpaged.pallas_kernels.fp8_product import triton as fp8
from jpaged.pallas_kernels.fp8_product.operands import Operands, Options


def unsupported(x: jax.Array, w: jax.Array, scale: jax.Array, group: int | None, activations: str) -> str | None:
    """Why the kernel cannot take these (checked) arguments; None if it can."""
    if activations != "none":
        return f"activations={activations!r}; it multiplies with those that are as they were"
    return fp8.unsupported(x, w, scale, group, activations)


def worthwhile(x: jax.Array, w: jax.Array, scale: jax.Array, group: int | None, activations: str) -> bool:
    """Until widening weights once for all rows costs less than for each tile of them: XLA writes the widened weights to
    memory, in each step (with a scale an output, too, where it widens FP8 as it reads)."""
    del w, scale, group, activations
    return x.shape[0] <= fp8.MOST_WIDENED_ROWS


def int8_product(operands: Operands, options: Options, config: fp8.Config | None = None) -> jax.Array:
    """`int8_product` of the package, checked. config: to try others than the table's."""
    return fp8.fp8_product(operands, options, config)
