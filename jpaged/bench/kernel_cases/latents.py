"""Prefill over latents with and without keys and values of heads for the step's own tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jpaged import pallas_kernels as ops
from jpaged.bench.kernel_cases.case import CARD_FLOPS, Built, Case, normal

_CALLS = 4  # of a program


@dataclass(frozen=True)
class Heads:
    """Shape of latent attention: DeepSeek's, with the heads of V2-Lite."""

    heads: int = 16
    rank: int = 512
    rotated: int = 64
    plain: int = 128
    values: int = 128
    block_size: int = 16
    dtype: Any = jnp.bfloat16

    def operations(self, chunk: int, cached: int, *, expanded: bool) -> float:
        """Of a chunk and the tokens cached before it: queries times keys of heads, attention, and heads' values.

        expanded: whether the chunk's own tokens have keys and values of heads, which are then made, too.
        """
        projections = chunk * self.rank * (self.plain + self.values)
        own, absorbed = chunk * (chunk + 1) / 2, self.rank + self.rotated + self.rank
        of_own = self.plain + self.rotated + self.values if expanded else absorbed
        pairs = own * of_own + chunk * cached * absorbed
        return 2.0 * self.heads * ((2 if expanded else 1) * projections + pairs)


def prefill_case(chunk: int, cached: int, shape: Heads, backend: str | None, *, expanded: bool) -> Built:
    """A chunk of a prompt from queries of heads to values of heads; its work are its operations."""
    s, tokens = shape, chunk + cached
    q = normal(0, (chunk, s.heads, s.plain + s.rotated), s.dtype)
    latents = normal(1, (chunk, s.rank + s.rotated), s.dtype)
    num_blocks = -(-tokens // s.block_size)
    pool = normal(2, (num_blocks + 1, 1, 1, s.block_size, s.rank + s.rotated), s.dtype)
    table = 1 + jax.random.permutation(jax.random.key(3), num_blocks).astype(jnp.int32)[None]
    to_keys = normal(4, (s.heads, s.plain, s.rank), s.dtype) * s.rank**-0.5
    to_values = normal(5, (s.heads, s.values, s.rank), s.dtype) * s.rank**-0.5
    rows = (jnp.full((1,), tokens, jnp.int32), jnp.array([0, chunk], jnp.int32), jnp.int32(0))
    scale = (s.plain + s.rotated) ** -0.5

    @jax.jit
    def program(q: jax.Array, pool: jax.Array, table: jax.Array, *others: Any) -> jax.Array:
        latents, to_keys, to_values, *rows = others
        for _ in range(_CALLS):
            absorbed = jnp.einsum("thn,hnr->thr", q[..., : s.plain], to_keys)
            of_latents = jnp.concatenate([absorbed, q[..., s.plain :]], axis=-1)
            if expanded:
                expansion = ops.Expansion(q, to_keys, to_values)
                made = ops.expanded_attention(
                    of_latents, latents, expansion, pool, table, *rows, scale=scale, backend=backend
                )
            else:
                summed = ops.mixed_attention(
                    of_latents, pool, table, *rows, scale=scale, value_dim=s.rank, backend=backend
                )
                made = jnp.einsum("thr,hvr->thv", summed, to_values)
            q = jnp.concatenate([made, q[..., s.values :]], axis=-1)
        return q

    arguments = (q, pool, table, latents, to_keys, to_values, *rows)
    return program, arguments, _CALLS, s.operations(chunk, cached, expanded=expanded)


def cases(backend: str | None) -> Iterator[Case]:
    shape = Heads()
    for chunk, cached in ((1024, 0), (2048, 0), (8192, 0), (2048, 2048), (2048, 14_336)):
        for how, expanded in (("expanded", True), ("absorbed", False)):
            floor = shape.operations(chunk, cached, expanded=expanded) / CARD_FLOPS * 1e6
            name = f"prefill {chunk:,} latents on {cached:,}, {how} (products {floor:.0f} us)"
            yield Case(name, "us", None, partial(prefill_case, chunk, cached, shape, backend, expanded=expanded))
