"""AFMoE (Arcee 2025): Trinity Nano, Mini and Large.

attention   a gate of what it gives; norms of queries and keys; windows and RoPE in three layers of four, none in
            the others
norms       before and after attention and MLP
MLPs        dense in the first layers, then experts, of which some are shared; a router's sigmoids with a bias
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jpaged.models.blocks import Decoder, Scales, SequentialBlock
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.experts import Routing, feed_forward
from jpaged.models.layers import Attention
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import RMSNorm
from jpaged.models.sparse_llama_family import SparseLlamaConfig, sparse_fields

_NAMES = pieces.ExpertNames(router="router.gate", correction="expert_bias")


@dataclass(frozen=True, kw_only=True)
class AfmoeConfig(SparseLlamaConfig):
    """embedding_scale: multiplies the embeddings."""

    embedding_scale: float


class AfmoeFamily:
    """All sizes."""

    model_type = "afmoe"
    base_prefix = "model."
    derived_tensors = r"rotary_emb\.inv_freq$"

    def read_config(self, read: ConfigReader) -> AfmoeConfig:
        read.refuse(("attention_bias", False), ("score_func", "sigmoid"), ("route_norm", True))
        read.refuse(("n_group", 1), ("topk_group", 1), ("num_expert_groups", 1), ("num_limited_groups", 1))
        read = read.with_defaults(head_dim=128)
        num_experts = read.with_other_names(num_experts="num_local_experts").integer("num_experts", 64)
        factor = read.number("route_scale", 1.0)
        routing = Routing(per_token=read.integer("num_experts_per_tok", 6), score="sigmoid", factor=factor, biased=True)
        sizes: dict[str, Any] = {"default_length": 16384, "default_eps": 1e-5}
        fields = sparse_fields(read, num_experts=num_experts, routing=routing, **sizes)
        num_layers, expert_size = fields["num_layers"], read.integer("moe_intermediate_size", 1408)
        every = read.integer("global_attn_every_n_layers", 4)
        kinds = read.with_entries(sliding_window_pattern=every).kinds_of_layers(num_layers, every)
        windows = read.layer_windows(kinds, 1024)
        return AfmoeConfig(
            **fields | {"layer_ropes": tuple(0 if kind == "sliding_attention" else None for kind in kinds)},
            layer_windows=windows,
            expert_size=expert_size,
            shared_size=expert_size * read.integer("num_shared_experts", 2),
            dense_layers=tuple(layer < read.number("num_dense_layers", 1) for layer in range(num_layers)),
            embedding_scale=fields["hidden_size"] ** 0.5 if read.flag("mup_enabled", False) else 1.0,
        )

    def module(self, config: AfmoeConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm = partial(RMSNorm, config.hidden_size, config.norm_eps, dtype, rngs)
        of_heads = partial(RMSNorm, config.head_dim, config.norm_eps, dtype, rngs)

        def block(layer: int) -> SequentialBlock:
            return SequentialBlock(
                Attention(config, layer, dtype, rngs, gated=True),
                feed_forward(config, layer, dtype, rngs, collectives),
                attention_norm=norm(),
                after_attention=norm(),
                mlp_norm=norm(),
                after_mlp=norm(),
                query_norm=of_heads(),
                key_norm=of_heads(),
                rope=config.layer_ropes[layer],
            )

        return Decoder(config, block, norm, dtype, rngs, collectives, scales=Scales(embedding=config.embedding_scale))

    def tensors(self, config: AfmoeConfig) -> Iterator[Piece | TiedTensor]:
        hidden, heads, dim = config.hidden_size, config.num_heads, config.head_dim
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            attention = f"{theirs}.self_attn"
            yield pieces.norm(f"{theirs}.input_layernorm", f"{ours}.attention_norm", hidden)
            yield from pieces.separate_qkv(attention, f"{ours}.attention", config, bias=False, order=config.columns)
            gate, split = f"{attention}.gate_proj.weight", (heads, dim, hidden)
            yield Piece(gate, (heads * dim, hidden), f"{ours}.attention.gate", split, (2, 0, 1))
            yield from pieces.output_projection(f"{attention}.o_proj", f"{ours}.attention", config, bias=False)
            yield pieces.norm(f"{attention}.q_norm", f"{ours}.query_norm", dim)
            yield pieces.norm(f"{attention}.k_norm", f"{ours}.key_norm", dim)
            yield pieces.norm(f"{theirs}.post_attention_layernorm", f"{ours}.after_attention", hidden)
            yield pieces.norm(f"{theirs}.pre_mlp_layernorm", f"{ours}.mlp_norm", hidden)
            if config.dense_layers[i]:
                yield from pieces.gated_mlp(f"{theirs}.mlp", f"{ours}.mlp", hidden, config.intermediate_size)
            else:
                yield from pieces.sparse_mlp(f"{theirs}.mlp", f"{ours}.mlp", config, _NAMES)
            yield pieces.norm(f"{theirs}.post_mlp_layernorm", f"{ours}.after_mlp", hidden)
        yield pieces.norm("model.norm", "norm", hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)
