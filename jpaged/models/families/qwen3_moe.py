"""Qwen3-MoE and Qwen2-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B)."""

from typing import Any

from jpaged.api.errors import CheckpointError, shown
from jpaged.models.config_reader import ConfigReader
from jpaged.models.experts import Routing
from jpaged.models.families.sparse import Names, SparseLlamaConfig, SparseLlamaFamily, read_fields


def _read_qwen3_moe(read: ConfigReader) -> SparseLlamaConfig:
    """A window is one of all layers, as in transformers."""
    # transformers 5 writes "num_local_experts" where the published files have "num_experts".
    num_experts = read.integer("num_experts", read.integer("num_local_experts", 128))
    fields = _fields(read, num_experts, default_head_dim=128)
    bias = read.flag("attention_bias", False)
    window = read.optional_positive("sliding_window", 4096) if read.flag("use_sliding_window", False) else None
    windows = (window,) * fields["num_layers"]
    return SparseLlamaConfig(**fields, qk_norm=True, qkv_bias=bias, output_bias=bias, layer_windows=windows)


def _read_qwen2_moe(read: ConfigReader) -> SparseLlamaConfig:
    num_experts = read.integer("num_experts", read.integer("num_local_experts", 60))
    fields = _fields(read, num_experts)
    num_layers = fields["num_layers"]
    window = read.optional_positive("sliding_window", 4096) if read.flag("use_sliding_window", False) else None
    first = read.number("max_window_layers", 28)
    default = tuple("sliding_attention" if i >= first else "full_attention" for i in range(num_layers))
    kinds = read.layer_kinds(num_layers) or default
    return SparseLlamaConfig(
        **fields,
        qkv_bias=read.flag("qkv_bias", True),
        layer_windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        shared_size=read.integer("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )


def _fields(read: ConfigReader, num_experts: int, default_head_dim: int | None = None) -> dict[str, Any]:
    """What both spell alike. A layer has experts if its number, from 1 on, is a multiple of `decoder_sparse_step`, and
    it is none of `mlp_only_layers`, which are counted from 0.
    """
    routing = Routing(
        per_token=read.integer("num_experts_per_tok", 8 if default_head_dim else 4),
        renormalized=read.flag("norm_topk_prob", False),
    )
    fields = read_fields(
        read, num_experts=num_experts, routing=routing, default_length=32768, default_head_dim=default_head_dim
    )
    step, dense = read.integer("decoder_sparse_step", 1), read.config.get("mlp_only_layers") or []
    if not isinstance(dense, list | tuple) or not all(type(layer) is int for layer in dense):
        raise CheckpointError(f"config.json: mlp_only_layers must list layers by number, got {shown(dense)}.")
    layers = range(fields["num_layers"])
    return fields | {
        "expert_size": read.integer("moe_intermediate_size", 768 if default_head_dim else 1408),
        "dense_layers": tuple(layer in dense or (layer + 1) % step != 0 for layer in layers),
    }


QWEN3_MOE = SparseLlamaFamily("qwen3_moe", _read_qwen3_moe)
QWEN2_MOE = SparseLlamaFamily("qwen2_moe", _read_qwen2_moe, Names(shared="shared_expert"))
