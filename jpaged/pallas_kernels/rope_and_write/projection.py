"""What queries, keys and values are made of."""

from typing import NamedTuple

import jax


class Projection(NamedTuple):
    """A projection's output, and what its queries and keys are normed and rotated by; as in `split_qkv` (`api.py`).

    qkv: [T, kv_heads, group + 2, head_dim]. rotation: cos and sin, float32 [T, head_dim / 2] each, or None. norms:
    scales [head_dim] for queries and keys, both of qkv's dtype or float32, or None.
    """

    qkv: jax.Array
    rotation: tuple[jax.Array, jax.Array] | None
    norms: tuple[jax.Array, jax.Array] | None
