"""How much a JSON body holds, counted before it is decoded: decoding holds the interpreter, and all streams wait.

    {"prompt": [1, 2, "a, b"], ...}     values: commas outside strings; strings: keys, too; containers: [ and { outside

Counting is left to numpy, which does not hold the interpreter meanwhile. Quotes are bounded wherever they stand.
"""

from typing import NamedTuple

import numpy as np

from jpaged.serving.errors import ApiError

SMALL_BYTES = 64 << 10
"""Bodies up to this size are not counted: whatever they hold, it is decoded in a few milliseconds."""

MAX_VALUES = 1 << 19
MAX_QUOTES = 1 << 19
MAX_STRINGS = 1 << 16
MAX_CONTAINERS = 1 << 14
MAX_BYTES_OUTSIDE = 8 << 20
"""What a body may hold. Bytes outside strings are those of numbers; one of millions of digits costs by its length."""
MOST_DECODING_S = 0.04
"""What all of it together may take to decode, by these costs of each, measured on one core of a server."""
_VALUE_S, _STRING_S, _CONTAINER_S, _ESCAPE_S = 4e-8, 25e-8, 8e-7, 1e-8

_SLICE = 1 << 20
"""Bytes that are counted at once."""

_QUOTE, _ESCAPE, _COMMA, _LIST, _OBJECT = (np.uint8(ord(character)) for character in '"\\,[{')


def check_size(body: bytes) -> None:
    """Raises ApiError if a body holds more than can be decoded at once."""
    if len(body) <= SMALL_BYTES:
        return
    text = np.frombuffer(body, np.uint8)
    quotes = _count(text, _QUOTE)
    if quotes > MAX_QUOTES:
        raise _too_much("quotes", MAX_QUOTES)
    escapes = _count(text, _ESCAPE)
    # Mostly the text has so few of these that it need not be told apart from what is outside strings.
    commas, brackets = _count(text, _COMMA), _count(text, _LIST) + _count(text, _OBJECT)
    if not _excess(commas, quotes // 2, brackets, escapes, len(body)):
        return
    values = containers = outside = quotes = 0
    place = _Place(False, 0)
    for at in range(0, len(body), _SLICE):
        part, place = _outside_strings(text[at : at + _SLICE], place)
        values += _count(part.text, _COMMA)
        containers += _count(part.text, _LIST) + _count(part.text, _OBJECT)
        outside += part.text.size
        quotes += part.quotes
        if excess := _excess(values, quotes // 2, containers, escapes, outside):
            raise _too_much(*excess)


class _Place(NamedTuple):
    """Between two characters: whether it is inside a string, and how many escapes stand before it."""

    in_string: bool
    escapes: int


class _Part(NamedTuple):
    """text: uint8, what is outside strings, without quotes. quotes: those that begin or end one."""

    text: np.ndarray
    quotes: int


def _outside_strings(text: np.ndarray, before: _Place) -> tuple[_Part, _Place]:
    """The part of a slice that is outside strings, and the place behind the slice."""
    others = np.flatnonzero(text != _ESCAPE)
    if not others.size:
        return _Part(text[:0], 0), _Place(before.in_string, before.escapes + text.size)
    # A quote behind an odd number of escapes is a character of its string.
    is_even = np.diff(others, prepend=-1 - before.escapes) & 1 == 1
    escapes = text.size - 1 - int(others[-1])
    text = text[others]
    is_quote = (text == _QUOTE) & is_even
    in_string = np.bitwise_xor.accumulate(is_quote)  # of the character behind
    if before.in_string:
        np.logical_not(in_string, out=in_string)
    part = _Part(text[~(in_string | is_quote)], int(np.count_nonzero(is_quote)))
    return part, _Place(bool(in_string[-1]), escapes)


def _excess(values: int, strings: int, containers: int, escapes: int, outside: int) -> tuple[str, int] | None:
    """What there is too much of, and the most that there may be; None if a body may hold so much."""
    for what, count, most in (
        ("values", values, MAX_VALUES),
        ("strings", strings, MAX_STRINGS),
        ("lists and objects", containers, MAX_CONTAINERS),
        ("bytes outside strings", outside, MAX_BYTES_OUTSIDE),
    ):
        if count > most:
            return what, most
    cost_s = values * _VALUE_S + strings * _STRING_S + containers * _CONTAINER_S + escapes * _ESCAPE_S
    if cost_s > MOST_DECODING_S:
        return "ms of decoding, with all its values, strings, lists and escapes,", round(1000 * MOST_DECODING_S)
    return None


def _count(text: np.ndarray, character: np.uint8) -> int:
    return int(sum(np.count_nonzero(text[at : at + _SLICE] == character) for at in range(0, text.size, _SLICE)))


def _too_much(what: str, most: int) -> ApiError:
    return ApiError(413, f"The body holds more than {most} {what}, the most this server takes.", code="too_large")
