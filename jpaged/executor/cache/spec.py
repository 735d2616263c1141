"""What each layer of a model keeps of a token, or of a sequence.

model --cache_spec--> (LayerCache, StateCache, ...) --token_layers--> PagedCache: groups, arrays, attention
                                                    '-------------> StateSlots: states of sequences, by slot
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from jpaged.models import Model
from jpaged.models.states import LayerState


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps: a key and a value for each token and head, or a latent that is both (MLA).

    kv_heads: heads of keys and values, on one device. head_dim: columns of a key.
    window: the most tokens that a query sees, its own included; None: all before it. Older tokens need not be kept.
    chunked: a query sees only its own chunk, up to itself: chunks of `window` tokens follow each other from the
        sequence's first token on.
    value_dim: values are the first so many columns of keys; None where they are kept apart, as wide as keys.
    scales: what keys and what values are divided by before they are rounded to e4m3.
    source: it keeps nothing, and reads what an earlier layer keeps: that layer's place among those of a `TokenSpec`.
        The other fields are that layer's. None: it keeps its own.
    """

    kv_heads: int
    head_dim: int
    dtype: np.dtype[Any]
    window: int | None = None
    value_dim: int | None = None
    scales: tuple[float, float] = (1.0, 1.0)
    chunked: bool = False
    source: int | None = None

    @property
    def arrays(self) -> int:
        """What is kept of a head: 2 for a key and a value, 1 for a latent."""
        return 2 if self.value_dim is None else 1

    def block(self, block_size: int) -> tuple[int, int, int, int]:
        """The shape of so many tokens: [2 or 1, kv_heads, block_size, head_dim]."""
        return self.arrays, self.kv_heads, block_size, self.head_dim


@dataclass(frozen=True)
class StateCache:
    """What one layer keeps of a sequence, whatever its length. state: its sizes, on one device. dtype: the model's."""

    state: LayerState
    dtype: np.dtype[Any]


CacheSpec = tuple[LayerCache | StateCache, ...]
"""What each layer keeps, from the first layer to the last."""

TokenSpec = tuple[LayerCache, ...]
"""Likewise, of the layers that keep tokens, or read those of another."""


FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def cache_spec(model: Model, kv_scales: tuple[tuple[float, float], ...] | None = None) -> CacheSpec:
    """What the layers of a model, or of a shard of one, keep.

    kv_scales: of each layer, keys and values then are in e4m3; None: they have the model's dtype.
    """
    config, plain = model.config, np.dtype(model.dtype)
    dtype = plain if kv_scales is None else FP8
    scales = kv_scales or ((1.0, 1.0),) * config.num_layers

    def kept(layer: int) -> LayerCache | StateCache:
        state, source, window = config.layer_states[layer], config.layer_sources[layer], config.layer_windows[layer]
        if state is not None:
            return StateCache(state, plain)
        of_layer = config.of_layer(layer)
        return LayerCache(
            of_layer.num_kv_heads,
            of_layer.head_dim,
            dtype,
            window,
            config.value_dim,
            scales[layer if source is None else source],
            chunked=config.chunked_windows and window is not None,
            source=None if source is None else config.layer_states[:source].count(None),
        )

    return tuple(map(kept, range(config.num_layers)))


def token_layers(spec: CacheSpec) -> TokenSpec:
    """The layers that keep tokens, or read those of another, in their order."""
    return tuple(layer for layer in spec if isinstance(layer, LayerCache))


def kernel_block_bytes(layer: LayerCache, block_size: int) -> int:
    """Bytes of the keys and values of so many tokens in one layer."""
    return prod(layer.block(block_size)) * layer.dtype.itemsize
