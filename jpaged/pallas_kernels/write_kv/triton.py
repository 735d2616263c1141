"""KV write as a Triton kernel: new keys and values into their slots, in place.

    k, v [T, kv_heads, head_dim]  ->  pool[block, 0 and 1, :, offset]      a CTA a token, or a part of its heads

Few bytes and nothing to share between threads: from global memory to registers and back.
"""

import jax
import triton
import triton.language as tl

from jpaged.pallas_kernels.common.numerics import as_bits, from_bits
from jpaged.pallas_kernels.common.triton_call import Launch, call
from jpaged.pallas_kernels.common.triton_fp8 import narrow
from jpaged.pallas_kernels.write_kv.destination import Destination

_CTA_NUMBERS = 4096  # of keys, and as many of values; 32 each a thread


def unsupported(kv_pool: jax.Array) -> str | None:
    """Why the kernel cannot take this (already checked) pool; None if it can."""
    if kv_pool.dtype.itemsize > 4:
        return f"dtype {kv_pool.dtype} is wider than 32 bits"
    return None


@jax.jit  # so that the layers of a model lower the kernel once between them
def write_kv(kv_pool: jax.Array, k: jax.Array, v: jax.Array | None, destination: Destination) -> jax.Array:
    """`write_kv` of the package, checked."""
    slot_mapping, kv_scales = destination
    num_blocks, _, kv_heads, block_size, head_dim = kv_pool.shape
    width = triton.next_power_of_2(head_dim)
    heads = min(triton.next_power_of_2(kv_heads), max(1, _CTA_NUMBERS // width))
    launch = Launch((k.shape[0], triton.cdiv(kv_heads, heads)))
    constants = {
        "SLOTS": num_blocks * block_size,
        "KV_HEADS": kv_heads,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "HEADS": heads,
        "WIDTH": width,
        "LATENT": v is None,
        "SCALED": kv_scales is not None,
    }
    scales = slot_mapping if kv_scales is None else kv_scales  # which nobody reads then
    values = k if v is None else v
    (pool,) = call(_write_kv, launch, k, values, slot_mapping, scales, updated=[as_bits(kv_pool)], **constants)
    return from_bits(pool, kv_pool.dtype)


@triton.jit
def _write_kv(
    k,
    v,
    slots,
    scales,
    pool,
    SLOTS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,  # of a CTA, a power of two
    WIDTH: tl.constexpr,  # head_dim, rounded up to a power of two
    LATENT: tl.constexpr,  # there are no values
    SCALED: tl.constexpr,  # whether there are scales
):
    """k, v: [T, KV_HEADS, HEAD_DIM]. slots: int32 [T]. scales: float32 [2]. pool: [blocks, 2, KV_HEADS,
    BLOCK_SIZE, HEAD_DIM], or of latents 1 in place of 2."""
    ARRAYS: tl.constexpr = 1 if LATENT else 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    exists = (head < KV_HEADS) & (column < HEAD_DIM)
    slot = tl.load(slots + token)
    source = token * (KV_HEADS * HEAD_DIM) + head * HEAD_DIM + column
    key = tl.load(k + source, mask=exists)
    value = tl.load(v + source, mask=exists)
    if pool.dtype.element_ty == tl.uint8:  # bits of e4m3
        wide_key, wide_value = key.to(tl.float32), value.to(tl.float32)
        if SCALED:
            wide_key, wide_value = wide_key / tl.load(scales), wide_value / tl.load(scales + 1)
        key, value = narrow(wide_key), narrow(wide_value)
    if (slot >= 0) & (slot < SLOTS):
        block = (slot // BLOCK_SIZE).to(tl.int64)
        row = (block * (ARRAYS * KV_HEADS) + head) * BLOCK_SIZE + slot % BLOCK_SIZE
        target = pool + row * HEAD_DIM + column
        tl.store(target, key, mask=exists)
        if not LATENT:
            tl.store(target + KV_HEADS * BLOCK_SIZE * HEAD_DIM, value, mask=exists)
