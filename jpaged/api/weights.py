"""Weights as a caller gives them: nested or flat, by name; and what becomes of running requests when they change."""

from collections.abc import Mapping
from typing import Any, Literal

from jpaged.api.errors import InvalidParameterError, shown

InFlight = Literal["recompute", "continue"]
"""What running requests do when the weights change.

"recompute": they keep their tokens, and their keys and values are computed again with the new weights, as after a
preemption. "continue": they go on from the keys and values of the old weights.
"""


def flat_weights(weights: Mapping[Any, Any]) -> dict[str, Any]:
    """Arrays by name. Nested mappings are joined by dots, and an outermost "params" of Flax's is left out.

    weights: names, or parts of names, to arrays, variables of `flax.nnx`, or further mappings.

    Raises:
        InvalidParameterError: it is no mapping, it is empty, two of its entries have the same name, or it has other
            collections of Flax's.
    """
    if not isinstance(weights, Mapping):
        raise InvalidParameterError(
            f"weights must map names to arrays, got {type(weights).__name__}; give the state of a module"
            " (nnx.state(module, nnx.Param)), a nested dictionary of parameters, or checkpoint names and arrays."
        )
    if "params" in weights and isinstance(weights["params"], Mapping):
        if len(weights) > 1:
            others = ", ".join(repr(key) for key in weights if key != "params")
            raise InvalidParameterError(f"weights holds {others} beside 'params'; give weights['params'] alone.")
        weights = weights["params"]
    flat: dict[str, Any] = {}
    _flatten(weights, "", flat)
    if not flat:
        raise InvalidParameterError("weights holds no array; give at least one, by its name.")
    return flat


def _flatten(weights: Mapping[Any, Any], prefix: str, flat: dict[str, Any]) -> None:
    for key, value in weights.items():
        if not isinstance(key, str | int):
            raise InvalidParameterError(f"weights: names must be strings, got {shown(key)}.")
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            _flatten(value, f"{name}.", flat)
        elif name in flat:
            raise InvalidParameterError(f"weights holds {name!r} twice; leave one of them out.")
        else:
            flat[name] = value.get_value() if hasattr(value, "get_value") else value
