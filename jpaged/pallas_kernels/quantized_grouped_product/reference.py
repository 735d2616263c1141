"""The grouped product in few bits in plain XLA: one expert's matrix is widened at a time, of those that have rows."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.pallas_kernels.common.numerics import precision_of
from jpaged.pallas_kernels.fp8_product.reference import dequantized as by_scales
from jpaged.pallas_kernels.gated_product.reference import ACTIVATIONS
from jpaged.pallas_kernels.int4_product.reference import dequantized as int4_dequantized
from jpaged.pallas_kernels.int4_product.reference import e2m1, nvfp4_dequantized
from jpaged.pallas_kernels.quantized_grouped_product.api import EIGHT_BITS
from jpaged.pallas_kernels.quantized_grouped_product.operands import Operands, Options


@partial(jax.jit, static_argnames="options")
def quantized_grouped_product(operands: Operands, options: Options) -> jax.Array:
    """`quantized_grouped_product` of the package, checked.

    Each expert with rows multiplies them all, as `jax.lax.ragged_dot` does on most devices, and keeps its own.
    """
    x, (w, scale, zero, outer), (group_sizes, groups, _), weights, _ = operands.gathered()
    form, group, activation = options.form, options.group, options.activation
    experts = w.shape[0]
    if groups is None:
        assert group_sizes is not None
        ends = jnp.cumsum(group_sizes)
        groups = jnp.sum(jnp.arange(x.shape[0])[:, None] >= ends, axis=1, dtype=jnp.int32)
    present = jnp.any(groups[:, None] == jnp.arange(experts), axis=0)

    def of_expert(expert: jax.Array, sums: jax.Array) -> jax.Array:
        values, scales = w[expert], scale[expert]
        zeros = None if zero is None else zero[expert]
        divisors = None if outer is None else outer[expert]
        if form in EIGHT_BITS and scales.shape[1] == 1:
            y = _dot(x, values.astype(x.dtype)) * scales[:, 0]
        else:
            y = _dot(x, dequantized(values, scales, zeros, divisors, form=form, group=group).astype(x.dtype))
        return jnp.where((groups == expert)[:, None], y, sums)

    def body(expert: jax.Array, sums: jax.Array) -> jax.Array:
        return lax.cond(present[expert], of_expert, lambda _, kept: kept, expert, sums)

    sums = lax.fori_loop(0, experts, body, jnp.zeros((x.shape[0], w.shape[1]), jnp.float32))
    if activation is not None:
        half = w.shape[1] // 2
        sums = ACTIVATIONS[activation](sums[:, :half]) * sums[:, half:]
    elif weights is not None:
        sums = sums * weights[: x.shape[0], None]
    return sums.astype(x.dtype)


def dequantized(
    w: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    outer: jax.Array | None = None,
    *,
    form: str,
    group: int | None,
) -> jax.Array:
    """float32 [N, K] of one matrix's values [N, K] or [N, K / 2], scales and zero points [N, G], outer scales [N]."""
    if form in EIGHT_BITS:
        return by_scales(w, scale, group)
    assert group is not None
    if form == "int4":
        return int4_dequantized(w, scale, zero, group)
    if form == "nvfp4":
        assert outer is not None
        return nvfp4_dequantized(w, scale, outer)
    return e2m1(w, group) * jnp.repeat(power_of_two(scale), group, axis=1)


def power_of_two(scale: jax.Array) -> jax.Array:
    """uint8 -> float32: 2^(scale - 127); NaN of 255 (E8M0). CPUs make zero of 2^-127, which is subnormal."""
    wide = scale.astype(jnp.int32)
    bits = jnp.where(wide == 0, 1 << 22, jnp.where(wide == 255, 0x7FC00000, wide << 23))
    return lax.bitcast_convert_type(bits, jnp.float32)


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """float32 [A, N]."""
    dims = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, w, dims, precision=precision_of(x.dtype), preferred_element_type=jnp.float32)
