"""What implementations of `sample_tokens` take."""

from typing import NamedTuple

import jax


class Operands(NamedTuple):
    """The arguments of `sample_tokens`, of R rows: `api.py` says what each is. None where no row has one."""

    logits: jax.Array
    temperature: jax.Array
    top_k: jax.Array | None
    top_p: jax.Array | None
    min_p: jax.Array | None
    seeds: jax.Array
    positions: jax.Array
