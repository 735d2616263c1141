"""The Llama family: Llama 2 and 3, Mistral, Ministral and Ministral 3, Qwen2, Qwen2.5 and Qwen3, Seed-OSS, ERNIE 4.5
without experts, Helium, CWM, InternLM3 and IQuest-Coder.

They differ in what `LlamaConfig` says (biases, windows, RoPE, norms of queries and keys), not in structure.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.models.collectives import Collectives
from jpaged.models.config import ModelConfig
from jpaged.models.config_reader import ConfigReader
from jpaged.models.family import OTHER_PARTS, TEXT_PART_NAMES, Attend
from jpaged.models.layers import Attention, GatedMLP, run_layers
from jpaged.models.linear import Embedding
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import RMSNorm
from jpaged.models.residual import PLAIN_XLA, Kernels, Stream, begin_stream
from jpaged.models.rope import Rope, parse_rope, without_image_sections
from jpaged.models.temperature import Temperature

_ROPE_OF_MINISTRAL3 = {
    "type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""RoPE's parameters where the config.json of a Ministral 3 has none."""

_ROPE_OF_CWM = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Likewise of a CWM."""


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """rope: the rotation of queries and keys.
    norm_eps: of all norms.
    activation: of the MLPs' gate.
    qk_norm: queries and keys are RMS-normalised head by head before the rotation (Qwen3).
    qkv_bias, output_bias, mlp_bias: which products have biases.
    temperature: of attention (Ministral 3); None for none.
    """

    rope: Rope
    norm_eps: float
    activation: str
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    temperature: Temperature | None = None


class LlamaBlock(nnx.Module):
    """One layer: attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: LlamaConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        hidden, dim, eps = config.hidden_size, config.head_dim, config.norm_eps
        self.attention_norm = RMSNorm(hidden, eps, dtype, rngs)
        self.attention = Attention(config, layer, dtype, rngs, qkv_bias=config.qkv_bias, output_bias=config.output_bias)
        self.query_norm = RMSNorm(dim, eps, dtype, rngs) if config.qk_norm else None
        self.key_norm = RMSNorm(dim, eps, dtype, rngs) if config.qk_norm else None
        self.mlp_norm = RMSNorm(hidden, eps, dtype, rngs)
        self.mlp = GatedMLP(config, config.activation, dtype, rngs, bias=config.mlp_bias)

    def __call__(
        self, stream: Stream, cos: jax.Array, sin: jax.Array, temperature: jax.Array | None, attend: Attend
    ) -> None:
        norms = None if self.query_norm is None or self.key_norm is None else (self.query_norm, self.key_norm)
        read = stream.normed_for(self.attention.rounding(stream.num_rows, stream.backend), self.attention_norm)
        stream.add(self.attention(read, attend, (cos, sin), norms, stream.backend, temperature))
        read = stream.normed_for(self.mlp.rounding(stream.num_rows, stream.backend), self.mlp_norm)
        stream.add(self.mlp(read, stream.backend))


