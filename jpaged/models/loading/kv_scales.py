"""What the keys and values of each layer are divided by before they are rounded to FP8, as checkpoints have it.

model.layers.3.self_attn.k_scale, .v_scale                  compressed-tensors (LLM Compressor)
model.layers.3.self_attn.k_proj.k_scale, .v_proj.v_scale    ModelOpt, and .attn.k_scale of some
kv_cache_scales.json: {"keys": [..], "values": [..]}        Orbax checkpoints of `jpaged convert`
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jpaged.api.errors import CheckpointError, OutputError
from jpaged.models.config_reader import read_json
from jpaged.models.loading.checkpoint import KV_SCALE, find_tensors, is_orbax
from jpaged.models.quantization.scheme import FLOAT_TYPES
from jpaged.pallas_kernels.common.numerics import LEAST_SCALE, MOST_SCALE

_FILE = "kv_cache_scales.json"
_WHAT = {"k": "keys", "v": "values"}


def read_kv_scales(load_format: str, directory: Path, keeps_tokens: Sequence[bool]) -> tuple[tuple[float, float], ...]:
    """(keys', values') of each layer; 1 where the checkpoint has none, or is made up, and of layers without any.

    keeps_tokens: of each layer, whether it keeps keys and values.

    Raises:
        CheckpointError: it has some of them only, two of one, or one that is not a finite number above 0.
    """
    plain = ((1.0, 1.0),) * len(keeps_tokens)
    if load_format == "dummy":
        return plain
    if is_orbax(load_format, directory):
        return _read_file(directory / _FILE, len(plain)) if (directory / _FILE).exists() else plain
    found: dict[tuple[int, str], float] = {}
    for name, tensor in find_tensors(directory).items():
        parts = KV_SCALE.search(name)
        if parts is None:
            continue
        place = int(parts["layer"]), parts["kind"]
        if place in found:
            raise CheckpointError(f"{directory} has two scales of the {_WHAT[place[1]]} of layer {place[0]} ({name}).")
        if tensor.type_name not in FLOAT_TYPES or int(np.prod(tensor.shape)) != 1:
            raise CheckpointError(
                f"{tensor.path}: {name} is {tensor.type_name}{tensor.shape}; scales of the KV cache must be one number"
                " a layer."
            )
        found[place] = _checked(float(tensor.read().astype(np.float32).reshape(())), tensor.path, name)
    if not found:
        return plain
    layers = [layer for layer, keeps in enumerate(keeps_tokens) if keeps]
    lacking = [(layer, kind) for layer in layers for kind in "kv" if (layer, kind) not in found]
    if lacking:
        layer, kind = lacking[0]
        raise CheckpointError(
            f"{directory} has scales of the KV cache, but none of the {_WHAT[kind]} of layer {layer}; download it"
            ' again, or use kv_cache_dtype="auto".'
        )
    return tuple((found.get((layer, "k"), 1.0), found.get((layer, "v"), 1.0)) for layer in range(len(keeps_tokens)))


def write_kv_scales(scales: Sequence[tuple[float, float]], directory: Path) -> None:
    """Puts scales, as `read_kv_scales` has them, into the directory of an Orbax checkpoint that is to be written. Where
    all are 1, or there are none, it holds no such file.

    Raises:
        OutputError: they cannot be written.
    """
    path = directory / _FILE
    try:
        if all(one == (1.0, 1.0) for one in scales):
            path.unlink(missing_ok=True)
            return
        keys, values = zip(*scales, strict=True)
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({_WHAT["k"]: keys, _WHAT["v"]: values}) + "\n")
    except OSError as error:
        raise OutputError(f"{path} cannot be written ({error.strerror}); make room, or name another place.") from error


def _read_file(path: Path, layers: int) -> tuple[tuple[float, float], ...]:
    """What `write_kv_scales` wrote."""
    found = read_json(path)
    keys, values = (found.get(what, ()) for what in _WHAT.values())
    if not all(isinstance(of, list) and all(type(one) in (int, float) for one in of) for of in (keys, values)):
        raise CheckpointError(f"{path} holds no lists of numbers for keys and values; convert it again.")
    if not len(keys) == len(values) == layers:
        raise CheckpointError(
            f"{path} has scales of {len(keys)} and {len(values)} layers, and the model has {layers}; convert it again."
        )
    for what, scales in zip(_WHAT.values(), (keys, values), strict=True):
        for layer, scale in enumerate(scales):
            _checked(scale, path, f"{what}[{layer}]")
    return tuple(zip(map(float, keys), map(float, values), strict=True))


def _checked(scale: float, path: Path, name: str) -> float:
    if not LEAST_SCALE <= scale <= MOST_SCALE:
        raise CheckpointError(
            f"{path}: {name} is {scale:g}, which must be above 0 and finite (from {LEAST_SCALE:g} to {MOST_SCALE:g})."
        )
    return scale
