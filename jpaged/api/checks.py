"""Checks of arguments' types and ranges. Numbers may be Python's or numpy's; booleans are not numbers.

Python's own are told by their type: asking an abstract class takes ten times as long, and a request has 16 numbers.
"""

from numbers import Integral, Real
from typing import Any, TypeGuard, get_args

from jpaged.api.errors import InvalidParameterError, shown

LARGEST_FLOAT32 = 3.4028234663852886e38


def is_integer(value: object) -> TypeGuard[int]:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def is_number(value: object) -> TypeGuard[float]:
    """NaN and the infinities are numbers too: compare with bounds, which NaN is never within."""
    return type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))


def check_integer(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raises InvalidParameterError unless it is an integer from `least` to `most`."""
    if not is_integer(value):
        raise InvalidParameterError(f"{name} must be an integer, got {shown(value)}.")
    if value < least:
        raise InvalidParameterError(f"{name} must be at least {least}, got {shown(value)}.")
    if most is not None and int(value) > most:
        raise InvalidParameterError(f"{name} must be at most {most}, got {shown(value)}.")


def check_bool(name: str, value: object) -> None:
    """Raises InvalidParameterError for anything but True and False, such as 0 or 1."""
    if not isinstance(value, bool):
        raise InvalidParameterError(f"{name} must be True or False, got {shown(value)}.")


def check_choice(name: str, value: object, kind: Any) -> None:
    """Raises InvalidParameterError if `value` is not one of those that the Literal type `kind` lists."""
    if value not in get_args(kind):
        choices = ", ".join(map(repr, get_args(kind)))
        raise InvalidParameterError(f"{name} must be one of {choices}, got {shown(value)}.")


def plain(value: Any) -> Any:
    """Numpy's numbers, and tuples of them, as Python's own, which JSON knows. Anything else is returned as it is."""
    if is_integer(value):
        return int(value)
    if is_number(value):
        return float(value)
    return tuple(map(plain, value)) if isinstance(value, tuple) else value
