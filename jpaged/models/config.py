"""A model's architecture, in one vocabulary for all families, read from a Hugging Face config.json."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jpaged.api.checks import LARGEST_FLOAT32, is_number
from jpaged.api.errors import CheckpointError, UnsupportedModelError, shown
from jpaged.models.loading.safetensors_file import read_header
from jpaged.models.rope import Rope, parse_rope

_LARGEST_INTEGER = 2**31 - 1
_LARGEST_HEAD_DIM = 4096

ACTIVATIONS = ("silu", "relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a model computes.

    architecture: the name in config.json, such as "LlamaForCausalLM".
    family: which implementation runs it.
    max_position_embeddings: the usable context in tokens, RoPE scaling included.
    sliding_windows: per layer; the tokens a query sees, itself included, or None for all before it.
    attention_scales: per layer; what multiplies the product of query and key.
    rope: the rotation of queries and keys; None where positions are learned.
    norm: RMS norm or layer norm, with norm_eps.
    pre_norm: norms stand before attention and MLP; False puts them after the residual sums (OPT-350m).
    final_norm: a norm follows the last layer.
    qk_norm: queries and keys are RMS-normalised head by head before the rotation (Qwen3).
    embedding_size: width of the token embedding; projected where it differs from hidden_size (OPT-350m).
    kv_head_copies: equal key-value heads that stand side by side among num_kv_heads; more than one where a model with
        few of them is split over more shards (`sharding.shard_config`), never in a checkpoint.
    num_learned_positions, position_offset: rows of the table of learned positions, and the row of position 0.
    eos_token_ids: every token that ends a text; what is no token of the vocabulary (-1, often) never comes.
    dtype: the type the checkpoint was saved in, "bfloat16" for example; None when nothing tells.
    source: the config.json it came from.
    """

    architecture: str
    family: Literal["llama", "opt", "gpt2"]
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    sliding_windows: tuple[int | None, ...]
    attention_scales: tuple[float, ...]
    rope: Rope | None
    norm: Literal["rms", "layer"]
    norm_eps: float
    activation: str
    tie_word_embeddings: bool
    pre_norm: bool = True
    final_norm: bool = True
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    kv_head_copies: int = 1
    embedding_size: int
    num_learned_positions: int = 0
    position_offset: int = 0
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None
    source: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads ({self.num_heads}) must be a multiple of"
                f" num_key_value_heads ({self.num_kv_heads})."
            )
        if self.rope is not None and self.head_dim % 2:
            raise CheckpointError(f"config.json: RoPE needs an even head_dim, got {self.head_dim}.")
        if self.activation not in ACTIVATIONS:
            raise UnsupportedModelError(
                f"config.json: activation {shown(self.activation)} is not supported; supported:"
                f" {', '.join(ACTIVATIONS)}."
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Reads the contents of a config.json, written by transformers 4 or 5.

        Raises:
            UnsupportedModelError: the architecture, or a feature that it asks for, is not implemented.
            CheckpointError: a needed entry is missing or of the wrong type.
        """
        read = _Reader(config)
        architecture = _architecture(config)
        for feature in ("quantization_config", "compression_config"):
            if config.get(feature):
                raise UnsupportedModelError(
                    f"config.json: {feature} is not supported; use the checkpoint that is not quantized."
                )
        for feature in ("num_experts", "num_local_experts", "n_routed_experts"):
            if config.get(feature):
                raise UnsupportedModelError(f"config.json: mixtures of experts ({feature}) are not supported.")
        fields = _PARSERS[architecture](read)
        windows = tuple(
            None if window is None or window >= fields["max_position_embeddings"] else window
            for window in fields.pop("sliding_windows", (None,) * fields["num_layers"])
        )
        scale = fields["head_dim"] ** -0.5
        fields.setdefault("attention_scales", (scale,) * fields["num_layers"])
        fields.setdefault("embedding_size", fields["hidden_size"])
        dtype = config.get("dtype") or config.get("torch_dtype")
        return cls(
            architecture=architecture,
            sliding_windows=windows,
            bos_token_id=read.optional_integer("bos_token_id"),
            pad_token_id=read.optional_integer("pad_token_id"),
            eos_token_ids=tuple(t for t in _token_ids(config.get("eos_token_id")) if 0 <= t < fields["vocab_size"]),
            dtype=str(dtype).removeprefix("torch.") if dtype else None,
            source=dict(config),
            **fields,
        )

    @classmethod
    def from_directory(cls, path: str | Path) -> "ModelConfig":
        """Reads config.json, the end-of-text tokens of generation_config.json where there is one, and, when
        config.json does not tell the type of the weights, that of the first weight."""
        path = Path(path)
        config = dict(read_json(path / "config.json"))
        if (path / "generation_config.json").is_file():
            eos = read_json(path / "generation_config.json").get("eos_token_id")
            if eos is not None:
                config["eos_token_id"] = eos
        if not (config.get("dtype") or config.get("torch_dtype")):
            config["torch_dtype"] = _stored_dtype(path)
        return cls.from_dict(config)


def supported_architectures() -> tuple[str, ...]:
    return tuple(_PARSERS)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint; CheckpointError when it is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist; a checkpoint directory in the Hugging Face layout must have it."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); download or write it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}.")
    return value


def _stored_dtype(directory: Path) -> str | None:
    """The type of the first floating-point tensor of the safetensors files; None where there is none."""
    for path in sorted(directory.glob("*.safetensors")):
        for tensor in read_header(path).values():
            if tensor.is_floating:
                return tensor.dtype.name
    return None


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or [_BY_MODEL_TYPE.get(str(config.get("model_type")))]
    for architecture in named if isinstance(named, list | tuple) else [named]:
        if isinstance(architecture, str) and architecture in _PARSERS:
            return architecture
    shown = config.get("architectures") or f"model_type {config.get('model_type')!r}"
    raise UnsupportedModelError(
        f"config.json: architecture {shown} is not supported; supported: {', '.join(_PARSERS)}."
    )


def _token_ids(value: Any) -> tuple[int, ...]:
    values = () if value is None else value if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise CheckpointError(f"config.json: eos_token_id must be an integer or a list of them, got {shown(value)}.")
    return tuple(values)


class _Reader:
    """Reads entries of a config.json and blames the right one."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer; null counts as missing, as in transformers."""
        value = self.config.get(name)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"config.json: {name!r} is missing.")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"config.json: {name!r} must be a positive integer, got {shown(value)}.")
        if value > _LARGEST_INTEGER:
            raise CheckpointError(f"config.json: {name!r} must be at most {_LARGEST_INTEGER}, got {shown(value)}.")
        return value

    def optional_integer(self, name: str) -> int | None:
        value = self.config.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise CheckpointError(f"config.json: {name!r} must be an integer or null, got {shown(value)}.")
        return value

    def optional_positive(self, name: str, default: int) -> int | None:
        """A positive integer, or None for an explicit null."""
        if self.config.get(name, default) is None:
            return None
        return self.integer(name, default)

    def number(self, name: str, default: float) -> float:
        """A finite number from 0 up."""
        value = self.config.get(name, default)
        if not is_number(value) or not 0 <= value <= LARGEST_FLOAT32:
            raise CheckpointError(f"config.json: {name!r} must be a number from 0 up, got {shown(value)}.")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.config.get(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {name!r} must be true or false, got {shown(value)}.")
        return value


def _llama_fields(
    read: _Reader, *, default_length: int = 2048, default_head_dim: int | None = None, default_eps: float = 1e-6
) -> dict[str, Any]:
    """What all of the Llama family shares."""
    hidden_size = read.integer("hidden_size")
    num_heads = read.integer("num_attention_heads")
    head_dim = read.integer("head_dim", default_head_dim or hidden_size // num_heads)
    if head_dim > _LARGEST_HEAD_DIM:
        raise UnsupportedModelError(
            f"config.json: heads of {head_dim} are not supported; at most {_LARGEST_HEAD_DIM} are."
        )
    rope, length = parse_rope(read.config, head_dim, read.integer("max_position_embeddings", default_length))
    return {
        "family": "llama",
        "vocab_size": read.integer("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": read.integer("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": read.integer("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "intermediate_size": read.integer("intermediate_size"),
        "max_position_embeddings": length,
        "rope": rope,
        "norm": "rms",
        "norm_eps": read.number("rms_norm_eps", default_eps),
        "activation": read.config.get("hidden_act", "silu"),
        "tie_word_embeddings": read.flag("tie_word_embeddings", False),
    }


def _parse_llama(read: _Reader) -> dict[str, Any]:
    bias = read.flag("attention_bias", False)
    return _llama_fields(read) | {"qkv_bias": bias, "output_bias": bias, "mlp_bias": read.flag("mlp_bias", False)}


def _parse_mistral(read: _Reader) -> dict[str, Any]:
    fields = _llama_fields(read, default_length=131072)
    window = read.optional_positive("sliding_window", 4096)
    return fields | {"sliding_windows": (window,) * fields["num_layers"]}


def _parse_qwen2(read: _Reader) -> dict[str, Any]:
    fields = _llama_fields(read, default_length=32768)
    return fields | {"qkv_bias": True, "sliding_windows": _qwen_windows(read, fields["num_layers"])}


def _parse_qwen3(read: _Reader) -> dict[str, Any]:
    fields = _llama_fields(read, default_length=32768, default_head_dim=128)
    bias = read.flag("attention_bias", False)
    windows = _qwen_windows(read, fields["num_layers"])
    return fields | {"qk_norm": True, "qkv_bias": bias, "output_bias": bias, "sliding_windows": windows}


def _qwen_windows(read: _Reader, num_layers: int) -> tuple[int | None, ...]:
    window = read.optional_positive("sliding_window", 4096) if read.flag("use_sliding_window", False) else None
    kinds = read.config.get("layer_types")
    if kinds is None:
        first = read.number("max_window_layers", 28)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    elif not isinstance(kinds, list | tuple) or len(kinds) != num_layers:
        raise CheckpointError(f"config.json: layer_types must list {num_layers} layers, got {shown(kinds)}.")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"config.json: layer type {kind!r} is not supported; supported: full_attention, sliding_attention."
            )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _parse_opt(read: _Reader) -> dict[str, Any]:
    hidden_size = read.integer("hidden_size")
    num_heads = read.integer("num_attention_heads")
    length = read.integer("max_position_embeddings", 2048)
    bias = read.flag("enable_bias", True)
    pre_norm = read.flag("do_layer_norm_before", True)
    if not read.flag("layer_norm_elementwise_affine", True):
        raise UnsupportedModelError("config.json: layer_norm_elementwise_affine=false is not supported.")
    return {
        "family": "opt",
        "vocab_size": read.integer("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": read.integer("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": _divide(hidden_size, num_heads),
        "intermediate_size": read.integer("ffn_dim"),
        "max_position_embeddings": length,
        "rope": None,
        "norm": "layer",
        "norm_eps": 1e-5,
        "activation": read.config.get("activation_function", "relu"),
        "tie_word_embeddings": read.flag("tie_word_embeddings", True),
        "pre_norm": pre_norm,
        "final_norm": pre_norm and not read.flag("_remove_final_layer_norm", False),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
        "embedding_size": read.integer("word_embed_proj_dim", hidden_size),
        "num_learned_positions": length + 2,
        "position_offset": 2,
    }


def _parse_gpt2(read: _Reader) -> dict[str, Any]:
    hidden_size = read.integer("n_embd", 768)
    num_heads = read.integer("n_head", 12)
    num_layers = read.integer("n_layer", 12)
    head_dim = _divide(hidden_size, num_heads)
    length = read.integer("n_positions", 1024)
    if read.flag("add_cross_attention", False):
        raise UnsupportedModelError("config.json: add_cross_attention=true is not supported.")
    scale = head_dim**-0.5 if read.flag("scale_attn_weights", True) else 1.0
    by_layer = read.flag("scale_attn_by_inverse_layer_idx", False)
    return {
        "family": "gpt2",
        "vocab_size": read.integer("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": head_dim,
        "intermediate_size": read.integer("n_inner", 4 * hidden_size),
        "max_position_embeddings": length,
        "rope": None,
        "norm": "layer",
        "norm_eps": read.number("layer_norm_epsilon", 1e-5),
        "activation": read.config.get("activation_function", "gelu_new"),
        "tie_word_embeddings": read.flag("tie_word_embeddings", True),
        "attention_scales": tuple(scale / (i + 1) if by_layer else scale for i in range(num_layers)),
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "num_learned_positions": length,
    }


def _divide(hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise CheckpointError(
            f"config.json: the hidden size ({hidden_size}) must be a multiple of the number of heads ({num_heads})."
        )
    return hidden_size // num_heads


_PARSERS: dict[str, Callable[[_Reader], dict[str, Any]]] = {
    "LlamaForCausalLM": _parse_llama,
    "MistralForCausalLM": _parse_mistral,
    "Qwen2ForCausalLM": _parse_qwen2,
    "Qwen3ForCausalLM": _parse_qwen3,
    "OPTForCausalLM": _parse_opt,
    "GPT2LMHeadModel": _parse_gpt2,
}
_BY_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "opt": "OPTForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
