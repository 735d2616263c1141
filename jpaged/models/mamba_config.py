"""What config.json says of Mamba-2 layers, as Granite 4, Bamba and Falcon-H1 spell it."""

from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from jpaged.api.checks import is_number
from jpaged.api.errors import CheckpointError, UnsupportedModelError, shown
from jpaged.models.config_reader import ConfigReader
from jpaged.models.states import MambaState

ANY_STEP = (0.0, inf)
"""Limits of dt that limit nothing."""


@dataclass(frozen=True)
class MambaOptions:
    """bias: of a layer's products. output_bias: of the last one; as the others have it if None.
    convolution_bias: of its convolution. dt_limits: the least and the largest dt.
    norm: what happens to the heads' outputs: the norm of them times the gate, the norm of them, then times the gate; or
        they are multiplied by the gate alone.
    multipliers: of the gate, of inputs, b, c and dt as the products give them (Falcon-H1).
    """

    bias: bool = False
    output_bias: bool | None = None
    convolution_bias: bool = True
    dt_limits: tuple[float, float] = ANY_STEP
    norm: Literal["of gated", "before gate"] | None = "of gated"
    multipliers: tuple[float, ...] = (1.0,) * 5

    @property
    def last_bias(self) -> bool:
        """Whether the last product has a bias."""
        return self.bias if self.output_bias is None else self.output_bias


PLAIN_MAMBA = MambaOptions()


def read_mamba_layers(read: ConfigReader, num_layers: int) -> tuple[tuple[MambaState | None, ...], MambaOptions]:
    """For each layer the state that it keeps, None for attention; and what all Mamba-2 layers are like.

    Raises:
        CheckpointError: entries are of the wrong type, or do not go together.
        UnsupportedModelError: there are other kinds of layers, no attention, or another activation than SiLU.
    """
    recurrent = _read_kinds(read, num_layers)
    if not any(recurrent):
        return (None,) * num_layers, PLAIN_MAMBA
    state, options = read_mamba(read, read.integer("mamba_expand", 2) * read.integer("hidden_size"))
    return tuple(state if one else None for one in recurrent), options


def read_mamba(read: ConfigReader, inner: int) -> tuple[MambaState, MambaOptions]:
    """What one Mamba-2 layer keeps, and what it is like. inner: columns of all its heads.

    Raises: as `read_mamba_layers`.
    """
    read.refuse(("hidden_act", "silu"))
    options = MambaOptions(
        bias=read.flag("mamba_proj_bias", False),
        convolution_bias=read.flag("mamba_conv_bias", True),
        dt_limits=_read_dt_limits(read),
    )
    return _read_state(read, inner), options


def _read_state(read: ConfigReader, inner: int) -> MambaState:
    heads = read.integer("mamba_n_heads", 128)
    size = read.config.get("mamba_d_head", "auto")
    head_dim = inner // heads if size in ("auto", None) else read.integer("mamba_d_head")
    if heads * head_dim != inner:
        raise CheckpointError(
            f"config.json: mamba_n_heads ({heads}) times mamba_d_head ({shown(size)}) must be mamba_expand times"
            f" hidden_size, or mamba_d_ssm where the model has that ({inner})."
        )
    groups, width = read.integer("mamba_n_groups", 1), read.integer("mamba_d_conv", 4)
    if heads % groups or width < 2:
        raise CheckpointError(
            f"config.json: mamba_n_groups ({groups}) must divide mamba_n_heads ({heads}), and mamba_d_conv ({width})"
            " must be at least 2."
        )
    return MambaState(
        heads=heads,
        groups=groups,
        group_heads=heads // groups,
        head_dim=head_dim,
        state_dim=read.integer("mamba_d_state", 256),
        width=width,
    )


def _read_dt_limits(read: ConfigReader) -> tuple[float, float]:
    """config.json's time_step_limit; infinity is a number there, or {"__float__": "Infinity"} (transformers 5)."""
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


def _read_kinds(read: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Of each layer whether it is recurrent, as layer_types (or layers_block_type) says; all are if it does not."""
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
