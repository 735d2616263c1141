"""Attention that sharpens with the position of the token that asks (Nakanishi 2025, arXiv:2501.19399), as in Llama 4
and Ministral 3: its query is multiplied by a number that grows in steps.

    1 + weight * log(1 + floor((position + shift) / length))
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Temperature:
    """weight: how much a step sharpens. length: of a step, tokens. shift: what is added to positions, from 0 on."""

    weight: float
    length: int
    shift: int = 0

    def of(self, positions: jax.Array) -> jax.Array:
        """What the queries of int32 positions [tokens] are multiplied by, float32 [tokens]."""
        steps = (positions + self.shift) // self.length  # of integers: a quotient in float32 may round up to a step
        return 1 + self.weight * jnp.log1p(steps.astype(jnp.float32))
