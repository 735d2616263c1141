"""The Llama family with experts: Mixtral, Qwen2-MoE, Qwen3-MoE, Mellum 2, dots.llm1, GLM-4.5, Solar Open, K-EXAONE,
OLMoE, FlexOlmo and MiniMax-M2.

They differ in what `SparseLlamaConfig` says (routers, shared experts, dense layers, norms of queries and keys), and in
the names of their checkpoints' tensors.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from jpaged.api.errors import CheckpointError, shown
from jpaged.models.config_reader import ConfigReader
from jpaged.models.experts import Routing, sigmoid_routing
from jpaged.models.family import TEXT_PART_NAMES
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece
from jpaged.models.rope import window_rope, without_image_sections
from jpaged.models.sparse_llama_family import SparseLlamaConfig, SparseLlamaFamily, sparse_fields

_FUSED = "experts_in_one_tensor"
"""As in `qwen_hybrid`: an entry of ours in config.json, whether one tensor has all experts of a layer."""
_SHAPE = f"{_FUSED}_shape"
"""The shape of a layer's down then; None for that of published checkpoints. That of gate and up says nothing where both
together are as wide as what they read."""


class Qwen3MoeFamily(SparseLlamaFamily):
    """Qwen3-MoE, also as the text part of a Qwen3-VL, whose checkpoints have one tensor for all experts of a layer."""

    other_types = ("qwen3_vl_moe",)
    aliases = TEXT_PART_NAMES
    probed_tensor = _FUSED, "experts.down_proj"

    def read_config(self, read: ConfigReader) -> SparseLlamaConfig:
        if "text_config" not in read.config:
            return self._with_layout(self.reads(read), read.flag(_FUSED, False), read.config.get(_SHAPE))
        part, fused = read.text_part("Qwen3MoeForCausalLM"), read.flag(_FUSED, True)
        if part.config.get("model_type") is not None:
            part.refuse(("model_type", "qwen3_vl_moe_text"))
        shape = read.config.get(_SHAPE)
        known = {**part.config, "norm_topk_prob": True, "use_sliding_window": False, _FUSED: fused, _SHAPE: shape}
        text = ConfigReader(part.architecture, without_image_sections(known), part.max_model_len)
        text = text.with_defaults(num_experts=text.integer("num_local_experts", 60), num_experts_per_tok=4)
        text = text.with_defaults(num_key_value_heads=16, moe_intermediate_size=1408)
        text = text.with_defaults(rope_theta=500000.0, max_position_embeddings=128000)
        return self._with_layout(self.reads(text), fused, shape)

    def _with_layout(self, config: SparseLlamaConfig, fused: bool, shape: Any) -> SparseLlamaConfig:
        if not fused:
            return config
        turned = shape is not None and list(shape[1:]) == [config.hidden_size, config.expert_size]
        return replace(config, fused_experts="outputs, inputs" if turned else "inputs, outputs")

    def sparse_mlp(self, theirs: str, ours: str, config: SparseLlamaConfig) -> Iterator[Piece]:
        if config.fused_experts is None:
            yield from super().sparse_mlp(theirs, ours, config)
            return
        experts, hidden, inner = config.num_experts, config.hidden_size, config.expert_size
        yield pieces.transposed(f"{theirs}.gate.weight", f"{ours}.router.gate", hidden, experts)
        if config.fused_experts == "outputs, inputs":
            yield from pieces.joined_experts(f"{theirs}.experts", f"{ours}.experts", hidden, inner, experts)
        else:
            both, split = (experts, hidden, 2 * inner), (experts, hidden, 2, inner)
            yield Piece(f"{theirs}.experts.gate_up_proj", both, f"{ours}.experts.gate_up", split, (0, 1, 2, 3))
            yield pieces.as_is(f"{theirs}.experts.down_proj", f"{ours}.experts.down", experts, inner, hidden)


def _read_mixtral(read: ConfigReader) -> SparseLlamaConfig:
    """Jiang et al. 2024, arXiv:2401.04088: experts of the full inner width in every layer."""
    read = read.with_defaults(num_key_value_heads=8)
    fields = sparse_fields(
        read,
        num_experts=read.integer("num_local_experts", read.integer("num_experts", 8)),
        routing=Routing(per_token=read.integer("num_experts_per_tok", 2)),
        default_length=131072,
        default_theta=1e6,
        default_eps=1e-5,
    )
    num_layers = fields["num_layers"]
    window = read.integer("sliding_window") if read.config.get("sliding_window") is not None else None
    return SparseLlamaConfig(
        **fields,
        expert_size=fields["intermediate_size"],
        dense_layers=(False,) * num_layers,
        layer_windows=(window,) * num_layers,
    )


def _read_qwen3_moe(read: ConfigReader) -> SparseLlamaConfig:
    """A window is one of all layers, as in transformers."""
    read = read.with_defaults(num_key_value_heads=4)
    # transformers 5 writes "num_local_experts" where the published files have "num_experts".
    num_experts = read.integer("num_experts", read.integer("num_local_experts", 128))
    fields = _qwen_fields(read, num_experts, per_token=8, expert_size=768)
    bias = read.flag("attention_bias", False)
    window = read.optional_positive("sliding_window", 4096) if read.flag("use_sliding_window", False) else None
    windows = (window,) * fields["num_layers"]
    return SparseLlamaConfig(**fields, qk_norm=True, qkv_bias=bias, output_bias=bias, layer_windows=windows)


def _read_mellum(read: ConfigReader) -> SparseLlamaConfig:
    """Mellum 2 (JetBrains 2026): Qwen3-MoE's layers; windows in some, with a RoPE of their own."""
    read = read.with_defaults(num_key_value_heads=4, head_dim=128, intermediate_size=7168)
    num_experts = read.integer("num_experts", read.integer("num_local_experts", 64))
    routing = Routing(per_token=read.integer("num_experts_per_tok", 8), renormalized=read.flag("norm_topk_prob", True))
    sizes: dict[str, Any] = {"default_length": 131072, "default_theta": 500000.0, "layers": "full_attention"}
    fields = sparse_fields(read, num_experts=num_experts, routing=routing, **sizes)
    num_layers, bias = fields["num_layers"], read.flag("attention_bias", False)
    kinds = read.layer_kinds(num_layers) or ("full_attention",) * num_layers
    local = window_rope(read.config, fields["head_dim"], 10000.0)
    fields |= {
        "max_position_embeddings": read.integer("max_position_embeddings", 131072),  # stretched already
        "ropes": (*fields["ropes"], local),
        "layer_ropes": tuple(int(kind == "sliding_attention") for kind in kinds),
        "layer_windows": read.layer_windows(kinds, 1024),
    }
    return SparseLlamaConfig(
        **fields,
        expert_size=read.integer("moe_intermediate_size", 896),
        dense_layers=read.dense_layers(num_layers) or (False,) * num_layers,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
    )


