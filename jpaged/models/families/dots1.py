"""dots.llm1 (Huo et al. 2025, arXiv:2506.05767): DeepSeek-V3's router and shared experts, and ordinary attention."""

from jpaged.models.config_reader import ConfigReader
from jpaged.models.experts import Routing
from jpaged.models.families.sparse import SparseLlamaConfig, SparseLlamaFamily, read_fields


def _read_dots1(read: ConfigReader) -> SparseLlamaConfig:
    routing = Routing(
        per_token=read.integer("num_experts_per_tok"),
        score="sigmoid",
        renormalized=read.flag("norm_topk_prob", False),
        factor=read.number("routed_scaling_factor", 1.0),
        biased=True,
        groups=read.integer("n_group", 1),
        kept_groups=read.integer("topk_group", 1),
    )
    num_experts = read.integer("n_routed_experts")
    fields = read_fields(read, num_experts=num_experts, routing=routing, default_length=2048)
    num_layers, expert_size = fields["num_layers"], read.integer("moe_intermediate_size", 1408)
    bias = read.flag("attention_bias", False)
    window, first = read.optional_positive("sliding_window", 4096), read.number("max_window_layers", 62)
    default = tuple("sliding_attention" if i >= first else "full_attention" for i in range(num_layers))
    kinds = read.layer_kinds(num_layers) or default
    return SparseLlamaConfig(
        **fields,
        expert_size=expert_size,
        shared_size=expert_size * read.integer("n_shared_experts", 1),
        dense_layers=tuple(layer < read.number("first_k_dense_replace", 0) for layer in range(num_layers)),
        layer_windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
    )


DOTS1 = SparseLlamaFamily("dots1", _read_dots1)
