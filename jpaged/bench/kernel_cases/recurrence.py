"""Recurrent layers: one token of each row, whose floor is bytes, as each state is read and written once; and the gated
delta rule over chunks of prompts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpaged import pallas_kernels as ops
from jpaged.bench.kernel_cases.case import CARD_BYTES_S, CARD_FLOPS, L2_BYTES, Built, Case, normal

_CHUNK = 64  # tokens
_CHUNK_CALLS = 4  # of a program


class Layer(Protocol):
    """A recurrent layer on one device."""

    @property
    def state(self) -> tuple[int, int, int]:
        """The shape of a sequence's state."""

    def operands(self, rows: int) -> tuple[jax.Array, ...]:
        """What a step takes between states and slots, of so many rows of bfloat16."""

    def step(self, *arguments: Any, backend: str | None) -> tuple[jax.Array, jax.Array]: ...


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net; by default Qwen3-Next's."""

    key_heads: int = 16
    heads: int = 32
    key_dim: int = 128
    value_dim: int = 128

    @property
    def state(self) -> tuple[int, int, int]:
        return self.heads, self.key_dim, self.value_dim

    def operands(self, rows: int) -> tuple[jax.Array, ...]:
        q, k = (normal(i, (rows, self.key_heads, self.key_dim), jnp.bfloat16) for i in range(2))
        gates = jnp.full((rows, self.heads), 0.5)
        return q, k, normal(2, (rows, self.heads, self.value_dim), jnp.bfloat16), -gates, gates

    def step(self, *arguments: Any, backend: str | None) -> tuple[jax.Array, jax.Array]:
        return ops.gated_delta_rule(*arguments, backend=backend)

    def moved_bytes(self, rows: int, tokens: int) -> float:
        """What must be read and written for so many tokens in all: states once each way, queries, keys, values and
        outputs once, and two float32 gates a token and head."""
        columns = 2 * self.key_heads * self.key_dim + 2 * self.heads * self.value_dim
        each = columns * 2 + 8 * self.heads
        return 2.0 * rows * _state_bytes(self) + float(tokens) * each

    def operations(self, tokens: int) -> float:
        """Of the products of whole chunks: keys and queries with keys and with the state, the inverse with what keys
        lack, scores with that, and the state's update. The inverse is left out, as a way to compute it is a choice."""
        with_state = 3 * self.key_dim * self.value_dim
        return 2.0 * tokens * self.heads * (2 * _CHUNK * (self.key_dim + self.value_dim) + with_state)

    def floors_us(self, rows: int, tokens: int) -> tuple[float, float]:
        """What memory and what products of so many tokens take at least, microseconds; the latter in TF32, at half the
        card's rate in 16 bits. A row of one token has no chunks."""
        products = self.operations(tokens) if tokens > rows else 0.0
        return self.moved_bytes(rows, tokens) / CARD_BYTES_S * 1e6, products / (CARD_FLOPS / 2) * 1e6


@dataclass(frozen=True)
class Mamba:
    """A Mamba-2 layer; by default that of Granite 4.0 H-Small."""

    groups: int = 1
    heads: int = 128
    head_dim: int = 64
    state_dim: int = 128

    @property
    def state(self) -> tuple[int, int, int]:
        return self.heads, self.head_dim, self.state_dim

    def operands(self, rows: int) -> tuple[jax.Array, ...]:
        x = normal(0, (rows, self.heads, self.head_dim), jnp.bfloat16)
        b, c = (normal(i, (rows, self.groups, self.state_dim), jnp.bfloat16) for i in (1, 2))
        ones = jnp.ones((self.heads,))
        return x, jnp.full((rows, self.heads), 0.5), -ones, b, c, ones

    def step(self, *arguments: Any, backend: str | None) -> tuple[jax.Array, jax.Array]:
        return ops.state_space_dual(*arguments, backend=backend)


