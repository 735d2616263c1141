"""Step plans as bytes, for processes on other hosts that carry out the same plan.

    8 bytes: n, little-endian | n bytes of JSON: the plan, arrays by reference | the arrays' bytes, one after the other

JSON holds what Python keeps apart and JSON does not as one-entry objects: {"array": [dtype, shape, offset]},
{"tuple": [...]}, {"dict": [[key, value], ...]}, {"StepPlan": {field: value}}. Only the types below come out, so bytes
from a stranger can do no more than make a wrong plan; unlike a pickle they cannot run anything.
"""

import json
import math
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np

from jpaged.api import sampling_params, structured_outputs
from jpaged.engine import interface

_TYPES = {
    name: kind
    for module in (interface, sampling_params, structured_outputs)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, Enum))
}
"""Dataclasses and enumerations that a plan is made of, by name."""


def encode(value: Any) -> bytes:
    """A plan, or any value of the types that plans are made of. TypeError for others."""
    arrays: list[np.ndarray] = []
    header = json.dumps(_to_json(value, arrays), separators=(",", ":")).encode()
    return b"".join([len(header).to_bytes(8, "little"), header, *(array.tobytes() for array in arrays)])


def decode(data: bytes) -> Any:
    """What was encoded. Arrays are read-only views of `data`. ValueError for anything else."""
    size = int.from_bytes(data[:8], "little")
    return _from_json(json.loads(data[8 : 8 + size]), memoryview(data)[8 + size :])


def _to_json(value: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(value, Enum):
        return {type(value).__name__: value.value}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        offset = sum(array.nbytes for array in arrays)
        arrays.append(value)
        return {"array": [value.dtype.str, value.shape, offset]}
    if isinstance(value, list):
        return [_to_json(item, arrays) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_to_json(item, arrays) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_to_json(key, arrays), _to_json(item, arrays)] for key, item in value.items()]}
    if type(value).__name__ in _TYPES:
        return {type(value).__name__: {f.name: _to_json(getattr(value, f.name), arrays) for f in fields(value)}}
    raise TypeError(f"{type(value).__name__} is no part of a plan.")


def _from_json(value: Any, data: memoryview) -> Any:
    if isinstance(value, list):
        return [_from_json(item, data) for item in value]
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    if name == "array":
        dtype, shape, offset = content
        return np.frombuffer(data, dtype, math.prod(shape), offset).reshape(shape)
    if name == "tuple":
        return tuple(_from_json(item, data) for item in content)
    if name == "dict":
        return {_from_json(key, data): _from_json(item, data) for key, item in content}
    if name not in _TYPES:
        raise ValueError(f"{name!r} is no part of a plan.")
    kind = _TYPES[name]
    if issubclass(kind, Enum):
        return kind(content)
    return kind(**{key: _from_json(item, data) for key, item in content.items()})
