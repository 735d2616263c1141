"""Arguments as Gemma writes them: like JSON, but with bare keys, and strings between marks of their own.

    city:<|"|>Paris<|"|>,days:3,where:{at:[1,2]}

Keys are in alphabetical order, as these models' chat templates write them.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jpaged.api.errors import InvalidParameterError
from jpaged.text.turns.arguments import (
    NAME_PATTERN,
    bounds_of,
    escaped,
    held_back,
    json_expression,
    listed,
    properties_of,
    text_before,
)
from jpaged.text.turns.declarations import Mismatch, RuleWriter, Scanner, Tool

_MOST_REFERENCES = 256
"""Different ones in a schema."""
_OF_NUMBERS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf")
_HEEDED = {
    "array": ("items", "maxItems", "minItems", "prefixItems"),
    "integer": _OF_NUMBERS,
    "number": _OF_NUMBERS,
    "object": ("additionalProperties", "properties", "required"),
    "string": ("maxLength", "minLength"),
}
"""Keywords that are enforced, by type."""
_UNENFORCED = ("$comment", "$defs", "$id", "$schema", "default", "definitions", "description", "examples", "title")
"""Keywords that allow every value."""


@dataclass(frozen=True)
class BraceArguments:
    """Members without the braces around them, which belong to the call.

    Args:
        quote: what stands in front of strings and behind them.
    """

    quote: str

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.quote,)

    def grammar(self, tool: Tool, rules: RuleWriter) -> str:
        return _Values(self.quote, tool, rules).arguments()

    def scanner(self, tool: Tool) -> Scanner:
        return _BraceScanner(self.quote)

    def render(self, tool: Tool, arguments: Mapping[str, Any]) -> str:
        return _members(arguments, self.quote)


QUOTED_BRACES, ESCAPED_BRACES = BraceArguments('<|"|>'), BraceArguments("<escape>")


def _in_order(name: str) -> tuple[str, str]:
    """For sorting: as Jinja's `dictsort`, which takes no notice of capitals."""
    return name.lower(), name


def _members(values: Mapping[str, Any], quote: str) -> str:
    return ",".join(f"{name}:{_written(values[name], quote)}" for name in sorted(values, key=_in_order))


