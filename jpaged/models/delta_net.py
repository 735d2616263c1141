"""The gated delta net (Yang et al. 2024, arXiv:2412.06464), as Qwen3-Next and Qwen3.5 have it.

x --qkvz-> queries, keys, values --short convolution--> the gated delta rule --norm, times silu(z)--> out
  --ba---> beta = sigmoid(b), log_decay = -exp(a_log) softplus(a + dt_bias)
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.models.linear import DelicateLinear, Linear, PartialSum
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Part, Piece
from jpaged.models.norms import RMSNorm
from jpaged.models.parameters import Constant, Normal, parameter
from jpaged.models.recurrence import Recurrence, RecurrentLayer
from jpaged.models.states import DeltaState


class GatedRMSNorm(RMSNorm):
    """The norm of x times silu(gate); in float32, rounded before the scale and at the end."""

    def gated(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        """[..., size], twice -> [..., size]."""
        return (self(x).astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)


class GatedDeltaNet(RecurrentLayer):
    """A recurrent layer, without the norm before it. Everything is laid out by key head, so that it splits over devices
    along that axis.

        qkvz [hidden, key_heads, 2 key_dim + 2 group value_dim]     a key head's query, key, and its group's values, z
        ba   [hidden, key_heads, 2 group]                           its group's b, then a

    num_layers: of the model, for the scale of random weights.
    """

    def __init__(
        self, state: DeltaState, hidden: int, num_layers: int, eps: float, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        self.state = state
        heads, group, wide = state.key_heads, state.group, jnp.dtype(jnp.float32)
        inner = 2 * state.key_dim + 2 * group * state.value_dim
        self.qkvz = Linear((hidden,), (heads, inner), hidden**-0.5, dtype, rngs, shard_axis=1)
        self.ba = DelicateLinear((hidden,), (heads, 2 * group), hidden**-0.5, dtype, rngs, shard_axis=1)
        shape = (state.width, heads, inner - group * state.value_dim)
        self.convolution = parameter(rngs, Normal(state.width**-0.5), shape, dtype, 1)
        self.a_log = parameter(rngs, Constant(0.0), (heads, group), wide, 0)
        self.dt_bias = parameter(rngs, Constant(1.0), (heads, group), wide, 0)
        self.norm = GatedRMSNorm(state.value_dim, eps, dtype, rngs)
        std = (state.value_heads * state.value_dim * 2 * num_layers) ** -0.5
        self.out = Linear((state.value_heads, state.value_dim), (hidden,), std, dtype, rngs, shard_axis=0)

    def mix(self, x: jax.Array, recurrence: Recurrence, backend: str | None) -> PartialSum:
        state, tokens = self.state, x.shape[0]
        qkvz, ba = self.qkvz(x, backend=backend), self.ba(x, backend=backend).astype(jnp.float32)
        kernel = self.convolution[...]
        channels, z = jnp.split(qkvz, [kernel.shape[2]], axis=-1)
        b, a = jnp.split(ba, 2, axis=-1)
        log_decay = -jnp.exp(self.a_log[...]) * jax.nn.softplus(a + self.dt_bias[...])
        mixed = recurrence.convolve(channels.reshape(tokens, -1), kernel.reshape(kernel.shape[0], -1))
        gates = log_decay.reshape(tokens, -1), jax.nn.sigmoid(b).reshape(tokens, -1)
        y = recurrence.gated_delta_rule(*state.split(mixed), *gates)
        return self.out.partial_sum(self.norm.gated(y, z.reshape(y.shape)), backend)


def delta_net_pieces(theirs: str, ours: str, hidden: int, state: DeltaState, *, joined: bool) -> Iterator[Piece]:
    """The tensors of a gated delta net in checkpoints, into `GatedDeltaNet`.

    joined: one projection has queries, keys, values and z of each key head, another b and a (Qwen3-Next). Else each has
        its own, but for queries, keys and values: all queries come first, then all keys, all values (Qwen3.5). The
        convolution's channels stand so in both.
    """
    heads, group, size = state.key_heads, state.group, state.key_dim
    values = group * state.value_dim  # of a key head
    if joined:
        for name, inner in (("qkvz", 2 * size + 2 * values), ("ba", 2 * group)):
            shape, split = (heads * inner, hidden), (heads, inner, hidden)
            yield Piece(f"{theirs}.in_proj_{name}.weight", shape, f"{ours}.{name}", split, (2, 0, 1))
    else:
        yield from _by_head(f"{theirs}.in_proj_qkv.weight", f"{ours}.qkvz", hidden, state)
        for name, ours_too, inner, first in (
            ("z", "qkvz", values, 2 * size + values),
            ("b", "ba", group, 0),
            ("a", "ba", group, group),
        ):
            shape, split = (heads * inner, hidden), (heads, inner, hidden)
            yield Piece(f"{theirs}.in_proj_{name}.weight", shape, f"{ours}.{ours_too}", split, (2, 0, 1), (0, 0, first))
    yield from _by_head(f"{theirs}.conv1d.weight", f"{ours}.convolution", state.width, state, middle=(1,))
    for name, own in (("A_log", "a_log"), ("dt_bias", "dt_bias")):
        yield Piece(f"{theirs}.{name}", (heads * group,), f"{ours}.{own}", (heads, group), (0, 1))
    yield pieces.norm(f"{theirs}.norm", f"{ours}.norm", state.value_dim)
    shape = (hidden, state.value_heads * state.value_dim)
    by_head = (hidden, state.value_heads, state.value_dim)
    yield Piece(f"{theirs}.out_proj.weight", shape, f"{ours}.out", by_head, (1, 2, 0))


def _by_head(
    tensor: str, parameter: str, columns: int, state: DeltaState, middle: tuple[int, ...] = ()
) -> Iterator[Piece]:
    """A tensor [channels, *middle, columns] whose rows are all queries, all keys, all values, into
    [columns, key_heads, ...]. middle: axes of 1.
    """
    heads, size, values = state.key_heads, state.key_dim, state.group * state.value_dim
    rows, first = state.channels, 0
    for inner, place in ((size, 0), (size, size), (values, 2 * size)):
        part = Part((rows, columns), 0, first, heads * inner)
        first += part.count
        shape, split = (rows, *middle, columns), (heads, inner, columns)
        yield Piece(tensor, shape, parameter, split, (2, 0, 1), (0, 0, place), part=part)
