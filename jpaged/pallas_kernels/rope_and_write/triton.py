"""From the projection's output to queries and a written pool in one Triton kernel.

    qkv [T, rows, head_dim]      rows: of each KV head its queries, its key, its value; a CTA takes some rows of a token
         q --norm--rotate--> q [T, kv_heads, group, head_dim]
         k --norm--rotate--> pool[block, 0, :, offset]
         v ----------------> pool[block, 1, :, offset]

A rotation pairs column i with column i + head_dim / 2, so the halves of the rows are arrays apart, laid out alike.
"""

from functools import partial

import jax
import triton
import triton.language as tl

from jpaged.pallas_kernels.common.numerics import as_bits, from_bits
from jpaged.pallas_kernels.common.triton_call import Launch, call
from jpaged.pallas_kernels.common.triton_fp8 import narrow
from jpaged.pallas_kernels.rope_and_write.projection import Projection
from jpaged.pallas_kernels.write_kv.destination import Destination

_CTA_NUMBERS = 2048  # 16 a thread, in float32


def unsupported(kv_pool: jax.Array, qkv: jax.Array) -> str | None:
    """Why the kernel cannot take these (already checked) arguments; None if it can."""
    if kv_pool.dtype.itemsize > 4:
        return f"dtype {kv_pool.dtype} is wider than 32 bits"
    if qkv.shape[3] % 2:
        return f"head_dim {qkv.shape[3]} is odd"
    return None


