"""Families of Llama's layers whose MLPs square a ReLU and have no gate: Nemotron-4 and Minitron (Parmar et al. 2024,
arXiv:2402.16819; Muralidharan et al. 2024, arXiv:2407.14679), Jais 2 (Inception 2025), and Arcee's AFM.

    Nemotron    layer norms times 1 + w; RoPE on a part of each head
    Jais 2      layer norms; biases
    AFM         RMS norms
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
from jpaged.models.layers import MLP, Attention
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import LayerNorm, OnePlusLayerNorm, RMSNorm

_NORMS: dict[str, type[LayerNorm | RMSNorm]] = {"layer, 1 + w": OnePlusLayerNorm, "layer": LayerNorm, "rms": RMSNorm}


@dataclass(frozen=True, kw_only=True)
class NemotronConfig(DecoderConfig):
    """attention_bias, mlp_bias: the products of attention, or of the MLPs, have biases.
    norm: a key of `_NORMS`.
    """

    attention_bias: bool
    mlp_bias: bool
    norm: str


@dataclass(frozen=True)
class NemotronFamily:
    """One of the architectures. norm: as of `NemotronConfig`. eps: the entry that has the norms' epsilon.
    length: of the context, where config.json does not say.
    rotated_fraction: of a head, where config.json does not say; None if heads are rotated whole.
    biases: products have them where config.json does not say.
    """

    model_type: str
    norm: str
    eps: str
    length: int = 4096
    rotated_fraction: float | None = None
    biases: bool = False

    base_prefix = "model."
    derived_tensors = r"rotary_emb\.inv_freq$"

    def read_config(self, read: ConfigReader) -> NemotronConfig:
        is_squared = read.config.get("hidden_act", "relu2") == "relu2"
        known = read.with_entries(hidden_act="relu") if is_squared else read  # "relu2" is of MLPs without gates alone
        rope = {"rotated_fraction": self.rotated_fraction}
        fields: dict[str, Any] = decoder_fields(
            known, default_length=self.length, eps=self.eps, default_eps=1e-5, rope=rope
        )
        return NemotronConfig(
            **fields | ({"activation": "relu2"} if is_squared else {}),
            attention_bias=read.flag("attention_bias", self.biases),
            mlp_bias=read.flag("mlp_bias", self.biases),
            norm=self.norm,
        )

    def module(self, config: NemotronConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm = partial(_NORMS[config.norm], config.hidden_size, config.norm_eps, dtype, rngs)
        bias = config.attention_bias

        def block(layer: int) -> SequentialBlock:
            attention = Attention(config, layer, dtype, rngs, qkv_bias=bias, output_bias=bias)
            mlp = MLP(config, config.activation, dtype, rngs, bias=config.mlp_bias)
            return SequentialBlock(attention, mlp, attention_norm=norm(), mlp_norm=norm())

        return Decoder(config, block, norm, dtype, rngs, collectives)

    def tensors(self, config: NemotronConfig) -> Iterator[Piece | TiedTensor]:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.attention_bias
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            attention, mlp = f"{ours}.attention", f"{ours}.mlp"
            yield from _norm(f"{theirs}.input_layernorm", f"{ours}.attention_norm", config)
            yield from pieces.separate_qkv(f"{theirs}.self_attn", attention, config, bias=bias, order=config.columns)
            yield from pieces.output_projection(f"{theirs}.self_attn.o_proj", attention, config, bias=bias)
            yield from _norm(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm", config)
            yield from pieces.linear(f"{theirs}.mlp.up_proj", f"{mlp}.up", hidden, inner, bias=config.mlp_bias)
            yield from pieces.linear(f"{theirs}.mlp.down_proj", f"{mlp}.down", inner, hidden, bias=config.mlp_bias)
        yield from _norm("model.norm", "norm", config)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)


def _norm(theirs: str, ours: str, config: NemotronConfig) -> Iterator[Piece]:
    if config.norm == "rms":
        yield pieces.norm(theirs, ours, config.hidden_size)
    else:
        yield from pieces.layer_norm(theirs, ours, config.hidden_size)


NEMOTRON = NemotronFamily("nemotron", norm="layer, 1 + w", eps="norm_eps", rotated_fraction=0.5)
JAIS2 = NemotronFamily("jais2", norm="layer", eps="layer_norm_eps", length=8192, biases=True)
ARCEE = NemotronFamily("arcee", norm="rms", eps="rms_norm_eps")
