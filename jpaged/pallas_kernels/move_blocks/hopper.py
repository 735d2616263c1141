"""Block copy, gather and scatter as one Mosaic GPU kernel (Hopper): whole blocks, many at a time, of many layers.

    grid (piece of a block, layer, pair)      TMA in, TMA out, up to 32 KiB a CTA; several CTAs a multiprocessor
                                              keep loads and stores of different pieces in flight together

Pairs are CUDA's first axis, which Pallas names last: the others have at most 65,535 CTAs, and a few pages of the
virtual layout may be more blocks than that.

A launch takes up to `_LAYERS` layers' pools as separate references. Pools are written in place.
"""

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_PIECE_BYTES = 32 * 1024
_LAYERS = 8


def unsupported(kv_pool: jax.Array) -> str | None:
    """Why the kernel cannot take this (already checked) pool; None if it can."""
    _, _, _, block_size, head_dim = kv_pool.shape
    row_bytes = head_dim * kv_pool.dtype.itemsize
    if kv_pool.dtype.itemsize == 1:
        return f"dtype {kv_pool.dtype}: it has no kernel for 8 bits"
    if kv_pool.dtype.itemsize > 4:
        return f"dtype {kv_pool.dtype} is wider than 32 bits"
    if row_bytes % 16 or head_dim > 256 or block_size > 256 or block_size * row_bytes > 4 * _PIECE_BYTES:
        return f"TMA moves boxes of up to 256 rows of up to 256, in 16 bytes; got {block_size} rows of {head_dim}"
    return None


def _move(
    pools: list[Any],
    source_ids: jax.Array | None,
    target_ids: jax.Array | None,
    staging: Any,
    first_layer: int,
    interpret: Any,
) -> None:
    """Copies block `source_ids[i]` of every pool to block `target_ids[i]` of the same pool, for every i.

    Without source_ids the blocks come from `staging`, without target_ids they go there: [layers * pairs, tiles,
    block_size, head_dim], of which the pools are the layers from `first_layer` on. What is written is a reference.
    pools: [blocks, tiles, block_size, head_dim] each.
    """
    _, tiles, block_size, head_dim = pools[0].shape
    dtype = pools[0].dtype
    ids = [x for x in (source_ids, target_ids) if x is not None]
    pairs, layers = ids[0].shape[0], len(pools)
    most = max(1, _PIECE_BYTES // (block_size * head_dim * dtype.itemsize))
    piece = max(p for p in range(1, min(tiles, most, 256) + 1) if tiles % p == 0)
    staged = [] if staging is None else [staging]

    def body(*refs: Any) -> None:
        pool_refs, staged_refs, id_refs = (
            refs[:layers],
            refs[layers : layers + len(staged)],
            refs[layers + len(staged) : -2],
        )
        buffer, full = refs[-2:]
        layer, pair = lax.axis_index("layer"), lax.axis_index("pair")
        at = pl.ds(lax.axis_index("piece") * piece, piece)
        for i in range(layers):

            @pl.when(layer == i)
            def _copy(i: int = i) -> None:
                in_staging = (first_layer + i) * pairs + pair
                source = target = None
                if source_ids is None:
                    source, target = staged_refs[0].at[in_staging, at], pool_refs[i].at[id_refs[0][pair], at]
                elif target_ids is None:
                    source, target = pool_refs[i].at[id_refs[0][pair], at], staged_refs[0].at[in_staging, at]
                else:
                    source, target = (pool_refs[i].at[id_ref[pair], at] for id_ref in id_refs)
                plgpu.copy_gmem_to_smem(source, buffer, full)
                plgpu.barrier_wait(full)
                plgpu.copy_smem_to_gmem(buffer, target)
                plgpu.wait_smem_to_gmem(0)

    plgpu.kernel(
        body,
        out_type=(),
        scratch_types=[plgpu.SMEM((piece, block_size, head_dim), dtype), plgpu.Barrier()],
        grid=(tiles // piece, layers, pairs),
        grid_names=("piece", "layer", "pair"),
        kernel_name="paged_move_blocks",
        interpret=interpret,
    )(*pools, *staged, *ids)


def _tiled(x: jax.Array) -> jax.Array:
    """[..., 2, kv_heads, block_size, head_dim] -> [blocks, 2 * kv_heads, block_size, head_dim]."""
    return x.reshape(-1, x.shape[-4] * x.shape[-3], *x.shape[-2:])


def copy_blocks(
    kv_pools: tuple[jax.Array, ...], src: jax.Array, dst: jax.Array, *, interpret: Any = None
) -> tuple[jax.Array, ...]:
    """`copy_blocks` of the package, checked. interpret: a `plgpu.InterpretGPUParams` runs the kernel on a CPU."""
    refs = [jax.new_ref(_tiled(pool)) for pool in kv_pools]
    for first in range(0, len(refs), _LAYERS):
        _move(refs[first : first + _LAYERS], src, dst, None, first, interpret)
    return tuple(ref[...].reshape(pool.shape) for ref, pool in zip(refs, kv_pools, strict=True))


def gather_blocks(kv_pools: tuple[jax.Array, ...], block_ids: jax.Array, *, interpret: Any = None) -> jax.Array:
    """`gather_blocks` of the package, checked."""
    pools = [_tiled(pool) for pool in kv_pools]
    shape = (len(pools), block_ids.shape[0], *kv_pools[0].shape[1:])
    staging = jax.new_ref(lax.empty((shape[0] * shape[1], *pools[0].shape[1:]), pools[0].dtype))
    for first in range(0, len(pools), _LAYERS):
        _move(pools[first : first + _LAYERS], block_ids, None, staging, first, interpret)
    return staging[...].reshape(shape)


def scatter_blocks(
    kv_pools: tuple[jax.Array, ...], staging: jax.Array, block_ids: jax.Array, *, interpret: Any = None
) -> tuple[jax.Array, ...]:
    """`scatter_blocks` of the package, checked."""
    refs = [jax.new_ref(_tiled(pool)) for pool in kv_pools]
    for first in range(0, len(refs), _LAYERS):
        _move(refs[first : first + _LAYERS], None, block_ids, _tiled(staging), first, interpret)
    return tuple(ref[...].reshape(pool.shape) for ref, pool in zip(refs, kv_pools, strict=True))
