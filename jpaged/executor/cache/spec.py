"""What each layer of a model keeps of a token.

model --cache_spec--> (LayerCache, LayerCache, ...) --PagedCache--> groups, arrays, attention
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jpaged.models import Model


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps: a key and a value for each token and head.

    kv_heads: heads of keys and values, on one device.
    window: the most tokens that a query sees, its own included; None: all before it. Older tokens need not be kept.
    """

    kv_heads: int
    head_dim: int
    dtype: np.dtype[Any]
    window: int | None = None


CacheSpec = tuple[LayerCache, ...]
"""What each layer keeps, from the first layer to the last."""


def cache_spec(model: Model) -> CacheSpec:
    """What the layers of a model, or of a shard of one, keep. Keys and values have the model's dtype."""
    config = model.config
    return tuple(
        LayerCache(config.num_kv_heads, config.head_dim, np.dtype(model.dtype), window)
        for window in config.layer_windows
    )


def kernel_block_bytes(layer: LayerCache, block_size: int) -> int:
    """Bytes of the keys and values of so many tokens in one layer."""
    return 2 * layer.kv_heads * block_size * layer.head_dim * layer.dtype.itemsize
