"""StarCoder2 (Lozhkov et al. 2024, arXiv:2402.19173): layer norms, plain MLPs, biases everywhere, RoPE, a sliding
window."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from flax import nnx

from jpaged.models.blocks import Decoder, DecoderConfig, SequentialBlock, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.layers import MLP, Attention
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import LayerNorm


@dataclass(frozen=True, kw_only=True)
class Starcoder2Config(DecoderConfig):
    """bias: all products of the layers have biases, or none has."""

    bias: bool


class Starcoder2Family:
    """All sizes."""

    model_type = "starcoder2"
    base_prefix = "model."
    derived_tensors = r"rotary_emb\.inv_freq$"

    def read_config(self, read: ConfigReader) -> Starcoder2Config:
        read = read.with_defaults(num_key_value_heads=2)
        fields = decoder_fields(
            read,
            default_length=4096,
            eps="norm_epsilon",
            default_eps=1e-5,
            default_activation="gelu_pytorch_tanh",
            tied=True,
        )
        window = read.optional_positive("sliding_window", fields["max_position_embeddings"])
        windows = (window,) * fields["num_layers"]
        return Starcoder2Config(**fields, layer_windows=windows, bias=read.flag("use_bias", True))

    def module(self, config: Starcoder2Config, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm = partial(LayerNorm, config.hidden_size, config.norm_eps, dtype, rngs)
        bias = config.bias

        def block(layer: int) -> SequentialBlock:
            attention = Attention(config, layer, dtype, rngs, qkv_bias=bias, output_bias=bias)
            mlp = MLP(config, config.activation, dtype, rngs, bias=bias)
            return SequentialBlock(attention, mlp, attention_norm=norm(), mlp_norm=norm())

        return Decoder(config, block, norm, dtype, rngs, collectives)

    def tensors(self, config: Starcoder2Config) -> Iterator[Piece | TiedTensor]:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.bias
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            attention, mlp = f"{ours}.attention", f"{ours}.mlp"
            yield from pieces.layer_norm(f"{theirs}.input_layernorm", f"{ours}.attention_norm", hidden)
            yield from pieces.separate_qkv(f"{theirs}.self_attn", attention, config, bias=bias)
            yield from pieces.output_projection(f"{theirs}.self_attn.o_proj", attention, config, bias=bias)
            yield from pieces.layer_norm(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm", hidden)
            yield from pieces.linear(f"{theirs}.mlp.c_fc", f"{mlp}.up", hidden, inner, bias=bias)
            yield from pieces.linear(f"{theirs}.mlp.c_proj", f"{mlp}.down", inner, hidden, bias=bias)
        yield from pieces.layer_norm("model.norm", "norm", hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)
