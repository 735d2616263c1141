"""Qwen3-Next and Qwen3.5 (text): three layers of four are gated delta nets, the others attention with a gate.

They differ in how checkpoints spell the projections of the delta nets, and in what follows attention: Qwen3-Next and
Qwen3.5-MoE have experts, one of them shared, Qwen3.5 has ordinary MLPs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jpaged.api.errors import CheckpointError, UnsupportedModelError, shown
from jpaged.models.blocks import Decoder, DecoderConfig, SequentialBlock
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.delta_net import GatedDeltaNet, delta_net_pieces
from jpaged.models.experts import Routing, SparseConfig, feed_forward
from jpaged.models.family import TEXT_PART_NAMES
from jpaged.models.layers import Attention
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import OnePlusRMSNorm
from jpaged.models.rope import parse_rope, without_image_sections
from jpaged.models.states import DeltaState

_FUSED = "experts_in_one_tensor"
"""An entry of ours in config.json: whether a checkpoint has one tensor for all experts of a layer, as the names of its
tensors say (`Family.probed_tensor`). Published ones of Qwen3.5 do, but for those in FP8; what transformers saves does
not."""


@dataclass(frozen=True, kw_only=True)
class QwenHybridConfig(DecoderConfig, SparseConfig):
    """qkv_bias: attention's products have biases.
    joined: checkpoints have one projection for queries, keys, values and z of each key head (Qwen3-Next).
    fused_experts: checkpoints have one tensor for all experts of a layer.
    """

    qkv_bias: bool
    joined: bool
    fused_experts: bool


@dataclass(frozen=True)
class QwenHybridFamily:
    """One of the architectures. text: that of the text part, of a multimodal checkpoint. kv_heads, inner, experts,
    per_token: key-value heads, columns of MLPs, experts, and those of a token, where config.json leaves them out.
    """

    model_type: str
    text: str
    kv_heads: int = 2
    inner: int = 5632
    experts: int = 256
    per_token: int = 8
    joined: bool = False
    has_experts: bool = True
    # Layers that predict further tokens, and the vision tower.
    derived_tensors: str = r"rotary_emb\.inv_freq$|^mtp\.|^(model\.)?visual\."

    base_prefix = "model."
    aliases = TEXT_PART_NAMES
    probed_tensor = _FUSED, "experts.gate_up_proj"

    @property
    def other_types(self) -> tuple[str, ...]:
        return (f"{self.model_type}_text",)

    def read_config(self, read: ConfigReader) -> QwenHybridConfig:
        if "text_config" in read.config:
            part = read.text_part(self.text)
            stored = ("quantization_config", "compression_config")
            is_quantized = any(one.config.get(name) for one in (read, part) for name in stored)
            fused = read.flag(_FUSED, not is_quantized)
            read = ConfigReader(self.text, {**part.config, _FUSED: fused}, part.max_model_len)
            read.refuse(("model_type", f"{self.model_type}_text"))
        read.refuse(("hidden_act", "silu"), ("attn_output_gate", True), ("use_sliding_window", False))
        read = read.with_defaults(num_key_value_heads=self.kv_heads)
        num_layers, num_heads = read.integer("num_hidden_layers"), read.integer("num_attention_heads")
        dim, length = read.head_dim("head_dim", 256), read.integer("max_position_embeddings", 32768)
        options: dict[str, Any] = {"rotated_fraction": 0.25, "max_model_len": read.max_model_len}
        rope, length = parse_rope(without_image_sections(read.config), dim, length, **options)
        state, kinds = _state(read), _layer_kinds(read, num_layers)
        num_experts = 0
        if self.has_experts:
            num_experts = read.integer("num_experts", read.integer("num_local_experts", self.experts))
        routing = Routing(
            per_token=read.integer("num_experts_per_tok", self.per_token) if num_experts else 1,
            renormalized=read.flag("norm_topk_prob", True) if self.joined else True,
        )
        if num_experts:
            routing.check(num_experts)
        return QwenHybridConfig(
            **read.common(),
            hidden_size=read.integer("hidden_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=read.integer("num_key_value_heads", num_heads),
            head_dim=dim,
            intermediate_size=read.integer("intermediate_size", self.inner),
            max_position_embeddings=length,
            tie_word_embeddings=read.flag("tie_word_embeddings", False),
            layer_states=tuple(state if kind == "linear_attention" else None for kind in kinds),
            num_experts=num_experts,
            routing=routing,
            expert_size=read.integer("moe_intermediate_size", 512) if num_experts else 0,
            shared_size=read.integer("shared_expert_intermediate_size", 512) if num_experts else 0,
            shared_gate=bool(num_experts),
            dense_layers=_dense_layers(read, num_layers) if self.joined else (not num_experts,) * num_layers,
            activation="silu",
            ropes=(rope,),
            norm_eps=read.number("rms_norm_eps", 1e-6),
            qkv_bias=read.flag("attention_bias", False),
            joined=self.joined,
            fused_experts=bool(num_experts) and read.flag(_FUSED, False),
        )

    def module(self, config: QwenHybridConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        hidden, eps, bias = config.hidden_size, config.norm_eps, config.qkv_bias
        norm, of_head = (partial(OnePlusRMSNorm, size, eps, dtype, rngs) for size in (hidden, config.head_dim))

        def block(layer: int) -> SequentialBlock:
            state = config.layer_states[layer]
            mlp = feed_forward(config, layer, dtype, rngs, collectives)
            if isinstance(state, DeltaState):
                delta = GatedDeltaNet(state, hidden, config.num_layers, eps, dtype, rngs)
                return SequentialBlock(delta, mlp, attention_norm=norm(), mlp_norm=norm(), rope=None)
            attention = Attention(config, layer, dtype, rngs, qkv_bias=bias, output_bias=bias, gated=True)
            query_norm, key_norm = of_head(), of_head()
            return SequentialBlock(
                attention, mlp, attention_norm=norm(), mlp_norm=norm(), query_norm=query_norm, key_norm=key_norm
            )

        return Decoder(config, block, norm, dtype, rngs, collectives)

    def tensors(self, config: QwenHybridConfig) -> Iterator[Piece | TiedTensor]:
        hidden = config.hidden_size
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours, state = f"model.layers.{i}", f"layers.{i}", config.layer_states[i]
            yield pieces.norm(f"{theirs}.input_layernorm", f"{ours}.attention_norm", hidden)
            if isinstance(state, DeltaState):
                delta = f"{theirs}.linear_attn", f"{ours}.attention"
                yield from delta_net_pieces(*delta, hidden, state, joined=config.joined)
            else:
                yield from _attention(f"{theirs}.self_attn", ours, config)
            yield pieces.norm(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm", hidden)
            if config.dense_layers[i]:
                yield from pieces.gate_and_up(f"{theirs}.mlp", f"{ours}.mlp", config)
                yield pieces.transposed(
                    f"{theirs}.mlp.down_proj.weight", f"{ours}.mlp.down", config.intermediate_size, hidden
                )
            else:
                yield from _experts(f"{theirs}.mlp", f"{ours}.mlp", config)
        yield pieces.norm("model.norm", "norm", hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)


def _attention(theirs: str, ours: str, config: QwenHybridConfig) -> Iterator[Piece]:
    bias, order = config.qkv_bias, config.columns
    yield from pieces.separate_qkv(theirs, f"{ours}.attention", config, bias=bias, order=order, gated=True)
    yield from pieces.output_projection(f"{theirs}.o_proj", f"{ours}.attention", config, bias=bias)
    for norm in ("query", "key"):
        scale = pieces.norm(f"{theirs}.{norm[0]}_norm", f"{ours}.{norm}_norm", config.head_dim)
        yield replace(scale, order=order)


def _experts(theirs: str, ours: str, config: QwenHybridConfig) -> Iterator[Piece]:
    hidden, inner, count = config.hidden_size, config.expert_size, config.num_experts
    yield pieces.transposed(f"{theirs}.gate.weight", f"{ours}.router.gate", hidden, count)
    if config.fused_experts:
        yield from pieces.joined_experts(f"{theirs}.experts", f"{ours}.experts", hidden, inner, count)
    else:
        names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
        yield from pieces.experts(f"{theirs}.experts", f"{ours}.experts", hidden, inner, count, **names)
    shared = replace(config, intermediate_size=config.shared_size)
    yield from pieces.gate_and_up(f"{theirs}.shared_expert", f"{ours}.shared", shared)
    down = f"{theirs}.shared_expert.down_proj.weight"
    yield pieces.transposed(down, f"{ours}.shared.down", config.shared_size, hidden)
    yield pieces.transposed(f"{theirs}.shared_expert_gate.weight", f"{ours}.shared_gate", hidden, 1)


def _state(read: ConfigReader) -> DeltaState:
    state = DeltaState(
        key_heads=read.integer("linear_num_key_heads", 16),
        value_heads=read.integer("linear_num_value_heads", 32),
        key_dim=read.integer("linear_key_head_dim", 128),
        value_dim=read.integer("linear_value_head_dim", 128),
        width=read.integer("linear_conv_kernel_dim", 4),
    )
    if state.value_heads % state.key_heads or state.width < 2:
        raise CheckpointError(
            f"config.json: linear_num_value_heads ({state.value_heads}) must be a multiple of linear_num_key_heads"
            f" ({state.key_heads}), and linear_conv_kernel_dim ({state.width}) at least 2."
        )
    return state


def _layer_kinds(read: ConfigReader, num_layers: int) -> list[str]:
    """Of each layer "linear_attention" or "full_attention"."""
    every = read.integer("full_attention_interval", 4)
    default = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
    kinds = read.config.get("layer_types") or default
    if not isinstance(kinds, list | tuple) or len(kinds) != num_layers:
        raise CheckpointError(f"config.json: layer_types must list {num_layers} layers, got {shown(kinds)}.")
    for kind in kinds:
        if kind not in ("linear_attention", "full_attention"):
            raise UnsupportedModelError(
                f"config.json: layer type {kind!r} is not supported; supported: linear_attention, full_attention."
            )
    if "full_attention" not in kinds:
        raise UnsupportedModelError("config.json: layer_types without a full_attention layer are not supported.")
    return list(kinds)


def _dense_layers(read: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """As of Qwen3-MoE: decoder_sparse_step counts layers from 1, mlp_only_layers from 0."""
    step, dense = read.integer("decoder_sparse_step", 1), read.config.get("mlp_only_layers") or []
    if not isinstance(dense, list | tuple) or not all(type(layer) is int for layer in dense):
        raise CheckpointError(f"config.json: mlp_only_layers must list layers by number, got {shown(dense)}.")
    return tuple(layer in dense or (layer + 1) % step != 0 for layer in range(num_layers))


QWEN3_NEXT = QwenHybridFamily("qwen3_next", "Qwen3NextForCausalLM", experts=512, per_token=10, joined=True)
QWEN35 = QwenHybridFamily("qwen3_5", "Qwen3_5ForCausalLM", kv_heads=4, inner=12288, has_experts=False)
QWEN35_MOE = QwenHybridFamily("qwen3_5_moe", "Qwen3_5MoeForCausalLM")
