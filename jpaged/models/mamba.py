"""Mamba-2 (Dao and Gu 2024, arXiv:2405.21060, section 7), as Granite 4 and Bamba have it.

    x --zx--> z, inputs }
      --bc--> b, c      } --short convolution--> inputs, b, c --state space duality--> y --times silu(z), norm--> out
      --dt_in--> dt = softplus(dt + dt_bias), within limits; a = -exp(a_log)

Heads are split over devices, and groups of heads, which share b and c, with them. Where there are fewer groups than
devices, each device computes b and c of all groups, and the norm of a group adds up squares over devices.
"""

from collections.abc import Iterator
from math import inf, prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.api.checks import is_number
from jpaged.api.errors import CheckpointError, UnsupportedModelError, shown
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.family import Attend
from jpaged.models.linear import Linear, PartialSum
from jpaged.models.loading.pieces import Part, Piece, as_is
from jpaged.models.norms import HeadNorms, Norm
from jpaged.models.parameters import Constant, Normal, parameter
from jpaged.models.recurrence import Recurrence, recurrence_of
from jpaged.models.states import MambaState

ANY_STEP = (0.0, inf)
"""Limits of dt that limit nothing."""


class GatedGroupNorm(nnx.Module):
    """The RMS norm, over each group of heads, of y times silu(gate); in float32, rounded before the scale.

    scale: [heads, head_dim].
    """

    def __init__(
        self, state: MambaState, eps: float, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives
    ) -> None:
        self.state, self.eps, self.collectives = state, eps, collectives
        self.scale = parameter(rngs, Constant(1.0), (state.heads, state.head_dim), dtype, 0)

    def __call__(self, y: jax.Array, gate: jax.Array) -> jax.Array:
        """[T, heads, head_dim], twice -> [T, heads, head_dim]."""
        state, tokens = self.state, y.shape[0]
        wide = y.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
        own = state.groups if state.has_whole_groups else 1
        grouped = wide.reshape(tokens, own, -1)
        sums = jnp.sum(jnp.square(grouped), axis=-1, keepdims=True)
        if not state.has_whole_groups:
            sums = self._of_whole_groups(sums)
        factors = jax.lax.rsqrt(sums / (state.group_heads * state.head_dim) + self.eps)
        return self.scale[...] * (grouped * factors).reshape(y.shape).astype(y.dtype)

    def _of_whole_groups(self, sums: jax.Array) -> jax.Array:
        """[T, 1, 1], of a part of one group on each shard -> of the whole group."""
        groups = self.state.groups
        if groups == 1:
            return self.collectives.all_reduce(sums)
        mine = jnp.arange(groups)[:, None] == own_group(self.state, self.collectives)
        return jnp.sum(jnp.where(mine, self.collectives.all_reduce(jnp.where(mine, sums, 0.0)), 0.0), 1, keepdims=True)


def own_group(state: MambaState, collectives: Collectives) -> jax.Array | int:
    """Which group this shard's heads are of, where they are some of one."""
    return collectives.first(state.heads) // state.group_heads


