"""Falcon (Almazrouei et al. 2023, arXiv:2311.16867), not Falcon 3, which is a Llama.

7B     attention and MLP side by side behind one layer norm; one key-value head
40B, 180B, Falcon2-11B    a norm each, or one; several key-value heads
RW     attention, then MLP; ALiBi instead of RoPE; biases
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from flax import nnx

from jpaged.models.alibi import alibi_slopes
from jpaged.models.blocks import Block, Decoder, DecoderConfig, ParallelBlock, SequentialBlock, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader, divide_into_heads
from jpaged.models.layers import MLP, Attention
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import LayerNorm


@dataclass(frozen=True, kw_only=True)
class FalconConfig(DecoderConfig):
    """parallel: attention and MLP stand side by side. two_norms: each then has a norm of its own.
    bias: all products of the layers have biases, or none has.
    slopes: of ALiBi, of all heads; None with RoPE. They are scaled like the scores.
    """

    parallel: bool
    two_norms: bool
    bias: bool
    slopes: tuple[float, ...] | None


class FalconFamily:
    """All sizes."""

    model_type = "falcon"
    base_prefix = "transformer."
    derived_tensors = r"rotary(_emb)?\.inv_freq$"

    def read_config(self, read: ConfigReader) -> FalconConfig:
        hidden_size = read.integer("hidden_size")
        num_heads = read.integer("num_attention_heads")
        is_new = read.flag("new_decoder_architecture", False)
        has_one_kv_head = not is_new and read.flag("multi_query", True)
        known = {
            "head_dim": divide_into_heads(hidden_size, num_heads),
            "intermediate_size": read.config.get("ffn_hidden_size") or 4 * hidden_size,
            "num_key_value_heads": 1 if has_one_kv_head else read.config.get("num_kv_heads") if is_new else num_heads,
        }
        read = read.with_entries(**known)
        fields = decoder_fields(
            read,
            eps="layer_norm_epsilon",
            default_eps=1e-5,
            activation="activation",
            default_activation="gelu",
            tied=True,
        )
        parallel = is_new or read.flag("parallel_attn", True)
        norms = read.integer("num_ln_in_parallel_attn", 2 if is_new else 1)
        slopes = None
        if read.flag("alibi", False):
            fields |= {"ropes": (), "layer_ropes": (None,) * fields["num_layers"]}
            slopes = tuple(slope * fields["head_dim"] ** -0.5 for slope in alibi_slopes(num_heads))
        return FalconConfig(
            **fields,
            parallel=parallel,
            two_norms=is_new and norms == 2,
            bias=read.flag("bias", False),
            slopes=slopes,
        )

    def module(self, config: FalconConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm = partial(LayerNorm, config.hidden_size, config.norm_eps, dtype, rngs)

        def block(layer: int) -> Block:
            attention = Attention(
                config,
                layer,
                dtype,
                rngs,
                qkv_bias=config.bias,
                output_bias=config.bias,
                alibi_slopes=config.slopes,
                collectives=collectives,
            )
            mlp, rope = MLP(config, config.activation, dtype, rngs, bias=config.bias), config.layer_ropes[layer]
            if not config.parallel:
                return SequentialBlock(attention, mlp, attention_norm=norm(), mlp_norm=norm(), rope=rope)
            of_mlp = norm() if config.two_norms else None
            return ParallelBlock(attention, mlp, attention_norm=norm(), mlp_norm=of_mlp, rope=rope)

        return Decoder(config, block, norm, dtype, rngs, collectives)

    def tensors(self, config: FalconConfig) -> Iterator[Piece | TiedTensor]:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.bias
        yield pieces.as_is("transformer.word_embeddings.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"transformer.h.{i}", f"layers.{i}"
            attention, mlp = f"{ours}.attention", f"{ours}.mlp"
            first = "ln_attn" if config.two_norms else "input_layernorm"
            yield from pieces.layer_norm(f"{theirs}.{first}", f"{ours}.attention_norm", hidden)
            if config.two_norms or not config.parallel:
                second = "ln_mlp" if config.two_norms else "post_attention_layernorm"
                yield from pieces.layer_norm(f"{theirs}.{second}", f"{ours}.mlp_norm", hidden)
            yield from pieces.grouped_qkv(f"{theirs}.self_attention.query_key_value", attention, config, bias=bias)
            yield from pieces.output_projection(f"{theirs}.self_attention.dense", attention, config, bias=bias)
            yield from pieces.linear(f"{theirs}.mlp.dense_h_to_4h", f"{mlp}.up", hidden, inner, bias=bias)
            yield from pieces.linear(f"{theirs}.mlp.dense_4h_to_h", f"{mlp}.down", inner, hidden, bias=bias)
        yield from pieces.layer_norm("transformer.ln_f", "norm", hidden)
        yield pieces.head("lm_head.weight", "transformer.word_embeddings.weight", config)
