"""Granite 3 and the dense models of Granite 4 (IBM): Llama's layers with multipliers of embeddings, scores, residuals
and logits. Granite 4's checkpoints are those of a hybrid with experts, of which the dense ones have neither part; their
layers may have no RoPE."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from flax import nnx

from jpaged.api.errors import UnsupportedModelError, shown
from jpaged.models.blocks import Decoder, DecoderConfig, Scales, SequentialBlock, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.layers import Attention, GatedMLP
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import RMSNorm


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(DecoderConfig):
    """attention_scale: multiplies the product of query and key. residual_scale: what layers add to the stream.
    scales: of embeddings and logits.
    attention_bias, mlp_bias: which products have biases.
    joined_mlp: gate and up are one tensor (Granite 4).
    """

    attention_scale: float
    residual_scale: float
    scales: Scales
    attention_bias: bool
    mlp_bias: bool
    joined_mlp: bool


@dataclass(frozen=True)
class GraniteFamily:
    """One of the architectures. is_hybrid: Granite 4."""

    model_type: str
    is_hybrid: bool

    base_prefix = "model."
    derived_tensors = r"rotary_emb\.inv_freq$"

    def read_config(self, read: ConfigReader) -> GraniteConfig:
        if self.is_hybrid:
            read = _dense_part(read)
        fields = decoder_fields(read)
        if self.is_hybrid and read.config.get("position_embedding_type") != "rope":
            fields |= {"ropes": (), "layer_ropes": (None,) * fields["num_layers"]}
        logits_scaling = read.optional_number("logits_scaling")
        return GraniteConfig(
            **fields,
            attention_scale=read.number("attention_multiplier", 1.0),
            residual_scale=read.number("residual_multiplier", 1.0),
            scales=Scales(
                embedding=read.number("embedding_multiplier", 1.0),
                logits=1.0 if logits_scaling is None else 1 / logits_scaling,
            ),
            attention_bias=read.flag("attention_bias", False),
            mlp_bias=False if self.is_hybrid else read.flag("mlp_bias", False),
            joined_mlp=self.is_hybrid,
        )

    def module(self, config: GraniteConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm = partial(RMSNorm, config.hidden_size, config.norm_eps, dtype, rngs)

        def block(layer: int) -> SequentialBlock:
            return SequentialBlock(
                Attention(
                    config,
                    layer,
                    dtype,
                    rngs,
                    scale=config.attention_scale,
                    qkv_bias=config.attention_bias,
                    output_bias=config.attention_bias,
                ),
                GatedMLP(config, config.activation, dtype, rngs, bias=config.mlp_bias),
                attention_norm=norm(),
                mlp_norm=norm(),
                rope=config.layer_ropes[layer],
                residual_scale=config.residual_scale,
            )

        return Decoder(config, block, norm, dtype, rngs, collectives, scales=config.scales)

    def tensors(self, config: GraniteConfig) -> Iterator[Piece | TiedTensor]:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.attention_bias
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            attention, mlp = f"{ours}.attention", f"{ours}.mlp"
            yield pieces.norm(f"{theirs}.input_layernorm", f"{ours}.attention_norm", hidden)
            yield from pieces.separate_qkv(f"{theirs}.self_attn", attention, config, bias=bias)
            yield from pieces.output_projection(f"{theirs}.self_attn.o_proj", attention, config, bias=bias)
            yield pieces.norm(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm", hidden)
            if config.joined_mlp:
                yield pieces.joined_gate_up(f"{theirs}.shared_mlp.input_linear.weight", mlp, config)
                down = f"{theirs}.shared_mlp.output_linear"
            else:
                yield from pieces.gate_and_up(f"{theirs}.mlp", mlp, config, bias=config.mlp_bias)
                down = f"{theirs}.mlp.down_proj"
            yield from pieces.linear(down, f"{mlp}.down", inner, hidden, bias=config.mlp_bias)
        yield pieces.norm("model.norm", "norm", hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)


def _dense_part(read: ConfigReader) -> ConfigReader:
    """The entries under the names that dense models use.

    Raises:
        UnsupportedModelError: there are experts or recurrent layers.
    """
    config = read.config
    kinds = config.get("layer_types") or config.get("layers_block_type") or ["mamba"]
    if config.get("num_local_experts", 8):
        raise UnsupportedModelError(
            f"config.json: num_local_experts={shown(config.get('num_local_experts', 8))} is not supported, only 0."
        )
    if not isinstance(kinds, list | tuple) or any(kind not in ("attention", "full_attention") for kind in kinds):
        raise UnsupportedModelError(f"config.json: layer_types {shown(kinds)} are not supported, only attention.")
    return read.with_entries(intermediate_size=config.get("shared_intermediate_size", 1024))


GRANITE = GraniteFamily("granite", False)
GRANITE_HYBRID = GraniteFamily("granitemoehybrid", True)
