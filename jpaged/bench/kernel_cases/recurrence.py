"""The gated delta rule over chunks of prompts, and over one token of each row."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged import pallas_kernels as ops
from jpaged.bench.kernel_cases.case import CARD_BYTES_S, CARD_FLOPS, Built, Case, normal

_CHUNK_CALLS, _STEP_CALLS = 4, 32  # of a program


@dataclass(frozen=True)
class DeltaRule:
    """Shape of a recurrent layer: Qwen3-Next-80B-A3B's."""

    key_heads: int = 16
    heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    dtype: Any = jnp.bfloat16

    @property
    def state_bytes(self) -> int:
        """Of all heads of a sequence, float32."""
        return 4 * self.heads * self.key_dim * self.value_dim

    def moved_bytes(self, rows: int, tokens: int) -> float:
        """What must be read and written for so many tokens in all: states once each way, queries, keys, values and
        outputs once, and two float32 gates a token and head."""
        columns = 2 * self.key_heads * self.key_dim + 2 * self.heads * self.value_dim
        each = columns * jnp.dtype(self.dtype).itemsize + 8 * self.heads
        return 2.0 * rows * self.state_bytes + float(tokens) * each

    def operations(self, tokens: int, chunk: int = 64) -> float:
        """Of the products of whole chunks: keys and queries with keys and with the state, the inverse with what keys
        lack, scores with that, and the state's update. The inverse is left out, as a way to compute it is a choice."""
        with_state = 3 * self.key_dim * self.value_dim
        return 2.0 * tokens * self.heads * (2 * chunk * (self.key_dim + self.value_dim) + with_state)

    def floors_us(self, rows: int, tokens: int) -> tuple[float, float]:
        """What memory and what products of so many tokens take at least, microseconds; the latter in TF32, at half the
        card's rate in 16 bits. A row of one token has no chunks."""
        products = self.operations(tokens) if tokens > rows else 0.0
        return self.moved_bytes(rows, tokens) / CARD_BYTES_S * 1e6, products / (CARD_FLOPS / 2) * 1e6


def delta_rule_case(lengths: np.ndarray, shape: DeltaRule, backend: str | None) -> Built:
    """Rows of so many tokens each, which go on from their states; its work are the bytes."""
    s, rows, tokens = shape, len(lengths), int(lengths.sum())
    q, k = (normal(i, (tokens, s.key_heads, s.key_dim), s.dtype) for i in (1, 2))
    v = normal(3, (tokens, s.heads, s.value_dim), s.dtype)
    log_decay = -jnp.abs(normal(4, (tokens, s.heads), jnp.float32)) * 0.1
    beta = jax.nn.sigmoid(normal(5, (tokens, s.heads), jnp.float32))
    states = jnp.zeros((rows, s.heads, s.key_dim, s.value_dim), jnp.float32)
    slots, fresh = jnp.arange(rows, dtype=jnp.int32), jnp.zeros((rows,), jnp.bool_)
    starts = None if tokens == rows else jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)
    calls = _CHUNK_CALLS if tokens > rows else _STEP_CALLS

    @partial(jax.jit, donate_argnums=0)
    def program(states: jax.Array, v: jax.Array, *others: Any) -> jax.Array:
        q, k, log_decay, beta, slots, fresh, starts = others
        for _ in range(calls):
            v, states = ops.gated_delta_rule(states, q, k, v, log_decay, beta, slots, fresh, starts, backend=backend)
        return states

    arguments = (states, v, q, k, log_decay, beta, slots, fresh, starts)
    return program, arguments, calls, s.moved_bytes(rows, tokens)


def cases(backend: str | None) -> Iterator[Case]:
    shape = DeltaRule()
    for rows, length in ((1, 16_384), (4, 4096), (16, 1024), (64, 128), (256, 1)):
        memory, products = shape.floors_us(rows, rows * length)
        name = f"delta rule, {rows} x {length:,} (bytes {memory:.0f} us, products {products:.0f} us)"
        lengths = np.full(rows, length, np.int64)
        yield Case(name, "us", None, partial(delta_rule_case, lengths, shape, backend))
