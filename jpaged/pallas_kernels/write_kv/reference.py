"""KV write in plain XLA."""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from jpaged.pallas_kernels.common.numerics import FP8, to_fp8
from jpaged.pallas_kernels.common.put_rows import put_rows
from jpaged.pallas_kernels.write_kv.destination import Destination


@jax.jit
def write_kv(kv_pool: jax.Array, k: jax.Array, v: jax.Array | None, destination: Destination) -> jax.Array:
    """`write_kv` of the package, checked.

    A scatter of whole head_dim rows into the pool seen as a matrix: with the block and the offset as two indices the
    compiler transposes the pool first, a copy of all of it. With one KV head it would copy the result, too, into a
    layout that is the same but for that axis, unless told which.
    """
    slot_mapping, kv_scales = destination
    num_blocks, arrays, kv_heads, block_size, head_dim = kv_pool.shape
    if kv_pool.dtype == FP8:
        one, other = (None, None) if kv_scales is None else kv_scales
        k, v = to_fp8(k, one), None if v is None else to_fp8(v, other)
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    tile = jnp.arange(arrays * kv_heads, dtype=jnp.int32)
    rows = (block[:, None] * (arrays * kv_heads) + tile) * block_size + offset[:, None]
    rows = jnp.where((slot_mapping >= 0)[:, None], rows, num_blocks * arrays * kv_heads * block_size)
    kv = (k if v is None else jnp.stack([k, v], axis=1)).reshape(-1, head_dim)
    written = put_rows(kv_pool.reshape(-1, head_dim), rows.reshape(-1), kv)
    return with_layout_constraint(written.reshape(kv_pool.shape), Layout(major_to_minor=(0, 1, 2, 3, 4)))
