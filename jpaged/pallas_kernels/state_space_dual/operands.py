"""What implementations of state space duality take: `api.py` says what each array is."""

from typing import NamedTuple

import jax


class Operands(NamedTuple):
    """What tokens bring: arrays [T, ..], or [R, ..] where each row has one token."""

    x: jax.Array
    dt: jax.Array
    b: jax.Array
    c: jax.Array


class Heads(NamedTuple):
    """The numbers of each head, [heads]."""

    a: jax.Array
    d: jax.Array
