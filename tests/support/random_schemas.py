"""Random JSON schemas whose values are short, so that even a model that samples anything soon comes to an end."""

from typing import Any

import numpy as np

WORDS = ("name", "age", "kind", "größe", "a b", 'quo"te', "x", "tags", "$id", "back\\slash")
PATTERNS = ("^[a-c]{2,5}$", "^(ab|cd){1,3}$", "^[0-9]{3}-[0-9]{2}$", "^x?y{1,2}z$")


def random_schema(rng: np.random.Generator) -> dict[str, Any]:
    """A schema of objects, arrays, strings, numbers, enumerations, alternatives and references, three levels deep."""
    shared = _leaf(rng)
    schema = _schema(rng, 3)
    return {"$defs": {"shared": shared}, **schema}


def _schema(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    kinds = [_leaf] if not depth else [_leaf, _object, _object, _array, _alternatives, _reference]
    make = kinds[rng.integers(len(kinds))]
    return make(rng) if make in (_leaf, _reference) else make(rng, depth - 1)


def _reference(rng: np.random.Generator) -> dict[str, Any]:
    return {"$ref": "#/$defs/shared"}


def _object(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    names = [str(name) for name in rng.choice(WORDS, rng.integers(1, 4), replace=False)]
    required = [name for name in names if rng.random() < 0.7]
    return {
        "type": "object",
        "properties": {name: _schema(rng, depth) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _array(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    least = int(rng.integers(0, 3))
    schema = {"type": "array", "minItems": least, "maxItems": least + int(rng.integers(0, 3))}
    if rng.random() < 0.3:
        first = [_schema(rng, depth) for _ in range(rng.integers(1, 3))]
        return schema | {"prefixItems": first, "items": False, "minItems": len(first), "maxItems": len(first)}
    return schema | {"items": _schema(rng, depth)}


def _alternatives(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth) for _ in range(rng.integers(2, 4))]}


def _leaf(rng: np.random.Generator) -> dict[str, Any]:
    low = int(rng.integers(-200, 200))
    leaves: list[dict[str, Any]] = [
        {"type": "string", "maxLength": int(rng.integers(1, 9))},
        {"type": "string", "minLength": 2, "maxLength": int(rng.integers(2, 7))},
        {"type": "string", "pattern": str(rng.choice(PATTERNS))},
        {"type": "string", "format": "date"},
        {"type": "integer", "minimum": low, "maximum": low + int(rng.integers(0, 500))},
        {"type": "integer", "minimum": 0, "maximum": 60, "multipleOf": 4},
        {"type": "boolean"},
        {"type": "null"},
        {"type": ["boolean", "null"]},
        {"enum": ["red", "grün", 3, None, True, {"a": 1}]},
        {"const": 'a "quoted" text\n'},
    ]
    return leaves[rng.integers(len(leaves))]
