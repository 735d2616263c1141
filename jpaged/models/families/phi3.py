"""Phi-3 and Phi-4 (Abdin et al. 2024, arXiv:2404.14219, arXiv:2412.08905): Llama's layers with q, k, v in one tensor
and gate and up in another, LongRoPE in the long variants, and a part of each head rotated in Phi-4-mini."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jpaged.models.blocks import Decoder, DecoderConfig, SequentialBlock, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.layers import Attention, GatedMLP
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import RMSNorm


class Phi3Family:
    """All sizes."""

    model_type = "phi3"
    base_prefix = "model."
    derived_tensors = r"rotary_emb\.inv_freq$"

    def read_config(self, read: ConfigReader) -> DecoderConfig:
        read = read.with_entries(**_of_longrope(read))
        fields = decoder_fields(read, default_length=4096, default_eps=1e-5, rope={"rotated_fraction": 1.0})
        read.refuse(("attention_bias", False))
        window = read.optional_positive("sliding_window", fields["max_position_embeddings"])
        return DecoderConfig(**fields, layer_windows=(window,) * fields["num_layers"])

    def module(self, config: DecoderConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm = partial(RMSNorm, config.hidden_size, config.norm_eps, dtype, rngs)

        def block(layer: int) -> SequentialBlock:
            mlp = GatedMLP(config, config.activation, dtype, rngs)
            return SequentialBlock(Attention(config, layer, dtype, rngs), mlp, attention_norm=norm(), mlp_norm=norm())

        return Decoder(config, block, norm, dtype, rngs, collectives)

    def tensors(self, config: DecoderConfig) -> Iterator[Piece | TiedTensor]:
        hidden, inner, order = config.hidden_size, config.intermediate_size, config.columns
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            attention = f"{ours}.attention"
            yield pieces.norm(f"{theirs}.input_layernorm", f"{ours}.attention_norm", hidden)
            yield from pieces.joined_qkv(f"{theirs}.self_attn.qkv_proj", attention, config, bias=False, order=order)
            yield from pieces.output_projection(f"{theirs}.self_attn.o_proj", attention, config, bias=False)
            yield pieces.norm(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm", hidden)
            yield pieces.joined_gate_up(f"{theirs}.mlp.gate_up_proj.weight", f"{ours}.mlp", config)
            yield from pieces.linear(f"{theirs}.mlp.down_proj", f"{ours}.mlp.down", inner, hidden, bias=False)
        yield pieces.norm("model.norm", "norm", hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)


def _of_longrope(read: ConfigReader) -> dict[str, Any]:
    """What transformers makes of a LongRoPE: its first name was "yarn"; and the original length is 4096 unless the
    entry at the top says otherwise, whatever the RoPE's parameters say."""
    name = "rope_scaling" if read.config.get("rope_scaling") else "rope_parameters"
    parameters = read.config.get(name)
    if not isinstance(parameters, Mapping):
        return {}
    kind = parameters.get("rope_type") or parameters.get("type")
    if kind not in ("longrope", "su", "yarn"):
        return {}
    original = read.integer("original_max_position_embeddings", 4096)
    return {name: {**parameters, "rope_type": "longrope"}, "original_max_position_embeddings": original}