def _state_bytes(layer: Layer) -> int:
    """Of all heads of a sequence, float32."""
    return 4 * int(np.prod(layer.state))


def step_case(layer: Layer, rows: int, backend: str | None) -> Built:
    """Steps of rows in other slots each. Its work is the states, read and written, and what comes in and goes out."""
    state_bytes = _state_bytes(layer)
    copies = min(64, -(-L2_BYTES // (rows * state_bytes)))
    order = np.random.default_rng(0).permutation(copies * rows).astype(np.int32)
    slots = [jnp.asarray(part) for part in order.reshape(copies, rows)]
    operands, fresh = layer.operands(rows), jnp.zeros((rows,), bool)
    calls = max(copies, 16)
    states = normal(3, (copies * rows, *layer.state), jnp.float32)
    shape = jax.eval_shape(partial(layer.step, backend="xla"), states, *operands, slots[0], fresh)[0]

    @partial(jax.jit, donate_argnums=0)
    def program(states: jax.Array, operands: tuple[jax.Array, ...], slots: list, fresh: jax.Array) -> jax.Array:
        out = jnp.zeros(shape.shape, shape.dtype)
        for i in range(calls):
            given, _ = lax.optimization_barrier((operands, out))  # keeps all outputs, and their order
            out, states = layer.step(states, *given, slots[i % copies], fresh, backend=backend)
        return lax.optimization_barrier((states, out))[0]

    moved = sum(x.nbytes for x in operands) + shape.size * shape.dtype.itemsize
    return program, (states, operands, slots, fresh), calls, 2.0 * rows * state_bytes + moved


def chunks_case(lengths: np.ndarray, shape: DeltaNet, backend: str | None) -> Built:
    """Rows of so many tokens each, which go on from their states; its work are the bytes."""
    s, rows, tokens = shape, len(lengths), int(lengths.sum())
    q, k = (normal(i, (tokens, s.key_heads, s.key_dim), jnp.bfloat16) for i in (1, 2))
    v = normal(3, (tokens, s.heads, s.value_dim), jnp.bfloat16)
    log_decay = -jnp.abs(normal(4, (tokens, s.heads), jnp.float32)) * 0.1
    beta = jax.nn.sigmoid(normal(5, (tokens, s.heads), jnp.float32))
    states = jnp.zeros((rows, s.heads, s.key_dim, s.value_dim), jnp.float32)
    slots, fresh = jnp.arange(rows, dtype=jnp.int32), jnp.zeros((rows,), jnp.bool_)
    starts = jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)

    @partial(jax.jit, donate_argnums=0)
    def program(states: jax.Array, v: jax.Array, *others: Any) -> jax.Array:
        q, k, log_decay, beta, slots, fresh, starts = others
        for _ in range(_CHUNK_CALLS):
            v, states = ops.gated_delta_rule(states, q, k, v, log_decay, beta, slots, fresh, starts, backend=backend)
        return states

    arguments = (states, v, q, k, log_decay, beta, slots, fresh, starts)
    return program, arguments, _CHUNK_CALLS, s.moved_bytes(rows, tokens)


def cases(backend: str | None) -> Iterator[Case]:
    layers: tuple[tuple[str, Layer], ...] = (("gated delta rule", DeltaNet()), ("state space dual", Mamba()))
    for name, layer in layers:
        for rows in (1, 32, 256):
            yield Case(f"{name}, step of {rows} rows", "GB/s", None, partial(step_case, layer, rows, backend))
    for rows, length in ((1, 16_384), (4, 4096), (16, 1024), (64, 128)):
        memory, products = DeltaNet().floors_us(rows, rows * length)
        case = f"gated delta rule, {rows} x {length:,} (bytes {memory:.0f} us, products {products:.0f} us)"
        lengths = np.full(rows, length, np.int64)
        yield Case(case, "us", None, partial(chunks_case, lengths, DeltaNet(), backend))
