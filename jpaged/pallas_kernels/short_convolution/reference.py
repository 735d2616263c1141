"""The short convolution in plain XLA."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common.rows import Rows


@partial(jax.jit, static_argnames="activation")
def short_convolution(
    history: jax.Array,
    x: jax.Array,
    kernel: jax.Array,
    rows: Rows,
    bias: jax.Array | None,
    *,
    activation: Literal["silu"] | None,
) -> tuple[jax.Array, jax.Array]:
    """`short_convolution` of the package, checked."""
    slots, fresh, query_starts = rows
    num_slots, before, _ = history.shape
    tokens = x.shape[0]
    live = (slots >= 0) & (slots < num_slots)
    held = jnp.where((live & ~fresh)[:, None, None], history[jnp.where(live, slots, 0)], 0)
    written = jnp.where(live, slots, num_slots)
    if query_starts is None:
        inputs = jnp.concatenate([held, x[:, None]], axis=1)  # [R, width, channels]
        total = jnp.sum(inputs.astype(jnp.float32) * kernel.astype(jnp.float32), axis=1)
        return _activated(total, bias, activation).astype(x.dtype), history.at[written].set(inputs[:, 1:], mode="drop")
    starts, lengths = query_starts[:-1], query_starts[1:] - query_starts[:-1]
    token = jnp.arange(tokens, dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(token[:, None] >= query_starts[None, 1:], axis=1, dtype=jnp.int32), slots.shape[0] - 1)
    total = within_rows(x, kernel, token - starts[row])
    # A row's first tokens lack what came before it: R * (width - 1) terms, added where they belong.
    wide, taps = held.astype(jnp.float32), kernel.astype(jnp.float32)
    offset = jnp.arange(before, dtype=jnp.int32)
    missing = jnp.stack([jnp.sum(wide[:, j:] * taps[: before - j], axis=1) for j in range(before)], axis=1)
    place = jnp.where(offset < lengths[:, None], starts[:, None] + offset, tokens)
    total = total.at[place].add(missing, mode="drop")
    # The last inputs: of the row, or of what was held where the row has fewer.
    index = lengths[:, None] - before + offset
    own = x[jnp.clip(starts[:, None] + index, 0, tokens - 1)]
    old = jnp.take_along_axis(held, jnp.clip(index + before, 0, before - 1)[..., None], axis=1)
    last = jnp.where((index >= 0)[..., None], own, old)
    written = jnp.where(lengths > 0, written, num_slots)
    return _activated(total, bias, activation).astype(x.dtype), history.at[written].set(last, mode="drop")


def convolved_sequences(
    x: jax.Array,
    kernel: jax.Array,
    position: jax.Array,
    bias: jax.Array | None = None,
    activation: Literal["silu"] | None = "silu",
) -> jax.Array:
    """The short convolution over whole sequences. It is differentiable.

    x: [T, channels]. kernel: [width, channels]. position: int32 [T], of each token in its sequence, whose tokens are
    consecutive. bias: [channels], or None. activation: as of `short_convolution`. Returns [T, channels].
    """
    return _activated(within_rows(x, kernel, position), bias, activation).astype(x.dtype)


def within_rows(x: jax.Array, kernel: jax.Array, position: jax.Array) -> jax.Array:
    """float32 [T, channels], before the activation; what comes before a row's first token counts as zeros."""
    width = kernel.shape[0]
    wide, taps = x.astype(jnp.float32), kernel.astype(jnp.float32)
    total = wide * taps[-1]
    for back in range(1, width):
        earlier = jnp.pad(wide, ((back, 0), (0, 0)))[: x.shape[0]]
        total = total + jnp.where((position >= back)[:, None], earlier * taps[width - 1 - back], 0.0)
    return total


def _activated(total: jax.Array, bias: jax.Array | None, activation: Literal["silu"] | None) -> jax.Array:
    if bias is not None:
        total = total + bias.astype(jnp.float32)
    return total if activation is None else total * jax.nn.sigmoid(total)
