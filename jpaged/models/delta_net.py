"""The gated delta net (Yang et al. 2024, arXiv:2412.06464), as Qwen3-Next, Qwen3.5 and OLMo Hybrid have it.

x --qkvz-> queries, keys, values --short convolution--> the gated delta rule --norm, times silu(z)--> out
  --ba---> beta = sigmoid(b), or twice that, log_decay = -exp(a_log) softplus(a + dt_bias)
"""

from collections.abc import Iterator
from itertools import pairwise

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
    doubled: beta is twice the sigmoid, so that a state's eigenvalues may be negative (OLMo Hybrid; Grazzi et al. 2024,
        arXiv:2411.12537).
    """

    def __init__(
        self,
        state: DeltaState,
        hidden: int,
        num_layers: int,
        eps: float,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        *,
        doubled: bool = False,
    ) -> None:
        self.state, self.doubled = state, doubled
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
        beta = jax.nn.sigmoid(b)
        beta = 2 * beta if self.doubled else beta
        gates = log_decay.reshape(tokens, -1), beta.reshape(tokens, -1)
        y = recurrence.gated_delta_rule(*state.split(mixed), *gates)
        return self.out.partial_sum(self.norm.gated(y, z.reshape(y.shape)), backend)


def delta_net_pieces(theirs: str, ours: str, hidden: int, state: DeltaState, *, joined: bool) -> Iterator[Piece]:
    """The tensors of a gated delta net in checkpoints, into `GatedDeltaNet`.

    joined: one projection has queries, keys, values and z of each key head, another b and a (Qwen3-Next). Else each has
        its own, but for queries, keys and values: all queries come first, then all keys, all values (Qwen3.5). The
        convolution's channels stand so in both.
    """
    heads, group, channels = state.key_heads, state.group, state.channels
    if joined:
        values = group * state.value_dim  # of a key head
        for name, inner in (("qkvz", 2 * state.key_dim + 2 * values), ("ba", 2 * group)):
            shape, split = (heads * inner, hidden), (heads, inner, hidden)
            yield Piece(f"{theirs}.in_proj_{name}.weight", shape, f"{ours}.{name}", split, (2, 0, 1))
    else:
        yield from _by_head({f"{theirs}.in_proj_qkv.weight": channels}, f"{ours}.qkvz", hidden, state)
        names = {name: f"{theirs}.in_proj_{name}.weight" for name in "zba"}
        yield from _gates(names, ours, hidden, state)
    convolution = {f"{theirs}.conv1d.weight": channels}
    yield from _by_head(convolution, f"{ours}.convolution", state.width, state, middle=(1,))
    yield from _after_products(theirs, ours, hidden, state, norm="norm", out="out_proj")


def separate_delta_net_pieces(
    theirs: str, ours: str, hidden: int, state: DeltaState, convolved: tuple[int, int, int]
) -> Iterator[Piece]:
    """Likewise, of a checkpoint with a projection each for queries, keys, values, z, b and a, and with three tensors of
    the convolution (OLMo Hybrid).

    convolved: channels of each of the three; one may have those of several kinds, and end within a head.
    """
    keys, values = state.key_heads * state.key_dim, state.value_heads * state.value_dim
    rows = {"q": keys, "k": keys, "v": values}
    projections = {f"{theirs}.{name}_proj.weight": count for name, count in rows.items()}
    yield from _by_head(projections, f"{ours}.qkvz", hidden, state)
    names = {one: f"{theirs}.{name}_proj.weight" for one, name in (("z", "g"), ("b", "b"), ("a", "a"))}
    yield from _gates(names, ours, hidden, state)
    convolution = {f"{theirs}.{name}_conv1d.weight": count for name, count in zip("qkv", convolved, strict=True)}
    yield from _by_head(convolution, f"{ours}.convolution", state.width, state, middle=(1,))
    yield from _after_products(theirs, ours, hidden, state, norm="o_norm", out="o_proj")


def _gates(names: dict[str, str], ours: str, hidden: int, state: DeltaState) -> Iterator[Piece]:
    """The projections of z, b and a, one tensor each. names: of the tensors."""
    heads, group = state.key_heads, state.group
    values = group * state.value_dim  # of a key head
    for name, place, inner, first in (
        ("z", "qkvz", values, 2 * state.key_dim + values),
        ("b", "ba", group, 0),
        ("a", "ba", group, group),
    ):
        shape, split = (heads * inner, hidden), (heads, inner, hidden)
        yield Piece(names[name], shape, f"{ours}.{place}", split, (2, 0, 1), (0, 0, first))


def _after_products(theirs: str, ours: str, hidden: int, state: DeltaState, *, norm: str, out: str) -> Iterator[Piece]:
    """What does not differ but for names: the decays' parameters, the norm and the output projection."""
    heads, group = state.key_heads, state.group
    for name, own in (("A_log", "a_log"), ("dt_bias", "dt_bias")):
        yield Piece(f"{theirs}.{name}", (heads * group,), f"{ours}.{own}", (heads, group), (0, 1))
    yield pieces.norm(f"{theirs}.{norm}", f"{ours}.norm", state.value_dim)
    shape = (hidden, state.value_heads * state.value_dim)
    by_head = (hidden, state.value_heads, state.value_dim)
    yield Piece(f"{theirs}.{out}.weight", shape, f"{ours}.out", by_head, (1, 2, 0))


def _by_head(
    tensors: dict[str, int], parameter: str, columns: int, state: DeltaState, middle: tuple[int, ...] = ()
) -> Iterator[Piece]:
    """Tensors [channels, *middle, columns] whose rows, one tensor behind the other, are all queries, all keys, all
    values, into [columns, key_heads, ...].

    tensors: names, and how many channels each has, which may end anywhere. middle: axes of 1.
    """
    heads, size, values = state.key_heads, state.key_dim, state.group * state.value_dim
    begins = 0
    for name, rows in tensors.items():
        first = 0
        for inner, place in ((size, 0), (size, size), (values, 2 * size)):
            low, high = max(begins, first), min(begins + rows, first + heads * inner)
            for start, stop in _cut_at_heads(low - first, high - first, inner):
                (head, within), count = divmod(start, inner), stop - start
                part = Part((rows, columns), 0, first + start - begins, count)
                shape, split = (rows, *middle, columns), (-(-count // inner), min(count, inner), columns)
                whole = None if count == rows else part
                yield Piece(name, shape, parameter, split, (2, 0, 1), (0, head, place + within), part=whole)
            first += heads * inner
        begins += rows


def _cut_at_heads(low: int, high: int, size: int) -> Iterator[tuple[int, int]]:
    """Channels low .. high - 1 of heads of a size: the rest of a head, whole heads, and the beginning of one, as far as
    there are any. Where each begins and ends; nothing where low is not below high."""
    if low < high:
        cuts = {low, min(high, -(-low // size) * size), max(low, high // size * size), high}
        yield from pairwise(sorted(cuts))
