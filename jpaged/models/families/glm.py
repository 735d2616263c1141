"""GLM-4 (Team GLM 2024, arXiv:2406.12793): half of each head is rotated, in neighbouring pairs; biases of queries, keys
and values; joined gate and up. The models of April 2025 (GLM-4-0414) have norms after attention and MLP too."""

from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class GlmConfig(DecoderConfig):
    """qkv_bias: queries, keys and values have biases. norms_after: attention and MLP have a norm behind them."""

    qkv_bias: bool
    norms_after: bool


@dataclass(frozen=True)
class GlmFamily:
    """One of the architectures. norms_after: see `GlmConfig`."""

    model_type: str
    norms_after: bool

    base_prefix = "model."
    derived_tensors = r"rotary_emb\.inv_freq$"

    def read_config(self, read: ConfigReader) -> GlmConfig:
        rope = {"rotated_fraction": 0.5, "interleaved": True}
        read = read.with_defaults(num_key_value_heads=2)
        fields = decoder_fields(read, default_length=131072, head_dim=128, default_eps=1.5625e-7, rope=rope)
        return GlmConfig(**fields, qkv_bias=read.flag("attention_bias", True), norms_after=self.norms_after)

    def module(self, config: GlmConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm = partial(RMSNorm, config.hidden_size, config.norm_eps, dtype, rngs)

        def block(layer: int) -> SequentialBlock:
            return SequentialBlock(
                Attention(config, layer, dtype, rngs, qkv_bias=config.qkv_bias),
                GatedMLP(config, config.activation, dtype, rngs),
                attention_norm=norm(),
                after_attention=norm() if config.norms_after else None,
                mlp_norm=norm(),
                after_mlp=norm() if config.norms_after else None,
            )

        return Decoder(config, block, norm, dtype, rngs, collectives)

    def tensors(self, config: GlmConfig) -> Iterator[Piece | TiedTensor]:
        hidden, inner = config.hidden_size, config.intermediate_size
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            attention, mlp = f"{ours}.attention", f"{ours}.mlp"
            yield pieces.norm(f"{theirs}.input_layernorm", f"{ours}.attention_norm", hidden)
            yield from pieces.separate_qkv(
                f"{theirs}.self_attn", attention, config, bias=config.qkv_bias, order=config.columns
            )
            yield from pieces.output_projection(f"{theirs}.self_attn.o_proj", attention, config, bias=False)
            yield pieces.norm(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm", hidden)
            if config.norms_after:
                yield pieces.norm(f"{theirs}.post_self_attn_layernorm", f"{ours}.after_attention", hidden)
                yield pieces.norm(f"{theirs}.post_mlp_layernorm", f"{ours}.after_mlp", hidden)
            yield pieces.joined_gate_up(f"{theirs}.mlp.gate_up_proj.weight", mlp, config)
            yield from pieces.linear(f"{theirs}.mlp.down_proj", f"{mlp}.down", inner, hidden, bias=False)
        yield pieces.norm("model.norm", "norm", hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)


GLM = GlmFamily("glm", False)
GLM4 = GlmFamily("glm4", True)
