"""The schemes that there are, by the names that checkpoints and users give them."""

from collections.abc import Callable, Mapping
from typing import Any

from jpaged.api.errors import CheckpointError, InvalidParameterError, UnsupportedModelError, shown
from jpaged.models.quantization.compressed_tensors import read_compressed_tensors
from jpaged.models.quantization.fp8_weights import read_fbgemm, read_fp8
from jpaged.models.quantization.modelopt import read_modelopt
from jpaged.models.quantization.mxfp4 import read_mxfp4
from jpaged.models.quantization.online import ONLINE
from jpaged.models.quantization.packed_weights import read_awq, read_gptq
from jpaged.models.quantization.scheme import Entries, Scheme

_METHODS: dict[str, Callable[[Entries], Scheme]] = {
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
    "fbgemm_fp8": read_fbgemm,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4,
}
"""By "quant_method" of a config.json."""


def find_scheme(config: Mapping[str, Any], asked: str | None) -> Scheme | None:
    """The scheme of a config.json's "quantization_config", or the one that a user asks for; None for neither.

    asked: as `EngineArgs.quantization`. Of a quantized checkpoint it must be what this is anyway.

    Raises:
        UnsupportedModelError: the checkpoint's scheme, or part of it, is not supported.
        InvalidParameterError: another one is asked for, or one that nothing can be brought into.
        CheckpointError: an entry is of the wrong type.
    """
    entries = _entries(config)
    if entries is None:
        if asked is not None and asked not in ONLINE:
            raise InvalidParameterError(
                f"quantization={asked!r} is for checkpoints of that scheme, and this one is not quantized; supported"
                f" for such: {', '.join(map(repr, ONLINE))}."
            )
        return None if asked is None else ONLINE[asked]
    method = _method(entries)
    if asked is not None and asked != method:
        raise InvalidParameterError(
            f"quantization={asked!r}, but the checkpoint is quantized by {method!r}; leave quantization out."
        )
    return _METHODS[method](entries)


def stored_method(config: Mapping[str, Any]) -> str | None:
    """The "quant_method" of a checkpoint; None if it is not quantized.

    Raises:
        UnsupportedModelError: it is not supported, or not said.
        CheckpointError: an entry is of the wrong type.
    """
    entries = _entries(config)
    return None if entries is None else _method(entries)


def _method(entries: Entries) -> str:
    method = entries.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise UnsupportedModelError(
            f"config.json: quantization_config: quant_method {shown(method)} is not supported; supported:"
            f" {', '.join(_METHODS)}."
        )
    return method


def _entries(config: Mapping[str, Any]) -> Entries | None:
    texts = config.get("text_config")
    for part in (config, texts if isinstance(texts, Mapping) else {}):
        for name in ("quantization_config", "compression_config"):
            value = part.get(name)
            if not value:
                continue
            if not isinstance(value, Mapping):
                raise CheckpointError(f"config.json: {name} must be an object, got {shown(value)}.")
            return Entries(value)
    return None
