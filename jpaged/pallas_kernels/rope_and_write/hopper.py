"""From the projection's output to queries and a written pool in one Mosaic GPU kernel (Hopper).

    qkv [T, kv_heads, group + 2, head_dim]               a CTA, one warpgroup, takes a token, or some of its KV heads
         q --norm--rotate--> q [T, kv_heads, group, head_dim]
         k --norm--rotate--> pool[block, 0, :, offset]
         v ----------------> pool[block, 1, :, offset]

Few bytes and nothing to share between threads: operands go from global memory to registers and back, all loads of a
token before its first store. A rotation pairs column i with column i + head_dim / 2, so the halves of the heads are
arrays apart, laid out alike. The pool is a mutable reference inside the caller's jit: nothing of it is copied.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.common import hopper_interpreted, hopper_primitives
from jpaged.pallas_kernels.rope_and_write.hopper_layout import thread_layout
from jpaged.pallas_kernels.rope_and_write.projection import Projection
from jpaged.pallas_kernels.write_kv.destination import Destination

_VECTOR = 4  # columns a load; 8 would be 32 bytes of the float32 tables, twice what a load can have
_CTA_NUMBERS = 6144  # of heads, at most, unless one KV head's group has more: 48 registers of a thread


def unsupported(kv_pool: jax.Array, qkv: jax.Array) -> str | None:
    """Why the kernel cannot take these (already checked) arguments; None if it can."""
    _, _, slots, head_dim = qkv.shape
    if kv_pool.dtype.itemsize == 1:
        return f"dtype {kv_pool.dtype}: it has no kernel for 8 bits"
    if kv_pool.dtype.itemsize > 4:
        return f"dtype {kv_pool.dtype} is wider than 32 bits"
    if head_dim % 16:
        return f"head_dim {head_dim} is not a multiple of 16"
    if slots * head_dim > 2 * _CTA_NUMBERS:
        return f"the {slots} heads of {head_dim} that one KV head has in qkv are more than {2 * _CTA_NUMBERS} numbers"
    return None


@partial(jax.jit, static_argnames=("norm_eps", "interpret"))  # the layers of a model lower the kernel once
def rope_and_write(
    kv_pool: jax.Array, projection: Projection, destination: Destination, *, norm_eps: float, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """`rope_and_write` of the package, checked. interpret: a `plgpu.InterpretGPUParams` runs the kernel on a CPU."""
    qkv, rotation, norms, scales = projection
    gpu = hopper_primitives if interpret is None else hopper_interpreted
    num_blocks, _, kv_heads, block_size, head_dim = kv_pool.shape
    tokens, group, dtype = destination.slot_mapping.size, qkv.shape[2] - 2, kv_pool.dtype
    most = max(1, _CTA_NUMBERS // ((group + 2) * head_dim))
    heads = max(n for n in range(1, min(kv_heads, most) + 1) if kv_heads % n == 0)
    half = head_dim // 2
    halves = (pl.ds(0, half), pl.ds(half, half))
    shapes: list[tuple[int, ...]] = [(heads, group, half), (heads, half)]  # half of a CTA's queries, keys or values
    layout_of = {shape: thread_layout(shape, _VECTOR) for shape in shapes}

    def body(
        pool_ref: Any, qkv_ref: Any, slots_ref: Any, rotation_ref: Any, norms_ref: Any, scales_ref: Any, q_ref: Any
    ) -> None:
        gpu.await_kernel_before()
        token = lax.axis_index("token")
        slot = slots_ref[token]

        def read(ref: Any, shape: tuple[int, ...]) -> list[jax.Array]:
            """Both halves of its heads, of one kind."""
            return [plgpu.load(ref.at[..., columns], layout=layout_of[shape], optimized=False) for columns in halves]

        def read_heads(which: Any, shape: tuple[int, ...]) -> list[jax.Array]:
            """Of the projection, with the scales that it may lack, rounded as they would be without this kernel."""
            found = read(qkv_ref.at[token, own, which], shape)
            if scales_ref is None:
                return found
            of_row, of_outputs = scales_ref[0][token, 0], read(scales_ref[1].at[own, which], shape)
            scaled = [x.astype(jnp.float32) * of_row * by for x, by in zip(found, of_outputs, strict=True)]
            return [x.astype(dtype) for x in scaled]

        def along_columns(ref: Any, shape: tuple[int, ...], columns: Any) -> jax.Array:
            """One number a column, for all heads."""
            layout, last = layout_of[shape], len(shape) - 1
            row = plgpu.load(ref.at[columns], layout=layout.reduce(tuple(range(last))), optimized=False)
            return plgpu.layout_cast(lax.broadcast_in_dim(row, shape, (last,)), layout).astype(jnp.float32)

        def prepare(x: list[jax.Array], which: int) -> list[jax.Array]:
            """Norm and rotation in float32, rounded where `reference.split_qkv` rounds."""
            shape = x[0].shape
            layout, last = layout_of[shape], len(shape) - 1
            wide = [part.astype(jnp.float32) for part in x]
            if norms_ref is not None:
                squares = wide[0] * wide[0] + wide[1] * wide[1]
                mean = plgpu.layout_cast(squares.sum(axis=last) * (1.0 / head_dim), layout.reduce(last))
                by = lax.rsqrt(mean + norm_eps)
                by = plgpu.layout_cast(lax.broadcast_in_dim(by, shape, tuple(range(last))), layout)
                normed = [(x * by).astype(norms_ref[which].dtype).astype(jnp.float32) for x in wide]
                scales = [along_columns(norms_ref[which], shape, columns) for columns in halves]
                wide = [(x * s).astype(dtype).astype(jnp.float32) for x, s in zip(normed, scales, strict=True)]
            if rotation_ref is not None:
                cos, sin = (along_columns(ref.at[token], shape, pl.ds(0, half)) for ref in rotation_ref)
                first, second = wide
                wide = [first * cos - second * sin, second * cos + first * sin]
            return [x.astype(dtype) for x in wide]

        own = pl.ds(lax.axis_index("part") * heads, heads)
        q = read_heads(pl.ds(0, group), shapes[0])
        k, v = (read_heads(group + i, shapes[1]) for i in range(2))
        if norms_ref is not None or rotation_ref is not None:
            q, k = prepare(q, 0), prepare(k, 1)
        for columns, x in zip(halves, q, strict=True):
            q_ref.at[token, own, :, columns][...] = x

        @pl.when((slot >= 0) & (slot < num_blocks * block_size))
        def _write() -> None:
            block, offset = lax.div(slot, jnp.int32(block_size)), lax.rem(slot, jnp.int32(block_size))
            for i, kv in enumerate((k, v)):
                for columns, x in zip(halves, kv, strict=True):
                    pool_ref.at[block, i, own, offset, columns][...] = x

    pool_ref = jax.new_ref(kv_pool)
    q = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, kv_heads, group, head_dim), dtype),
        grid=(kv_heads // heads, tokens),
        grid_names=("part", "token"),
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="rope_and_write",
        interpret=interpret,
    )(pool_ref, qkv, destination.slot_mapping, rotation, norms, scales)
    return q.reshape(tokens, kv_heads * group, head_dim), pool_ref[...]
