"""DBRX (Databricks 2024): Llama's layers with norms without bias, clipped queries, keys and values, and experts."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jpaged.api.errors import CheckpointError, UnsupportedModelError, shown
from jpaged.models.blocks import Decoder, DecoderConfig, SequentialBlock, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.experts import Routing, SparseConfig, SparseMLP
from jpaged.models.layers import Attention
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import LayerNorm

log = logging.getLogger("jpaged.engine")


@dataclass(frozen=True, kw_only=True)
class DbrxConfig(DecoderConfig, SparseConfig):
    """clip: of queries, keys and values; None for none."""

    clip: float | None


class DbrxFamily:
    """The one size."""

    model_type = "dbrx"
    base_prefix = "transformer."
    derived_tensors = r"rotary_emb\.inv_freq$"

    def read_config(self, read: ConfigReader) -> DbrxConfig:
        read.refuse(("tie_word_embeddings", False))
        attention, experts = read.part("attn_config"), read.part("ffn_config")
        experts.refuse(("moe_normalize_expert_weights", 1))
        num_experts, per_token = experts.integer("moe_num_experts", 4), experts.integer("moe_top_k", 1)
        if per_token > num_experts:
            raise CheckpointError(
                f"config.json: moe_top_k ({per_token}) must be at most moe_num_experts ({num_experts})."
            )
        renormalized = experts.config.get("moe_normalize_expert_weights", 1) is not None
        fields = decoder_fields(_with_usual_names(read, attention, experts))
        return DbrxConfig(
            **fields | {"norm_eps": 1e-5},
            num_experts=num_experts,
            routing=Routing(per_token=per_token, renormalized=renormalized),
            expert_size=fields["intermediate_size"],
            dense_layers=(False,) * fields["num_layers"],
            clip=attention.optional_number("clip_qkv"),
        )

    def module(self, config: DbrxConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm = partial(LayerNorm, config.hidden_size, config.norm_eps, dtype, rngs, bias=False)

        def block(layer: int) -> SequentialBlock:
            attention = Attention(config, layer, dtype, rngs, clip=config.clip)
            experts = SparseMLP(config, dtype, rngs, collectives)
            return SequentialBlock(attention, experts, attention_norm=norm(), mlp_norm=norm())

        return Decoder(config, block, norm, dtype, rngs, collectives)

    def tensors(self, config: DbrxConfig) -> Iterator[Piece | TiedTensor]:
        hidden = config.hidden_size
        yield pieces.as_is("transformer.wte.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"transformer.blocks.{i}", f"layers.{i}"
            attention = f"{theirs}.norm_attn_norm.attn"
            yield pieces.norm(f"{theirs}.norm_attn_norm.norm_1", f"{ours}.attention_norm", hidden)
            yield from pieces.joined_qkv(f"{attention}.Wqkv", f"{ours}.attention", config, bias=False)
            yield from pieces.output_projection(f"{attention}.out_proj", f"{ours}.attention", config, bias=False)
            yield pieces.norm(f"{theirs}.norm_attn_norm.norm_2", f"{ours}.mlp_norm", hidden)
            router = f"{theirs}.ffn.router.layer.weight"
            yield pieces.transposed(router, f"{ours}.mlp.router.gate", hidden, config.num_experts)
            yield from _experts(f"{theirs}.ffn.experts.mlp", f"{ours}.mlp.experts", config)
        yield pieces.norm("transformer.norm_f", "norm", hidden)
        yield pieces.head("lm_head.weight", "transformer.wte.weight", config)


def _experts(theirs: str, ours: str, config: DbrxConfig) -> Iterator[Piece]:
    """Each tensor has the rows of all experts, whose inner columns they are: w1 is the gate, v1 up and w2 down."""
    hidden, inner, count = config.hidden_size, config.expert_size, config.num_experts
    shape = (count * inner, hidden)
    for slot, name in enumerate(("w1", "v1")):
        split, start = (count, 1, inner, hidden), (0, 0, slot, 0)
        yield Piece(f"{theirs}.{name}", shape, f"{ours}.gate_up", split, (0, 3, 1, 2), start)
    yield Piece(f"{theirs}.w2", shape, f"{ours}.down", (count, inner, hidden), (0, 1, 2))


def _with_usual_names(read: ConfigReader, attention: ConfigReader, experts: ConfigReader) -> ConfigReader:
    """The reader with the entries that `decoder_fields` knows."""
    others = {"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"}
    read = read.with_other_names(**others, max_seq_len="max_position_embeddings")
    activation = experts.config.get("ffn_act_fn") or {"name": "silu"}
    if not isinstance(activation, Mapping) or {*activation} - {"name"}:
        raise UnsupportedModelError(
            f"config.json: ffn_act_fn={shown(activation)} is not supported, only an object with a name."
        )
    heads, kv_heads = read.integer("n_heads", 16), attention.integer("kv_n_heads", 1)
    if heads % kv_heads:
        raise CheckpointError(f"config.json: n_heads ({heads}) must be a multiple of kv_n_heads ({kv_heads}).")
    return _with_theta(read, attention).with_entries(
        hidden_size=read.integer("d_model", 2048),
        num_hidden_layers=read.integer("n_layers", 24),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=None,
        intermediate_size=experts.integer("ffn_hidden_size", 3584),
        max_position_embeddings=read.integer("max_seq_len", 2048),
        hidden_act=activation.get("name", "silu"),
    )


def _with_theta(read: ConfigReader, attention: ConfigReader) -> ConfigReader:
    """RoPE's theta is in "attn_config", as published, or at the top, as transformers 5 has it.

    transformers 5 reads only the top-level one, and writes 10000 there when it saves a published model.

    Raises:
        UnsupportedModelError: both are given and differ.
    """
    published = attention.config.get("rope_theta")
    parameters: Any = read.config.get("rope_scaling") or read.config.get("rope_parameters") or {}
    within = parameters.get("rope_theta") if isinstance(parameters, Mapping) else None
    theta = read.config.get("rope_theta") if within is None else within
    if published is None:
        return read
    if theta is None:
        if published != _DEFAULT_THETA:
            log.warning(
                "config.json: RoPE rotates by rope_theta=%s, which attn_config has; transformers 5 does not read it"
                " there, and rotates by %s.",
                shown(published),
                _DEFAULT_THETA,
            )
        return read.with_entries(rope_theta=published)
    if published != theta:
        raise UnsupportedModelError(
            f"config.json: rope_theta={shown(published)} in attn_config and {shown(theta)} outside of it are not"
            " supported together. transformers 5 writes rope_theta=10000 when it saves a published model: delete"
            " rope_parameters (or rope_theta) from config.json. Of a model that was trained with the one outside,"
            " delete the one in attn_config."
        )
    return read


_DEFAULT_THETA = 10000.0
"""What transformers 5 rotates by where config.json has no theta at the top."""
