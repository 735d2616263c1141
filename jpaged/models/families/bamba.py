"""Bamba (IBM, Princeton, CMU and UIUC 2024): Llama's layers, most of which have Mamba-2 in place of attention."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from flax import nnx

from jpaged.api.errors import CheckpointError, shown
from jpaged.models.blocks import Decoder, DecoderConfig, SequentialBlock, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.layers import Attention, GatedMLP
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.mamba import Mamba2, mamba_pieces
from jpaged.models.mamba_config import MambaOptions, read_mamba_layers
from jpaged.models.norms import RMSNorm
from jpaged.models.states import MambaState


@dataclass(frozen=True, kw_only=True)
class BambaConfig(DecoderConfig):
    """attention_bias, mlp_bias: which products have biases. mamba: what Mamba-2 layers are like."""

    attention_bias: bool
    mlp_bias: bool
    mamba: MambaOptions


class BambaFamily:
    """All versions."""

    model_type = "bamba"
    base_prefix = "model."
    derived_tensors = r"rotary_emb\.inv_freq$"

    def read_config(self, read: ConfigReader) -> BambaConfig:
        read = read.with_defaults(num_key_value_heads=8)
        fields = decoder_fields(read, default_length=262144, default_eps=1e-5, rope={"rotated_fraction": 0.5})
        layers = fields["num_layers"]
        indices = read.config.get("attn_layer_indices") or []
        if not isinstance(indices, list | tuple) or not all(type(i) is int and 0 <= i < layers for i in indices):
            raise CheckpointError(
                f"config.json: attn_layer_indices must list layers from 0 to {layers - 1}, got {shown(indices)}."
            )
        kinds = ["attention" if i in indices else "mamba" for i in range(layers)]
        fields["layer_states"], mamba = read_mamba_layers(read.with_entries(layer_types=kinds), layers)
        return BambaConfig(
            **fields,
            attention_bias=read.flag("attention_bias", False),
            mlp_bias=read.flag("mlp_bias", False),
            mamba=mamba,
        )

    def module(self, config: BambaConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        hidden, layers, eps, bias = config.hidden_size, config.num_layers, config.norm_eps, config.attention_bias
        norm = partial(RMSNorm, hidden, eps, dtype, rngs)

        def block(layer: int) -> SequentialBlock:
            state = config.layer_states[layer]
            mlp = GatedMLP(config, config.activation, dtype, rngs, bias=config.mlp_bias)
            if isinstance(state, MambaState):
                mamba = Mamba2(state, hidden, layers, eps, dtype, rngs, collectives, config.mamba)
                return SequentialBlock(mamba, mlp, attention_norm=norm(), mlp_norm=norm(), rope=None)
            attention = Attention(config, layer, dtype, rngs, qkv_bias=bias, output_bias=bias)
            return SequentialBlock(attention, mlp, attention_norm=norm(), mlp_norm=norm())

        return Decoder(config, block, norm, dtype, rngs, collectives)

    def tensors(self, config: BambaConfig) -> Iterator[Piece | TiedTensor]:
        hidden, inner, bias, order = config.hidden_size, config.intermediate_size, config.attention_bias, config.columns
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours, state = f"model.layers.{i}", f"layers.{i}", config.layer_states[i]
            attention, mlp = f"{ours}.attention", f"{ours}.mlp"
            yield pieces.norm(f"{theirs}.input_layernorm", f"{ours}.attention_norm", hidden)
            if isinstance(state, MambaState):
                yield from mamba_pieces(f"{theirs}.mamba", attention, hidden, state, config.mamba)
            else:
                yield from pieces.separate_qkv(f"{theirs}.self_attn", attention, config, bias=bias, order=order)
                yield from pieces.output_projection(f"{theirs}.self_attn.o_proj", attention, config, bias=bias)
            yield pieces.norm(f"{theirs}.pre_ff_layernorm", f"{ours}.mlp_norm", hidden)
            yield from pieces.gate_and_up(f"{theirs}.feed_forward", mlp, config, bias=config.mlp_bias)
            down = f"{theirs}.feed_forward.down_proj"
            yield from pieces.linear(down, f"{mlp}.down", inner, hidden, bias=config.mlp_bias)
        yield pieces.norm("model.final_layernorm", "norm", hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)
