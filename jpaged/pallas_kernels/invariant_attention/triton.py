"""Invariant attention for GPUs from Ampere on: `ragged_attention`, which takes keys in steps of fixed size from the
first one up. Those in which a query sees nothing leave its state as it was."""

import jax

from jpaged.pallas_kernels.common.attention_arguments import Features, Operands
from jpaged.pallas_kernels.ragged_attention import triton
from jpaged.pallas_kernels.ragged_attention.triton import unsupported

__all__ = ["invariant_attention", "unsupported"]


def invariant_attention(operands: Operands, query_starts: jax.Array, features: Features) -> tuple[jax.Array, jax.Array]:
    """`invariant_attention` of the package, checked; with its log-sum-exp, float32 [T, H]."""
    return triton.ragged_attention(operands, query_starts, features)
