"""Block copy, gather and scatter in Triton: whole blocks, many at a time, of one layer a launch.

grid (piece of a block + pieces * pair)      from global memory to registers and back
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax

from jpaged.pallas_kernels.common.numerics import as_bits, from_bits
from jpaged.pallas_kernels.common.triton_call import Launch, call

_PIECE = 4096  # numbers; 32 a thread


def unsupported(kv_pool: jax.Array) -> str | None:
    """Why the kernels cannot take this (already checked) pool; None if they can."""
    if kv_pool.dtype.itemsize > 4:
        return f"dtype {kv_pool.dtype} is wider than 32 bits"
    return None


@jax.jit
def copy_blocks(kv_pools: tuple[jax.Array, ...], src: jax.Array, dst: jax.Array) -> tuple[jax.Array, ...]:
    """`copy_blocks` of the package, checked."""
    launch, sizes = _plan(kv_pools[0], src)
    copied = (call(_copy_blocks, launch, src, dst, updated=[as_bits(pool)], **sizes)[0] for pool in kv_pools)
    return tuple(from_bits(pool, kv_pools[0].dtype) for pool in copied)


@jax.jit
def gather_blocks(kv_pools: tuple[jax.Array, ...], block_ids: jax.Array) -> jax.Array:
    """`gather_blocks` of the package, checked."""
    launch, sizes = _plan(kv_pools[0], block_ids)
    staging = as_bits(lax.empty((len(kv_pools), block_ids.shape[0], *kv_pools[0].shape[1:]), kv_pools[0].dtype))
    for pool, places in zip(kv_pools, _places(kv_pools, block_ids), strict=True):
        (staging,) = call(_transfer_blocks, launch, as_bits(pool), block_ids, places, updated=[staging], **sizes)
    return from_bits(staging, kv_pools[0].dtype)


@jax.jit
def scatter_blocks(kv_pools: tuple[jax.Array, ...], staging: jax.Array, block_ids: jax.Array) -> tuple[jax.Array, ...]:
    """`scatter_blocks` of the package, checked."""
    launch, sizes = _plan(kv_pools[0], block_ids)
    kept = as_bits(staging)
    scattered = (
        call(_transfer_blocks, launch, kept, places, block_ids, updated=[as_bits(pool)], **sizes)[0]
        for pool, places in zip(kv_pools, _places(kv_pools, block_ids), strict=True)
    )
    return tuple(from_bits(pool, staging.dtype) for pool in scattered)


def _plan(pool: jax.Array, ids: jax.Array) -> tuple[Launch, dict[str, Any]]:
    """The launch for one layer, and the kernels' constants."""
    size = pool[0].size
    pieces = triton.cdiv(size, _PIECE)
    sizes = {"SIZE": size, "PIECE": _PIECE, "PIECES": pieces}
    return Launch((pieces * ids.shape[0],)), sizes  # only a grid's first axis may have more than 65,535 CTAs


def _places(pools: tuple[jax.Array, ...], ids: jax.Array) -> jax.Array:
    """Where each layer's blocks are among those of the staging array: int32 [layers, n]."""
    return jnp.arange(len(pools) * ids.shape[0], dtype=jnp.int32).reshape(len(pools), -1)


@triton.jit
def _copy_blocks(src, dst, pool, SIZE: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr):
    """Within pool [blocks, SIZE], block src[i] to dst[i]: int32 [pairs]."""
    pair, piece = tl.program_id(0) // PIECES, tl.program_id(0) % PIECES
    from_block, to_block = tl.load(src + pair).to(tl.int64), tl.load(dst + pair).to(tl.int64)
    _move_piece(pool + from_block * SIZE, pool + to_block * SIZE, piece, SIZE, PIECE)


@triton.jit
def _transfer_blocks(source, src, dst, target, SIZE: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr):
    """Block src[i] of source [blocks, SIZE] to dst[i] of target."""
    pair, piece = tl.program_id(0) // PIECES, tl.program_id(0) % PIECES
    from_block, to_block = tl.load(src + pair).to(tl.int64), tl.load(dst + pair).to(tl.int64)
    _move_piece(source + from_block * SIZE, target + to_block * SIZE, piece, SIZE, PIECE)


@triton.jit
def _move_piece(source, target, piece, SIZE: tl.constexpr, PIECE: tl.constexpr):
    """A part of a block."""
    at = piece * PIECE + tl.arange(0, PIECE)
    tl.store(target + at, tl.load(source + at, mask=at < SIZE), mask=at < SIZE)