def _read_qwen2_moe(read: ConfigReader) -> SparseLlamaConfig:
    read = read.with_defaults(num_key_value_heads=16)
    num_experts = read.integer("num_experts", read.integer("num_local_experts", 60))
    fields = _qwen_fields(read, num_experts, per_token=4, expert_size=1408)
    num_layers = fields["num_layers"]
    window = read.optional_positive("sliding_window", 4096) if read.flag("use_sliding_window", False) else None
    end = read.number("max_window_layers", 28)  # every second layer before it, as in transformers 5
    default = tuple("sliding_attention" if i % 2 == 0 and i < end else "full_attention" for i in range(num_layers))
    kinds = read.layer_kinds(num_layers) or default
    return SparseLlamaConfig(
        **fields,
        qkv_bias=read.flag("qkv_bias", True),
        layer_windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        shared_size=read.integer("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )


def _qwen_fields(read: ConfigReader, num_experts: int, *, per_token: int, expert_size: int) -> dict[str, Any]:
    """What both spell alike. A layer has experts if its number, from 1 on, is a multiple of `decoder_sparse_step`, and
    it is none of `mlp_only_layers`, which are counted from 0.

    per_token, expert_size: what holds where config.json leaves it out.
    """
    routing = Routing(
        per_token=read.integer("num_experts_per_tok", per_token),
        renormalized=read.flag("norm_topk_prob", False),
    )
    fields = sparse_fields(read, num_experts=num_experts, routing=routing, default_length=32768)
    step, dense = read.integer("decoder_sparse_step", 1), read.config.get("mlp_only_layers") or []
    if not isinstance(dense, list | tuple) or not all(type(layer) is int for layer in dense):
        raise CheckpointError(f"config.json: mlp_only_layers must list layers by number, got {shown(dense)}.")
    layers = range(fields["num_layers"])
    return fields | {
        "expert_size": read.integer("moe_intermediate_size", expert_size),
        "dense_layers": tuple(layer in dense or (layer + 1) % step != 0 for layer in layers),
    }


def _read_dots1(read: ConfigReader) -> SparseLlamaConfig:
    """Huo et al. 2025, arXiv:2506.05767: DeepSeek-V3's router and shared experts, and ordinary attention."""
    read = read.with_defaults(num_key_value_heads=32)
    routing = sigmoid_routing(read)
    num_experts = read.with_other_names(n_routed_experts="num_local_experts").integer("n_routed_experts")
    fields = sparse_fields(read, num_experts=num_experts, routing=routing, default_length=2048)
    num_layers, expert_size = fields["num_layers"], read.integer("moe_intermediate_size", 1408)
    bias = read.flag("attention_bias", False)
    window, first = read.optional_positive("sliding_window", 4096), read.number("max_window_layers", 62)
    default = tuple("sliding_attention" if i >= first else "full_attention" for i in range(num_layers))
    kinds = read.layer_kinds(num_layers) or default
    return SparseLlamaConfig(
        **fields,
        expert_size=expert_size,
        shared_size=expert_size * read.integer("n_shared_experts"),
        dense_layers=tuple(layer < read.number("first_k_dense_replace", 0) for layer in range(num_layers)),
        layer_windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
    )


def _read_glm4_moe(read: ConfigReader) -> SparseLlamaConfig:
    """GLM-4.5 Team 2025, arXiv:2508.06471: as dots.llm1, but half of each head is rotated."""
    read = read.with_defaults(num_key_value_heads=8)
    routing = sigmoid_routing(read, per_token=8, renormalized=True)
    num_experts = read.integer("n_routed_experts", read.integer("num_local_experts", 128))
    fields = sparse_fields(
        read,
        num_experts=num_experts,
        routing=routing,
        default_length=131072,
        default_eps=1e-5,
        rotated_fraction=0.5,
    )
    num_layers, expert_size = fields["num_layers"], read.integer("moe_intermediate_size", 1408)
    return SparseLlamaConfig(
        **fields,
        expert_size=expert_size,
        shared_size=expert_size * read.integer("n_shared_experts", 1),
        dense_layers=tuple(layer < read.number("first_k_dense_replace", 1) for layer in range(num_layers)),
        qk_norm=read.flag("use_qk_norm", False),
        qkv_bias=read.flag("attention_bias", False),
    )


def _read_solar_open(read: ConfigReader) -> SparseLlamaConfig:
    """Upstage 2026: GLM-4.5's experts in every layer."""
    read = read.with_defaults(num_key_value_heads=8, head_dim=128)
    expert_size = read.integer("moe_intermediate_size", 1280)
    routing = sigmoid_routing(read, per_token=8, renormalized=True)
    num_experts = read.integer("n_routed_experts", read.integer("num_local_experts", 128))
    sizes: dict[str, Any] = {"default_length": 131072, "default_theta": 1e6, "default_eps": 1e-5}
    # No layer has an MLP of this size.
    known = read.with_entries(intermediate_size=read.integer("intermediate_size", expert_size))
    fields = sparse_fields(known, num_experts=num_experts, routing=routing, rotated_fraction=1.0, **sizes)
    return SparseLlamaConfig(
        **fields,
        expert_size=expert_size,
        shared_size=expert_size * read.integer("n_shared_experts", 1),
        dense_layers=(False,) * fields["num_layers"],
        qkv_bias=read.flag("attention_bias", False),
    )


def _read_exaone_moe(read: ConfigReader) -> SparseLlamaConfig:
    """K-EXAONE (LG AI Research 2026, arXiv:2601.01739): DeepSeek-V3's router; windows in three layers of four, and RoPE
    in those alone."""
    read = read.with_defaults(num_key_value_heads=32, routed_scaling_factor=2.5)
    routing = sigmoid_routing(read, per_token=8, renormalized=True)
    num_experts, expert_size = read.integer("num_experts", 64), read.integer("moe_intermediate_size", 1024)
    fields = sparse_fields(read, num_experts=num_experts, routing=routing, default_length=2048, default_eps=1e-5)
    num_layers, first_sparse = fields["num_layers"], read.number("first_k_dense_replace", 1)
    if read.optional_positive("sliding_window", 4096) is not None:
        kinds = read.layer_kinds(num_layers) or read.kinds_of_layers(num_layers, every=4)
        fields |= {
            "layer_ropes": tuple(0 if kind == "sliding_attention" else None for kind in kinds),
            "layer_windows": read.layer_windows(kinds, 4096),
        }
    return SparseLlamaConfig(
        **fields,
        expert_size=expert_size,
        shared_size=expert_size * read.integer("num_shared_experts", 1),
        dense_layers=read.dense_layers(num_layers) or tuple(layer < first_sparse for layer in range(num_layers)),
        qk_norm=True,
    )


def _read_olmoe(read: ConfigReader) -> SparseLlamaConfig:
    """Muennighoff et al. 2024, arXiv:2409.02060."""
    read.refuse(("clip_qkv", None))
    return _olmoe(read, per_token=8, num_experts=64, inner=2048, eps=1e-5, theta=10000.0)


def _read_flex_olmo(read: ConfigReader) -> SparseLlamaConfig:
    """Shi et al. 2025, arXiv:2507.07024: OLMoE's experts in OLMo 2's layers."""
    found = _olmoe(read, per_token=5, num_experts=7, inner=11008, eps=1e-6, theta=500000.0)
    return replace(found, norms_after=True)


def _olmoe(
    read: ConfigReader, *, per_token: int, num_experts: int, inner: int, eps: float, theta: float
) -> SparseLlamaConfig:
    """What both spell alike; the numbers are those of transformers where config.json has none."""
    routing = Routing(
        per_token=read.integer("num_experts_per_tok", per_token), renormalized=read.flag("norm_topk_prob", False)
    )
    num_experts = read.integer("num_experts", read.integer("num_local_experts", num_experts))
    read = read.with_entries(intermediate_size=read.integer("intermediate_size", inner))
    sizes: dict[str, Any] = {"default_length": 4096, "default_theta": theta, "default_eps": eps}
    fields = sparse_fields(read, num_experts=num_experts, routing=routing, **sizes)
    bias = read.flag("attention_bias", False)
    return SparseLlamaConfig(
        **fields,
        expert_size=fields["intermediate_size"],
        dense_layers=(False,) * fields["num_layers"],
        norms_of_all=True,
        qkv_bias=bias,
        output_bias=bias,
    )


def _read_minimax_m2(read: ConfigReader) -> SparseLlamaConfig:
    """MiniMax 2025; the published files say by "rotary_dim" how much of a head is rotated."""
    read.refuse(("use_qk_norm", True), ("qk_norm_type", "per_layer"), ("scoring_func", "sigmoid"))
    read.refuse(("use_routing_bias", True), ("shared_intermediate_size", 0))
    read = read.with_defaults(num_key_value_heads=8, head_dim=128, intermediate_size=1536)
    if read.config.get("rotary_dim") is not None:
        read = read.with_defaults(partial_rotary_factor=read.integer("rotary_dim") / read.head_dim("head_dim", 128))
    num_experts = read.integer("num_local_experts", read.integer("num_experts", 256))
    routing = Routing(per_token=read.integer("num_experts_per_tok", 8), score="sigmoid", biased=True)
    sizes: dict[str, Any] = {"default_length": 196608, "default_theta": 5e6, "rotated_fraction": 1.0}
    fields = sparse_fields(read, num_experts=num_experts, routing=routing, **sizes)
    return SparseLlamaConfig(
        **fields,
        expert_size=fields["intermediate_size"],
        dense_layers=(False,) * fields["num_layers"],
        norms_of_all=True,
    )


_MIXTRAL_NAMES = pieces.ExpertNames(
    block="block_sparse_moe", gate="w1", up="w3", down="w2", correction="e_score_correction_bias"
)
MIXTRAL = SparseLlamaFamily("mixtral", _read_mixtral, _MIXTRAL_NAMES)
MINIMAX_M2 = SparseLlamaFamily("minimax_m2", _read_minimax_m2, _MIXTRAL_NAMES)
OLMOE = SparseLlamaFamily("olmoe", _read_olmoe)
FLEX_OLMO = SparseLlamaFamily("flex_olmo", _read_flex_olmo)
SOLAR_OPEN = SparseLlamaFamily("solar_open", _read_solar_open)
EXAONE_MOE = SparseLlamaFamily(
    *("exaone_moe", _read_exaone_moe, pieces.ExpertNames(correction="e_score_correction_bias")),
    derived_tensors=r"rotary_emb\.inv_freq$|^mtp\.",
)
QWEN3_MOE = Qwen3MoeFamily("qwen3_moe", _read_qwen3_moe, derived_tensors=r"rotary_emb\.inv_freq$|^(model\.)?visual\.")
QWEN2_MOE = SparseLlamaFamily("qwen2_moe", _read_qwen2_moe, pieces.ExpertNames(shared="shared_expert"))
MELLUM = SparseLlamaFamily("mellum", _read_mellum, derived_tensors=r"rotary_emb\.inv_freq$|^mtp\.")
DOTS1 = SparseLlamaFamily("dots1", _read_dots1)
GLM4_MOE = SparseLlamaFamily(
    # Also where config.json has fewer layers than GLM-4.5-Air, or than GLM-4.5 and 4.6.
    *("glm4_moe", _read_glm4_moe),
    looks_ahead=True,
    derived_tensors=r"rotary_emb\.inv_freq$|^model\.layers\.(46|92)\.",
)
