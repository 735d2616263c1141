"""Reads the entries of a config.json; what is wrong with one is an error that names it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jpaged.api.checks import LARGEST_FLOAT32, is_number
from jpaged.api.errors import CheckpointError, UnsupportedModelError, shown

_LARGEST_INTEGER = 2**31 - 1
_LARGEST_HEAD_DIM = 4096
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Hugging Face's names of activations, and those of `pallas_kernels`."""


class ConfigReader:
    """Entries of a config.json.

    architecture: the one of its "architectures" that is read. config: all entries.
    max_model_len: the length that the user asked for, in tokens; None for what the model was made for.
    source: the entries as they were read; `config` may have more (`with_entries`).
    """

    def __init__(
        self,
        architecture: str,
        config: Mapping[str, Any],
        max_model_len: int | None = None,
        source: Mapping[str, Any] | None = None,
    ) -> None:
        self.architecture = architecture
        self.config = config
        self.max_model_len = max_model_len
        self.source = config if source is None else source

    def with_entries(self, **entries: Any) -> "ConfigReader":
        """This one with other values of some entries: for those that have other names than most families' have."""
        return ConfigReader(self.architecture, {**self.config, **entries}, self.max_model_len, self.source)

    def with_defaults(self, **entries: Any) -> "ConfigReader":
        """This one with values of entries that config.json leaves out; what it sets to null stays null."""
        return self.with_entries(**{name: value for name, value in entries.items() if name not in self.config})

    def with_usual(self, **entries: Any) -> "ConfigReader":
        """This one with values of entries that config.json leaves out or sets to null."""
        return self.with_entries(**{name: value for name, value in entries.items() if self.config.get(name) is None})

    def with_other_names(self, **others: str) -> "ConfigReader":
        """This one with values of entries that config.json leaves out, by other names that transformers knows for them.

        others: the other name of each entry.
        """
        config = self.config
        return self.with_defaults(**{name: config[other] for name, other in others.items() if other in config})

    def text_part(self, architecture: str) -> "ConfigReader":
        """The reader of a multimodal model's "text_config", as if that were a config.json of this architecture."""
        text = self.config.get("text_config")
        if not isinstance(text, Mapping):
            raise CheckpointError(f"config.json: text_config must be an object, got {shown(text)}.")
        outer = ("eos_token_id", "bos_token_id", "pad_token_id", "dtype", "torch_dtype", "tie_word_embeddings")
        known = {name: self.config[name] for name in outer if self.config.get(name) is not None}
        return ConfigReader(architecture, {**text, **known, "architectures": [architecture]}, self.max_model_len)

    def part(self, name: str) -> "ConfigReader":
        """The reader of an object in config.json, such as "attn_config"; of an empty one where it is missing."""
        entries = self.config.get(name) or {}
        if not isinstance(entries, Mapping):
            raise CheckpointError(f"config.json: {name} must be an object, got {shown(entries)}.")
        return ConfigReader(self.architecture, entries)

    def common(self) -> dict[str, Any]:
        """The fields of a `ModelConfig` that every family's config.json spells alike."""
        vocab_size = self.integer("vocab_size")
        dtype = self.config.get("dtype") or self.config.get("torch_dtype")
        return {
            "architecture": self.architecture,
            "vocab_size": vocab_size,
            "bos_token_id": self.optional_integer("bos_token_id"),
            "pad_token_id": self.optional_integer("pad_token_id"),
            "eos_token_ids": tuple(token for token in self._eos_token_ids() if 0 <= token < vocab_size),
            "dtype": str(dtype).removeprefix("torch.") if dtype else None,
            "source": dict(self.source),
        }

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

    def count(self, name: str, default: int) -> int:
        """An integer from 0 up; null means 0."""
        if self.config.get(name, default) in (None, 0):
            return 0
        return self.integer(name, default)

    def number(self, name: str, default: float) -> float:
        """A finite number from 0 up."""
        value = self.config.get(name, default)
        if not is_number(value) or not 0 <= value <= LARGEST_FLOAT32:
            raise CheckpointError(f"config.json: {name!r} must be a number from 0 up, got {shown(value)}.")
        return float(value)

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """A finite number above 0, or None for an explicit null."""
        if self.config.get(name, default) is None:
            return None
        if (value := self.number(name, default or 0.0)) == 0:
            raise CheckpointError(f"config.json: {name!r} must be above 0 or null, got {shown(value)}.")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.config.get(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {name!r} must be true or false, got {shown(value)}.")
        return value

    def activation(self, name: str, default: str) -> str:
        """An activation, by its name in `pallas_kernels.gated_product.ACTIVATIONS`."""
        value = self.config.get(name, default)
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"config.json: activation {shown(value)} is not supported; supported: {', '.join(_ACTIVATIONS)}."
            )
        return _ACTIVATIONS[value]

    def head_dim(self, name: str, default: int | None = None) -> int:
        """The size of a head."""
        value = self.integer(name, default)
        if value > _LARGEST_HEAD_DIM:
            raise UnsupportedModelError(
                f"config.json: heads of {value} are not supported; at most {_LARGEST_HEAD_DIM} are."
            )
        return value

    def refuse(self, *entries: tuple[str, Any]) -> None:
        """Refuses a config.json that asks for what the family does not implement.

        entries: names, and the one value of each that is implemented; null and a missing entry mean it too.

        Raises:
            UnsupportedModelError: an entry has another value.
        """
        for name, only in entries:
            value = self.config.get(name)
            if value is not None and value != only:
                raise UnsupportedModelError(f"config.json: {name}={shown(value)} is not supported, only {only!r}.")

    def layer_kinds(
        self, num_layers: int, supported: tuple[str, ...] = ("full_attention", "sliding_attention")
    ) -> tuple[str, ...] | None:
        """ "layer_types": for each layer one of those that are supported; None where it is not said."""
        kinds = self.config.get("layer_types")
        if kinds is None:
            return None
        if not isinstance(kinds, list | tuple) or len(kinds) != num_layers:
            raise CheckpointError(f"config.json: layer_types must list {num_layers} layers, got {shown(kinds)}.")
        for kind in kinds:
            if kind not in supported:
                raise UnsupportedModelError(
                    f"config.json: layer type {kind!r} is not supported; supported: {', '.join(supported)}."
                )
        return tuple(kinds)

    def dense_layers(self, num_layers: int) -> tuple[bool, ...] | None:
        """ "mlp_layer_types": for each layer whether it has an ordinary MLP, not experts; None where it is not said."""
        kinds = self.config.get("mlp_layer_types")
        if kinds is None:
            return None
        known = isinstance(kinds, list | tuple) and len(kinds) == num_layers
        if not known or any(kind not in ("dense", "sparse") for kind in kinds):
            raise CheckpointError(
                f"config.json: mlp_layer_types must list dense or sparse for {num_layers} layers, got {shown(kinds)}."
            )
        return tuple(kind == "dense" for kind in kinds)

    def layer_windows(self, kinds: tuple[str, ...], default: int | None = None) -> tuple[int | None, ...]:
        """For each layer the "sliding_window", where its kind is "sliding_attention"; None where it is not.

        default: where config.json has no "sliding_window".
        """
        if "sliding_attention" not in kinds:
            return (None,) * len(kinds)
        window = self.integer("sliding_window", default)
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def layer_sources(self, kinds: tuple[str, ...], default: int = 0) -> tuple[int | None, ...]:
        """`ModelConfig.layer_sources`: the last "num_kv_shared_layers" read what the last one before them of their kind
        keeps.

        default: where config.json has no "num_kv_shared_layers".
        """
        own = len(kinds) - self.count("num_kv_shared_layers", default)
        if {*kinds[: max(own, 0)]} != {*kinds}:
            raise CheckpointError(
                f"config.json: num_kv_shared_layers ({len(kinds) - own}) leaves no layer of some type with keys and"
                " values."
            )
        last = {kind: own - 1 - kinds[own - 1 :: -1].index(kind) for kind in kinds}
        return tuple(None if layer < own else last[kind] for layer, kind in enumerate(kinds))

    def kinds_of_layers(self, num_layers: int, every: int) -> tuple[str, ...]:
        """`layer_kinds`; where it is not said, every so many layers one is "full_attention" and the others are not.

        every: where config.json has no "sliding_window_pattern".
        """
        every = self.integer("sliding_window_pattern", every)
        said = self.layer_kinds(num_layers)
        return said or tuple("sliding_attention" if (i + 1) % every else "full_attention" for i in range(num_layers))

    def _eos_token_ids(self) -> tuple[int, ...]:
        value = self.config.get("eos_token_id")
        values = () if value is None else value if isinstance(value, list | tuple) else (value,)
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
            raise CheckpointError(
                f"config.json: eos_token_id must be an integer or a list of them, got {shown(value)}."
            )
        return tuple(values)


def divide_into_heads(hidden_size: int, num_heads: int) -> int:
    """The size of a head where heads divide the hidden size between them."""
    if hidden_size % num_heads:
        raise CheckpointError(
            f"config.json: the hidden size ({hidden_size}) must be a multiple of the number of heads ({num_heads})."
        )
    return hidden_size // num_heads


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
