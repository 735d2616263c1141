"""Where new keys and values go."""

from typing import NamedTuple

import jax


class Destination(NamedTuple):
    """Slots of a pool, and what keys and values are divided by before they are rounded to it; as in `write_kv`.

    slot_mapping: int32 [T]. kv_scales: float32 [2], for a pool in e4m3 alone; or None.
    """

    slot_mapping: jax.Array
    kv_scales: jax.Array | None = None
