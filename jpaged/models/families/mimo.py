"""MiMo-V2-Flash (Xiaomi 2026, arXiv:2601.02780): experts, windows in most layers, and values narrower than keys.

    attention   of five layers in six with a window of 128 tokens before the query, sinks and twice as many key-value
                heads; RoPE on a third of a head; values are scaled, and are kept with zeros behind, as wide as keys
    MLPs        experts chosen by a sigmoid with a bias, none shared; one ordinary MLP in the first layer

Layers that predict further tokens are not run.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jpaged.api.errors import CheckpointError, UnsupportedModelError, shown
from jpaged.models.blocks import Decoder, DecoderConfig, SequentialBlock, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config import KVHeads
from jpaged.models.config_reader import ConfigReader
from jpaged.models.experts import SparseConfig, feed_forward, sigmoid_routing
from jpaged.models.layers import Attention
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import RMSNorm
from jpaged.models.rope import parse_rope

_SLIDING, _FULL = "sliding_attention", "full_attention"
_USUAL = {"num_attention_heads": 64, "num_key_value_heads": 4, "intermediate_size": 16384, "rms_norm_eps": 1e-5}
_USUAL |= {"moe_intermediate_size": 2048, "n_routed_experts": 256, "routed_scaling_factor": 1.0}


@dataclass(frozen=True, kw_only=True)
class MimoConfig(DecoderConfig, SparseConfig):
    """values: columns of a head's value. value_scale: multiplies values. sinks: per layer. bias: queries, keys and
    values have biases."""

    values: int
    value_scale: float
    sinks: tuple[bool, ...]
    bias: bool


class MimoFamily:
    model_type = "mimo_v2_flash"
    base_prefix = "model."
    derived_tensors = r"rotary_emb\.inv_freq$|^model\.mtp\."

    def read_config(self, read: ConfigReader) -> MimoConfig:
        read = read.with_other_names(rms_norm_eps="layernorm_epsilon", n_routed_experts="num_local_experts")
        read = read.with_usual(**_USUAL)
        fraction: dict[str, Any] = {"rotated_fraction": 0.334, "max_model_len": read.max_model_len}
        whole = {"theta": 5e6, "layers": _FULL, "rotated_fraction": 0.334}
        fields = decoder_fields(read, head_dim=192, default_length=131072, rope=whole)
        num_layers, dim, number = fields["num_layers"], fields["head_dim"], fields["num_kv_heads"]
        values = read.head_dim("v_head_dim", 128)
        if values > dim:
            raise UnsupportedModelError(f"config.json: v_head_dim ({values}) above head_dim ({dim}) is not supported.")
        read.refuse(("swa_num_attention_heads", fields["num_heads"]), ("swa_head_dim", dim), ("swa_v_head_dim", values))
        read.refuse(("add_swa_attention_sink_bias", True), ("add_full_attention_sink_bias", False))
        read.refuse(("attention_projection_layout", "split"), ("scoring_func", "sigmoid"), ("n_shared_experts", 0))
        kinds = read.layer_kinds(num_layers) or _listed(read, "hybrid_layer_pattern", num_layers, _FULL, _SLIDING)
        kinds = kinds or tuple(_FULL if i == 0 or (i + 1) % 6 == 0 else _SLIDING for i in range(num_layers))
        dense = read.dense_layers(num_layers) or _listed(read, "moe_layer_freq", num_layers, True, False)
        if read.config.get("sliding_window_size") is not None:  # of tokens before the query
            read = read.with_entries(sliding_window=read.integer("sliding_window_size") + 1)
        theta = read.config.get("swa_rope_theta", 10000.0)
        local = read.with_entries(rope_theta=theta)
        rope, _ = parse_rope(local.config, dim, fields["max_position_embeddings"], layers=_SLIDING, **fraction)
        heads = {_FULL: KVHeads(number, dim)}
        heads[_SLIDING] = KVHeads(read.integer("swa_num_key_value_heads", 2 * number), dim)
        routing, num_experts = sigmoid_routing(read, per_token=8, renormalized=True), read.integer("n_routed_experts")
        routing.check(num_experts)
        fields |= {
            "ropes": (*fields["ropes"], rope),
            "layer_ropes": tuple(int(kind == _SLIDING) for kind in kinds),
            "layer_windows": read.layer_windows(kinds, 129),
            "layer_heads": tuple(heads[kind] for kind in kinds),
        }
        scale = read.config.get("attention_value_scale", 0.707)
        return MimoConfig(
            **fields,
            values=values,
            value_scale=1.0 if scale is None else read.number("attention_value_scale", 0.707),
            sinks=tuple(kind == _SLIDING for kind in kinds),
            bias=read.flag("attention_bias", False),
            num_experts=num_experts,
            routing=routing,
            expert_size=read.integer("moe_intermediate_size"),
            dense_layers=dense or tuple(layer == 0 for layer in range(num_layers)),
        )

    def module(self, config: MimoConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm = partial(RMSNorm, config.hidden_size, config.norm_eps, dtype, rngs)

        def block(layer: int) -> SequentialBlock:
            values: dict[str, Any] = {"value_dim": config.values, "value_scale": config.value_scale}
            sinks, bias = config.sinks[layer], config.bias
            return SequentialBlock(
                Attention(config, layer, dtype, rngs, qkv_bias=bias, sinks=sinks, **values),
                feed_forward(config, layer, dtype, rngs, collectives),
                attention_norm=norm(),
                mlp_norm=norm(),
                rope=config.layer_ropes[layer],
            )

        return Decoder(config, block, norm, dtype, rngs, collectives)

    def tensors(self, config: MimoConfig) -> Iterator[Piece | TiedTensor]:
        hidden = config.hidden_size
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours, of_layer = f"model.layers.{i}", f"layers.{i}", config.of_layer(i)
            attention = f"{ours}.attention"
            order = config.ropes[config.layer_ropes[i] or 0].column_order
            options: dict[str, Any] = {"bias": config.bias, "order": order, "value_dim": config.values}
            yield pieces.norm(f"{theirs}.input_layernorm", f"{ours}.attention_norm", hidden)
            yield from pieces.separate_qkv(f"{theirs}.self_attn", attention, of_layer, **options)
            if config.sinks[i]:
                yield pieces.as_is(f"{theirs}.self_attn.attention_sink_bias", f"{attention}.sinks", config.num_heads)
            sizes: dict[str, Any] = {"bias": False, "value_dim": config.values}
            yield from pieces.output_projection(f"{theirs}.self_attn.o_proj", attention, of_layer, **sizes)
            yield pieces.norm(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm", hidden)
            if config.dense_layers[i]:
                yield from pieces.gated_mlp(f"{theirs}.mlp", f"{ours}.mlp", hidden, config.intermediate_size)
            else:
                yield from pieces.sparse_mlp(f"{theirs}.mlp", f"{ours}.mlp", config)
        yield pieces.norm("model.norm", "norm", hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)


def _listed(read: ConfigReader, name: str, num_layers: int, zero: Any, one: Any) -> tuple[Any, ...] | None:
    """What 0 and 1 stand for in an entry that has one of them for each layer; None where there is no such entry."""
    said = read.config.get(name)
    if said is None:
        return None
    if not isinstance(said, list | tuple) or len(said) != num_layers or any(number not in (0, 1) for number in said):
        raise CheckpointError(f"config.json: {name} must list 0 or 1 for {num_layers} layers, got {shown(said)}.")
    return tuple(one if number else zero for number in said)


MIMO_V2_FLASH = MimoFamily()
