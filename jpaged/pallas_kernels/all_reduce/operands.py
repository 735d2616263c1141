"""What implementations of `all_reduce_add_norm` take."""

from typing import NamedTuple

import jax


class Operands(NamedTuple):
    """The arrays of one sum over devices: `api.py` says what each is. bias, scale: None for none."""

    inbox: jax.Array
    generations: jax.Array
    peers: jax.Array
    parts: jax.Array
    residual: jax.Array
    bias: jax.Array | None
    scale: jax.Array | None
