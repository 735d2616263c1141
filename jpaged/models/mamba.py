"""Mamba-2 (Dao and Gu 2024, arXiv:2405.21060, section 7), as Granite 4, Bamba, Nemotron-H and Falcon-H1 have it.

    x --zx--> z, inputs }
      --bc--> b, c      } --short convolution--> inputs, b, c --state space duality--> y --times silu(z), norm--> out
      --dt_in--> dt = softplus(dt + dt_bias), within limits; a = -exp(a_log)

Heads are split over devices. Each device computes b and c of all groups of heads, which share them; where it has a part
of a group alone, the group's norm adds up squares over devices.
"""

from collections.abc import Iterator
from math import prod

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.models.collectives import Collectives
from jpaged.models.linear import Linear, PartialSum, times
from jpaged.models.loading.pieces import Part, Piece, as_is
from jpaged.models.mamba_config import ANY_STEP, PLAIN_MAMBA, MambaOptions
from jpaged.models.parameters import Constant, Normal, parameter
from jpaged.models.recurrence import Recurrence, RecurrentLayer
from jpaged.models.states import MambaState


class GatedGroupNorm(nnx.Module):
    """The RMS norm, over each group of heads, of y times silu(gate), or of y, which is then multiplied by that; in
    float32, rounded before the scale.

    scale: [heads, head_dim]. gate_first: the norm is of y times silu(gate).
    """

    def __init__(
        self,
        state: MambaState,
        eps: float,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        collectives: Collectives,
        *,
        gate_first: bool = True,
    ) -> None:
        self.state, self.eps, self.collectives, self.gate_first = state, eps, collectives, gate_first
        self.scale = parameter(rngs, Constant(1.0), (state.heads, state.head_dim), dtype, 0)

    def __call__(self, y: jax.Array, gate: jax.Array) -> jax.Array:
        """[T, heads, head_dim], twice -> [T, heads, head_dim]."""
        state = self.state
        wide, opening = y.astype(jnp.float32), jax.nn.silu(gate.astype(jnp.float32))
        if self.gate_first:
            wide = wide * opening
        grouped = wide.reshape(y.shape[0], state.own_groups, -1)
        sums = jnp.sum(jnp.square(grouped), axis=-1, keepdims=True)
        if state.heads < state.group_heads:
            sums = self._of_whole_group(sums)
        factors = jax.lax.rsqrt(sums / (state.group_heads * state.head_dim) + self.eps)
        normed = self.scale[...] * (grouped * factors).reshape(y.shape).astype(y.dtype)
        return normed if self.gate_first else (normed * opening).astype(y.dtype)

    def _of_whole_group(self, sums: jax.Array) -> jax.Array:
        """[T, 1, 1], of each shard's part of a group -> of the whole group."""
        groups = self.state.groups
        if groups == 1:
            return self.collectives.all_reduce(sums)
        mine = jnp.arange(groups)[:, None] == first_group(self.state, self.collectives)
        of_all = self.collectives.all_reduce(jnp.where(mine, sums, 0.0))
        return jnp.sum(jnp.where(mine, of_all, 0.0), axis=1, keepdims=True)


def first_group(state: MambaState, collectives: Collectives) -> jax.Array | int:
    """The first group that this shard's heads are of."""
    return collectives.first(state.heads) // state.group_heads


class Mamba2(RecurrentLayer):
    """A Mamba-2 layer, without the norm before it.

        zx    [hidden, heads, 2, head_dim]      a head's gate z, then its inputs
        bc    [hidden, 2, groups, state_dim]    b, then c, of each group
        dt_in [hidden, heads]

    num_layers: of the model, for the scale of random weights.
    """

    def __init__(
        self,
        state: MambaState,
        hidden: int,
        num_layers: int,
        eps: float,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        collectives: Collectives,
        options: MambaOptions = PLAIN_MAMBA,
    ) -> None:
        self.state, self.dt_limits, self.collectives = state, options.dt_limits, collectives
        self.multipliers = options.multipliers
        bias = options.bias
        heads, size, std, wide = state.heads, state.head_dim, hidden**-0.5, jnp.dtype(jnp.float32)
        shared = (2, state.groups, state.state_dim)
        self.zx = Linear((hidden,), (heads, 2, size), std, dtype, rngs, shard_axis=1, bias=bias)
        self.bc = Linear((hidden,), shared, std, dtype, rngs, bias=bias, joined=True)
        self.dt_in = Linear((hidden,), (heads,), std, dtype, rngs, shard_axis=1, bias=bias)
        taps, zero = Normal(state.width**-0.5), Constant(0.0)
        self.input_taps = parameter(rngs, taps, (state.width, heads, size), dtype, 1)
        self.shared_taps = parameter(rngs, taps, (state.width, *shared), dtype)
        biased = options.convolution_bias
        self.input_bias = parameter(rngs, zero, (heads, size), dtype, 0) if biased else None
        self.shared_bias = parameter(rngs, zero, shared, dtype) if biased else None
        self.a_log = parameter(rngs, zero, (heads,), wide, 0)
        self.dt_bias = parameter(rngs, Constant(1.0), (heads,), wide, 0)
        self.d = parameter(rngs, Constant(1.0), (heads,), wide, 0)
        gate_first = options.norm == "of gated"
        self.norm = (
            None
            if options.norm is None
            else GatedGroupNorm(state, eps, dtype, rngs, collectives, gate_first=gate_first)
        )
        all_heads = heads * collectives.size
        out_std = (all_heads * size * 2 * num_layers) ** -0.5
        self.out = Linear((heads, size), (hidden,), out_std, dtype, rngs, shard_axis=0, bias=options.last_bias)

    def mix(self, x: jax.Array, recurrence: Recurrence, backend: str | None) -> PartialSum:
        state = self.state
        of_z, of_x, of_b, of_c, of_dt = self.multipliers
        zx = _times(self.zx(x, backend=backend), (of_z, of_x), -2)
        channels = _side_by_side(zx[:, :, 1], _times(self.bc(x, backend=backend), (of_b, of_c), 1), 1)
        taps = _side_by_side(self.input_taps[...], self.shared_taps[...], 1)
        bias = None
        if self.input_bias is not None and self.shared_bias is not None:
            bias = _side_by_side(self.input_bias[...], self.shared_bias[...], 0)
        inputs, b, c = state.split(recurrence.convolve(channels, taps, bias))
        if state.own_groups < state.groups:
            first = first_group(state, self.collectives)
            b, c = (jax.lax.dynamic_slice_in_dim(z, first, state.own_groups, axis=1) for z in (b, c))
        dt = times(self.dt_in(x, jnp.dtype(jnp.float32), backend), of_dt)
        dt = jax.nn.softplus(dt + self.dt_bias[...])
        if self.dt_limits != ANY_STEP:
            dt = jnp.clip(dt, *self.dt_limits)
        y = recurrence.state_space_dual(inputs, dt, -jnp.exp(self.a_log[...]), b, c, self.d[...])
        gate = zx[:, :, 0]
        if self.norm is None:
            gated = (y.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))).astype(y.dtype)
        else:
            gated = self.norm(y, gate)
        return self.out.partial_sum(gated, backend)


