"""What implementations of the gated delta rule take."""

from typing import NamedTuple

import jax


class Operands(NamedTuple):
    """What tokens bring: `api.py` says what each is. Arrays [T, ..], or [R, ..] where each row has one token."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array
