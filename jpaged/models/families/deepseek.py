"""DeepSeek-V2 (Liu et al. 2024, arXiv:2405.04434), V3 and R1 (Liu et al. 2024, arXiv:2412.19437), and what has their
architecture: Kimi K2, Moonlight, GLM-4.7-Flash, Mistral Small 4. And, without experts, MiniCPM3 and Youtu-LLM.

    attention   latents (`models/latent.py`); YaRN, whose temperature multiplies scores, not the rotation; Mistral's
                sharpens with the position, too
    MLPs        dense in the first layers, then experts, of which some are shared
    MiniCPM3    embeddings, residuals and logits are multiplied by numbers of config.json
    routers     V2: softmax, of all experts or of the best groups; V3: sigmoid with a bias, in groups; Mistral: softmax,
                in groups

The layers behind the last one, which predict further tokens, are not read.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jpaged.api.errors import CheckpointError, shown
from jpaged.models.blocks import Decoder, DecoderConfig, Scales, SequentialBlock
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader, divide_into_heads
from jpaged.models.experts import Routing, SparseConfig, feed_forward, sigmoid_routing
from jpaged.models.family import OTHER_PARTS, TEXT_PART_NAMES
from jpaged.models.latent import LatentAttention, LatentConfig
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import RMSNorm
from jpaged.models.rope import parse_rope, yarn_temperature
from jpaged.models.temperature import Temperature

_ROPE_OF_MISTRAL4: dict[str, Any] = {
    "type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""RoPE's parameters where the config.json of a Mistral 4 has none."""


_UNSCALED = Scales()


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(DecoderConfig, SparseConfig, LatentConfig):
    """joined_experts: checkpoints have one tensor for gate and up of all experts of a layer, and one for down.
    residual_scale: of what layers add to the stream. scales: of embeddings and logits.
    """

    joined_experts: bool = False
    residual_scale: float = 1.0
    scales: Scales = _UNSCALED


