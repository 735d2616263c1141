"""The state that the all-reduce keeps on each device: its shapes, its limits, and how it begins."""

from typing import Any

import jax
import jax.numpy as jnp

MAX_CTAS = 264
"""Thread blocks of a call, which share its rows out: row r is block r % 264's, on every device and in every call. A
block waits for those of the same number on the other devices, so all have to fit on a device at once."""

MIN_MULTIPROCESSORS = 132
"""Where they fit whatever their registers: two blocks of 128 threads on each."""

EMPTY = -1
"""A word of an inbox that has not arrived: as 16-bit floats, two NaNs."""

MOST_WORDS = 2**31
"""The most words of an inbox; the kernel counts them in 32 bits."""


def initial_all_reduce_state(
    num_devices: int, max_rows: int, hidden: int, dtype: Any
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Shapes of a device's inbox and generations, int32; the inbox begins as EMPTY, generations as zeros.

    They have to be that on every device before the first call is dispatched (`jax.block_until_ready`): a device that
    filled them after a faster peer's first row would wipe it out, and wait for ever.

    inbox [2, devices - 1, max_rows, words], by generation and sender. generations [blocks of threads]: the calls that
    each took part in.
    """
    words = hidden * jnp.dtype(dtype).itemsize // 4
    inbox = jax.ShapeDtypeStruct((2, num_devices - 1, max_rows, words), jnp.int32)
    return inbox, jax.ShapeDtypeStruct((min(max_rows, MAX_CTAS),), jnp.int32)


def most_rows(num_devices: int, hidden: int) -> int:
    """The most rows of 16-bit floats that the inboxes of this many devices, two or more, may have room for."""
    return MOST_WORDS // ((num_devices - 1) * hidden)
