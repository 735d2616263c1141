"""Layers that keep a state of each sequence instead of its tokens: the gated delta net (Yang et al. 2024,
arXiv:2412.06464), as Qwen3-Next and Qwen3.5 have it.

    x --qkvz-> queries, keys, values --short convolution--> the gated delta rule --norm, times silu(z)--> out
      --ba---> beta = sigmoid(b), log_decay = -exp(a_log) softplus(a + dt_bias)

What such a layer calls instead of attention is a `Recurrence`, which knows where the states are. A family says in
`ModelConfig.layer_states` which layers have one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.models.family import Attend
from jpaged.models.linear import Linear, PartialSum, Reader
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Part, Piece
from jpaged.models.norms import HeadNorms, Norm, RMSNorm
from jpaged.models.parameters import Constant, Normal, parameter
from jpaged.models.states import DeltaState
from jpaged.pallas_kernels.gated_delta_rule.reference import gated_delta_sequences
from jpaged.pallas_kernels.short_convolution.reference import convolved_sequences


class Recurrence:
    """The contract of what a recurrent layer calls; the caller decides where states live."""

    def __call__(
        self, channels: jax.Array, kernel: jax.Array, log_decay: jax.Array, beta: jax.Array, state: DeltaState
    ) -> jax.Array:
        """The short convolution, and the gated delta rule of what it gives (`pallas_kernels`).

        channels: [T, state.channels], as `DeltaState.split` takes them. kernel: [width, state.channels].
        log_decay, beta: float32 [T, heads].
        Returns [T, heads, value_dim].
        """
        raise NotImplementedError


@dataclass(frozen=True)
class WholeSequences(Recurrence):
    """Over whole sequences, without slots: for training and for tests, as `dense_causal_attend` is.

    segment_ids: int32 [T], as of that; None for one sequence.
    """

    segment_ids: jax.Array | None = None

    def __call__(
        self, channels: jax.Array, kernel: jax.Array, log_decay: jax.Array, beta: jax.Array, state: DeltaState
    ) -> jax.Array:
        index = jnp.arange(channels.shape[0], dtype=jnp.int32)
        ids = jnp.zeros_like(index) if self.segment_ids is None else self.segment_ids
        begins = jnp.concatenate([jnp.ones((1,), bool), ids[1:] != ids[:-1]])
        position = index - jax.lax.cummax(jnp.where(begins, index, 0))
        row = jnp.cumsum(begins, dtype=jnp.int32)
        return gated_delta_sequences(
            *state.split(convolved_sequences(channels, kernel, position)), log_decay, beta, row
        )


def recurrence_of(attend: Attend | Recurrence) -> Recurrence:
    """What a recurrent layer calls, given what its model was called with."""
    if isinstance(attend, Recurrence):
        return attend
    bound: dict[str, Any] = getattr(attend, "keywords", {})  # of a functools.partial
    return WholeSequences(bound.get("segment_ids"))


class GatedRMSNorm(RMSNorm):
    """The norm of x times silu(gate); in float32, rounded before the scale and at the end."""

    def gated(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        """[..., size], twice -> [..., size]."""
        return (self(x).astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)


class GatedDeltaNet(Reader):
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
        self.ba = Linear((hidden,), (heads, 2 * group), hidden**-0.5, dtype, rngs, shard_axis=1)
        shape = (state.width, heads, inner - group * state.value_dim)
        self.convolution = parameter(rngs, Normal(state.width**-0.5), shape, dtype, 1)
        self.a_log = parameter(rngs, Constant(0.0), (heads, group), wide, 0)
        self.dt_bias = parameter(rngs, Constant(1.0), (heads, group), wide, 0)
        self.norm = GatedRMSNorm(state.value_dim, eps, dtype, rngs)
        std = (state.value_heads * state.value_dim * 2 * num_layers) ** -0.5
        self.out = Linear((state.value_heads, state.value_dim), (hidden,), std, dtype, rngs, shard_axis=0)

    def __call__(
        self,
        x: jax.Array,
        attend: Attend | Recurrence,
        rotation: tuple[jax.Array, jax.Array] | None = None,
        norms: tuple[Norm, Norm] | HeadNorms | None = None,
        backend: str | None = "xla",
    ) -> PartialSum:
        """[T, hidden] -> [T, hidden]; called as `Attention` is.

        attend: a `Recurrence`, or `dense_causal_attend`, for whole sequences. backend: of products (`Linear`).

        Raises:
            ValueError: a rotation or norms are given, of which there are none here.
        """
        if rotation is not None or norms is not None:
            raise ValueError("A gated delta net takes no rotation, and no norms of queries and keys.")
        state, tokens = self.state, x.shape[0]
        qkvz, ba = self.qkvz(x, backend=backend), self.ba(x, backend=backend).astype(jnp.float32)
        kernel = self.convolution[...]
        channels, z = jnp.split(qkvz, [kernel.shape[2]], axis=-1)
        b, a = jnp.split(ba, 2, axis=-1)
        log_decay = -jnp.exp(self.a_log[...]) * jax.nn.softplus(a + self.dt_bias[...])
        y = recurrence_of(attend)(
            channels.reshape(tokens, -1),
            kernel.reshape(kernel.shape[0], -1),
            log_decay.reshape(tokens, -1),
            jax.nn.sigmoid(b).reshape(tokens, -1),
            state,
        )
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