def _times(x: jax.Array, factors: tuple[float, float], axis: int) -> jax.Array:
    """x, whose axis has two entries, with each multiplied by its factor, in float32, rounded to x's type."""
    if factors == (1.0, 1.0):
        return x
    shape = [1] * x.ndim
    shape[axis] = 2
    return (x.astype(jnp.float32) * jnp.asarray(factors, jnp.float32).reshape(shape)).astype(x.dtype)


def _side_by_side(of_heads: jax.Array, shared: jax.Array, axis: int) -> jax.Array:
    """Channels as `MambaState.split` takes them, of arrays [..., heads, head_dim] and [..., 2, groups, state_dim] whose
    channels begin at `axis`."""
    flat = [x.reshape(*x.shape[:axis], prod(x.shape[axis:])) for x in (of_heads, shared)]
    return jnp.concatenate(flat, axis=-1)


def mamba_pieces(
    theirs: str, ours: str, hidden: int, state: MambaState, options: MambaOptions = PLAIN_MAMBA
) -> Iterator[Piece]:
    """The tensors of a Mamba-2 layer in checkpoints, into `Mamba2`.

    in_proj has the rows of z, of inputs, of b, of c and of dt; conv1d the channels of inputs, of b and of c.
    """
    heads, size = state.heads, state.head_dim
    of_heads, shared = (heads, size), (2, state.groups, state.state_dim)
    inner, channels, width = heads * size, state.channels, state.width
    rows: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = (
        ("zx", (heads, 1, size), ()),
        ("zx", (heads, 1, size), (0, 1, 0)),
        ("bc", shared, ()),
        ("dt_in", (heads,), ()),
    )
    first, count = 0, inner + channels + heads
    for name, split, start in rows:
        part = Part((count, hidden), 0, first, prod(split))
        first += part.count
        axes, last, place = tuple(range(len(split))), len(split), (0, *start) if start else ()
        product = f"{ours}.{name}"
        tensor, shape = f"{theirs}.in_proj.weight", (count, hidden)
        yield Piece(tensor, shape, product, (*split, hidden), (last, *axes), place, part=part)
        if options.bias:
            of_bias = Part((count,), 0, part.first, part.count)
            yield Piece(f"{theirs}.in_proj.bias", (count,), f"{product}_bias", split, axes, start, part=of_bias)
    first = 0
    convolved: tuple[tuple[str, tuple[int, ...]], ...] = (("input", of_heads), ("shared", shared))
    for name, split in convolved:
        part = Part((channels, width), 0, first, prod(split))
        first += part.count
        axes, last = tuple(range(len(split))), len(split)
        tensor, taps = f"{theirs}.conv1d.weight", f"{ours}.{name}_taps"
        yield Piece(tensor, (channels, 1, width), taps, (*split, width), (last, *axes), part=part)
        if options.convolution_bias:
            of_bias = Part((channels,), 0, part.first, part.count)
            yield Piece(f"{theirs}.conv1d.bias", (channels,), f"{ours}.{name}_bias", split, axes, part=of_bias)
    for tensor, own in (("A_log", "a_log"), ("dt_bias", "dt_bias"), ("D", "d")):
        yield as_is(f"{theirs}.{tensor}", f"{ours}.{own}", heads)
    if options.norm is not None:
        yield Piece(f"{theirs}.norm.weight", (inner,), f"{ours}.norm.scale", of_heads, (0, 1))
    yield Piece(f"{theirs}.out_proj.weight", (hidden, inner), f"{ours}.out", (hidden, *of_heads), (1, 2, 0))
    if options.last_bias:
        yield as_is(f"{theirs}.out_proj.bias", f"{ours}.out_bias", hidden)