def _written(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        return f"{{{_members(value, quote)}}}"
    if isinstance(value, Sequence):
        return f"[{','.join(_written(one, quote) for one in value)}]"
    return json.dumps(value)


def _can_be_written(value: Any, quote: str) -> bool:
    if isinstance(value, str):
        return quote not in value
    if isinstance(value, Mapping):
        return all(re.fullmatch(NAME_PATTERN, key) and _can_be_written(one, quote) for key, one in value.items())
    return not isinstance(value, Sequence) or all(_can_be_written(one, quote) for one in value)


def _is_of(kind: str, value: Any) -> bool:
    """Whether a value is of one of JSON schema's types."""
    if kind in ("integer", "number") and isinstance(value, int | float) and not isinstance(value, bool):
        return kind == "number" or isinstance(value, int) or value.is_integer()
    types = {"string": str, "boolean": bool, "null": type(None), "array": list, "object": Mapping}
    return kind in types and isinstance(value, types[kind])


def _times(least: int, most: int | None) -> str:
    """How often an expression stands there."""
    return f"{{{least},{'' if most is None else most}}}"


class _Values:
    """The expressions for a tool's arguments.

    What a `$ref` names is a rule, written when all that is around it has been: definitions may refer to each other in
    long chains, and in circles.
    """

    def __init__(self, quote: str, tool: Tool, rules: RuleWriter) -> None:
        self._quote, self._tool, self._rules = quote, tool, rules
        self._referred: dict[str, tuple[str, Any]] = {}  # rule and schema, by reference
        self._unwritten: list[str] = []  # those whose rules are still to be written
        self._anything = ""

    def arguments(self) -> str:
        """The expression for all of them.

        Raises:
            InvalidParameterError: as of `Arguments.grammar`.
        """
        schema = self._tool.parameters
        self._check_keywords("", schema, ("type", *_HEEDED["object"]))
        found = self._members("", schema)
        while self._unwritten:
            reference = self._unwritten.pop()
            rule, referred = self._referred[reference]
            self._rules.write(rule, self._value(reference, referred))
        self._check_ends()
        return found

    def _members(self, where: str, schema: Mapping[str, Any]) -> str:
        """The members of an object with properties. where: in front of theirs, "" or with a dot behind it."""
        given = sorted(properties_of(schema, where), key=lambda one: _in_order(one[0]))
        written = []
        for name, of_member, required in given:
            value = self._value(f"{where}properties.{name}", of_member)
            written.append((self._rules.add("member", f"{self._rules.literal(name + ':')} {value}"), required))
        return listed(written, ",", self._rules)

    def _value(self, where: str, schema: Any) -> str:
        if schema is True:
            return self._any()
        if not isinstance(schema, Mapping):
            raise InvalidParameterError(f"{where} must be a JSON schema.")
        kinds = self._kinds(where, schema)
        if "$ref" in schema:
            self._check_keywords(where, schema, ("$ref",))
            return self._reference(where, schema["$ref"])
        if "enum" in schema or "const" in schema:
            self._check_keywords(where, schema, ("const", "enum", "type"))
            return self._one_of(where, schema.get("enum", [schema.get("const")]), kinds)
        if (key := self._choice(schema)) is not None:
            self._check_keywords(where, schema, ("anyOf",))
            options = self._list(f"{where}.{key}", schema[key])
            return self._either([self._value(f"{where}.{key}[{i}]", one) for i, one in enumerate(options)])
        self._check_keywords(where, schema, ("type", *(key for kind in kinds for key in _HEEDED.get(kind, ()))))
        return self._either([self._of_kind(where, schema, kind) for kind in kinds]) if kinds else self._any()

    @staticmethod
    def _choice(schema: Mapping[str, Any]) -> str | None:
        """The keyword whose list of schemas a value is of one of. Beside properties it only says more of these."""
        return None if "properties" in schema else next((key for key in ("anyOf", "oneOf") if key in schema), None)

    def _kinds(self, where: str, schema: Mapping[str, Any]) -> list[str]:
        """The types that a schema allows; none if it does not say."""
        given = schema.get("type")
        if given is None:
            return next(([kind] for kind in ("object", "array") if schema.keys() & {*_HEEDED[kind]}), [])
        kinds = [given] if isinstance(given, str) else self._list(f"{where}.type", given)
        for kind in kinds:
            if kind not in _HEEDED and kind not in ("boolean", "null"):
                raise InvalidParameterError(f"{where}.type must be a JSON schema's type, got {str(kind)[:80]!r}.")
        return kinds

    def _check_keywords(self, where: str, schema: Mapping[str, Any], heeded: Sequence[str]) -> None:
        """Raises InvalidParameterError where a strict tool asks for what is not enforced."""
        others = sorted(schema.keys() - {*heeded, *_UNENFORCED})
        if self._tool.strict and others:
            raise InvalidParameterError(
                f"{where + ': ' if where else ''}{others[0]} cannot be enforced here in this model's format of calls;"
                " leave it out, or strict."
            )

    def _of_kind(self, where: str, schema: Mapping[str, Any], kind: str) -> str:
        if kind == "string":
            low, high = bounds_of(where, schema, "minLength", "maxLength")
            return f"{self._rules.literal(self._quote)} {text_before(self._quote, low, high, self._rules)}"
        if kind == "object":
            return self._object(where, schema)
        if kind == "array":
            return self._array(where, schema)
        if kind in ("integer", "number"):
            limits = {key: schema[key] for key in _OF_NUMBERS if key in schema}
            return self._rules.add("number", json_expression({"type": kind, **limits}, lenient=not self._tool.strict))
        return '("true" | "false")' if kind == "boolean" else '"null"'

    def _object(self, where: str, schema: Mapping[str, Any]) -> str:
        if schema.get("properties") or schema.get("required"):
            own = {key: schema[key] for key in _HEEDED["object"] if key in schema}
            return f'"{{" {self._members(f"{where}.", own)} "}}"'
        others = schema.get("additionalProperties", True)
        if others is False:
            return '"{" "}"'
        return self._mapping(self._value(f"{where}.additionalProperties", others))

    def _mapping(self, value: str) -> str:
        member = self._rules.add("entry", f"/{NAME_PATTERN}:/ {value}")
        return f'"{{" ({member} ("," {member})*)? "}}"'

    def _array(self, where: str, schema: Mapping[str, Any]) -> str:
        low, high = bounds_of(where, schema, "minItems", "maxItems")
        given = self._list(f"{where}.prefixItems", schema["prefixItems"]) if "prefixItems" in schema else []
        first = [self._rules.add("item", self._value(f"{where}.prefixItems[{i}]", one)) for i, one in enumerate(given)]
        items = schema.get("items", True)
        most = int(high) if high != "" else max(low, len(first)) if items is False else None
        first = first[:most]
        head = ' "," '.join(first)
        if len(first) == most:
            return f'"[" {head} "]"'
        item = self._rules.add("item", self._value(f"{where}.items", items))
        least, left = max(low - len(first), 0), None if most is None else most - len(first)
        if head:
            return f'"[" {head} ("," {item}){_times(least, left)} "]"'
        more = f'("," {item}){_times(max(least - 1, 0), None if left is None else left - 1)}'
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'

    def _one_of(self, where: str, values: Any, kinds: Sequence[str]) -> str:
        given = self._list(f"{where}.enum", values)
        fitting = [one for one in given if not kinds or any(_is_of(kind, one) for kind in kinds)]
        texts = [_written(one, self._quote) for one in fitting if _can_be_written(one, self._quote)]
        if not texts:
            raise InvalidParameterError(f"{where}.enum has no value that this model's format of calls can write.")
        return self._either([self._rules.literal(text) for text in texts])

    def _any(self) -> str:
        """Any value, as a rule that stands in its own body."""
        if not self._anything:
            self._anything = self._rules.name("anything")
            kinds = ("string", "number", "boolean", "null", "array")
            body = [self._of_kind("", {}, kind) for kind in kinds] + [self._mapping(self._anything)]
            self._rules.write(self._anything, " | ".join(body))
        return self._anything

    def _reference(self, where: str, reference: Any) -> str:
        if not isinstance(reference, str):
            raise InvalidParameterError(f"{where}.$ref must be a string.")
        if reference not in self._referred:
            if len(self._referred) == _MOST_REFERENCES:
                raise InvalidParameterError(
                    f"{where}.$ref is one of more than {_MOST_REFERENCES} different references; use fewer."
                )
            self._referred[reference] = self._rules.name("referred"), self._found(where, reference)
            self._unwritten.append(reference)
        return self._referred[reference][0]

    def _found(self, where: str, reference: str) -> Any:
        """What a reference names."""
        found: Any = self._tool.parameters
        parts = reference.split("/")
        try:
            if parts[0] != "#":
                raise KeyError(reference)
            for part in parts[1:]:
                found = found[int(part) if isinstance(found, list) else part.replace("~1", "/").replace("~0", "~")]
        except (KeyError, TypeError, ValueError, IndexError):
            raise InvalidParameterError(f"{where}.$ref names {reference[:80]!r}, which is not there.") from None
        return found

    def _check_ends(self) -> None:
        """Raises InvalidParameterError where a reference names a schema whose every value holds another of its own."""
        ending: set[str] = set()
        left = [*self._referred]
        while left:
            still_left: list[str] = []
            for reference in reversed(left):
                if self._ends(self._referred[reference][1], ending):
                    ending.add(reference)
                else:
                    still_left.append(reference)
            if len(still_left) == len(left):
                raise InvalidParameterError(f"{left[0][:80]} refers to itself without an end: no value is complete.")
            left = still_left[::-1]

    def _ends(self, schema: Any, ending: set[str]) -> bool:
        """Whether a schema has a value. ending: references that have."""
        if not isinstance(schema, Mapping) or "enum" in schema or "const" in schema:
            return True
        if "$ref" in schema:
            return schema["$ref"] in ending
        if (key := self._choice(schema)) is not None:
            return any(self._ends(one, ending) for one in schema[key])
        kinds = self._kinds("", schema)
        if "object" in kinds:
            properties = schema.get("properties", {})
            if all(self._ends(properties[name], ending) for name in schema.get("required", ())):
                return True
        if "array" in kinds:
            needed = [*schema.get("prefixItems", ())]
            if schema.get("minItems", 0) > len(needed):
                needed.append(schema.get("items", True))
            if all(self._ends(one, ending) for one in needed):
                return True
        return not kinds or bool({*kinds} - {"object", "array"})

    def _either(self, expressions: Sequence[str]) -> str:
        return expressions[0] if len(expressions) == 1 else self._rules.add("either", " | ".join(expressions))

    @staticmethod
    def _list(where: str, value: Any) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise InvalidParameterError(f"{where} must be a list that is not empty.")
        return value


class _BraceScanner:
    """Reads members up to the brace that closes them, which is not used. A `None` is read as null."""

    _WORDS = {"true": "true", "false": "false", "null": "null", "None": "null"}  # noqa: RUF012  # never written to
    _NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
    _WORD = re.compile(r"[\w.+-]+")
    _BARE_KEY = re.compile(NAME_PATTERN)

    def __init__(self, quote: str) -> None:
        self.done = False
        self._quote = quote
        self._closings = ["}"]
        self._written = ["{"]
        self._next: Callable[[str, int], int] = self._first

    def feed(self, text: str) -> tuple[str, str]:
        at = 0
        while at < len(text) and not self.done:
            end = self._next(text, at)
            if end < 0:  # more text is needed
                break
            at = end
        json_text, self._written = "".join(self._written), []
        return json_text, text[at:]

    # Each reads what stands at a place of the text, adds to what is written, and returns the place behind it; -1 for
    # that more text is needed.

    def _first(self, text: str, at: int) -> int:
        return self._close(text, at) if text[at] == self._closings[-1] else self._item(text, at)

    def _item(self, text: str, at: int) -> int:
        if self._closings[-1] == "]":
            return self._value(text, at)
        if self._may_be_quote(text, at):
            return -1
        if text.startswith(self._quote, at):
            begin = at + len(self._quote)
            end = text.find(self._quote, begin)
            behind = end + len(self._quote)
        else:
            found = self._BARE_KEY.match(text, at)
            if found is None:
                raise Mismatch
            begin, end = found.span()
            behind = end
        if end < 0 or behind == len(text):
            return -1
        if text[behind] != ":":
            raise Mismatch
        self._written.append(f"{json.dumps(text[begin:end], ensure_ascii=False)}: ")
        self._next = self._value
        return behind + 1

    def _value(self, text: str, at: int) -> int:
        if self._may_be_quote(text, at):
            return -1
        if text.startswith(self._quote, at):
            self._written.append('"')
            self._next = self._string
            return at + len(self._quote)
        if text[at] in "{[":
            self._written.append(text[at])
            self._closings.append("}" if text[at] == "{" else "]")
            self._next = self._first
            return at + 1
        found = self._WORD.match(text, at)
        if found is None:
            raise Mismatch
        if found.end() == len(text):  # it may go on
            return -1
        word = self._WORDS.get(found[0])
        if word is None and not self._NUMBER.fullmatch(found[0]):
            raise Mismatch
        self._written.append(word or found[0])
        self._next = self._behind
        return found.end()

    def _string(self, text: str, at: int) -> int:
        end = text.find(self._quote, at)
        if end < 0:
            end = len(text) - held_back(text[max(at, len(text) - len(self._quote)) :], self._quote)
            self._written.append(escaped(text[at:end]))
            return end if end > at else -1
        self._written.append(escaped(text[at:end]) + '"')
        self._next = self._behind
        return end + len(self._quote)

    def _behind(self, text: str, at: int) -> int:
        if text[at] != ",":
            return self._close(text, at)
        self._written.append(", ")
        self._next = self._item
        return at + 1

    def _close(self, text: str, at: int) -> int:
        if text[at] != self._closings[-1]:
            raise Mismatch
        self._written.append(text[at])
        self._closings.pop()
        self.done = not self._closings
        self._next = self._behind
        return at if self.done else at + 1

    def _may_be_quote(self, text: str, at: int) -> bool:
        """Whether the text ends within what may be a quote."""
        left = len(text) - at
        return left < len(self._quote) and self._quote.startswith(text[at:])
