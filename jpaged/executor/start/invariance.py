"""Checks that an engine with batch_invariant=True attends by the same kernels as a trainer's forward pass."""

from functools import partial
from typing import Any

import jax

from jpaged.api.errors import InvalidParameterError
from jpaged.models import Model
from jpaged.pallas_kernels.invariant_attention.api import OP

TRAINERS_BLOCK_SIZE = 16
"""Tokens in the blocks of keys and values that `training.token_logprobs` makes."""


def check_attention(model: Model, kernel_backend: str | None, block_size: int) -> None:
    """Raises InvalidParameterError where the backend cannot do a layer's attention, or blocks of this size would take
    another backend than a trainer's.

    kernel_backend: as of `EngineArgs`, its own name.
    """
    config = model.config
    sizes = {(one.num_kv_heads, one.head_dim) for one in map(config.of_layer, range(config.num_layers))}
    for kv_heads, head_dim in sorted(sizes):
        q = jax.ShapeDtypeStruct((1, config.num_heads, head_dim), model.dtype)
        pool = partial(_pool, kv_heads, head_dim, model.dtype)
        if kernel_backend is not None and (reason := OP.unsupported(kernel_backend, q, pool(block_size))) is not None:
            raise InvalidParameterError(
                f"batch_invariant=True cannot be had with kernel_backend={kernel_backend!r}: {reason}. Leave"
                " kernel_backend out to choose by device."
            )
        found, trainers = (OP.pick(kernel_backend, q, pool(size)).backend for size in (block_size, TRAINERS_BLOCK_SIZE))
        if found != trainers:
            raise InvalidParameterError(
                f"batch_invariant=True with block_size={block_size} would take the kernels of {found!r}, and a trainer"
                f" those of {trainers!r}, whose bits differ; use a block_size of 16, 32, 64 or 128."
            )


def _pool(kv_heads: int, head_dim: int, dtype: Any, block_size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, 2, kv_heads, block_size, head_dim), dtype)
