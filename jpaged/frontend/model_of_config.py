"""A model that is a configuration and no directory: weights come from arrays, text is the caller's business."""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jpaged.api.errors import InvalidParameterError, shown
from jpaged.models import ModelConfig


def options_of(config: Any) -> dict[str, Any]:
    """The options of an engine that follow from a configuration and that its config.json does not say."""
    if not isinstance(config, ModelConfig):
        return {}
    if config.quantization is None:
        return {"quantization": "none"} if config.source.get("quantization_config") else {}
    return {"quantization": config.quantization.name} if config.quantization.online else {}


def as_directory(config: Any) -> TemporaryDirectory[str]:
    """A directory that holds the configuration as a config.json and nothing else, until it is cleaned up.

    config: the contents of a config.json, a configuration of transformers (anything with `to_dict`), or a `ModelConfig`
        that was read from either.

    Raises:
        InvalidParameterError: it is none of these, or it cannot be written as JSON.
    """
    contents = config.source if isinstance(config, ModelConfig) else config
    if not isinstance(contents, Mapping) and callable(getattr(contents, "to_dict", None)):
        contents = contents.to_dict()
    if not isinstance(contents, Mapping):
        raise InvalidParameterError(
            "model must be a directory, a hub id, the contents of a config.json, or a configuration of transformers or"
            f" of jpaged.models, got {shown(config)}."
        )
    if not contents:
        raise InvalidParameterError(
            "model is a ModelConfig that was read from no config.json; make it by ModelConfig.from_dict."
        )
    try:
        text = json.dumps(dict(contents))
    except (TypeError, ValueError) as error:
        raise InvalidParameterError(f"model cannot be written as a config.json: {error}.") from error
    directory: TemporaryDirectory[str] = TemporaryDirectory(prefix="jpaged-config-")
    (Path(directory.name) / "config.json").write_text(text, encoding="utf-8")
    return directory