@partial(jax.jit, static_argnames="norm_eps")  # the layers of a model lower the kernel once
def rope_and_write(
    kv_pool: jax.Array, projection: Projection, destination: Destination, *, norm_eps: float
) -> tuple[jax.Array, jax.Array]:
    """`rope_and_write` of the package, checked."""
    (qkv, rotation, norms, _), (slot_mapping, kv_scales) = projection, destination
    num_blocks, _, kv_heads, block_size, head_dim = kv_pool.shape
    tokens, group = qkv.shape[0], qkv.shape[2] - 2
    width = triton.next_power_of_2(head_dim // 2)
    all_rows = kv_heads * (group + 2)
    rows = min(triton.next_power_of_2(all_rows), max(1, _CTA_NUMBERS // (2 * width)))
    constants = {
        "SLOTS": num_blocks * block_size,
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "BLOCK_SIZE": block_size,
        "HALF": head_dim // 2,
        "ROWS": rows,
        "WIDTH": width,
        "ROTATED": rotation is not None,
        "NORMED": norms is not None,
        "EPS": norm_eps,
        "SCALED": kv_scales is not None,
    }
    # Pointers that the kernel does not follow stand for what there is none of.
    cos, sin = (qkv, qkv) if rotation is None else rotation
    q_scale, k_scale = (qkv, qkv) if norms is None else norms
    q, pool = call(
        _rope_and_write,
        Launch((tokens, triton.cdiv(all_rows, rows))),
        qkv,
        slot_mapping,
        cos,
        sin,
        q_scale,
        k_scale,
        qkv if kv_scales is None else kv_scales,
        updated=[as_bits(kv_pool)],
        out=[jax.ShapeDtypeStruct((tokens, kv_heads * group, head_dim), qkv.dtype)],
        **constants,
    )
    return q, from_bits(pool, kv_pool.dtype)


@triton.jit
def _rope_and_write(
    qkv,
    slots,
    cos,
    sin,
    q_scale,
    k_scale,
    kv_scales,
    pool,
    q_out,
    SLOTS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,  # of head_dim
    ROWS: tl.constexpr,  # of a CTA, a power of two
    WIDTH: tl.constexpr,  # HALF, rounded up to a power of two
    ROTATED: tl.constexpr,
    NORMED: tl.constexpr,
    EPS: tl.constexpr,
    SCALED: tl.constexpr,
):
    """qkv: [T, KV_HEADS, GROUP + 2, 2 * HALF]. slots: int32 [T]. cos, sin: float32 [T, HALF]. q_scale, k_scale: [2 *
    HALF]. kv_scales: float32 [2]. pool: [blocks, 2, KV_HEADS, BLOCK_SIZE, 2 * HALF]. q_out: [T, KV_HEADS, GROUP, 2 *
    HALF]."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    head, kind = row // (GROUP + 2), row % (GROUP + 2)
    exists = (row < KV_HEADS * (GROUP + 2))[:, None] & (column < HALF)[None, :]
    slot = tl.load(slots + token)
    source = qkv + (token * (KV_HEADS * (GROUP + 2)) + row)[:, None] * (2 * HALF) + column[None, :]
    dtype = qkv.dtype.element_ty
    first = tl.load(source, mask=exists, other=0.0)
    second = tl.load(source + HALF, mask=exists, other=0.0)

    is_value = (kind == GROUP + 1)[:, None]
    x, y = first.to(tl.float32), second.to(tl.float32)
    if NORMED:
        mean = tl.sum(x * x + y * y, axis=1) / (2 * HALF)
        by = (1.0 / tl.sqrt(mean + EPS))[:, None]
        is_key = (kind == GROUP)[:, None]
        inside = (column < HALF)[None, :]
        # Rounded to the scale's type before the scale, as `reference.split_qkv` does.
        kept = q_scale.dtype.element_ty
        x = (x * by).to(kept).to(tl.float32)
        y = (y * by).to(kept).to(tl.float32)
        x = _scaled(x, q_scale + column[None, :], k_scale + column[None, :], inside, is_key, dtype)
        y = _scaled(y, q_scale + HALF + column[None, :], k_scale + HALF + column[None, :], inside, is_key, dtype)
    if ROTATED:
        at = token * HALF + column
        c = tl.load(cos + at, mask=column < HALF, other=0.0)[None, :]
        s = tl.load(sin + at, mask=column < HALF, other=0.0)[None, :]
        x, y = x * c - y * s, y * c + x * s
    first, second = tl.where(is_value, first, x.to(dtype)), tl.where(is_value, second, y.to(dtype))

    is_query = (kind < GROUP)[:, None]
    target = q_out + ((token * KV_HEADS + head) * GROUP + kind)[:, None] * (2 * HALF) + column[None, :]
    tl.store(target, first, mask=exists & is_query)
    tl.store(target + HALF, second, mask=exists & is_query)
    if (slot >= 0) & (slot < SLOTS):
        is_kept = (kind >= GROUP)[:, None]
        tile = ((slot // BLOCK_SIZE).to(tl.int64) * 2 + (kind - GROUP)) * KV_HEADS + head
        kept_at = pool + (tile * BLOCK_SIZE + slot % BLOCK_SIZE)[:, None] * (2 * HALF) + column[None, :]
        if pool.dtype.element_ty == tl.uint8:  # bits of e4m3, which only keys and values become
            wide, also_wide = first.to(tl.float32), second.to(tl.float32)
            if SCALED:
                scale = tl.where(is_value, tl.load(kv_scales + 1), tl.load(kv_scales))
                wide, also_wide = wide / scale, also_wide / scale
            tl.store(kept_at, narrow(wide), mask=exists & is_kept)
            tl.store(kept_at + HALF, narrow(also_wide), mask=exists & is_kept)
        else:
            tl.store(kept_at, first, mask=exists & is_kept)
            tl.store(kept_at + HALF, second, mask=exists & is_kept)


@triton.jit
def _scaled(x, q_scale, k_scale, inside, is_key, dtype: tl.constexpr):
    """x [rows, columns] times its kind's scale, rounded; in float32."""
    of_queries = tl.load(q_scale, mask=inside, other=0.0).to(tl.float32)
    of_keys = tl.load(k_scale, mask=inside, other=0.0).to(tl.float32)
    return (x * tl.where(is_key, of_keys, of_queries)).to(dtype).to(tl.float32)
