"""SmolLM3 (Hugging Face 2025): Llama's layers, every fourth without RoPE."""

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
from jpaged.models.norms import RMSNorm


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(DecoderConfig):
    """attention_bias, mlp_bias: which products have biases."""

    attention_bias: bool
    mlp_bias: bool


class SmolLM3Family:
    """All sizes."""

    model_type = "smollm3"
    base_prefix = "model."
    derived_tensors = r"rotary_emb\.inv_freq$"

    def read_config(self, read: ConfigReader) -> SmolLM3Config:
        read = read.with_defaults(num_key_value_heads=4)
        fields = decoder_fields(read, default_length=32768, tied=True, rope={"theta": 2e6})
        num_layers = fields["num_layers"]
        every = read.integer("no_rope_layer_interval", 4)
        rotated = read.config.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(num_layers)]
        if not isinstance(rotated, list | tuple) or len(rotated) < num_layers or set(rotated) - {0, 1}:
            raise CheckpointError(
                f"config.json: no_rope_layers must list 0 or 1 for each of {num_layers} layers, got {shown(rotated)}."
            )
        kinds = read.layer_kinds(num_layers)  # transformers heeds them without use_sliding_window, too
        if kinds is None and read.flag("use_sliding_window", False):
            kinds = tuple("full_attention" if has_rope else "sliding_attention" for has_rope in rotated[:num_layers])
        if kinds is not None and read.config.get("sliding_window") is not None:
            fields["layer_windows"] = read.layer_windows(kinds)
        return SmolLM3Config(
            **fields | {"layer_ropes": tuple(0 if has_rope else None for has_rope in rotated[:num_layers])},
            attention_bias=read.flag("attention_bias", False),
            mlp_bias=read.flag("mlp_bias", False),
        )

    def module(self, config: SmolLM3Config, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm = partial(RMSNorm, config.hidden_size, config.norm_eps, dtype, rngs)

        def block(layer: int) -> SequentialBlock:
            return SequentialBlock(
                Attention(
                    config, layer, dtype, rngs, qkv_bias=config.attention_bias, output_bias=config.attention_bias
                ),
                GatedMLP(config, config.activation, dtype, rngs, bias=config.mlp_bias),
                attention_norm=norm(),
                mlp_norm=norm(),
                rope=config.layer_ropes[layer],
            )

        return Decoder(config, block, norm, dtype, rngs, collectives)

    def tensors(self, config: SmolLM3Config) -> Iterator[Piece | TiedTensor]:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.attention_bias
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            attention, mlp = f"{ours}.attention", f"{ours}.mlp"
            yield pieces.norm(f"{theirs}.input_layernorm", f"{ours}.attention_norm", hidden)
            yield from pieces.separate_qkv(f"{theirs}.self_attn", attention, config, bias=bias)
            yield from pieces.output_projection(f"{theirs}.self_attn.o_proj", attention, config, bias=bias)
            yield pieces.norm(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm", hidden)
            yield from pieces.gate_and_up(f"{theirs}.mlp", mlp, config, bias=config.mlp_bias)
            yield from pieces.linear(f"{theirs}.mlp.down_proj", f"{mlp}.down", inner, hidden, bias=config.mlp_bias)
        yield pieces.norm("model.norm", "norm", hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)
