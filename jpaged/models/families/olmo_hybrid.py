"""OLMo Hybrid (Ai2 2026): three layers of four are gated delta nets, the others attention as OLMo 3 has it.

gated delta net   norms before it and before the MLP
attention         norms after it and after the MLP, and over all queries and all keys; no rotation as published
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jpaged.api.errors import CheckpointError, UnsupportedModelError, shown
from jpaged.models.blocks import Decoder, DecoderConfig, SequentialBlock, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.delta_net import GatedDeltaNet, separate_delta_net_pieces
from jpaged.models.layers import Attention, GatedMLP
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import RMSNormOfAllHeads, WideRMSNorm
from jpaged.models.states import DeltaState

_CONVOLUTION = "stored_convolution"
"""Loading adds stored_convolution_shape to config.json: the shape of the first q_conv1d.weight in the checkpoint
(`Family.probed_tensor`). As published, the three tensors of a convolution are of queries, keys and values. transformers
5 joins them, and saves the whole in three chunks, as torch.chunk cuts it: two of a third of the channels, rounded up,
and the rest."""


@dataclass(frozen=True, kw_only=True)
class OlmoHybridConfig(DecoderConfig):
    """bias: the products of attention have biases. doubled: as of `GatedDeltaNet`.
    convolved: channels of each of a convolution's three tensors.
    """

    bias: bool
    doubled: bool
    convolved: tuple[int, int, int]


class OlmoHybridFamily:
    """All versions."""

    model_type = "olmo_hybrid"
    base_prefix = "model."
    derived_tensors = r"rotary_emb\.inv_freq$|^mtp"
    probed_tensor = _CONVOLUTION, "q_conv1d.weight"

    def aliases(self, config: OlmoHybridConfig) -> tuple[tuple[str, str], ...]:
        """Other names of norms, which transformers gives them when it saves a model."""
        names = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
        layers = [f"{prefix}layers.{i}" for prefix in (self.base_prefix, "") for i in range(config.num_layers)]
        return tuple((f"{layer}.{theirs}.", f"{layer}.{ours}.") for layer in layers for theirs, ours in names.items())

    def read_config(self, read: ConfigReader) -> OlmoHybridConfig:
        if read.config.get("hidden_act") != "swish":  # the same
            read.refuse(("hidden_act", "silu"))
        read.refuse(("linear_use_gate", True))
        rotated = _is_rotated(read)
        unrotated = {"rope_theta": None, "rope_scaling": None, "rope_parameters": None}
        fields = decoder_fields(read if rotated else read.with_entries(**unrotated), default_length=65536)
        num_layers, state = fields["num_layers"], _state(read, fields["hidden_size"], fields["num_heads"])
        if not rotated:
            fields |= {"ropes": (), "layer_ropes": (None,) * num_layers}
        kinds = _layer_kinds(read, num_layers)
        return OlmoHybridConfig(
            **fields,
            layer_states=tuple(state if kind == "linear_attention" else None for kind in kinds),
            bias=read.flag("attention_bias", False),
            doubled=read.flag("linear_allow_neg_eigval", True),
            convolved=_convolved(read, state),
        )

    def module(self, config: OlmoHybridConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        hidden, eps = config.hidden_size, config.norm_eps
        norm = partial(WideRMSNorm, hidden, eps, dtype, rngs)
        options: dict[str, Any] = {"qkv_bias": config.bias, "output_bias": config.bias, "collectives": collectives}

        def block(layer: int) -> SequentialBlock:
            state, mlp = config.layer_states[layer], GatedMLP(config, config.activation, dtype, rngs)
            if isinstance(state, DeltaState):
                # Its own norm has this epsilon whatever config.json says.
                delta = GatedDeltaNet(state, hidden, config.num_layers, 1e-5, dtype, rngs, doubled=config.doubled)
                return SequentialBlock(delta, mlp, attention_norm=norm(), mlp_norm=norm(), rope=None)
            return SequentialBlock(
                Attention(config, layer, dtype, rngs, **options),
                mlp,
                after_attention=norm(),
                after_mlp=norm(),
                head_norms=RMSNormOfAllHeads(config, eps, dtype, rngs),
                rope=config.layer_ropes[layer],
            )

        return Decoder(config, block, norm, dtype, rngs, collectives)

    def tensors(self, config: OlmoHybridConfig) -> Iterator[Piece | TiedTensor]:
        hidden, bias = config.hidden_size, config.bias
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours, state = f"model.layers.{i}", f"layers.{i}", config.layer_states[i]
            if isinstance(state, DeltaState):
                norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
                delta = f"{theirs}.linear_attn", f"{ours}.attention"
                yield from separate_delta_net_pieces(*delta, hidden, state, config.convolved)
            else:
                norms = {"post_attention_layernorm": "after_attention", "post_feedforward_layernorm": "after_mlp"}
                attention = f"{theirs}.self_attn"
                yield from pieces.separate_qkv(attention, f"{ours}.attention", config, bias=bias)
                of_heads = f"{attention}.q_norm", f"{attention}.k_norm"
                yield from pieces.head_norms(of_heads, f"{ours}.head_norms", config, flat=True)
                yield from pieces.output_projection(f"{attention}.o_proj", f"{ours}.attention", config, bias=bias)
            for name, own in norms.items():
                yield pieces.norm(f"{theirs}.{name}", f"{ours}.{own}", hidden)
            yield from pieces.gated_mlp(f"{theirs}.mlp", f"{ours}.mlp", hidden, config.intermediate_size)
        yield pieces.norm("model.norm", "norm", hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)


def _is_rotated(read: ConfigReader) -> bool:
    """Whether queries and keys are rotated. A null rope_theta means no RoPE; a missing one has a default.

    Raises UnsupportedModelError where RoPE's parameters are nested: transformers looks for rope_theta outside alone.
    """
    parameters = read.config.get("rope_scaling") or read.config.get("rope_parameters") or {}
    if isinstance(parameters, Mapping) and any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedModelError(
            f"config.json: RoPE parameters by layer type are not supported for OLMo Hybrid: {shown(parameters)}."
        )
    said = parameters if isinstance(parameters, Mapping) and "rope_theta" in parameters else read.config
    return said.get("rope_theta", 0) is not None


def _state(read: ConfigReader, hidden_size: int, num_heads: int) -> DeltaState:
    key_heads = read.integer("linear_num_key_heads", num_heads)
    key_dim = read.integer("linear_key_head_dim", max(1, int(0.75 * hidden_size / key_heads)))
    state = DeltaState(
        key_heads=key_heads,
        value_heads=read.integer("linear_num_value_heads", num_heads),
        key_dim=key_dim,
        value_dim=read.integer("linear_value_head_dim", 2 * key_dim),
        width=read.integer("linear_conv_kernel_dim", 4),
    )
    if state.value_heads % key_heads or state.width < 2:
        raise CheckpointError(
            f"config.json: linear_num_value_heads ({state.value_heads}) must be a multiple of linear_num_key_heads"
            f" ({key_heads}), and linear_conv_kernel_dim ({state.width}) at least 2."
        )
    return state


def _layer_kinds(read: ConfigReader, num_layers: int) -> tuple[str, ...]:
    kinds = read.layer_kinds(num_layers, ("linear_attention", "full_attention"))
    if kinds is None:
        default = [("linear_attention", "full_attention")[i % 4 == 3] for i in range(num_layers)]
        kinds = (*default[:-1], "full_attention" if num_layers < 4 else default[-1])
    if len({*kinds}) < 2:
        raise UnsupportedModelError(
            f"config.json: layer_types of {kinds[0]} alone are not supported; both types must be among them."
        )
    return kinds


def _convolved(read: ConfigReader, state: DeltaState) -> tuple[int, int, int]:
    keys, values = state.key_heads * state.key_dim, state.value_heads * state.value_dim
    chunk = -(-state.channels // 3)
    if read.config.get(f"{_CONVOLUTION}_shape") == [chunk, 1, state.width]:
        return chunk, chunk, state.channels - 2 * chunk
    return keys, keys, values
