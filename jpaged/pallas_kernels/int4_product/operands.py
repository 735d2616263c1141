"""What implementations of `int4_product` take."""

from typing import NamedTuple

import jax


class Operands(NamedTuple):
    """The arrays of one product: `api.py` says what each is. zero, outer: None for none."""

    x: jax.Array
    w: jax.Array
    scale: jax.Array
    zero: jax.Array | None
    outer: jax.Array | None
