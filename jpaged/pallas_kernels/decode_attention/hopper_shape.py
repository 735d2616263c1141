"""What both decode attention kernels are specialised for, known while they are traced."""

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common.attention_arguments import Features, Operands

LOG2E = math.log2(math.e)
"""Times which a score is in base 2."""


@dataclass(frozen=True)
class DecodeShape:
    """Sizes and options of a call; `rows` query heads of one KV head make a group.

    head_dim, value_dim: columns of a key, and of a value.
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
    value_dim: int
    dtype: Any
    features: Features
    alibi: bool
    config: Any
    gpu: ModuleType

    @classmethod
    def of(cls, operands: Operands, features: Features, **own: Any) -> Self:
        """That of a call. own: the fields that the kernel decides."""
        batch, heads, head_dim = operands.q.shape
        _, _, kv_heads, block_size, _ = operands.kv_pool.shape
        return cls(
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            dtype=operands.q.dtype,
            block_size=block_size,
            head_dim=head_dim,
            value_dim=features.value_dim or head_dim,
            features=features,
            alibi=operands.alibi_slopes is not None,
            **own,
        )

    @property
    def groups(self) -> int:
        return self.heads // self.rows

    @property
    def groups_a_kv_head(self) -> int:
        return self.groups // self.kv_heads

    @property
    def latent(self) -> bool:
        """Whether values are the first columns of keys."""
        return self.features.value_dim is not None

    @property
    def box(self) -> int:
        """Tokens of one TMA copy of keys or values."""
        return min(self.block_size, self.config.tile)

    def in_base_2(self, products: jax.Array) -> jax.Array:
        """Scores of products of queries and keys: scaled, capped, and in base 2."""
        scale, cap = self.features.scale, self.features.logit_softcap
        if cap is None:
            return products * (scale * LOG2E)
        # tanh(x) = 1 - 2 / (1 + exp(2 x)); the hardware's tanh is too coarse
        e = jnp.exp2(products * (2 * LOG2E * scale / cap))
        return (cap * LOG2E) - (2 * cap * LOG2E) / (1.0 + e)


class Loads(NamedTuple):
    """The barriers of what the producer loads into shared memory: `full` when TMA has written, `free` when a consumer
    has read."""

    q_full: Any
    q_free: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
