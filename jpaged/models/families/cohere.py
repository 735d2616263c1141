"""Command R (Cohere 2024) and Command A, R7B (2025, arXiv:2504.00698): attention and MLP side by side behind one layer
norm without bias, RoPE in neighbouring pairs, scaled logits. The newer ones have windows in three layers of four, and
RoPE in those alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from flax import nnx

from jpaged.models.blocks import Decoder, DecoderConfig, ParallelBlock, Scales, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.layers import Attention, GatedMLP
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import LayerNorm, LayerNormOfHeads


@dataclass(frozen=True, kw_only=True)
class CohereConfig(DecoderConfig):
    """logit_scale: multiplies logits. bias: the products of attention have biases. qk_norm: each head of queries and
    keys has a layer norm."""

    logit_scale: float
    bias: bool
    qk_norm: bool


@dataclass(frozen=True)
class CohereFamily:
    """One of the architectures. has_windows: Command A and R7B."""

    model_type: str
    has_windows: bool

    base_prefix = "model."
    derived_tensors = r"rotary_emb\.inv_freq$"

    def read_config(self, read: ConfigReader) -> CohereConfig:
        rope = {"interleaved": True, "theta": 10000.0 if self.has_windows else 500000.0}
        fields = decoder_fields(read, default_length=8192, eps="layer_norm_eps", default_eps=1e-5, tied=True, rope=rope)
        if self.has_windows:
            kinds = read.kinds_of_layers(fields["num_layers"], every=4)
            fields |= {
                "layer_ropes": tuple(0 if kind == "sliding_attention" else None for kind in kinds),
                "layer_windows": read.layer_windows(kinds, 4096),
            }
        return CohereConfig(
            **fields,
            logit_scale=read.number("logit_scale", 0.0625),
            bias=read.flag("attention_bias", False),
            qk_norm=not self.has_windows and read.flag("use_qk_norm", False),
        )

    def module(self, config: CohereConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm = partial(LayerNorm, config.hidden_size, config.norm_eps, dtype, rngs, bias=False)

        def block(layer: int) -> ParallelBlock:
            return ParallelBlock(
                Attention(config, layer, dtype, rngs, qkv_bias=config.bias, output_bias=config.bias),
                GatedMLP(config, config.activation, dtype, rngs),
                attention_norm=norm(),
                head_norms=LayerNormOfHeads(config, config.norm_eps, dtype, rngs) if config.qk_norm else None,
                rope=config.layer_ropes[layer],
            )

        scales = Scales(logits=config.logit_scale)
        return Decoder(config, block, norm, dtype, rngs, collectives, scales=scales)

    def tensors(self, config: CohereConfig) -> Iterator[Piece | TiedTensor]:
        hidden, inner, bias, order = config.hidden_size, config.intermediate_size, config.bias, config.columns
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            attention = f"{theirs}.self_attn"
            yield pieces.norm(f"{theirs}.input_layernorm", f"{ours}.attention_norm", hidden)
            yield from pieces.separate_qkv(attention, f"{ours}.attention", config, bias=bias, order=order)
            if config.qk_norm:
                norms = f"{attention}.q_norm", f"{attention}.k_norm"
                yield from pieces.head_norms(norms, f"{ours}.head_norms", config, order=order)
            yield from pieces.output_projection(f"{attention}.o_proj", f"{ours}.attention", config, bias=bias)
            yield from pieces.gate_and_up(f"{theirs}.mlp", f"{ours}.mlp", config)
            yield from pieces.linear(f"{theirs}.mlp.down_proj", f"{ours}.mlp.down", inner, hidden, bias=False)
        yield pieces.norm("model.norm", "norm", hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)


COHERE = CohereFamily("cohere", False)
COHERE2 = CohereFamily("cohere2", True)