@dataclass(frozen=True)
class DeepseekFamily:
    """One of the architectures, alone or as the text part of a multimodal checkpoint. reads: its configuration.
    text: the architecture of the text model. other_types: model_types of multimodal models. parts: further ones of
    their text part.
    """

    model_type: str
    reads: Callable[[ConfigReader], DeepseekConfig]
    text: str
    other_types: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()

    base_prefix = "model."
    derived_tensors = rf"rotary_emb\.inv_freq$|{OTHER_PARTS}"
    # The first one is how transformers saves layers of a Kimi K2.5; published ones have the usual names.
    aliases = (("language_model.model.blocks.", "model.layers."), *TEXT_PART_NAMES)

    def read_config(self, read: ConfigReader) -> DeepseekConfig:
        if "text_config" in read.config:
            read = read.text_part(self.text)
            if read.config.get("model_type") not in self.parts:
                read.refuse(("model_type", self.model_type))
        return self.reads(read)

    def passed_over(self, config: DeepseekConfig) -> str:
        return rf"^model\.layers\.{config.num_layers}\."

    def module(self, config: DeepseekConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm = partial(RMSNorm, config.hidden_size, config.norm_eps, dtype, rngs)

        def block(layer: int) -> SequentialBlock:
            attention = LatentAttention(config, dtype, rngs)
            mlp = feed_forward(config, layer, dtype, rngs, collectives)
            tempered = config.temperature is not None
            return SequentialBlock(
                attention,
                mlp,
                attention_norm=norm(),
                mlp_norm=norm(),
                tempered=tempered,
                residual_scale=config.residual_scale,
            )

        return Decoder(config, block, norm, dtype, rngs, collectives, scales=config.scales)

    def tensors(self, config: DeepseekConfig) -> Iterator[Piece | TiedTensor]:
        hidden = config.hidden_size
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            yield pieces.norm(f"{theirs}.input_layernorm", f"{ours}.attention_norm", hidden)
            yield from _attention(f"{theirs}.self_attn", f"{ours}.attention", config)
            yield pieces.norm(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm", hidden)
            if config.dense_layers[i]:
                yield from pieces.gated_mlp(f"{theirs}.mlp", f"{ours}.mlp", hidden, config.intermediate_size)
            elif config.joined_experts:
                yield from _joined_experts(f"{theirs}.mlp", f"{ours}.mlp", config)
            else:
                yield from pieces.sparse_mlp(f"{theirs}.mlp", f"{ours}.mlp", config)
        yield pieces.norm("model.norm", "norm", hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)


def _attention(theirs: str, ours: str, config: DeepseekConfig) -> Iterator[Piece]:
    hidden, heads, rank, order = config.hidden_size, config.num_heads, config.value_dim or 0, config.columns
    query_rank, bias = config.query_rank or 0, config.latent_bias
    if query_rank:
        name, shape = f"{theirs}.q_a_proj", (query_rank, hidden)
        yield Piece(f"{name}.weight", shape, f"{ours}.down", shape, (1, 0))
        if bias:
            yield pieces.as_is(f"{name}.bias", f"{ours}.down_bias", query_rank)
        yield pieces.norm(f"{theirs}.q_a_layernorm", f"{ours}.query_norm", query_rank)
    # Of each head its plain columns, then those that are rotated.
    by_head = (heads, config.plain_dim + config.rotated_dim, query_rank or hidden)
    weight = f"{theirs}.{'q_b_proj' if query_rank else 'q_proj'}.weight"
    shape = (by_head[0] * by_head[1], by_head[2])
    rotated = _behind(config.plain_dim, order)
    yield Piece(weight, shape, f"{ours}.query", by_head, (2, 0, 1), order=rotated, ordered_axis=1)

    name, shape, last = f"{theirs}.kv_a_proj_with_mqa", (config.head_dim, hidden), _behind(rank, order)
    yield Piece(f"{name}.weight", shape, f"{ours}.down", shape, (1, 0), (0, query_rank), order=last)
    if bias:
        size = (config.head_dim,)
        yield Piece(f"{name}.bias", size, f"{ours}.down_bias", size, (0,), (query_rank,), order=last)
    yield pieces.norm(f"{theirs}.kv_a_layernorm", f"{ours}.latent_norm", rank)

    both = (heads, config.plain_dim + config.head_values, rank)
    shape = (both[0] * both[1], rank)
    parts = (("to_keys", 0, config.plain_dim), ("to_values", config.plain_dim, config.head_values))
    for parameter, first, count in parts:
        part = pieces.Part(both, 1, first, count)
        yield Piece(f"{theirs}.kv_b_proj.weight", shape, f"{ours}.{parameter}", part.shape, (0, 1, 2), part=part)

    split = (hidden, heads, config.head_values)
    yield Piece(f"{theirs}.o_proj.weight", (hidden, split[1] * split[2]), f"{ours}.out", split, (1, 2, 0))
    if bias:
        yield pieces.as_is(f"{theirs}.o_proj.bias", f"{ours}.out_bias", hidden)


def _joined_experts(theirs: str, ours: str, config: DeepseekConfig) -> Iterator[Piece]:
    hidden, inner, count = config.hidden_size, config.expert_size, config.num_experts
    yield pieces.transposed(f"{theirs}.gate.weight", f"{ours}.router.gate", hidden, count)
    yield from pieces.joined_experts(f"{theirs}.experts", f"{ours}.experts", hidden, inner, count)
    yield from pieces.gated_mlp(f"{theirs}.shared_experts", f"{ours}.shared", hidden, config.shared_size)


def _behind(count: int, order: tuple[int, ...]) -> tuple[int, ...]:
    """An order of columns behind so many that stay in place."""
    return (*range(count), *(count + column for column in order)) if order else ()


def _read_v2(read: ConfigReader) -> DeepseekConfig:
    read.refuse(("norm_topk_prob", False), ("scoring_func", "softmax"), ("mlp_bias", False))
    method = read.config.get("topk_method") or "greedy"
    if method != "group_limited_greedy":
        read.refuse(("topk_method", "greedy"))
    in_groups = method == "group_limited_greedy"
    routing = Routing(
        per_token=read.integer("num_experts_per_tok"),
        renormalized=False,
        factor=read.number("routed_scaling_factor", 1.0),
        groups=read.integer("n_group", 1) if in_groups else 1,
        kept_groups=read.integer("topk_group", 1) if in_groups else 1,
        group_best=1,
    )
    return _config(read, routing, num_experts=64, num_shared=2, expert_size=1407, dense=0, default_length=2048)


def _read_v3(read: ConfigReader) -> DeepseekConfig:
    read.refuse(("topk_method", "noaux_tc"), ("scoring_func", "sigmoid"))
    usual = {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
    read = read.with_usual(**usual)
    routing = sigmoid_routing(read, per_token=8, renormalized=True)
    return _config(read, routing, num_experts=256, num_shared=1, expert_size=2048, dense=3, default_length=4096)


def _read_glm4_moe_lite(read: ConfigReader) -> DeepseekConfig:
    """Z.ai 2026. "mlp_layer_types" says which layers have experts: without it all but the first."""
    read.refuse(("topk_method", "noaux_tc"), ("scoring_func", "sigmoid"))
    num_layers = read.integer("num_hidden_layers")
    usual: dict[str, Any] = {"qk_nope_head_dim": 192, "v_head_dim": 256, "routed_scaling_factor": 1.8}
    usual |= {"rms_norm_eps": 1e-5, "q_lora_rank": 768}
    read = read.with_defaults(**usual)
    dense_layers = read.dense_layers(num_layers) or (True, *(False,) * (num_layers - 1))
    routing = sigmoid_routing(read, per_token=4, renormalized=True)
    found = _config(read, routing, num_experts=64, num_shared=1, expert_size=1536, dense=0, default_length=202752)
    return replace(found, dense_layers=dense_layers)


def _read_mistral4(read: ConfigReader) -> DeepseekConfig:
    """Mistral AI 2026. The weight of attention's temperature stands among RoPE's parameters."""
    usual: dict[str, Any] = {"kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64}
    read = read.with_defaults(**usual)
    given = read.config.get("rope_parameters") or read.config.get("rope_scaling") or _ROPE_OF_MISTRAL4
    if not isinstance(given, Mapping):
        raise CheckpointError(f"config.json: rope_parameters must be an object or null, got {shown(given)}.")
    # The rotated part of a head, which its sizes say as well.
    parameters = {name: value for name, value in given.items() if name != "partial_rotary_factor"}
    read = read.with_entries(rope_scaling=parameters, rope_parameters=None)
    routing = Routing(
        per_token=read.integer("num_experts_per_tok", 4),
        renormalized=read.flag("norm_topk_prob", True),
        factor=read.number("routed_scaling_factor", 1.0),
        groups=read.integer("n_group", 1),
        kept_groups=read.integer("topk_group", 1),
    )
    found = _config(read, routing, num_experts=128, num_shared=1, expert_size=2048, dense=0, default_length=1048576)
    of_rope = ConfigReader(read.architecture, parameters)
    weight = of_rope.optional_number("llama_4_scaling_beta")
    length = of_rope.integer("original_max_position_embeddings", read.integer("max_position_embeddings", 1048576))
    temperature = None if weight is None else Temperature(weight, length)
    return replace(found, temperature=temperature, joined_experts=True)


def _read_youtu(read: ConfigReader) -> DeepseekConfig:
    """Tencent 2025, arXiv:2512.24618."""
    return _without_experts(read.with_defaults(tie_word_embeddings=True), default_length=131072)


def _read_minicpm3(read: ConfigReader) -> DeepseekConfig:
    """OpenBMB 2024."""
    read.refuse(("mlp_bias", False))
    usual: dict[str, Any] = {"kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
    usual |= {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_interleave": False}
    read = read.with_defaults(**usual)
    hidden, layers = read.integer("hidden_size"), read.integer("num_hidden_layers")
    values = read.integer("v_head_dim", divide_into_heads(hidden, read.integer("num_attention_heads")))
    found = _without_experts(read.with_entries(v_head_dim=values), default_length=32768)
    depth, base = read.optional_number("scale_depth", 1.4), read.optional_number("dim_model_base", 256)
    return replace(
        found,
        residual_scale=1.0 if depth is None else depth * layers**-0.5,
        scales=Scales(embedding=read.number("scale_emb", 12.0), logits=1.0 if base is None else base / hidden),
    )


def _without_experts(read: ConfigReader, default_length: int) -> DeepseekConfig:
    """With MLPs in all layers."""
    return DeepseekConfig(
        **_fields(read, default_length),
        routing=Routing(per_token=1),
        expert_size=0,
        dense_layers=(True,) * read.integer("num_hidden_layers"),
    )


def _config(
    read: ConfigReader,
    routing: Routing,
    *,
    num_experts: int,
    num_shared: int,
    expert_size: int,
    dense: int,
    default_length: int,
) -> DeepseekConfig:
    """What both spell alike; the numbers are those of transformers where config.json has none."""
    read.refuse(("moe_layer_freq", 1))
    read = read.with_other_names(num_experts="num_local_experts")  # V3's other name, as "num_experts" is V2's
    num_experts = read.integer("n_routed_experts", read.integer("num_experts", num_experts))
    routing.check(num_experts)
    expert_size = read.integer("moe_intermediate_size", expert_size)
    first_sparse = read.number("first_k_dense_replace", dense)
    return DeepseekConfig(
        **_fields(read, default_length),
        num_experts=num_experts,
        routing=routing,
        expert_size=expert_size,
        shared_size=expert_size * read.integer("n_shared_experts", num_shared),
        dense_layers=tuple(layer < first_sparse for layer in range(read.integer("num_hidden_layers"))),
    )


def _fields(read: ConfigReader, default_length: int) -> dict[str, Any]:
    """What has nothing to do with experts."""
    num_layers = read.integer("num_hidden_layers")
    rank, plain_dim = read.integer("kv_lora_rank", 512), read.integer("qk_nope_head_dim", 128)
    rotated_dim = read.integer("qk_rope_head_dim", 64)
    length = read.integer("max_position_embeddings", default_length)
    options: dict[str, Any] = {"interleaved": read.flag("rope_interleave", True), "max_model_len": read.max_model_len}
    rope, length = parse_rope(read.config, rotated_dim, length, **options)
    return read.common() | {
        "hidden_size": read.integer("hidden_size"),
        "num_layers": num_layers,
        "num_heads": read.integer("num_attention_heads"),
        "num_kv_heads": 1,
        "head_dim": rank + rotated_dim,
        "value_dim": rank,
        "query_rank": read.optional_positive("q_lora_rank", 1536),
        "plain_dim": plain_dim,
        "rotated_dim": rotated_dim,
        "head_values": read.integer("v_head_dim", 128),
        "scale": (plain_dim + rotated_dim) ** -0.5 * yarn_temperature(read.config) ** 2,
        "latent_bias": read.flag("attention_bias", False),
        "intermediate_size": read.integer("intermediate_size"),
        "max_position_embeddings": length,
        "tie_word_embeddings": read.flag("tie_word_embeddings", False),
        "norm_eps": read.number("rms_norm_eps", 1e-6),
        "activation": read.activation("hidden_act", "silu"),
        "ropes": (rope,),
        "layer_ropes": (0,) * num_layers,
    }


DEEPSEEK_V2 = DeepseekFamily("deepseek_v2", _read_v2, "DeepseekV2ForCausalLM")
DEEPSEEK_V3 = DeepseekFamily(
    "deepseek_v3", _read_v3, "DeepseekV3ForCausalLM", other_types=("kimi_k25", "kimi_vl"), parts=("kimi_k2",)
)
GLM4_MOE_LITE = DeepseekFamily("glm4_moe_lite", _read_glm4_moe_lite, "Glm4MoeLiteForCausalLM")
MINICPM3 = DeepseekFamily("minicpm3", _read_minicpm3, "MiniCPM3ForCausalLM")
YOUTU = DeepseekFamily("youtu", _read_youtu, "YoutuForCausalLM")
MISTRAL4 = DeepseekFamily("mistral4", _read_mistral4, "Mistral4ForCausalLM")
