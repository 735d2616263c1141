"""What each layer of a model keeps of a token, or of a sequence.

model --cache_spec--> (LayerCache, StateCache, ...) --token_layers--> PagedCache: groups, arrays, attention
                                                    '-------------> StateSlots: states of sequences, by slot
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jpaged.models import Model
from jpaged.models.states import DeltaState


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


@dataclass(frozen=True)
class StateCache:
    """What one layer keeps of a sequence, whatever its length. state: its sizes, on one device. dtype: the model's."""

    state: DeltaState
    dtype: np.dtype[Any]


CacheSpec = tuple[LayerCache | StateCache, ...]
"""What each layer keeps, from the first layer to the last."""

TokenSpec = tuple[LayerCache, ...]
"""Likewise, of the layers that keep tokens."""


def cache_spec(model: Model) -> CacheSpec:
    """What the layers of a model, or of a shard of one, keep. Keys and values have the model's dtype."""
    config, dtype = model.config, np.dtype(model.dtype)
    return tuple(
        LayerCache(config.num_kv_heads, config.head_dim, dtype, window) if state is None else StateCache(state, dtype)
        for window, state in zip(config.layer_windows, config.layer_states, strict=True)
    )


def token_layers(spec: CacheSpec) -> TokenSpec:
    """The layers that keep tokens, in their order."""
    return tuple(layer for layer in spec if isinstance(layer, LayerCache))


def kernel_block_bytes(layer: LayerCache, block_size: int) -> int:
    """Bytes of the keys and values of so many tokens in one layer."""
    return 2 * layer.kv_heads * block_size * layer.head_dim * layer.dtype.itemsize