class Mamba2(nnx.Module):
    """A Mamba-2 layer, without the norm before it.

        zx    [hidden, heads, 2, head_dim]      a head's gate z, then its inputs
        bc    [hidden, 2, groups, state_dim]    b, then c, of each group
        dt_in [hidden, heads]

    num_layers: of the model, for the scale of random weights. dt_limits: the least and the largest dt.
    bias: of the products. convolution_bias: of the convolution.
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
        *,
        dt_limits: tuple[float, float] = ANY_STEP,
        bias: bool = False,
        convolution_bias: bool = True,
    ) -> None:
        self.state, self.dt_limits, self.collectives = state, dt_limits, collectives
        heads, size, wide = state.heads, state.head_dim, jnp.dtype(jnp.float32)
        std, by_group = hidden**-0.5, 2 if state.has_whole_groups else None
        shared = (2, state.groups, state.state_dim)
        self.zx = Linear((hidden,), (heads, 2, size), std, dtype, rngs, shard_axis=1, bias=bias)
        self.bc = Linear((hidden,), shared, std, dtype, rngs, shard_axis=by_group, bias=bias)
        self.dt_in = Linear((hidden,), (heads,), std, dtype, rngs, shard_axis=1, bias=bias)
        taps, zero = Normal(state.width**-0.5), Constant(0.0)
        self.input_taps = parameter(rngs, taps, (state.width, heads, size), dtype, 1)
        self.shared_taps = parameter(rngs, taps, (state.width, *shared), dtype, by_group)
        biased, axis = convolution_bias, None if by_group is None else 1
        self.input_bias = parameter(rngs, zero, (heads, size), dtype, 0) if biased else None
        self.shared_bias = parameter(rngs, zero, shared, dtype, axis) if biased else None
        self.a_log = parameter(rngs, zero, (heads,), wide, 0)
        self.dt_bias = parameter(rngs, Constant(1.0), (heads,), wide, 0)
        self.d = parameter(rngs, Constant(1.0), (heads,), wide, 0)
        self.norm = GatedGroupNorm(state, eps, dtype, rngs, collectives)
        all_heads = heads * collectives.size
        out_std = (all_heads * size * 2 * num_layers) ** -0.5
        self.out = Linear((heads, size), (hidden,), out_std, dtype, rngs, shard_axis=0, bias=bias)

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
            raise ValueError("A Mamba-2 layer takes no rotation, and no norms of queries and keys.")
        state, recurrence = self.state, recurrence_of(attend)
        zx = self.zx(x, backend=backend)
        channels = _side_by_side(zx[:, :, 1], self.bc(x, backend=backend), 1)
        taps = _side_by_side(self.input_taps[...], self.shared_taps[...], 1)
        bias = None
        if self.input_bias is not None and self.shared_bias is not None:
            bias = _side_by_side(self.input_bias[...], self.shared_bias[...], 0)
        inputs, b, c = state.split(recurrence.convolve(channels, taps, bias))
        if not state.has_whole_groups and state.groups > 1:
            group = own_group(state, self.collectives)
            b, c = (jax.lax.dynamic_slice_in_dim(z, group, 1, axis=1) for z in (b, c))
        dt = jax.nn.softplus(self.dt_in(x, jnp.dtype(jnp.float32), backend) + self.dt_bias[...])
        if self.dt_limits != ANY_STEP:
            dt = jnp.clip(dt, *self.dt_limits)
        y = recurrence.state_space_dual(inputs, dt, -jnp.exp(self.a_log[...]), b, c, self.d[...])
        return self.out.partial_sum(self.norm(y, zx[:, :, 0]), backend)


def _side_by_side(of_heads: jax.Array, shared: jax.Array, axis: int) -> jax.Array:
    """Channels as `MambaState.split` takes them, of arrays [..., heads, head_dim] and [..., 2, groups, state_dim] whose
    channels begin at `axis`."""
    flat = [x.reshape(*x.shape[:axis], prod(x.shape[axis:])) for x in (of_heads, shared)]
    return jnp.concatenate(flat, axis=-1)


def mamba_pieces(
    theirs: str, ours: str, hidden: int, state: MambaState, *, bias: bool = False, convolution_bias: bool = True
) -> Iterator[Piece]:
    """The tensors of a Mamba-2 layer in checkpoints, into `Mamba2`. bias, convolution_bias: as of that.

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
        if bias:
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
        if convolution_bias:
            of_bias = Part((channels,), 0, part.first, part.count)
            yield Piece(f"{theirs}.conv1d.bias", (channels,), f"{ours}.{name}_bias", split, axes, part=of_bias)
    for tensor, own in (("A_log", "a_log"), ("dt_bias", "dt_bias"), ("D", "d")):
        yield as_is(f"{theirs}.{tensor}", f"{ours}.{own}", heads)
    yield Piece(f"{theirs}.norm.weight", (inner,), f"{ours}.norm.scale", of_heads, (0, 1))
    yield Piece(f"{theirs}.out_proj.weight", (hidden, inner), f"{ours}.out", (hidden, *of_heads), (1, 2, 0))
    if bias:
        yield as_is(f"{theirs}.out_proj.bias", f"{ours}.out_bias", hidden)


