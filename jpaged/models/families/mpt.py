"""MPT (MosaicML 2023): ALiBi, layer norms without bias, no biases, and in some sizes clipped queries, keys and
values."""

from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class MptConfig(DecoderConfig):
    """attention_scale: multiplies the product of query and key. clip: of queries, keys and values; None for none.
    bias_max: of ALiBi's slopes."""

    attention_scale: float
    clip: float | None
    bias_max: float


class MptFamily:
    """All sizes."""

    model_type = "mpt"
    base_prefix = "transformer."
    derived_tensors = ""

    def read_config(self, read: ConfigReader) -> MptConfig:
        read.refuse(("no_bias", True), ("logit_scale", None), ("expansion_ratio", 4))
        read = read.with_other_names(d_model="hidden_size", n_heads="num_attention_heads", n_layers="num_hidden_layers")
        of_attention = read.part("attn_config")
        of_attention.refuse(
            ("alibi", True), ("qk_ln", False), ("prefix_lm", False), ("attn_type", "multihead_attention")
        )
        hidden_size, num_heads = read.integer("d_model", 2048), read.integer("n_heads", 16)
        head_dim = divide_into_heads(hidden_size, num_heads)
        return MptConfig(
            **read.common(),
            hidden_size=hidden_size,
            num_layers=read.integer("n_layers", 24),
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            intermediate_size=4 * hidden_size,
            max_position_embeddings=read.integer("max_seq_len", 2048),
            tie_word_embeddings=read.flag("tie_word_embeddings", True),
            norm_eps=read.number("layer_norm_epsilon", 1e-5),
            activation="gelu",
            attention_scale=of_attention.optional_number("softmax_scale") or head_dim**-0.5,
            clip=of_attention.optional_number("clip_qkv"),
            bias_max=of_attention.number("alibi_bias_max", 8),
        )

    def module(self, config: MptConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm = partial(LayerNorm, config.hidden_size, config.norm_eps, dtype, rngs, bias=False)
        slopes = alibi_slopes(config.num_heads * collectives.size, config.bias_max)

        def block(layer: int) -> SequentialBlock:
            attention = Attention(
                config,
                layer,
                dtype,
                rngs,
                scale=config.attention_scale,
                alibi_slopes=slopes,
                clip=config.clip,
                collectives=collectives,
            )
            mlp = MLP(config, config.activation, dtype, rngs)
            return SequentialBlock(attention, mlp, attention_norm=norm(), mlp_norm=norm(), rope=None)

        return Decoder(config, block, norm, dtype, rngs, collectives)

    def tensors(self, config: MptConfig) -> Iterator[Piece | TiedTensor]:
        hidden, inner = config.hidden_size, config.intermediate_size
        yield pieces.as_is("transformer.wte.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"transformer.blocks.{i}", f"layers.{i}"
            yield pieces.norm(f"{theirs}.norm_1", f"{ours}.attention_norm", hidden)
            yield from pieces.joined_qkv(f"{theirs}.attn.Wqkv", f"{ours}.attention", config, bias=False)
            yield from pieces.output_projection(f"{theirs}.attn.out_proj", f"{ours}.attention", config, bias=False)
            yield pieces.norm(f"{theirs}.norm_2", f"{ours}.mlp_norm", hidden)
            yield from pieces.linear(f"{theirs}.ffn.up_proj", f"{ours}.mlp.up", hidden, inner, bias=False)
            yield from pieces.linear(f"{theirs}.ffn.down_proj", f"{ours}.mlp.down", inner, hidden, bias=False)
        yield pieces.norm("transformer.norm_f", "norm", hidden)
        yield pieces.head("lm_head.weight", "transformer.wte.weight", config)
