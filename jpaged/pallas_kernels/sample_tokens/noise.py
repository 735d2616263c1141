"""The noise that draws tokens: a hash of (seed, position, token id), and of nothing else.

    seed, position --Threefry--> 64-bit key of a row --+
                                 token id -------------+-- two rounds of an integer hash --> uniform --> Gumbel

So it does not depend on the batch, the row, the slot or the step, and each token's can be had alone: a kernel computes
it where it can win. jax.random would run a kernel of its own, and write and read rows x vocabulary words.
"""

import jax
import jax.numpy as jnp
import numpy as np


def gumbel(seeds: jax.Array, positions: jax.Array, vocab_size: int, first: jax.Array | int | None = None) -> jax.Array:
    """Gumbel noise, float32 [R, vocab_size]: a function of (seed, position, token id).

    first: the token id of the first column, if it is not 0.
    """
    key0, key1 = row_keys(seeds, positions)
    ids = jnp.arange(vocab_size, dtype=jnp.uint32)
    if first is not None:
        ids = ids + jnp.asarray(first, jnp.uint32)
    return -jnp.log(-jnp.log1p(-uniform(ids[None, :], key0[:, None], key1[:, None])))


def row_keys(seeds: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two words under which the noise of a row is made: uint32 [R] each, from uint32 [R, 2] and int32 [R]."""
    return _threefry2x32(seeds[:, 0], seeds[:, 1], positions.astype(jnp.uint32), jnp.zeros_like(seeds[:, 0]))


def uniform(ids: jax.Array, key0: jax.Array, key1: jax.Array) -> jax.Array:
    """A float32 in (0, 1) for each token id (uint32); small ones, which make the largest noise, keep all 32 bits."""
    bits = _mix(_mix(ids * np.uint32(0x9E3779B9) + key0) ^ key1)
    # 1 itself must not occur.
    return jnp.minimum(bits.astype(jnp.float32) * np.float32(2**-32) + np.float32(2**-33), np.float32(1 - 2**-24))


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every input bit flips every output bit about half the time.

    The constants are "lowbias32" of Chris Wellons' hash prospector (https://nullprogram.com/blog/2018/07/31/).
    """
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _threefry2x32(key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)."""
    keys = (key0, key1, key0 ^ key1 ^ np.uint32(0x1BD11BDA))
    rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for rotation in rotations[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << rotation) | (x1 >> (32 - rotation))) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1
