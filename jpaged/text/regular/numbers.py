"""Numbers within bounds, as llguidance writes them: without exponents."""

import numpy as np

from jpaged.text.regular.automata import Automaton, NothingMatches
from jpaged.text.regular.expressions import (
    EMPTY,
    NOTHING,
    CharSet,
    Concat,
    Expression,
    Repeat,
    Text,
    Union,
    Within,
    compiled,
    union,
)

_DIGIT, _NO_ZERO = CharSet(((48, 57),)), CharSet(((49, 57),))


def integers(low: int | None, high: int | None, multiple_of: int | None = None) -> Expression:
    """Integers within bounds; NOTHING if there are none. -0 is one where both bounds are given, or none, and have both
    signs.
    """
    if low is not None and high is not None and low > high:
        return NOTHING
    negative: Expression = NOTHING
    if low is None or low < 0:
        has_zero = (low is None) == (high is None) and (high is None or high >= 0)
        negative = Text(b"-") + _natural(0 if has_zero else 1 if high is None else max(1, -high), low and -low)
    positive = _natural(max(0, low or 0), high) if high is None or high >= 0 else NOTHING
    within = union([negative, positive])
    if multiple_of is None:
        return within
    try:
        multiples = _multiples(multiple_of)
        return Within(compiled(within).intersection(multiples), {})
    except NothingMatches:
        return NOTHING


def decimals(low: int | None, high: int | None, excludes_low: bool, excludes_high: bool) -> Expression:
    """Numbers within bounds, of which one is given at least; NOTHING if there are none. -0 is none."""
    if low is not None and high is not None and low > high:
        return NOTHING
    negative: Expression = NOTHING
    positive: Expression = NOTHING
    if low is None or low < 0:
        begin, excludes_begin = (0, True) if high is None or high >= 0 else (-high, excludes_high)
        negative = Text(b"-") + _positive_decimals(begin, low and -low, excludes_begin, excludes_low)
    if high is None or high >= 0:
        begin, excludes_begin = (0, False) if low is None or low < 0 else (low, excludes_low)
        positive = _positive_decimals(begin, high, excludes_begin, excludes_high)
    return union([negative, positive])


def _positive_decimals(low: int, high: int | None, excludes_low: bool, excludes_high: bool) -> Expression:
    if low == high:
        return NOTHING if excludes_low or excludes_high else Text(str(low).encode())
    options: list[Expression] = []
    if excludes_low:
        options.append(Concat((Text(b"%d." % low), Repeat(_DIGIT), _NO_ZERO)))
        low += 1
    if high is None or low < high:
        options.append(_natural(low, None if high is None else high - 1) + Repeat(Text(b".") + Repeat(_DIGIT, 1), 0, 1))
    if high is not None and not excludes_high:
        options.append(Text(b"%d" % high) + Repeat(Text(b".") + Repeat(Text(b"0"), 1), 0, 1))
    return union(options)


def _natural(low: int, high: int | None) -> Expression:
    """Natural numbers, without zeros in front."""
    options: list[Expression] = []
    digits = len(str(low))
    while high is None or low <= high:
        last = 10**digits - 1
        if high is None and low == (0 if digits == 1 else 10 ** (digits - 1)):
            if digits == 1:
                options.append(Text(b"0"))
            options.append(_NO_ZERO + Repeat(_DIGIT, digits - 1))
            break
        options.append(_same_length(str(low), str(last if high is None else min(last, high))))
        low, digits = last + 1, digits + 1
    return union(options)


def _same_length(low: str, high: str) -> Expression:
    """Numbers of as many digits as both bounds have."""
    if not low:
        return EMPTY
    if low[0] == high[0]:
        return Text(low[0].encode()) + _same_length(low[1:], high[1:])
    rest = len(low) - 1
    options = [
        Text(low[0].encode()) + _same_length(low[1:], "9" * rest),
        Text(high[0].encode()) + _same_length("0" * rest, high[1:]),
    ]
    if ord(high[0]) - ord(low[0]) > 1:
        options.append(CharSet(((ord(low[0]) + 1, ord(high[0]) - 1),)) + Repeat(_DIGIT, rest, rest))
    return Union(tuple(options))


def _multiples(of: int) -> Automaton:
    """Digits behind an optional sign whose number is a multiple. State 0: nothing yet; 1: a sign; then remainders."""
    following = np.full((of + 2, 256), -1, np.int32)
    following[0, ord("-")] = 1
    for digit in range(10):
        following[:2, 48 + digit] = 2 + digit % of
        following[2:, 48 + digit] = 2 + (10 * np.arange(of) + digit) % of
    accepts = np.zeros((of + 2,), np.bool_)
    accepts[2] = True
    return Automaton(following, accepts)
