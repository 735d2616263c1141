"""What a case is, and what all kinds share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

L2_BYTES = 256 << 20  # rotate over at least this much; the largest L2 cache is 60 MB
CARD_BYTES_S, CARD_FLOPS = 4.42e12, 780e12  # what an H200 was measured to read and to multiply at most

Built = tuple[Callable[..., Any], tuple[Any, ...], int, float]
"""A jitted program, its arguments, calls in it, bytes or operations of one call."""


@dataclass(frozen=True)
class Case:
    """One row of the table. `work` is bytes or floating-point operations a call, as `unit` says. `aim` follows from
    FlashAttention 3 on an H200, or from the card's limits."""

    name: str
    unit: str  # GB/s, TFLOP/s or us
    aim: float | None
    build: Callable[[], Built]

    @property
    def of_the_card(self) -> bool:
        """Whether it measures the card or cuDNN, whatever the backend."""
        return self.name.startswith(("card:", "cuDNN"))


def normal(key: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Normal numbers, drawn a part at a time: float32 temporaries of a whole pool would not fit beside it."""
    rows = max(1, min(shape[0], (1 << 27) // max(1, int(np.prod(shape[1:])))))
    part = jax.random.normal(jax.random.key(key), (rows, *shape[1:]), dtype)
    return jnp.tile(part, (-(-shape[0] // rows), *[1] * (len(shape) - 1)))[: shape[0]]
