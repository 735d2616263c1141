"""Llama 4 (Meta 2025), text only: Scout, Maverick.

attention   three layers of four rotate neighbouring columns, norm queries and keys without weights, and see their
            chunk of the context alone; the fourth does none of that, and sharpens with the position
MLPs        experts in every layer or in some, others have an ordinary MLP; the sigmoid of a router's logit
            multiplies what an expert reads; a shared expert beside them
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp
from flax import nnx

from jpaged.api.errors import CheckpointError, shown
from jpaged.models.blocks import Decoder, DecoderConfig, SequentialBlock, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.experts import Routing, SparseConfig, feed_forward
from jpaged.models.family import OTHER_PARTS, TEXT_PART_NAMES
from jpaged.models.layers import Attention
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import RMSNorm, UnscaledRMSNorm
from jpaged.models.temperature import Temperature

_LAYER_TYPES = ("full_attention", "chunked_attention")


@dataclass(frozen=True, kw_only=True)
class Llama4Config(DecoderConfig, SparseConfig):
    """qk_norm_eps: of the norms of queries and keys, in layers that rotate them; None for no norms.
    bias: the products of attention have biases.
    """

    qk_norm_eps: float | None
    bias: bool


class Llama4Family:
    """All sizes, alone or as the text part of a multimodal checkpoint."""

    model_type = "llama4_text"
    other_types = ("llama4",)
    base_prefix = "model."
    derived_tensors = rf"rotary_emb\.inv_freq$|^(model\.)?vision_model\.|{OTHER_PARTS}"
    aliases = TEXT_PART_NAMES

    def read_config(self, read: ConfigReader) -> Llama4Config:
        if "text_config" in read.config:
            read = read.text_part("Llama4ForCausalLM")
        read = read.with_defaults(num_key_value_heads=8, intermediate_size=8192, intermediate_size_mlp=16384)
        expert_size = read.integer("intermediate_size")
        read = read.with_entries(intermediate_size=read.integer("intermediate_size_mlp"))
        fields = decoder_fields(
            read,
            default_length=131072,
            head_dim=128,
            default_eps=1e-5,
            rope={"theta": 500000.0, "interleaved": True},
        )
        num_layers, (rope,) = fields["num_layers"], fields["ropes"]
        rotated = _rotated_layers(read, num_layers)
        has_norms = read.flag("use_qk_norm", True)
        if has_norms:  # they come after the rotation, so they cancel its scale
            fields["ropes"] = (replace(rope, attention_scale=1.0),)
        temperature = Temperature(read.number("attn_scale", 0.1), read.integer("floor_scale", 8192), shift=1)
        num_experts = read.integer("num_local_experts", 16)
        routing = Routing(per_token=read.integer("num_experts_per_tok", 1), score="sigmoid", renormalized=False)
        routing.check(num_experts)
        return Llama4Config(
            **fields | {"layer_ropes": tuple(0 if has_rope else None for has_rope in rotated)},
            layer_windows=_chunks(read, rotated),
            chunked_windows=True,
            temperature=temperature if _is_tempered(read) else None,
            qk_norm_eps=fields["norm_eps"] / rope.attention_scale**2 if has_norms else None,
            bias=read.flag("attention_bias", False),
            num_experts=num_experts,
            routing=routing,
            weighted_inputs=True,
            expert_size=expert_size,
            shared_size=expert_size,
            dense_layers=_dense_layers(read, num_layers),
        )

    def module(self, config: Llama4Config, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm, eps = partial(RMSNorm, config.hidden_size, config.norm_eps, dtype, rngs), config.qk_norm_eps

        def block(layer: int) -> SequentialBlock:
            rope = config.layer_ropes[layer]
            of_heads = None if rope is None or eps is None else UnscaledRMSNorm(config.head_dim, eps, dtype)
            return SequentialBlock(
                Attention(config, layer, dtype, rngs, qkv_bias=config.bias, output_bias=config.bias),
                feed_forward(config, layer, dtype, rngs, collectives),
                attention_norm=norm(),
                mlp_norm=norm(),
                query_norm=of_heads,
                key_norm=of_heads,
                rope=rope,
                tempered=rope is None,
            )

        return Decoder(config, block, norm, dtype, rngs, collectives)

    def tensors(self, config: Llama4Config) -> Iterator[Piece | TiedTensor]:
        hidden, bias = config.hidden_size, config.bias
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            attention = f"{theirs}.self_attn"
            yield pieces.norm(f"{theirs}.input_layernorm", f"{ours}.attention_norm", hidden)
            yield from pieces.separate_qkv(attention, f"{ours}.attention", config, bias=bias, order=config.columns)
            yield from pieces.output_projection(f"{attention}.o_proj", f"{ours}.attention", config, bias=bias)
            yield pieces.norm(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm", hidden)
            if config.dense_layers[i]:
                yield from pieces.gated_mlp(f"{theirs}.feed_forward", f"{ours}.mlp", hidden, config.intermediate_size)
            else:
                yield from _experts(f"{theirs}.feed_forward", f"{ours}.mlp", config)
        yield pieces.norm("model.norm", "norm", hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)


def _experts(theirs: str, ours: str, config: Llama4Config) -> Iterator[Piece]:
    """A layer's experts are one tensor, [experts, inputs, outputs]; the gate's columns stand before those of up."""
    experts, hidden, inner = config.num_experts, config.hidden_size, config.expert_size
    yield pieces.transposed(f"{theirs}.router.weight", f"{ours}.router.gate", hidden, experts)
    both, split = (experts, hidden, 2 * inner), (experts, hidden, 2, inner)
    yield Piece(f"{theirs}.experts.gate_up_proj", both, f"{ours}.experts.gate_up", split, (0, 1, 2, 3))
    yield pieces.as_is(f"{theirs}.experts.down_proj", f"{ours}.experts.down", experts, inner, hidden)
    yield from pieces.gated_mlp(f"{theirs}.shared_expert", f"{ours}.shared", hidden, config.shared_size)


def _rotated_layers(read: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer rotates queries and keys; "no_rope_layers" has a 1 for those that do."""
    every = read.integer("no_rope_layer_interval", 4)
    said = read.config.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(num_layers)]
    if not isinstance(said, list | tuple) or len(said) < num_layers or any(one not in (0, 1) for one in said):
        raise CheckpointError(
            f"config.json: no_rope_layers must list 0 or 1 for each of {num_layers} layers, got {shown(said)}."
        )
    return tuple(one == 1 for one in said[:num_layers])


