"""EXAONE 4.0 (LG AI Research 2025, arXiv:2507.11407): norms after attention and MLP instead of before them, and norms
of each query and key. The 32B has windows in three layers of four, and rotates queries and keys in those alone."""

from collections.abc import Iterator
from functools import partial

import jax.numpy as jnp
from flax import nnx

from jpaged.models.blocks import Decoder, DecoderConfig, SequentialBlock, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.layers import Attention, GatedMLP
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import RMSNorm


class Exaone4Family:
    """All sizes."""

    model_type = "exaone4"
    base_prefix = "model."
    derived_tensors = r"rotary_emb\.inv_freq$"

    def read_config(self, read: ConfigReader) -> DecoderConfig:
        fields = decoder_fields(read.with_defaults(num_key_value_heads=32), default_eps=1e-5)
        if read.optional_positive("sliding_window", 4096) is None:
            return DecoderConfig(**fields)
        num_layers = fields["num_layers"]
        # The published pattern is "LLLG", which stands beside layer_types and says no more than those.
        kinds = read.layer_kinds(num_layers) or read.kinds_of_layers(num_layers, every=4)
        return DecoderConfig(
            **fields | {"layer_ropes": tuple(0 if kind == "sliding_attention" else None for kind in kinds)},
            layer_windows=read.layer_windows(kinds, 4096),
        )

    def module(self, config: DecoderConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm = partial(RMSNorm, config.hidden_size, config.norm_eps, dtype, rngs)
        of_heads = partial(RMSNorm, config.head_dim, config.norm_eps, dtype, rngs)

        def block(layer: int) -> SequentialBlock:
            return SequentialBlock(
                Attention(config, layer, dtype, rngs),
                GatedMLP(config, config.activation, dtype, rngs),
                after_attention=norm(),
                after_mlp=norm(),
                query_norm=of_heads(),
                key_norm=of_heads(),
                rope=config.layer_ropes[layer],
            )

        return Decoder(config, block, norm, dtype, rngs, collectives)

    def tensors(self, config: DecoderConfig) -> Iterator[Piece | TiedTensor]:
        hidden = config.hidden_size
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            attention = f"{theirs}.self_attn"
            yield from pieces.separate_qkv(attention, f"{ours}.attention", config, bias=False)
            yield pieces.norm(f"{attention}.q_norm", f"{ours}.query_norm", config.head_dim)
            yield pieces.norm(f"{attention}.k_norm", f"{ours}.key_norm", config.head_dim)
            yield from pieces.output_projection(f"{attention}.o_proj", f"{ours}.attention", config, bias=False)
            yield pieces.norm(f"{theirs}.post_attention_layernorm", f"{ours}.after_attention", hidden)
            yield from pieces.gated_mlp(f"{theirs}.mlp", f"{ours}.mlp", hidden, config.intermediate_size)
            yield pieces.norm(f"{theirs}.post_feedforward_layernorm", f"{ours}.after_mlp", hidden)
        yield pieces.norm("model.norm", "norm", hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)
