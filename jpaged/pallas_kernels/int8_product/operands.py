"""What implementations of `int8_product` take."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax


class Operands(NamedTuple):
    """The arrays of one product: `api.py` says what each is."""

    x: jax.Array
    w: jax.Array
    scale: jax.Array
    input_scale: jax.Array | None


@dataclass(frozen=True)
class Options:
    """What is known of one while tracing; hashable, so one static argument of a jit."""

    group: int | None
    activations: str
    dtype: Any
