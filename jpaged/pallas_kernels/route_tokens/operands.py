"""What implementations of `route_tokens` take."""

from typing import NamedTuple

import jax


class Operands(NamedTuple):
    """The arrays of `route_tokens`: `api.py` says what each is. None for none."""

    logits: jax.Array
    correction: jax.Array | None
    live: jax.Array | None
    first: jax.Array | None