class LlamaForCausalLM(nnx.Module):
    """The arguments are those of `Family.module`."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> None:
        vocab, hidden = config.vocab_size, config.hidden_size
        self.rope, self.temperature = config.rope, config.temperature
        self.collectives = collectives
        self.embedding = Embedding(vocab, hidden, hidden**-0.5, dtype, rngs)
        self.layers = nnx.List(LlamaBlock(config, layer, dtype, rngs) for layer in range(config.num_layers))
        self.norm = RMSNorm(hidden, config.norm_eps, dtype, rngs)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Embedding(vocab, hidden, hidden**-0.5, dtype, rngs)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, attend: Attend | list[Any], kernels: Kernels = PLAIN_XLA
    ) -> jax.Array:
        cos, sin = self.rope.table(positions)
        temperature = None if self.temperature is None else self.temperature.of(positions)
        rows = self.embedding.lookup(tokens, self.collectives)
        stream = begin_stream(rows, self.collectives, kernels)
        run_layers(self.layers, stream, (cos, sin, temperature), attend)
        return stream.normed(self.norm)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return (self.embedding if self.lm_head is None else self.lm_head).logits(hidden)


@dataclass(frozen=True)
class LlamaFamily:
    """One of the architectures. reads: its configuration."""

    model_type: str
    reads: Callable[[ConfigReader], LlamaConfig]

    base_prefix = "model."
    derived_tensors = r"rotary_emb\.inv_freq$"

    def read_config(self, read: ConfigReader) -> LlamaConfig:
        return self.reads(read)

    def module(
        self, config: LlamaConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives
    ) -> LlamaForCausalLM:
        return LlamaForCausalLM(config, dtype, rngs, collectives)

    def tensors(self, config: LlamaConfig) -> Iterator[Piece | TiedTensor]:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        qkv_bias, order = config.qkv_bias, config.rope.column_order
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            yield pieces.as_is(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.scale", hidden)
            attention = f"{theirs}.self_attn", f"{ours}.attention"
            yield from pieces.separate_qkv(*attention, config, bias=qkv_bias, order=order)
            yield from pieces.output_projection(
                f"{theirs}.self_attn.o_proj", f"{ours}.attention", config, bias=config.output_bias
            )
            if config.qk_norm:
                yield pieces.as_is(f"{theirs}.self_attn.q_norm.weight", f"{ours}.query_norm.scale", config.head_dim)
                yield pieces.as_is(f"{theirs}.self_attn.k_norm.weight", f"{ours}.key_norm.scale", config.head_dim)
            yield pieces.as_is(f"{theirs}.post_attention_layernorm.weight", f"{ours}.mlp_norm.scale", hidden)
            yield from pieces.gate_and_up(f"{theirs}.mlp", f"{ours}.mlp", config, bias=bias)
            yield from pieces.linear(f"{theirs}.mlp.down_proj", f"{ours}.mlp.down", inner, hidden, bias=bias)
        yield pieces.as_is("model.norm.weight", "norm.scale", hidden)
        if config.tie_word_embeddings:
            yield TiedTensor("lm_head.weight", "model.embed_tokens.weight")
        else:
            yield pieces.as_is("lm_head.weight", "lm_head", config.vocab_size, hidden)


class MistralFamily(LlamaFamily):
    """Mistral, also as the text part of a multimodal model, which may be Ministral 3 or Mistral 4 as well."""

    other_types = ("mistral3",)
    derived_tensors = rf"rotary_emb\.inv_freq$|{OTHER_PARTS}"
    aliases = TEXT_PART_NAMES

    def read_config(self, read: ConfigReader) -> Any:  # of Mistral 4 it is no LlamaConfig
        if "text_config" not in read.config:  # with layer_types transformers takes a Mistral for a Ministral
            of_layers = self.model_type == "mistral" and "layer_types" in read.config
            return _read_ministral(read) if of_layers else self.reads(read)
        text = read.text_part("MistralForCausalLM")
        if text.config.get("model_type") == MINISTRAL3.model_type:
            return _read_ministral3(read.text_part("Ministral3ForCausalLM"))
        if text.config.get("model_type") == "mistral4":
            return ModelConfig.from_dict(read.text_part("Mistral4ForCausalLM").config, read.max_model_len)
        text.refuse(("model_type", self.model_type))
        return self.reads(text)


@dataclass(frozen=True)
class QwenFamily(LlamaFamily):
    """Qwen, also as the text part of a Qwen-VL, whose config.json may be flat.

    text: the architecture of the text model. other_types: model_types of Qwen-VLs. parts: model_types of their text
    parts. usual: entries that a Qwen-VL's config.json may leave out, and their values.
    """

    text: str
    other_types: tuple[str, ...]
    parts: tuple[str, ...]
    usual: tuple[tuple[str, Any], ...]

    derived_tensors = r"rotary_emb\.inv_freq$|^(model\.)?visual\."
    aliases = TEXT_PART_NAMES

    def read_config(self, read: ConfigReader) -> LlamaConfig:
        if "text_config" in read.config:
            text = read.text_part(self.text)
            if text.config.get("model_type") not in (None, self.model_type, *self.parts):
                text.refuse(("model_type", self.parts[0]))
        elif read.config.get("model_type") in self.other_types:
            text = ConfigReader(self.text, {**read.config, "architectures": [self.text]}, read.max_model_len)
        else:
            return self.reads(read)
        text = text.with_defaults(**dict(self.usual))
        return self.reads(ConfigReader(self.text, without_image_sections(text.config), text.max_model_len, text.source))


def _fields(
    read: ConfigReader,
    *,
    default_length: int = 2048,
    default_head_dim: int | None = None,
    default_eps: float = 1e-6,
    tied: bool = False,
    **rope: Any,
) -> dict[str, Any]:
    """What all of the family spell alike.

    default_head_dim: where config.json has none; an explicit null means the hidden size divided by the heads, as None
        does.
    rope: further arguments of `parse_rope`.
    """
    hidden_size = read.integer("hidden_size")
    num_heads = read.integer("num_attention_heads")
    if default_head_dim is None or "head_dim" in read.config:
        default_head_dim = hidden_size // num_heads
    head_dim = read.head_dim("head_dim", default_head_dim)
    length = read.integer("max_position_embeddings", default_length)
    rotation, length = parse_rope(read.config, head_dim, length, max_model_len=read.max_model_len, **rope)
    return read.common() | {
        "hidden_size": hidden_size,
        "num_layers": read.integer("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": read.integer("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "intermediate_size": read.integer("intermediate_size"),
        "max_position_embeddings": length,
        "tie_word_embeddings": read.flag("tie_word_embeddings", tied),
        "rope": rotation,
        "norm_eps": read.number("rms_norm_eps", default_eps),
        "activation": read.activation("hidden_act", "silu"),
    }


def _read_llama(read: ConfigReader) -> LlamaConfig:
    bias = read.flag("attention_bias", False)
    return LlamaConfig(**_fields(read), qkv_bias=bias, output_bias=bias, mlp_bias=read.flag("mlp_bias", False))


def _read_mistral(read: ConfigReader) -> LlamaConfig:
    """Every layer has the window; in the text part of a multimodal model whatever layer_types says, as in
    transformers."""
    read = read.with_defaults(num_key_value_heads=8)
    fields = _fields(read, default_length=131072)
    window = read.optional_positive("sliding_window", 4096)
    return LlamaConfig(**fields, layer_windows=(window,) * fields["num_layers"])


def _read_ministral(read: ConfigReader) -> LlamaConfig:
    """Mistral with layers of either kind."""
    read = read.with_defaults(num_key_value_heads=8)
    fields = _fields(read, default_length=131072)
    num_layers = fields["num_layers"]
    kinds = read.layer_kinds(num_layers) or ("sliding_attention",) * num_layers
    return LlamaConfig(**fields, layer_windows=_windows(read.optional_positive("sliding_window", 4096), kinds))


def _read_ministral3(read: ConfigReader) -> LlamaConfig:
    """Mistral AI 2025: as Mistral, with a temperature of attention whose weight stands among RoPE's parameters."""
    read = read.with_defaults(num_key_value_heads=8)
    parameters = read.config.get("rope_scaling") or read.config.get("rope_parameters") or _ROPE_OF_MINISTRAL3
    read = read.with_entries(rope_scaling=parameters)
    fields = _fields(read, default_length=262144, default_head_dim=128, default_eps=1e-5)
    window = read.optional_positive("sliding_window", fields["max_position_embeddings"])
    of_rope = ConfigReader(read.architecture, parameters)
    weight = of_rope.optional_number("llama_4_scaling_beta")
    length = of_rope.integer("original_max_position_embeddings", read.integer("max_position_embeddings", 262144))
    return LlamaConfig(
        **fields,
        layer_windows=(window,) * fields["num_layers"],
        temperature=None if weight is None else Temperature(weight, length),
    )


