"""Whole blocks of every layer's pool: copied, gathered, scattered. The contracts."""

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.registry import Op

_ALSO = {"triton": check.triton_on_hopper}
COPY, GATHER, SCATTER = (Op(f"{what}_blocks", __package__, also=_ALSO) for what in ("copy", "gather", "scatter"))


def copy_blocks(
    kv_pools: tuple[jax.Array, ...], src: jax.Array, dst: jax.Array, *, backend: str | None = None
) -> tuple[jax.Array, ...]:
    """Copies whole blocks within every layer's pool: block dst[i] becomes block src[i] (copy-on-write).

    Args:
        kv_pools: one pool a layer, each [num_blocks, 2, kv_heads, block_size, head_dim].
        src, dst: int32 [n]. No block twice in dst, and none of src in dst, save (0, 0) pairs, which are padding.
        backend: None (by device), "hopper", "triton" or "xla".
    Returns:
        The pools, in place when the caller's jit donates them.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_pools("kv_pools", kv_pools)
    check.check_int32("src", src, "n", (None,))
    check.check_int32("dst", dst, "n", src.shape)
    kernel = COPY.pick(backend, kv_pools[0]).run
    return kernel(tuple(kv_pools), src, dst) if src.shape[0] else tuple(kv_pools)


def gather_blocks(kv_pools: tuple[jax.Array, ...], block_ids: jax.Array, *, backend: str | None = None) -> jax.Array:
    """Collects blocks of every layer in one contiguous array, to swap them out.

    Args:
        kv_pools, backend: as in `copy_blocks`.
        block_ids: int32 [n]; 0 for padding.
    Returns:
        [layers, n, 2, kv_heads, block_size, head_dim].
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_pools("kv_pools", kv_pools)
    check.check_int32("block_ids", block_ids, "n", (None,))
    kernel = GATHER.pick(backend, kv_pools[0]).run
    if not block_ids.shape[0]:
        return jnp.zeros((len(kv_pools), 0, *kv_pools[0].shape[1:]), kv_pools[0].dtype)
    return kernel(tuple(kv_pools), block_ids)


def scatter_blocks(
    kv_pools: tuple[jax.Array, ...], staging: jax.Array, block_ids: jax.Array, *, backend: str | None = None
) -> tuple[jax.Array, ...]:
    """Puts blocks that `gather_blocks` collected into (other) blocks of every layer's pool.

    Args:
        kv_pools, backend: as in `copy_blocks`.
        staging: [layers, n, 2, kv_heads, block_size, head_dim], of the pools' dtype.
        block_ids: int32 [n]; none twice, save 0, which is padding.
    Returns:
        The pools, as `copy_blocks` does.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_pools("kv_pools", kv_pools)
    check.check_int32("block_ids", block_ids, "n", (None,))
    want = (len(kv_pools), block_ids.shape[0], *kv_pools[0].shape[1:])
    check.check_rank("staging", staging, "layers, n, 2, kv_heads, block_size, head_dim")
    if staging.shape != want or staging.dtype != kv_pools[0].dtype:
        raise ValueError(f"staging must be {kv_pools[0].dtype}{want}, got {staging.dtype}{tuple(staging.shape)}")
    kernel = SCATTER.pick(backend, kv_pools[0]).run
    return kernel(tuple(kv_pools), staging, block_ids) if block_ids.shape[0] else tuple(kv_pools)
