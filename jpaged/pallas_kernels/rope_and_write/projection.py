"""What queries, keys and values are made of."""

from typing import NamedTuple

import jax


class Projection(NamedTuple):
    """A projection's output, and what its queries and keys are normed and rotated by; as in `split_qkv` (`api.py`).

    qkv: [T, kv_heads, group + 2, head_dim]. rotation: cos and sin, float32 [T, head_dim / 2] each, or None. norms:
    scales [head_dim] for queries and keys, both of qkv's dtype or float32, or None.

    scales: qkv is a product [R, ..] of T or more rows, whose scales of rows, float32 [R, 1], and of outputs, float32
    [kv_heads, group + 2, head_dim], are still to be multiplied; or None.
    """

    qkv: jax.Array
    rotation: tuple[jax.Array, jax.Array] | None
    norms: tuple[jax.Array, jax.Array] | None
    scales: tuple[jax.Array, jax.Array] | None = None
