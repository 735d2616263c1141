"""Regular expressions in the plain part of Rust's syntax, as `expressions.py` has them.

Characters, escapes of punctuation, `.`, classes in brackets, groups, alternatives and greedy repeats. `\\d` and `\\w`
are Unicode's in Rust, and ASCII's in JSON schemas; only the latter are translated. Everything else raises `NotCovered`:
lazy repeats, flags, anchors within, `\\s`, `\\b`, Unicode's classes, operations on classes.
"""

import re

from jpaged.text.regular.automata import NotCovered
from jpaged.text.regular.expressions import ANY_CHARACTER, EMPTY, CharSet, Concat, Expression, Repeat, Text, Union

_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
_ASCII_CLASSES = {"d": ((48, 57),), "w": ((48, 57), (65, 90), (95, 95), (97, 122))}
_BOUNDS = re.compile(r"\{(\d{1,5})(?:(,)(\d{0,5}))?\}")
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_]\w*>)?(?!\?)", re.ASCII)
_DOT = CharSet.of("\n").inverted
_MOST_DEEP = 64


def whole(regex: str) -> Expression:
    """The texts that match a regex as a whole."""
    return _Parser(regex, ascii_classes=False).parsed()


def found(regex: str) -> Expression:
    """The texts in which a JSON schema's pattern is found. `^` and `$` are allowed at its ends."""
    anything = Repeat(ANY_CHARACTER)
    begins, body = regex.startswith("^"), regex.removeprefix("^")
    ends = body.endswith("$") and (len(body) - len(body[:-1].rstrip("\\"))) % 2 == 1
    parser = _Parser(body[:-1] if ends else body, ascii_classes=True)
    part = parser.parsed()
    if parser.has_alternatives and (begins or ends):
        raise NotCovered("an anchor in one of several alternatives")
    return Concat((EMPTY if begins else anything, part, EMPTY if ends else anything))


class _Parser:
    def __init__(self, regex: str, ascii_classes: bool) -> None:
        self._text, self._place = regex, 0
        self._ascii_classes = ascii_classes
        self.has_alternatives = False

    def parsed(self) -> Expression:
        expression = self._alternatives(0)
        if self._place < len(self._text):
            raise NotCovered("a parenthesis too many")
        return expression

    def _peek(self) -> str:
        return self._text[self._place : self._place + 1]

    def _take(self) -> str:
        one = self._peek()
        if not one:
            raise NotCovered("a regex that ends too early")
        self._place += 1
        return one

    def _alternatives(self, depth: int) -> Expression:
        if depth > _MOST_DEEP:
            raise NotCovered("groups too deep in each other")
        options: list[Expression] = []
        while True:
            parts: list[Expression] = []
            while self._peek() not in ("", "|", ")"):
                parts.append(self._repeated(self._atom(depth)))
            options.append(Concat(tuple(parts)))
            if self._peek() != "|":
                break
            self._place += 1
        if depth == 0:
            self.has_alternatives = len(options) > 1
        return Union(tuple(options)) if len(options) > 1 else options[0]

    def _repeated(self, part: Expression) -> Expression:
        bounds: tuple[int, int | None] | None = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(self._peek())
        if bounds is not None:
            self._place += 1
        elif self._peek() == "{":
            given = _BOUNDS.match(self._text, self._place)
            if given is None:
                raise NotCovered("a brace without bounds")
            self._place = given.end()
            least, has_comma, most = given.groups()
            bounds = int(least), int(most) if most else None if has_comma else int(least)
        else:
            return part
        if self._peek() in ("?", "+", "*", "{"):
            raise NotCovered("a repeat that is lazy or repeated")
        if bounds[1] is not None and bounds[0] > bounds[1]:
            raise NotCovered("bounds in the wrong order")
        return Repeat(part, *bounds)

    def _atom(self, depth: int) -> Expression:
        group = _GROUP.match(self._text, self._place)
        if group is not None:
            self._place = group.end()
            inner = self._alternatives(depth + 1)
            if self._take() != ")":
                raise NotCovered("a group without an end")
            return inner
        one = self._take()
        if one == ".":
            return _DOT
        if one == "[":
            return self._bracketed()
        if one == "\\":
            ranges = self._escaped()
            return CharSet(ranges)
        if one in "^$*+?{}()]":
            raise NotCovered(f"{one} in a regex")
        return Text(one.encode())

    def _escaped(self) -> tuple[tuple[int, int], ...]:
        """The characters that an escape stands for."""
        one = self._take()
        if one in "dw" and self._ascii_classes:
            return _ASCII_CLASSES[one]
        if one in "DW" and self._ascii_classes:
            return CharSet(_ASCII_CLASSES[one.lower()]).inverted.ranges
        if one in _ESCAPED:
            return CharSet.of(_ESCAPED[one]).ranges
        if one.isascii() and not one.isalnum() and one not in "<> ":
            return CharSet.of(one).ranges
        raise NotCovered(f"\\{one} in a regex")

    def _bracketed(self) -> CharSet:
        is_inverted = self._peek() == "^"
        self._place += is_inverted
        ranges: list[tuple[int, int]] = []
        while self._peek() != "]" or not ranges:
            low = self._member()
            if self._peek() == "-" and self._text[self._place + 1 : self._place + 2] != "]":
                self._place += 1
                high = self._member()
                if len(low) != 1 or len(high) != 1 or low[0][0] > high[0][0]:
                    raise NotCovered("a range without ends")
                low = ((low[0][0], high[0][1]),)
            ranges += low
        self._place += 1
        members = CharSet(tuple(ranges))
        return members.inverted if is_inverted else members

    def _member(self) -> tuple[tuple[int, int], ...]:
        one = self._take()
        if one == "\\":
            return self._escaped()
        if one == "[" or (one in "&~-" and self._peek() == one):
            raise NotCovered("an operation on classes")
        return ((ord(one), ord(one)),)
