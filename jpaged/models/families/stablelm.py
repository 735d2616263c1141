"""StableLM (Stability AI 2023, 2024; arXiv:2402.17834): layer norms, a quarter of each head rotated, gated MLPs. The
12B has attention and MLP side by side, and a layer norm of each head of queries and keys."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from flax import nnx

from jpaged.models.blocks import Block, Decoder, DecoderConfig, ParallelBlock, SequentialBlock, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.layers import Attention, GatedMLP
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import LayerNorm, LayerNormOfHeads


@dataclass(frozen=True, kw_only=True)
class StableLMConfig(DecoderConfig):
    """qkv_bias: queries, keys and values have biases. qk_norm: each head of queries and keys has a layer norm.
    parallel: attention and MLP stand side by side."""

    qkv_bias: bool
    qk_norm: bool
    parallel: bool


class StableLMFamily:
    """All sizes."""

    model_type = "stablelm"
    base_prefix = "model."
    derived_tensors = r"rotary_emb\.inv_freq$"

    def read_config(self, read: ConfigReader) -> StableLMConfig:
        read = read.with_defaults(num_key_value_heads=32)
        fields = decoder_fields(
            read,
            default_length=4096,
            eps="layer_norm_eps",
            default_eps=1e-5,
            rope={"rotated_fraction": read.number("rope_pct", 0.25)},
        )
        return StableLMConfig(
            **fields,
            qkv_bias=read.flag("use_qkv_bias", False),
            qk_norm=read.flag("qk_layernorm", False),
            parallel=read.flag("use_parallel_residual", False),
        )

    def module(self, config: StableLMConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm = partial(LayerNorm, config.hidden_size, config.norm_eps, dtype, rngs)

        def block(layer: int) -> Block:
            attention = Attention(config, layer, dtype, rngs, qkv_bias=config.qkv_bias)
            mlp = GatedMLP(config, config.activation, dtype, rngs)
            of_heads = LayerNormOfHeads(config, config.norm_eps, dtype, rngs) if config.qk_norm else None
            if config.parallel:
                return ParallelBlock(attention, mlp, attention_norm=norm(), head_norms=of_heads)
            return SequentialBlock(attention, mlp, attention_norm=norm(), mlp_norm=norm(), head_norms=of_heads)

        return Decoder(config, block, norm, dtype, rngs, collectives)

    def tensors(self, config: StableLMConfig) -> Iterator[Piece | TiedTensor]:
        hidden, inner, order = config.hidden_size, config.intermediate_size, config.columns
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            attention = f"{theirs}.self_attn"
            yield from pieces.layer_norm(f"{theirs}.input_layernorm", f"{ours}.attention_norm", hidden)
            yield from pieces.separate_qkv(attention, f"{ours}.attention", config, bias=config.qkv_bias, order=order)
            if config.qk_norm:
                yield from _norms_by_head(attention, f"{ours}.head_norms.scale", config)
            yield from pieces.output_projection(f"{attention}.o_proj", f"{ours}.attention", config, bias=False)
            if not config.parallel:
                yield from pieces.layer_norm(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm", hidden)
            yield from pieces.gate_and_up(f"{theirs}.mlp", f"{ours}.mlp", config)
            yield from pieces.linear(f"{theirs}.mlp.down_proj", f"{ours}.mlp.down", inner, hidden, bias=False)
        yield from pieces.layer_norm("model.norm", "norm", hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)


def _norms_by_head(prefix: str, parameter: str, config: StableLMConfig) -> Iterator[Piece]:
    """A tensor for each head."""
    group, copies, dim = config.group_size, config.kv_head_copies, config.head_dim

    def piece(name: str, head: int, start: tuple[int, ...], copies: int = 1) -> Piece:
        tensor, shape = f"{prefix}.{name}_layernorm.norms.{head}.weight", (1, 1, dim)
        axes, order = (0, 1, 2), config.columns
        return Piece(tensor, (dim,), parameter, shape, axes, start, copies, order=order, ordered_axis=2)

    for head in range(config.num_heads):
        yield piece("q", head, (head // group, head % group, 0))
    for head in range(config.num_kv_heads // copies):
        yield piece("k", head, (head * copies, group, 0), copies)
