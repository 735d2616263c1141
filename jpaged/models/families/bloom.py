"""BLOOM (BigScience 2022, arXiv:2211.05100): ALiBi, a layer norm of the embeddings, biases everywhere."""

from collections.abc import Iterator
from functools import partial

import jax.numpy as jnp
from flax import nnx

from jpaged.models.alibi import alibi_slopes
from jpaged.models.blocks import Decoder, DecoderConfig, SequentialBlock
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader, divide_into_heads
from jpaged.models.layers import MLP, Attention
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import LayerNorm


class BloomFamily:
    """All sizes."""

    model_type = "bloom"
    base_prefix = "transformer."
    derived_tensors = ""

    def read_config(self, read: ConfigReader) -> DecoderConfig:
        read.refuse(("apply_residual_connection_post_layernorm", False))
        if read.integer("pretraining_tp", 1) > 1:  # where transformers then adds no biases
            read.refuse(("slow_but_exact", False))
        config = read.config

        def size(*names: str) -> int:
            return read.integer(next((name for name in names if config.get(name) is not None), names[0]))

        hidden_size, num_heads = size("hidden_size", "n_embed"), size("n_head", "num_attention_heads")
        num_layers = size("n_layer", "num_hidden_layers")
        return DecoderConfig(
            **read.common(),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=divide_into_heads(hidden_size, num_heads),
            intermediate_size=4 * hidden_size,
            max_position_embeddings=read.integer("seq_length", 2048),
            tie_word_embeddings=read.flag("tie_word_embeddings", True),
            norm_eps=read.number("layer_norm_epsilon", 1e-5),
            activation="gelu_tanh",
        )

    def module(self, config: DecoderConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm = partial(LayerNorm, config.hidden_size, config.norm_eps, dtype, rngs)
        slopes = alibi_slopes(config.num_heads * collectives.size)

        def block(layer: int) -> SequentialBlock:
            biases = {"qkv_bias": True, "output_bias": True}
            attention = Attention(config, layer, dtype, rngs, alibi_slopes=slopes, collectives=collectives, **biases)
            mlp = MLP(config, config.activation, dtype, rngs, bias=True)
            return SequentialBlock(attention, mlp, attention_norm=norm(), mlp_norm=norm(), rope=None)

        return Decoder(config, block, norm, dtype, rngs, collectives, embedding_norm=norm())

    def tensors(self, config: DecoderConfig) -> Iterator[Piece | TiedTensor]:
        hidden, inner = config.hidden_size, config.intermediate_size
        yield pieces.as_is("transformer.word_embeddings.weight", "embedding", config.vocab_size, hidden)
        yield from pieces.layer_norm("transformer.word_embeddings_layernorm", "embedding_norm", hidden)
        for i in range(config.num_layers):
            theirs, ours = f"transformer.h.{i}", f"layers.{i}"
            attention, mlp = f"{ours}.attention", f"{ours}.mlp"
            yield from pieces.layer_norm(f"{theirs}.input_layernorm", f"{ours}.attention_norm", hidden)
            yield from pieces.grouped_qkv(f"{theirs}.self_attention.query_key_value", attention, config, bias=True)
            yield from pieces.output_projection(f"{theirs}.self_attention.dense", attention, config, bias=True)
            yield from pieces.layer_norm(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm", hidden)
            yield from pieces.linear(f"{theirs}.mlp.dense_h_to_4h", f"{mlp}.up", hidden, inner, bias=True)
            yield from pieces.linear(f"{theirs}.mlp.dense_4h_to_h", f"{mlp}.down", inner, hidden, bias=True)
        yield from pieces.layer_norm("transformer.ln_f", "norm", hidden)
        yield pieces.head("lm_head.weight", "transformer.word_embeddings.weight", config)
