"""GPT-NeoX (Black et al. 2022, arXiv:2204.06745) and Pythia: attention and MLP side by side, each behind a layer norm
of its own, or in sequence; the first columns of each head rotated; biases everywhere."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from flax import nnx

from jpaged.models.blocks import Block, Decoder, DecoderConfig, ParallelBlock, SequentialBlock, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.layers import MLP, Attention
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import LayerNorm


@dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(DecoderConfig):
    """parallel: attention and MLP stand side by side. attention_bias: the products of attention have biases."""

    parallel: bool
    attention_bias: bool


class GPTNeoXFamily:
    """All sizes."""

    model_type = "gpt_neox"
    base_prefix = "gpt_neox."
    derived_tensors = r"\.attention\.(masked_)?bias$|rotary_emb\.inv_freq$"

    def read_config(self, read: ConfigReader) -> GPTNeoXConfig:
        # As transformers, which knows the first two by names of their own, and has a key and a value for each query.
        read = read.with_entries(partial_rotary_factor=None, rope_theta=None, num_key_value_heads=None)
        rope = {
            "rotated_fraction": read.number("rotary_pct", 0.25),
            "theta": read.number("rotary_emb_base", 10000.0),
        }
        fields = decoder_fields(read, eps="layer_norm_eps", default_eps=1e-5, default_activation="gelu", rope=rope)
        return GPTNeoXConfig(
            **fields,
            parallel=read.flag("use_parallel_residual", True),
            attention_bias=read.flag("attention_bias", True),
        )

    def module(self, config: GPTNeoXConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm = partial(LayerNorm, config.hidden_size, config.norm_eps, dtype, rngs)

        def block(layer: int) -> Block:
            attention = Attention(
                config, layer, dtype, rngs, qkv_bias=config.attention_bias, output_bias=config.attention_bias
            )
            mlp = MLP(config, config.activation, dtype, rngs, bias=True)
            if config.parallel:
                return ParallelBlock(attention, mlp, attention_norm=norm(), mlp_norm=norm())
            return SequentialBlock(attention, mlp, attention_norm=norm(), mlp_norm=norm())

        return Decoder(config, block, norm, dtype, rngs, collectives)

    def tensors(self, config: GPTNeoXConfig) -> Iterator[Piece | TiedTensor]:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.attention_bias
        yield pieces.as_is("gpt_neox.embed_in.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"gpt_neox.layers.{i}", f"layers.{i}"
            attention, mlp = f"{ours}.attention", f"{ours}.mlp"
            qkv, order = f"{theirs}.attention.query_key_value", config.columns
            yield from pieces.layer_norm(f"{theirs}.input_layernorm", f"{ours}.attention_norm", hidden)
            yield from pieces.layer_norm(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm", hidden)
            yield from pieces.grouped_qkv(qkv, attention, config, bias=bias, order=order)
            yield from pieces.output_projection(f"{theirs}.attention.dense", attention, config, bias=bias)
            yield from pieces.linear(f"{theirs}.mlp.dense_h_to_4h", f"{mlp}.up", hidden, inner, bias=True)
            yield from pieces.linear(f"{theirs}.mlp.dense_4h_to_h", f"{mlp}.down", inner, hidden, bias=True)
        yield from pieces.layer_norm("gpt_neox.final_layer_norm", "norm", hidden)
        yield pieces.head("embed_out.weight", "gpt_neox.embed_in.weight", config)
