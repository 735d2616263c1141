"""What each layer of a model keeps of a token.

model --cache_spec--> (LayerCache, LayerCache, ...) --PagedCache--> groups, arrays, attention
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jpaged.models import Model


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps: a key and a value for each token and head.

    kv_heads: heads of keys and values, on one device.
    window: the most tokens that a query sees, its own included; None: all before it. Older tokens need not be kept.
    scales: what keys and what values are divided by before they are rounded to e4m3.
    """

    kv_heads: int
    head_dim: int
    dtype: np.dtype[Any]
    window: int | None = None
    scales: tuple[float, float] = (1.0, 1.0)


CacheSpec = tuple[LayerCache, ...]
"""What each layer keeps, from the first layer to the last."""


FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def cache_spec(model: Model, kv_scales: tuple[tuple[float, float], ...] | None = None) -> CacheSpec:
    """What the layers of a model, or of a shard of one, keep.

    kv_scales: of each layer, keys and values then are in e4m3; None: they have the model's dtype.
    """
    config = model.config
    dtype = np.dtype(model.dtype) if kv_scales is None else FP8
    scales = kv_scales or ((1.0, 1.0),) * len(config.layer_windows)
    return tuple(
        LayerCache(config.num_kv_heads, config.head_dim, dtype, window, of_layer)
        for window, of_layer in zip(config.layer_windows, scales, strict=True)
    )


def kernel_block_bytes(layer: LayerCache, block_size: int) -> int:
    """Bytes of the keys and values of so many tokens in one layer."""
    return 2 * layer.kv_heads * block_size * layer.head_dim * layer.dtype.itemsize
