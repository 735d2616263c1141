"""What each layer of a model keeps of a token.

model --cache_spec--> (LayerCache, LayerCache, ...) --PagedCache--> groups, arrays, attention
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from jpaged.models import Model


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps: a key and a value for each token and head, or a latent that is both (MLA).

    kv_heads: heads of keys and values, on one device. head_dim: columns of a key.
    window: the most tokens that a query sees, its own included; None: all before it. Older tokens need not be kept.
    value_dim: values are the first so many columns of keys; None where they are kept apart, as wide as keys.
    """

    kv_heads: int
    head_dim: int
    dtype: np.dtype[Any]
    window: int | None = None
    value_dim: int | None = None

    @property
    def arrays(self) -> int:
        """What is kept of a head: 2 for a key and a value, 1 for a latent."""
        return 2 if self.value_dim is None else 1

    def block(self, block_size: int) -> tuple[int, int, int, int]:
        """The shape of so many tokens: [2 or 1, kv_heads, block_size, head_dim]."""
        return self.arrays, self.kv_heads, block_size, self.head_dim


CacheSpec = tuple[LayerCache, ...]
"""What each layer keeps, from the first layer to the last."""


def cache_spec(model: Model) -> CacheSpec:
    """What the layers of a model, or of a shard of one, keep. Keys and values have the model's dtype."""
    config = model.config
    return tuple(
        LayerCache(config.num_kv_heads, config.head_dim, np.dtype(model.dtype), window, config.value_dim)
        for window in config.layer_windows
    )


def kernel_block_bytes(layer: LayerCache, block_size: int) -> int:
    """Bytes of the keys and values of so many tokens in one layer."""
    return prod(layer.block(block_size)) * layer.dtype.itemsize
