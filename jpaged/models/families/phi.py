"""Phi-1, Phi-1.5 and Phi-2 (Gunasekar et al. 2023, arXiv:2306.11644): attention and MLP side by side behind one layer
norm, RoPE on a part of each head, all products with biases, the head included.

docs/adding_a_model.md writes the same family out in full.
"""

from collections.abc import Iterator
from functools import partial

import jax.numpy as jnp
from flax import nnx

from jpaged.models.blocks import Decoder, DecoderConfig, ParallelBlock, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.layers import MLP, Attention
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import LayerNorm


class PhiFamily:
    """All sizes."""

    model_type = "phi"
    base_prefix = "model."
    derived_tensors = r"rotary_emb\.inv_freq$"

    def read_config(self, read: ConfigReader) -> DecoderConfig:
        read.refuse(("qk_layernorm", False))
        rope = {"rotated_fraction": 0.5}
        fields = decoder_fields(read, eps="layer_norm_eps", default_eps=1e-5, default_activation="gelu_new", rope=rope)
        return DecoderConfig(**fields)

    def module(self, config: DecoderConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm = partial(LayerNorm, config.hidden_size, config.norm_eps, dtype, rngs)

        def block(layer: int) -> ParallelBlock:
            attention = Attention(config, layer, dtype, rngs, qkv_bias=True, output_bias=True)
            mlp = MLP(config, config.activation, dtype, rngs, bias=True)
            return ParallelBlock(attention, mlp, attention_norm=norm())

        return Decoder(config, block, norm, dtype, rngs, collectives, head_bias=True)

    def tensors(self, config: DecoderConfig) -> Iterator[Piece | TiedTensor]:
        hidden, inner = config.hidden_size, config.intermediate_size
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            attention, mlp = f"{ours}.attention", f"{ours}.mlp"
            yield from pieces.layer_norm(f"{theirs}.input_layernorm", f"{ours}.attention_norm", hidden)
            yield from pieces.separate_qkv(f"{theirs}.self_attn", attention, config, bias=True, order=config.columns)
            yield from pieces.output_projection(f"{theirs}.self_attn.dense", attention, config, bias=True)
            yield from pieces.linear(f"{theirs}.mlp.fc1", f"{mlp}.up", hidden, inner, bias=True)
            yield from pieces.linear(f"{theirs}.mlp.fc2", f"{mlp}.down", inner, hidden, bias=True)
        yield from pieces.layer_norm("model.final_layernorm", "norm", hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)
        yield pieces.head_bias("lm_head.bias", config)
