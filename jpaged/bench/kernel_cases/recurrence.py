"""Decode steps of recurrent layers. Their floor is bytes: each state is read and written once."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpaged import pallas_kernels as ops
from jpaged.bench.kernel_cases.case import L2_BYTES, Built, Case, normal


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


def step_case(layer: Layer, rows: int, backend: str | None) -> Built:
    """Steps of rows in other slots each. Its work is the states, read and written, and what comes in and goes out."""
    state_bytes = 4 * int(np.prod(layer.state))
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


def cases(backend: str | None) -> Iterator[Case]:
    layers: tuple[tuple[str, Layer], ...] = (("gated delta rule", DeltaNet()), ("state space dual", Mamba()))
    for name, layer in layers:
        for rows in (1, 32, 256):
            yield Case(f"{name}, step of {rows} rows", "GB/s", None, partial(step_case, layer, rows, backend))
