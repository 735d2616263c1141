"""How JSON values are written, as llguidance does it: separators, white space, escapes."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from jpaged.text.regular.automata import NotCovered, NothingMatches
from jpaged.text.regular.expressions import (
    ANY_CHARACTER,
    EMPTY,
    NOTHING,
    CharSet,
    Concat,
    Expression,
    Repeat,
    Text,
    Within,
    compiled,
    union,
)
from jpaged.text.regular.json_values import NONE, AnyOf, Array, Literal, Number, Object, String, Value, allowed_values
from jpaged.text.regular.numbers import decimals, integers
from jpaged.text.regular.regexes import whole

_MOST_EXACT = 2**53
"""Beyond it not all integers are floating-point numbers, which llguidance computes with."""
_SHORT = {8: b"b", 9: b"t", 10: b"n", 12: b"f", 13: b"r"}


def json_expression(
    schema: Mapping[str, Any], whitespace: str = "", item_separator: str = ",", key_separator: str = ":"
) -> Expression:
    """The texts that a schema allows. whitespace: a regular expression; empty for none. Raises NotCovered."""
    space = Repeat(whole(whitespace), 0, 1) if whitespace else EMPTY
    writer = _Writer(space, Text(item_separator.encode()), Text(key_separator.encode()))
    return writer.written(allowed_values(schema))


@dataclass(frozen=True)
class _Writer:
    """How values are written. space: what may stand between two tokens."""

    space: Expression
    comma: Expression
    colon: Expression

    def written(self, value: Value) -> Expression:
        """The texts of a value; NOTHING if there is none."""
        if isinstance(value, AnyOf):
            return union([self.written(option) for option in value.options])
        if isinstance(value, Literal):
            return Text(value.text.encode())
        if isinstance(value, Number):
            return _integer(value) if value.is_integer else _float(value)
        if isinstance(value, String):
            return _quoted(value)
        if isinstance(value, Array):
            return self._array(value)
        if isinstance(value, Object):
            return self._object(value)
        raise NotCovered("a value of any type")

    def _array(self, array: Array) -> Expression:
        if array.most is not None and array.least > array.most:
            return NOTHING
        items, most = [self._item(one) for one in array.first[: array.most]], array.most
        if NOTHING in items:
            items = items[: items.index(NOTHING)]
            most = len(items)
        other = NOTHING if most is not None and most <= len(items) else self._item(array.others)
        if other == NOTHING and len(items) < array.least:
            return NOTHING
        comma = self.comma + self.space
        behind: Expression = EMPTY
        if other != NOTHING:
            begins = EMPTY if items else other
            least, most = (None if n is None else n - len(items) - (begins is other) for n in (array.least, most))
            assert least is not None
            behind = begins + Repeat(comma + other, max(0, least), most)
            if not items and not array.least:
                behind |= EMPTY
        for i in reversed(range(len(items))):
            behind = Concat((comma if i else EMPTY, items[i], behind))
            behind = behind | EMPTY if i >= array.least else behind
        return Concat((Text(b"["), self.space, behind, Text(b"]")))

    def _object(self, value: Object) -> Expression:
        if self._item(value.additional) != NOTHING:
            raise NotCovered("properties of any name")
        behind: Expression = EMPTY  # fields that follow another one
        first: Expression = EMPTY  # fields that follow none
        names = [*value.properties, *(name for name in value.required if name not in value.properties)]
        for name in reversed(names):
            item, is_required = self._item(value.properties.get(name, NONE)), name in value.required
            if item == NOTHING:
                if is_required:
                    return NOTHING
                continue
            key = Text(json.dumps(name, ensure_ascii=False).encode())
            field = Concat((key, self.space, self.colon, self.space, item, behind))
            one_more = Concat((self.comma, self.space, field))
            first = field if is_required else field | first
            behind = one_more if is_required else one_more | behind
        return Concat((Text(b"{"), self.space, first, Text(b"}")))

    def _item(self, value: Value) -> Expression:
        """A value within another one."""
        written = self.written(value)
        return written if written == NOTHING else written + self.space


def _quoted(value: String) -> Expression:
    """The texts of strings."""
    if len(value.contents) == 1 and isinstance(content := value.contents[0], Text):
        if not value.least <= len(content.data.decode()) <= (math.inf if value.most is None else value.most):
            return NOTHING
        inner: Expression = Concat(tuple(_SPELLINGS.get(byte, Text(bytes([byte]))) for byte in content.data))
    elif value.most is not None and value.least > value.most:
        return NOTHING
    elif not value.contents:
        inner = Repeat(_character(), value.least, value.most)
    else:
        is_bounded = (value.least, value.most) != (0, None)
        parts = [*value.contents, *([Repeat(ANY_CHARACTER, value.least, value.most)] if is_bounded else [])]
        try:
            automaton, *others = map(compiled, parts)
            for other in others:
                automaton = automaton.intersection(other)
        except NothingMatches:
            return NOTHING
        inner = Within(automaton, _SPELLINGS)
    return Concat((Text(b'"'), inner, Text(b'"')))


def _escape(byte: int) -> Expression:
    """The escapes of a byte that does not stand in a string as it is."""
    if chr(byte) in '"\\':
        return Text(b"\\" + bytes([byte]))
    long = Concat((Text(b"\\u00"), *(CharSet.of(digit + digit.upper()) for digit in f"{byte:02x}")))
    return Text(b"\\" + _SHORT[byte]) | long if byte in _SHORT else long


_SPELLINGS = {byte: _escape(byte) for byte in (*range(32), *b'"\\', 127)}


@cache
def _character() -> Expression:
    """A character of a string, as few nodes."""
    return Within(compiled(Within(compiled(ANY_CHARACTER), _SPELLINGS)), {})


def _integer(value: Number) -> Expression:
    """The texts of integers."""
    least = [towards(one) for one, towards in ((value.minimum, _ceil), (value.above + 1, _floor)) if one > -math.inf]
    most = [towards(one) for one, towards in ((value.maximum, _floor), (value.below - 1, _ceil)) if one < math.inf]
    return integers(max(least, default=None), min(most, default=None), value.multiple_of)


def _float(value: Number) -> Expression:
    """The texts of numbers that need not be integers."""
    if value.multiple_of is not None:
        raise NotCovered("multiples of a number that is no integer")
    low, high = max(value.minimum, value.above), min(value.maximum, value.below)
    if (low, high) == (-math.inf, math.inf):
        return whole(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+\-]?[0-9]+)?")
    text = repr(float(low)).removesuffix(".0")
    if low == high and "e" not in text:
        return NOTHING if low == value.above or high == value.below else Text(text.encode())
    if not all(math.isinf(one) or one == int(one) for one in (low, high)):
        raise NotCovered("bounds of a number that are no integers")
    least, most = (None if math.isinf(one) else _floor(one) for one in (low, high))
    return decimals(least, most, low == value.above, high == value.below)


def _floor(bound: float) -> int:
    if abs(bound) > _MOST_EXACT:
        raise NotCovered("a large bound")
    return math.floor(bound)


def _ceil(bound: float) -> int:
    return -_floor(-bound)
