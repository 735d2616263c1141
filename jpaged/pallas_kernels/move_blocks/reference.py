"""Block copy, gather and scatter in plain XLA."""

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common.numerics import as_bits, from_bits
from jpaged.pallas_kernels.common.put_rows import put_rows


@jax.jit
def copy_blocks(kv_pools: tuple[jax.Array, ...], src: jax.Array, dst: jax.Array) -> tuple[jax.Array, ...]:
    """`copy_blocks` of the package, checked."""
    return tuple(put_rows(pool, dst, _blocks(pool, src)) for pool in kv_pools)


@jax.jit
def gather_blocks(kv_pools: tuple[jax.Array, ...], block_ids: jax.Array) -> jax.Array:
    """`gather_blocks` of the package, checked."""
    return jnp.stack([_blocks(pool, block_ids) for pool in kv_pools])


@jax.jit
def scatter_blocks(kv_pools: tuple[jax.Array, ...], staging: jax.Array, block_ids: jax.Array) -> tuple[jax.Array, ...]:
    """`scatter_blocks` of the package, checked."""
    return tuple(put_rows(pool, block_ids, staging[i]) for i, pool in enumerate(kv_pools))


def _blocks(pool: jax.Array, ids: jax.Array) -> jax.Array:
    return from_bits(as_bits(pool).at[ids].get(mode="clip"), pool.dtype)
