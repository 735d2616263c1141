"""KV write as a Mosaic GPU kernel (Hopper): new keys and values into their slots, in place.

    k, v [T, kv_heads, head_dim]  --TMA-->  shared memory  --one TMA store a token, K and V apart-->  pool[b, :, :, o]

A store is a box of kv_heads rows, head_dim wide, block_size * head_dim apart in the pool. CTAs are many and small, so
that their loads and stores overlap. The pool is a mutable reference inside the caller's jit: nothing of it is copied.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.common.arguments import holds_latents
from jpaged.pallas_kernels.write_kv.destination import Destination

_CTA_BYTES = 64 * 1024
_MAX_TOKENS = 16
_SPREAD = 128  # CTAs that few tokens are spread over, about one a multiprocessor


def unsupported(kv_pool: jax.Array) -> str | None:
    """Why the kernel cannot take this (already checked) pool; None if it can."""
    if holds_latents(kv_pool):
        return "it takes keys and values apart, not latents"
    _, _, kv_heads, _, head_dim = kv_pool.shape
    row_bytes = head_dim * kv_pool.dtype.itemsize
    if kv_pool.dtype.itemsize == 1:
        return f"dtype {kv_pool.dtype}: it has no kernel for 8 bits"
    if kv_pool.dtype.itemsize > 4:
        return f"dtype {kv_pool.dtype} is wider than 32 bits"
    if row_bytes % 16 or head_dim > 256 or kv_heads > 256:
        return (
            f"TMA moves rows of a multiple of 16 bytes, boxes of up to 256 by 256; got {kv_heads} heads of {head_dim}"
        )
    if 2 * kv_heads * row_bytes > _CTA_BYTES:
        return f"one token's keys and values take {2 * kv_heads * row_bytes} bytes, over {_CTA_BYTES}"
    return None


def tokens_a_cta(tokens: int, token_bytes: int) -> int:
    """The largest divisor of `tokens` that fits shared memory and leaves every multiprocessor some work."""
    limit = min(_MAX_TOKENS, max(1, tokens // _SPREAD), _CTA_BYTES // token_bytes)
    return max(n for n in range(1, limit + 1) if tokens % n == 0)


@partial(jax.jit, static_argnames="interpret")  # so that the layers of a model lower the kernel once between them
def write_kv(
    kv_pool: jax.Array, k: jax.Array, v: jax.Array, destination: Destination, *, interpret: Any = None
) -> jax.Array:
    """`write_kv` of the package, checked. interpret: a `plgpu.InterpretGPUParams` runs the kernel on a CPU."""
    num_blocks, _, kv_heads, block_size, head_dim = kv_pool.shape
    tokens = k.shape[0]
    count = tokens_a_cta(tokens, 2 * kv_heads * head_dim * kv_pool.dtype.itemsize)

    def body(pool_ref: Any, k_ref: Any, v_ref: Any, slots_ref: Any, k_s: Any, v_s: Any, full: Any) -> None:
        first = lax.axis_index("cta") * count
        plgpu.copy_gmem_to_smem(k_ref.at[pl.ds(first, count)], k_s, full)
        plgpu.copy_gmem_to_smem(v_ref.at[pl.ds(first, count)], v_s, full)
        slots = [slots_ref[first + i] for i in range(count)]
        plgpu.barrier_wait(full)
        for i, slot in enumerate(slots):
            inside = (slot >= 0) & (slot < num_blocks * block_size)
            block, offset = lax.div(slot, jnp.int32(block_size)), lax.rem(slot, jnp.int32(block_size))

            @pl.when(inside)
            def _store(i: int = i, block: jax.Array = block, offset: jax.Array = offset) -> None:
                plgpu.copy_smem_to_gmem(k_s.at[i], pool_ref.at[block, 0, :, offset])
                plgpu.copy_smem_to_gmem(v_s.at[i], pool_ref.at[block, 1, :, offset])

        plgpu.wait_smem_to_gmem(0)

    pool_ref = jax.new_ref(kv_pool)
    plgpu.kernel(
        body,
        out_type=(),
        scratch_types=[
            plgpu.SMEM((count, kv_heads, head_dim), kv_pool.dtype),
            plgpu.SMEM((count, kv_heads, head_dim), kv_pool.dtype),
            plgpu.Barrier(num_arrivals=2),
        ],
        grid=(tokens // count,),
        grid_names=("cta",),
        kernel_name="paged_write_kv",
        interpret=interpret,
    )(pool_ref, k, v, destination.slot_mapping)
    return pool_ref[...]