def _read_qwen2(read: ConfigReader) -> LlamaConfig:
    read = read.with_defaults(num_key_value_heads=32)
    fields = _fields(read, default_length=32768)
    return LlamaConfig(**fields, qkv_bias=True, layer_windows=_qwen_windows(read, fields["num_layers"]))


def _read_qwen3(read: ConfigReader) -> LlamaConfig:
    read = read.with_defaults(num_key_value_heads=32)
    fields = _fields(read, default_length=32768, default_head_dim=128)
    bias = read.flag("attention_bias", False)
    windows = _qwen_windows(read, fields["num_layers"])
    return LlamaConfig(**fields, qk_norm=True, qkv_bias=bias, output_bias=bias, layer_windows=windows)


def _read_seed_oss(read: ConfigReader) -> LlamaConfig:
    """ByteDance 2025."""
    read = read.with_defaults(num_key_value_heads=8)
    return LlamaConfig(
        **_fields(read, default_length=524288, default_head_dim=128),
        qkv_bias=read.flag("attention_bias", True),
        output_bias=read.flag("attention_out_bias", False),
        mlp_bias=read.flag("mlp_bias", False),
    )


def _read_ernie(read: ConfigReader) -> LlamaConfig:
    """Baidu 2025: neighbouring columns are rotated together."""
    read = read.with_defaults(num_key_value_heads=2)
    sizes: dict[str, Any] = {"default_length": 131072, "default_head_dim": 128, "default_eps": 1e-5, "tied": True}
    bias = read.flag("use_bias", False)
    fields = _fields(read, **sizes, interleaved=True, theta=500000.0)
    return LlamaConfig(**fields, qkv_bias=bias, output_bias=bias, mlp_bias=bias)


