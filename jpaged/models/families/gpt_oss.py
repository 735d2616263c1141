"""gpt-oss (OpenAI 2025, arXiv:2508.10925): experts with biases and a clamped activation, and attention with sinks.

    attention   a learned logit of each head in the softmax; a window of 128 tokens in every second layer; biases
    MLPs        a router with a bias, softmax over the four best of its logits; experts that are (up + 1) * gate *
                sigmoid(1.702 gate), clamped, with biases
    rotation    YaRN, whose range of pairs is not rounded

The published checkpoints have experts in MXFP4, which stay in 4 bits (`quantization/mxfp4.py`); with
`quantization="none"` loading makes bfloat16 of them (`loading/mxfp4.py`).
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
from jpaged.models.experts import ClampedSwiGLU, Routing, SparseConfig, SparseMLP
from jpaged.models.layers import Attention
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import WideRMSNorm

ROPE_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Where config.json has none, as in transformers."""


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(DecoderConfig, SparseConfig):
    """bias: the products of attention have biases."""

    bias: bool = True


@dataclass(frozen=True)
class GptOssFamily:
    """See above."""

    model_type = "gpt_oss"
    base_prefix = "model."
    derived_tensors = r"rotary_emb\.inv_freq$"
    quantizations = ("mxfp4",)

    def read_config(self, read: ConfigReader) -> GptOssConfig:
        read.refuse(("hidden_act", "silu"))
        usual: dict[str, Any] = {"num_key_value_heads": 8, "intermediate_size": 2880, "rms_norm_eps": 1e-5}
        if not (read.config.get("rope_scaling") or read.config.get("rope_parameters")):
            usual["rope_scaling"] = ROPE_SCALING
        read = read.with_usual(**usual)
        fields = decoder_fields(read, head_dim=64, default_length=131072, rope={"theta": 150000.0})
        num_layers = fields["num_layers"]
        num_experts = read.integer("num_local_experts", read.integer("num_experts", 128))
        kinds = read.layer_kinds(num_layers)
        if read.optional_positive("sliding_window", 128) is None:
            kinds = ("full_attention",) * num_layers
        alternating = tuple("full_attention" if i % 2 else "sliding_attention" for i in range(num_layers))
        routing = Routing(per_token=read.integer("num_experts_per_tok", 4))
        routing.check(num_experts)
        return GptOssConfig(
            **fields,
            bias=read.flag("attention_bias", True),
            layer_windows=read.layer_windows(kinds or alternating, 128),
            num_experts=num_experts,
            routing=routing,
            expert_size=fields["intermediate_size"],
            dense_layers=(False,) * num_layers,
            clamped=ClampedSwiGLU(read.number("swiglu_alpha", 1.702), read.number("swiglu_limit", 7.0)),
            router_bias=True,
            expert_bias=True,
        )

    def module(self, config: GptOssConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm = partial(WideRMSNorm, config.hidden_size, config.norm_eps, dtype, rngs)

        def block(layer: int) -> SequentialBlock:
            return SequentialBlock(
                Attention(config, layer, dtype, rngs, sinks=True, qkv_bias=config.bias, output_bias=config.bias),
                SparseMLP(config, dtype, rngs, collectives),
                attention_norm=norm(),
                mlp_norm=norm(),
            )

        return Decoder(config, block, norm, dtype, rngs, collectives)

    def tensors(self, config: GptOssConfig) -> Iterator[Piece | TiedTensor]:
        hidden, bias = config.hidden_size, config.bias
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            attention = f"{theirs}.self_attn"
            yield pieces.norm(f"{theirs}.input_layernorm", f"{ours}.attention_norm", hidden)
            yield from pieces.separate_qkv(attention, f"{ours}.attention", config, bias=bias)
            yield pieces.as_is(f"{attention}.sinks", f"{ours}.attention.sinks", config.num_heads)
            yield from pieces.output_projection(f"{attention}.o_proj", f"{ours}.attention", config, bias=bias)
            yield pieces.norm(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm", hidden)
            router, num_experts = f"{theirs}.mlp.router", config.num_experts
            yield from pieces.linear(router, f"{ours}.mlp.router.gate", hidden, num_experts, bias=True)
            yield from _experts(f"{theirs}.mlp.experts", f"{ours}.mlp.experts", config)
        yield pieces.norm("model.norm", "norm", hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)


def _experts(theirs: str, ours: str, config: GptOssConfig) -> Iterator[Piece]:
    """Of all experts together, inputs before outputs; columns of gate and up take turns."""
    experts, hidden, inner = config.num_experts, config.hidden_size, config.expert_size
    both, of_bias = (experts, hidden, 2 * inner), (experts, 2 * inner)
    yield Piece(f"{theirs}.gate_up_proj", both, f"{ours}.gate_up", (experts, hidden, inner, 2), (0, 1, 3, 2))
    yield Piece(f"{theirs}.gate_up_proj_bias", of_bias, f"{ours}.gate_up_bias", (experts, inner, 2), (0, 2, 1))
    yield pieces.as_is(f"{theirs}.down_proj", f"{ours}.down", experts, inner, hidden)
    yield pieces.as_is(f"{theirs}.down_proj_bias", f"{ours}.down_bias", experts, hidden)