def _chunks(read: ConfigReader, rotated: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Of each layer the tokens of a chunk, where queries see their chunk alone; None where they see all."""
    chunk = read.optional_positive("attention_chunk_size", 8192)
    default = tuple("chunked_attention" if one and chunk is not None else "full_attention" for one in rotated)
    kinds = read.layer_kinds(len(rotated), _LAYER_TYPES) or default
    if "chunked_attention" in kinds and chunk is None:
        raise CheckpointError("config.json: layer_types has chunked_attention, which needs an attention_chunk_size.")
    return tuple(chunk if kind == "chunked_attention" else None for kind in kinds)


def _is_tempered(read: ConfigReader) -> bool:
    """Whether layers without RoPE have a temperature. The first published files have a number in place of true."""
    value = read.config.get("attn_temperature_tuning", True)
    if not isinstance(value, int):
        raise CheckpointError(f"config.json: attn_temperature_tuning must be true or false, got {shown(value)}.")
    return bool(value)


def _dense_layers(read: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has an ordinary MLP: "moe_layers" lists the others, else every so many is one of them."""
    step, sparse = read.integer("interleave_moe_layer_step", 1), read.config.get("moe_layers")
    if sparse is None:
        sparse = list(range(step - 1, num_layers, step))
    if not isinstance(sparse, list | tuple) or not all(type(layer) is int for layer in sparse):
        raise CheckpointError(f"config.json: moe_layers must list layers by number, got {shown(sparse)}.")
    return tuple(layer not in sparse for layer in range(num_layers))
