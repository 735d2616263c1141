"""Whether an argument is the kind of number it should be; Python and numpy numbers alike, but no booleans.

Python's own are told by their type: asking an abstract class takes ten times as long, and a request has 16 numbers.
"""

from numbers import Integral, Real
from typing import TypeGuard

LARGEST_FLOAT32 = 3.4028234663852886e38


def is_integer(value: object) -> TypeGuard[int]:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def is_number(value: object) -> TypeGuard[float]:
    """NaN and the infinities are numbers too: compare with bounds, which NaN is never within."""
    return type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))
