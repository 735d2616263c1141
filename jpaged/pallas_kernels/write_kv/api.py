"""New keys and values into the slots of the pool: the contract."""

import jax

from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.registry import Op
from jpaged.pallas_kernels.write_kv.destination import Destination

OP = Op("write_kv", __package__, also={"triton": check.triton_on_hopper})


def write_kv(
    kv_pool: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    slot_mapping: jax.Array,
    *,
    kv_scales: jax.Array | None = None,
    backend: str | None = None,
) -> jax.Array:
    """Puts new keys and values into their slots; in place when the caller's jit donates the pool.

    Args:
        kv_pool: [num_blocks, 2, kv_heads, block_size, head_dim]; or of latents [num_blocks, 1, ...], whose keys are all
            there is.
        k, v: [T, kv_heads, head_dim], of the pool's dtype; of any float type for a pool in e4m3, rounded to it. What is
            beyond 448 becomes 448. v is None for a pool of latents.
        slot_mapping: int32 [T]; block * block_size + offset. No slot twice, save those of block 0 (the null block),
            which stand for padding. num_blocks * block_size must be below 2**31.
        kv_scales: float32 [2], what keys and what values are divided by before they are rounded to e4m3. Attention
            takes such a pool as it stands: who has scales multiplies queries by the one and outputs by the other.
        backend: None (by device), "hopper", "triton" or "xla".
    Returns:
        The pool.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_pool("kv_pool", kv_pool, latents=True)
    _, _, kv_heads, _, head_dim = kv_pool.shape
    if (v is None) != check.holds_latents(kv_pool):
        raise ValueError(f"v must be None for a pool of latents and only there, got {type(v).__name__}")
    for name, x in (("k", k),) if v is None else (("k", k), ("v", v)):
        check.check_rank(name, x, "T, kv_heads, head_dim")
        if not check.goes_with_pool(x.dtype, kv_pool):
            raise ValueError(f"{name} must have the pool's dtype {kv_pool.dtype}, got {x.dtype}")
        if x.shape != (k.shape[0], kv_heads, head_dim):
            raise ValueError(f"{name} must be [T, {kv_heads}, {head_dim}] like the pool, got shape {tuple(x.shape)}")
    check.check_int32("slot_mapping", slot_mapping, "T", (k.shape[0],))
    check.check_slots("kv_pool", kv_pool)
    check.check_kv_scales(kv_scales, kv_pool)
    kernel = OP.pick(backend, kv_pool).run
    return kernel(kv_pool, k, v, Destination(slot_mapping, kv_scales)) if k.shape[0] else kv_pool
