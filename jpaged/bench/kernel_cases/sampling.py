"""Draws of the next tokens."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jpaged import pallas_kernels as ops
from jpaged.bench.kernel_cases.case import L2_BYTES, Built, Case


def sample_case(rows: int, top_k: int, top_p: float, backend: str | None, vocab: int = 151_936) -> Built:
    """Draws from normal logits of deviation 2: flatter than a model's, so that more tokens have a chance to win."""
    copies = min(64, max(1, -(-L2_BYTES // (rows * vocab * 4))))
    logits = [jax.random.normal(jax.random.key(i), (rows, vocab)) * 2 for i in range(copies)]
    seeds = jax.random.bits(jax.random.key(copies), (rows, 2), jnp.uint32)
    ones = jnp.ones(rows)
    calls = max(copies, 4)
    draw: Callable[..., jax.Array] = partial(ops.sample_tokens, backend=backend)

    @jax.jit
    def program(positions: jax.Array, logits: list[jax.Array], arguments: Any) -> jax.Array:
        for i in range(calls):
            tokens = draw(logits[i % copies], *arguments, positions)
            positions = positions + (tokens & 1) + 1
        return positions

    arguments = (ones, jnp.full(rows, top_k, jnp.int32), ones * top_p, ones * 0, seeds)
    return program, (jnp.arange(rows, dtype=jnp.int32), logits, arguments), calls, 4.0 * rows * vocab


def cases(backend: str | None) -> Iterator[Case]:
    for batch, aim in ((1000, 600), (256, 160), (32, 40), (1, 25)):
        for name, top_k, top_p in (
            ("temperature", 0, 1.0),
            ("top_p 0.95", 0, 0.95),
            ("top_k 50", 50, 1.0),
            ("top_k 20, top_p 0.95", 20, 0.95),
            ("top_p 0.1", 0, 0.1),
        ):
            yield Case(f"sample {batch:,} rows, {name}", "us", aim, partial(sample_case, batch, top_k, top_p, backend))