def read_mamba_state(read: ConfigReader) -> MambaState:
    """As config.json of Granite 4 and Bamba has it: mamba_n_heads and so on.

    Raises:
        CheckpointError: entries are missing, or do not go together.
    """
    hidden, heads = read.integer("hidden_size"), read.integer("mamba_n_heads", 128)
    inner = read.integer("mamba_expand", 2) * hidden
    size = read.config.get("mamba_d_head", "auto")
    head_dim = inner // heads if size in ("auto", None) else read.integer("mamba_d_head")
    if heads * head_dim != inner:
        raise CheckpointError(
            f"config.json: mamba_n_heads ({heads}) times mamba_d_head ({shown(size)}) must be mamba_expand times"
            f" hidden_size ({inner})."
        )
    groups, width = read.integer("mamba_n_groups", 1), read.integer("mamba_d_conv", 4)
    return checked_state(
        MambaState(
            heads=heads,
            groups=groups,
            group_heads=heads // groups,
            head_dim=head_dim,
            state_dim=read.integer("mamba_d_state", 256),
            width=width,
        ),
        "mamba_n_heads",
        "mamba_n_groups",
        "mamba_d_conv",
    )


def checked_state(state: MambaState, heads: str, groups: str, width: str) -> MambaState:
    """The state. heads, groups, width: what config.json calls these.

    Raises:
        CheckpointError: groups do not divide the heads, or the convolution has one tap.
    """
    if state.heads % state.groups or state.width < 2:
        raise CheckpointError(
            f"config.json: {groups} ({state.groups}) must divide {heads} ({state.heads}), and {width} ({state.width})"
            " must be at least 2."
        )
    return state


def read_dt_limits(read: ConfigReader) -> tuple[float, float]:
    """config.json's time_step_limit; infinity is a number there, or {"__float__": "Infinity"} (transformers 5).

    Raises:
        CheckpointError: it is no pair of numbers, the least first.
    """
    limits: Any = read.config.get("time_step_limit")
    if limits is None:
        return ANY_STEP
    pair = [inf if one == {"__float__": "Infinity"} else one for one in limits] if _is_pair(limits) else []
    if not pair or not all(is_number(one) for one in pair) or not 0 <= pair[0] <= pair[1]:
        raise CheckpointError(
            f"config.json: time_step_limit must be two numbers, the least first, got {shown(limits)}."
        )
    return float(pair[0]), float(pair[1])


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2


def read_layer_kinds(read: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Of each layer whether it is recurrent, as config.json's layer_types (or layers_block_type) says; all are if it
    does not.

    Raises:
        CheckpointError: it is no list of so many layers.
        UnsupportedModelError: there are others than Mamba-2 layers and attention, or no attention.
    """
    kinds = read.config.get("layer_types") or read.config.get("layers_block_type") or ["mamba"] * num_layers
    if not isinstance(kinds, list | tuple) or len(kinds) != num_layers:
        raise CheckpointError(f"config.json: layer_types must list {num_layers} layers, got {shown(kinds)}.")
    recurrent = ("mamba", "linear_attention")  # the latter is what transformers 5 calls them
    attention = ("attention", "full_attention")
    for kind in kinds:
        if kind not in (*recurrent, *attention):
            raise UnsupportedModelError(
                f"config.json: layer type {shown(kind)} is not supported; supported: mamba, attention."
            )
    if not any(kind in attention for kind in kinds):
        raise UnsupportedModelError(
            "config.json: layer_types of mamba layers alone are not supported, only with attention among them."
        )
    return tuple(kind in recurrent for kind in kinds)
