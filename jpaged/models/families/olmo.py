"""OLMo (Groeneveld et al. 2024, arXiv:2402.00838), OLMo 2 and OLMo 3 (OLMo Team 2024, arXiv:2501.00656).

OLMo        Llama's layers, whose norms are layer norms without weights; q, k, v may be clipped
OLMo 2      norms after attention and MLP instead of before them, and norms over the queries of all heads and all keys
OLMo 3      as OLMo 2; windows in three layers of four, which stretch no RoPE
"""

from collections.abc import Iterator
from dataclasses import dataclass
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
from jpaged.models.norms import RMSNormOfAllHeads, UnscaledLayerNorm, WideRMSNorm
from jpaged.models.rope import window_rope

_THETA = 500000.0


@dataclass(frozen=True, kw_only=True)
class OlmoConfig(DecoderConfig):
    """bias: the products of attention have biases. clip: of queries, keys and values (OLMo); None for none."""

    bias: bool
    clip: float | None = None


class FirstOlmoFamily:
    """OLMo of 2024."""

    model_type = "olmo"
    base_prefix = "model."
    derived_tensors = r"rotary_emb\.inv_freq$"

    def read_config(self, read: ConfigReader) -> OlmoConfig:
        fields = decoder_fields(read) | {"norm_eps": 1e-5}  # whatever config.json says
        return OlmoConfig(**fields, bias=read.flag("attention_bias", False), clip=read.optional_number("clip_qkv"))

    def module(self, config: OlmoConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm = partial(UnscaledLayerNorm, config.norm_eps)
        options: dict[str, Any] = {"qkv_bias": config.bias, "output_bias": config.bias, "clip": config.clip}

        def block(layer: int) -> SequentialBlock:
            attention = Attention(config, layer, dtype, rngs, **options)
            mlp = GatedMLP(config, config.activation, dtype, rngs)
            return SequentialBlock(attention, mlp, attention_norm=norm(), mlp_norm=norm())

        return Decoder(config, block, norm, dtype, rngs, collectives)

    def tensors(self, config: OlmoConfig) -> Iterator[Piece | TiedTensor]:
        hidden, bias = config.hidden_size, config.bias
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            attention = f"{theirs}.self_attn"
            yield from pieces.separate_qkv(attention, f"{ours}.attention", config, bias=bias)
            yield from pieces.output_projection(f"{attention}.o_proj", f"{ours}.attention", config, bias=bias)
            yield from pieces.gated_mlp(f"{theirs}.mlp", f"{ours}.mlp", hidden, config.intermediate_size)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)


@dataclass(frozen=True)
class OlmoFamily:
    """One of the later architectures. has_windows: OLMo 3."""

    model_type: str
    has_windows: bool

    base_prefix = "model."
    derived_tensors = r"rotary_emb\.inv_freq$"

    def read_config(self, read: ConfigReader) -> OlmoConfig:
        theta = _THETA if self.has_windows else 10000.0
        rope = {"theta": theta, "layers": "full_attention" if self.has_windows else None}
        fields = decoder_fields(read, default_eps=1e-5, rope=rope)
        if self.has_windows:
            kinds = read.kinds_of_layers(fields["num_layers"], every=4)
            # "rope_theta" beside "rope_scaling" is that of the other layers alone, as in transformers.
            local = window_rope(read.config, fields["head_dim"], _THETA)
            fields |= {
                "ropes": (*fields["ropes"], local),
                "layer_ropes": tuple(int(kind == "sliding_attention") for kind in kinds),
                "layer_windows": read.layer_windows(kinds, 4096),
            }
        return OlmoConfig(**fields, bias=read.flag("attention_bias", False))

    def module(self, config: OlmoConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm = partial(WideRMSNorm, config.hidden_size, config.norm_eps, dtype, rngs)

        def block(layer: int) -> SequentialBlock:
            return SequentialBlock(
                Attention(
                    config, layer, dtype, rngs, collectives=collectives, qkv_bias=config.bias, output_bias=config.bias
                ),
                GatedMLP(config, config.activation, dtype, rngs),
                after_attention=norm(),
                after_mlp=norm(),
                head_norms=RMSNormOfAllHeads(config, config.norm_eps, dtype, rngs),
                rope=config.layer_ropes[layer],
            )

        return Decoder(config, block, norm, dtype, rngs, collectives)

    def tensors(self, config: OlmoConfig) -> Iterator[Piece | TiedTensor]:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.bias
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            attention = f"{theirs}.self_attn"
            yield from pieces.separate_qkv(attention, f"{ours}.attention", config, bias=bias)
            norms = f"{attention}.q_norm", f"{attention}.k_norm"
            yield from pieces.head_norms(norms, f"{ours}.head_norms", config, flat=True)
            yield from pieces.output_projection(f"{attention}.o_proj", f"{ours}.attention", config, bias=bias)
            yield pieces.norm(f"{theirs}.post_attention_layernorm", f"{ours}.after_attention", hidden)
            yield from pieces.gate_and_up(f"{theirs}.mlp", f"{ours}.mlp", config)
            yield from pieces.linear(f"{theirs}.mlp.down_proj", f"{ours}.mlp.down", inner, hidden, bias=False)
            yield pieces.norm(f"{theirs}.post_feedforward_layernorm", f"{ours}.after_mlp", hidden)
        yield pieces.norm("model.norm", "norm", hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)


OLMO = FirstOlmoFamily()
OLMO2 = OlmoFamily("olmo2", False)
OLMO3 = OlmoFamily("olmo3", True)
