"""Phi-3.5-MoE (Abdin et al. 2024, arXiv:2404.14219): Llama's layers with layer norms and two experts a token, which a
sparse mixer picks (Liu et al. 2024, arXiv:2409.12136)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jpaged.api.errors import UnsupportedModelError, shown
from jpaged.models.blocks import Decoder, DecoderConfig, SequentialBlock, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.experts import Routing, SparseConfig, SparseMLP
from jpaged.models.layers import Attention
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import LayerNorm

_NAMES = pieces.ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


@dataclass(frozen=True, kw_only=True)
class PhimoeConfig(DecoderConfig, SparseConfig):
    """bias: the products of attention have biases. head_bias: the head has one."""

    bias: bool
    head_bias: bool


class PhimoeFamily:
    """All versions."""

    model_type = "phimoe"
    base_prefix = "model."
    derived_tensors = r"rotary_emb\.inv_freq$"

    def read_config(self, read: ConfigReader) -> PhimoeConfig:
        read.refuse(("num_experts_per_tok", 2))
        read = _with_temperature(read.with_defaults(num_key_value_heads=8))
        num_experts = read.integer("num_local_experts", 16)
        routing = Routing(per_token=2, mixer_jitter=read.number("router_jitter_noise", 0.01))
        routing.check(num_experts)
        fields = decoder_fields(read, default_length=131072, default_eps=1e-5, rope={"theta": 1e6})
        num_layers = fields["num_layers"]
        window = None if read.config.get("sliding_window") is None else read.integer("sliding_window")
        return PhimoeConfig(
            **fields,
            layer_windows=(window,) * num_layers,
            num_experts=num_experts,
            routing=routing,
            expert_size=fields["intermediate_size"],
            dense_layers=(False,) * num_layers,
            bias=read.flag("attention_bias", False),
            head_bias=read.flag("lm_head_bias", False),
        )

    def module(self, config: PhimoeConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm = partial(LayerNorm, config.hidden_size, config.norm_eps, dtype, rngs)

        def block(layer: int) -> SequentialBlock:
            attention = Attention(config, layer, dtype, rngs, qkv_bias=config.bias, output_bias=config.bias)
            experts = SparseMLP(config, dtype, rngs, collectives)
            return SequentialBlock(attention, experts, attention_norm=norm(), mlp_norm=norm())

        return Decoder(config, block, norm, dtype, rngs, collectives, head_bias=config.head_bias)

    def tensors(self, config: PhimoeConfig) -> Iterator[Piece | TiedTensor]:
        hidden, bias = config.hidden_size, config.bias
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            attention = f"{ours}.attention"
            yield from pieces.layer_norm(f"{theirs}.input_layernorm", f"{ours}.attention_norm", hidden)
            yield from pieces.separate_qkv(f"{theirs}.self_attn", attention, config, bias=bias)
            yield from pieces.output_projection(f"{theirs}.self_attn.o_proj", attention, config, bias=bias)
            yield from pieces.layer_norm(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm", hidden)
            yield from pieces.sparse_mlp(f"{theirs}.{_NAMES.block}", f"{ours}.mlp", config, _NAMES)
        yield from pieces.layer_norm("model.norm", "norm", hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)
        if config.head_bias:
            yield pieces.head_bias("lm_head.bias", config)


def _with_temperature(read: ConfigReader) -> ConfigReader:
    """LongRoPE's temperature has a number of its own here: "short_mscale" for the original length, "long_mscale" for a
    longer one."""
    parameters = read.config.get("rope_scaling") or read.config.get("rope_parameters") or {}
    kind = (parameters.get("rope_type") or parameters.get("type")) if isinstance(parameters, Mapping) else None
    if kind in (None, "default"):
        return read
    if kind not in ("longrope", "su"):
        raise UnsupportedModelError(
            f"config.json: RoPE of type {shown(kind)} is not supported for {read.architecture}, only longrope."
        )
    known: dict[str, Any] = dict(parameters)
    length = read.config.get("original_max_position_embeddings") or known.get("original_max_position_embeddings")
    original = ConfigReader(read.architecture, {"original_max_position_embeddings": length}).integer(
        "original_max_position_embeddings", read.integer("max_position_embeddings", 131072)
    )
    is_long = read.max_model_len is not None and read.max_model_len > original
    entry = "long_mscale" if is_long else "short_mscale"
    known["attention_factor"] = ConfigReader(read.architecture, known).number(entry, 1.0)
    return read.with_entries(rope_scaling=known)
