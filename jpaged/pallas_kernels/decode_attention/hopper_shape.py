"""What both decode attention kernels are specialised for, known while they are traced."""

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

LOG2E = math.log2(math.e)
"""Times which a score is in base 2."""


@dataclass(frozen=True)
class DecodeShape:
    """Sizes and options of a call; `rows` query heads of one KV head make a group.

    slots: the most chunks that a sequence can touch. alibi: whether there are slopes. config: of the kernel.
    gpu: the primitives that the kernel calls: `hopper_primitives`, or `hopper_interpreted` on a CPU.
    """

    batch: int
    heads: int
    kv_heads: int
    rows: int
    slots: int
    block_size: int
    head_dim: int
    dtype: Any
    scale: float
    sliding_window: int | None
    logit_softcap: float | None
    alibi: bool
    config: Any
    gpu: ModuleType

    @property
    def groups(self) -> int:
        return self.heads // self.rows

    @property
    def groups_a_kv_head(self) -> int:
        return self.groups // self.kv_heads

    @property
    def box(self) -> int:
        """Tokens of one TMA copy of keys or values."""
        return min(self.block_size, self.config.tile)

    def in_base_2(self, products: jax.Array) -> jax.Array:
        """Scores of products of queries and keys: scaled, capped, and in base 2."""
        if self.logit_softcap is None:
            return products * (self.scale * LOG2E)
        # tanh(x) = 1 - 2 / (1 + exp(2 x)); the hardware's tanh is too coarse
        e = jnp.exp2(products * (2 * LOG2E * self.scale / self.logit_softcap))
        return (self.logit_softcap * LOG2E) - (2 * self.logit_softcap * LOG2E) / (1.0 + e)
