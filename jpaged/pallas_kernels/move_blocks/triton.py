"""Block copy, gather and scatter as one Triton kernel: whole blocks, many at a time, of one layer a launch.

grid (piece of a block, pair)      from global memory to registers and back
"""

from typing import Any

import jax
import triton
import triton.language as tl
from jax import lax

from jpaged.pallas_kernels.common.triton_call import Launch, call

_PIECE = 4096  # numbers; 32 a thread


def unsupported(kv_pool: jax.Array) -> str | None:
    """Why the kernel cannot take this (already checked) pool; None if it can."""
    if kv_pool.dtype.itemsize > 4:
        return f"dtype {kv_pool.dtype} is wider than 32 bits"
    return None


@jax.jit
def copy_blocks(kv_pools: tuple[jax.Array, ...], src: jax.Array, dst: jax.Array) -> tuple[jax.Array, ...]:
    """`copy_blocks` of the package, checked."""
    launch, constants = _plan(kv_pools[0], src)
    return tuple(call(_copy_blocks, launch, src, dst, updated=[pool], **constants)[0] for pool in kv_pools)


@jax.jit
def gather_blocks(kv_pools: tuple[jax.Array, ...], block_ids: jax.Array) -> jax.Array:
    """`gather_blocks` of the package, checked."""
    launch, constants = _plan(kv_pools[0], block_ids)
    staging = lax.empty((len(kv_pools), block_ids.shape[0], *kv_pools[0].shape[1:]), kv_pools[0].dtype)
    for layer, pool in enumerate(kv_pools):
        (staging,) = call(_gather_blocks, launch, pool, block_ids, updated=[staging], **constants, LAYER=layer)
    return staging


@jax.jit
def scatter_blocks(kv_pools: tuple[jax.Array, ...], staging: jax.Array, block_ids: jax.Array) -> tuple[jax.Array, ...]:
    """`scatter_blocks` of the package, checked."""
    launch, constants = _plan(kv_pools[0], block_ids)
    return tuple(
        call(_scatter_blocks, launch, staging, block_ids, updated=[pool], **constants, LAYER=layer)[0]
        for layer, pool in enumerate(kv_pools)
    )


def _plan(pool: jax.Array, ids: jax.Array) -> tuple[Launch, dict[str, Any]]:
    """The launch for one layer, and the constants of all three kernels."""
    size = pool[0].size
    return Launch((triton.cdiv(size, _PIECE), ids.shape[0])), {"SIZE": size, "PIECE": _PIECE}


@triton.jit
def _copy_blocks(src, dst, pool, SIZE: tl.constexpr, PIECE: tl.constexpr):
    """src, dst: int32 [pairs]. pool: [blocks, SIZE]."""
    pair = tl.program_id(1)
    _move(pool, tl.load(src + pair), pool, tl.load(dst + pair), SIZE, PIECE)


@triton.jit
def _gather_blocks(pool, ids, staging, SIZE: tl.constexpr, PIECE: tl.constexpr, LAYER: tl.constexpr):
    """pool: [blocks, SIZE]. ids: int32 [pairs]. staging: [layers, pairs, SIZE]."""
    pair = tl.program_id(1)
    _move(pool, tl.load(ids + pair), staging, LAYER * tl.num_programs(1) + pair, SIZE, PIECE)


@triton.jit
def _scatter_blocks(staging, ids, pool, SIZE: tl.constexpr, PIECE: tl.constexpr, LAYER: tl.constexpr):
    """As `_gather_blocks`, the other way."""
    pair = tl.program_id(1)
    _move(staging, LAYER * tl.num_programs(1) + pair, pool, tl.load(ids + pair), SIZE, PIECE)


@triton.jit
def _move(source, source_block, target, target_block, SIZE: tl.constexpr, PIECE: tl.constexpr):
    """A piece of one block to that of another."""
    at = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    exists = at < SIZE
    numbers = tl.load(source + source_block.to(tl.int64) * SIZE + at, mask=exists)
    tl.store(target + target_block.to(tl.int64) * SIZE + at, numbers, mask=exists)
