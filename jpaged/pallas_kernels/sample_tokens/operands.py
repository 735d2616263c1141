"""What implementations of `sample_tokens` take."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

_LOG2E = math.log2(math.e)


class Operands(NamedTuple):
    """The arguments of `sample_tokens`, of R rows: `api.py` says what each is. None where no row has one."""

    logits: jax.Array
    temperature: jax.Array
    top_k: jax.Array | None
    top_p: jax.Array | None
    min_p: jax.Array | None
    seeds: jax.Array
    positions: jax.Array


def row_numbers(operands: Operands) -> tuple[jax.Array, jax.Array]:
    """What kernels take of a row, beside its logits and its noise.

    Returns:
        float32 [R, 4]: log2(e) / temperature; what the noise is multiplied by, 0 for greedy rows; top_p; log(min_p) *
        temperature, to be added to the largest logit. And top_k, int32 [R]. Greedy rows have no truncation; none is a
        top_p of 1, minus infinity, and a top_k of 0.
    """
    logits, temperature, top_k, top_p, min_p, _, _ = operands
    rows, vocab_size = logits.shape
    greedy = temperature <= 0
    temperature = jnp.where(greedy, 1.0, temperature)
    top_k = jnp.zeros(rows, jnp.int32) if top_k is None else jnp.maximum(top_k, 0)
    top_p = jnp.ones(rows, jnp.float32) if top_p is None else top_p
    min_p = jnp.zeros(rows, jnp.float32) if min_p is None else min_p
    floats = [
        _LOG2E / temperature,
        jnp.where(greedy, 0.0, 1.0),
        jnp.where(greedy, 1.0, top_p),
        jnp.where(greedy, -math.inf, jnp.log(min_p) * temperature),
    ]
    return jnp.stack(floats, axis=1).astype(jnp.float32), jnp.where(greedy | (top_k >= vocab_size), 0, top_k)