def _read_helium(read: ConfigReader) -> LlamaConfig:
    """Kyutai 2025: neighbouring columns are rotated together."""
    sizes: dict[str, Any] = {"default_length": 4096, "default_head_dim": 128, "default_eps": 1e-8}
    fields = _fields(read.with_defaults(num_key_value_heads=20), **sizes, interleaved=True, theta=100000.0)
    bias, mlp_bias = read.flag("attention_bias", False), read.flag("mlp_bias", False)
    return LlamaConfig(**fields, qkv_bias=bias, mlp_bias=mlp_bias)


def _read_cwm(read: ConfigReader) -> LlamaConfig:
    """Meta's Code World Model (FAIR CodeGen team 2025, arXiv:2510.02387)."""
    read = read.with_defaults(num_key_value_heads=8)
    if not (read.config.get("rope_parameters") or read.config.get("rope_scaling")):
        read = read.with_entries(rope_scaling=_ROPE_OF_CWM)
    sizes: dict[str, Any] = {"default_length": 131072, "default_head_dim": 128, "default_eps": 1e-5}
    fields = _fields(read, **sizes, theta=1e6)
    num_layers, window = fields["num_layers"], read.config.get("sliding_window", 8192)
    default = tuple("sliding_attention" if i % 4 else "full_attention" for i in range(num_layers))
    window = read.integer("sliding_window", 8192) if window else None  # 0 is none, too
    windows = _windows(window, read.layer_kinds(num_layers) or default)
    return LlamaConfig(**fields, mlp_bias=read.flag("mlp_bias", False), layer_windows=windows)


def _read_internlm3(read: ConfigReader) -> LlamaConfig:
    """Shanghai AI Laboratory 2025: Llama, with names of its own for biases."""
    read = read.with_other_names(qkv_bias="attention_bias", bias="mlp_bias")
    sizes: dict[str, Any] = {"default_length": 32768, "default_head_dim": 128, "default_eps": 1e-5}
    fields, bias = _fields(read.with_defaults(num_key_value_heads=2), **sizes), read.flag("bias", False)
    return LlamaConfig(**fields, qkv_bias=read.flag("qkv_bias", False), output_bias=bias, mlp_bias=bias)


def _read_iquest_coder(read: ConfigReader) -> LlamaConfig:
    """IQuest Research 2026: Llama."""
    read.refuse(("clip_qkv", None), ("use_sliding_window", False))
    usual = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "head_dim": 128, "rms_norm_eps": 1e-5}
    return _read_llama(read.with_defaults(**usual))


def _qwen_windows(read: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    window = read.optional_positive("sliding_window", 4096) if read.flag("use_sliding_window", False) else None
    kinds = read.layer_kinds(num_layers)
    if kinds is None:
        first = read.number("max_window_layers", 28)
        kinds = tuple("sliding_attention" if i >= first else "full_attention" for i in range(num_layers))
    return _windows(window, kinds)


def _windows(window: int | None, kinds: tuple[str, ...]) -> tuple[int | None, ...]:
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


LLAMA = LlamaFamily("llama", _read_llama)
MISTRAL = MistralFamily("mistral", _read_mistral)
MINISTRAL = LlamaFamily("ministral", _read_ministral)
MINISTRAL3 = MistralFamily("ministral3", _read_ministral3)
QWEN2 = QwenFamily(
    model_type="qwen2",
    reads=_read_qwen2,
    text="Qwen2ForCausalLM",
    other_types=("qwen2_5_vl", "qwen2_vl"),
    parts=("qwen2_5_vl_text", "qwen2_vl_text"),
    usual=(("num_key_value_heads", 8), ("rms_norm_eps", 1e-5), ("rope_theta", 1e6)),
)
QWEN3 = QwenFamily(
    model_type="qwen3",
    reads=_read_qwen3,
    text="Qwen3ForCausalLM",
    other_types=("qwen3_vl",),
    parts=("qwen3_vl_text",),
    usual=(("rope_theta", 500000.0), ("max_position_embeddings", 128000)),
)
SEED_OSS = LlamaFamily("seed_oss", _read_seed_oss)
HELIUM = LlamaFamily("helium", _read_helium)
CWM = LlamaFamily("cwm", _read_cwm)
INTERNLM3 = LlamaFamily("internlm3", _read_internlm3)
IQUEST_CODER = LlamaFamily("iquestcoder", _read_iquest_coder)
ERNIE45 = LlamaFamily("ernie4_5", _read_ernie)
