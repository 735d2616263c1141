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
from jpaged.text.turns.arguments import escaped, held_back, json_expression, listed, properties_of, text_before
from jpaged.text.turns.declarations import Mismatch, RuleWriter, Scanner, Tool

_KEY = r"[\w.$-]+"
_ANNOTATIONS = frozenset(("$comment", "$defs", "$id", "$schema", "default", "definitions", "description", "examples"))
_OF_NUMBERS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf")
_ENFORCED = _ANNOTATIONS | {
    *("$ref", "additionalProperties", "anyOf", "const", "enum", "items", "maxItems", "maxLength", "minItems"),
    *("minLength", "properties", "required", "title", "type", *_OF_NUMBERS),
}
"""Keywords of schemas."""


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
        return _Values(self.quote, tool, rules).members("", tool.parameters)

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


class _Values:
    """The expressions for a tool's arguments."""

    def __init__(self, quote: str, tool: Tool, rules: RuleWriter) -> None:
        self._quote, self._tool, self._rules = quote, tool, rules
        self._referred: dict[str, str] = {}
        self._anything = ""

    def members(self, where: str, schema: Mapping[str, Any]) -> str:
        """The members of an object with properties."""
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
        unknown = sorted(schema.keys() - _ENFORCED)
        if self._tool.strict and unknown:
            raise InvalidParameterError(
                f"{where}: {unknown[0]} cannot be enforced in this model's format of calls; leave it out, or strict."
            )
        if "$ref" in schema:
            return self._reference(where, schema["$ref"])
        if "enum" in schema or "const" in schema:
            return self._one_of(where, schema.get("enum", [schema.get("const")]))
        for key in ("anyOf", "oneOf"):
            if key in schema and "properties" not in schema:
                options = self._list(f"{where}.{key}", schema[key])
                return self._either([self._value(f"{where}.{key}[{i}]", one) for i, one in enumerate(options)])
        kinds = schema.get("type") or self._kinds_without_type(schema)
        kinds = [kinds] if isinstance(kinds, str) else self._list(f"{where}.type", kinds)
        return self._either([self._of_kind(where, schema, kind) for kind in kinds]) if kinds else self._any()

    @staticmethod
    def _kinds_without_type(schema: Mapping[str, Any]) -> list[str]:
        return ["object"] if "properties" in schema else ["array"] if "items" in schema else []

    def _of_kind(self, where: str, schema: Mapping[str, Any], kind: Any) -> str:
        if kind == "string":
            return self._string(where, schema)
        if kind == "object":
            return self._object(where, schema)
        if kind == "array":
            return self._array(where, schema)
        if kind in ("integer", "number"):
            limits = {key: schema[key] for key in _OF_NUMBERS if key in schema}
            return self._rules.add("number", json_expression({"type": kind, **limits}, lenient=not self._tool.strict))
        if kind == "boolean":
            return '("true" | "false")'
        if kind == "null":
            return '"null"'
        raise InvalidParameterError(f"{where}.type must be a JSON schema's type, got {str(kind)[:80]!r}.")

    def _string(self, where: str, schema: Mapping[str, Any]) -> str:
        low, high = self._bounds(where, schema, "minLength", "maxLength")
        return f"{self._rules.literal(self._quote)} {text_before(self._quote, low, high, self._rules)}"

    def _object(self, where: str, schema: Mapping[str, Any]) -> str:
        if schema.get("properties"):
            return f'"{{" {self.members(f"{where}.", schema)} "}}"'
        others = schema.get("additionalProperties", True)
        if others is False:
            return '"{" "}"'
        return self._mapping(self._value(f"{where}.additionalProperties", others))

    def _array(self, where: str, schema: Mapping[str, Any]) -> str:
        low, high = self._bounds(where, schema, "minItems", "maxItems")
        item = self._value(f"{where}.items", schema.get("items", True))
        if high == 0:
            return '"[" "]"'
        more = f'("," {item}){{{max(low - 1, 0)},{"" if high == "" else int(high) - 1}}}'
        return f'"[" {item} {more} "]"' if low else f'"[" ({item} {more})? "]"'

    def _mapping(self, value: str) -> str:
        member = self._rules.add("entry", f"/{_KEY}:/ {value}")
        return f'"{{" ({member} ("," {member})*)? "}}"'

    def _one_of(self, where: str, values: Any) -> str:
        texts = [_written(value, self._quote) for value in self._list(f"{where}.enum", values)]
        writable = [text for text in texts if text.count(self._quote) in (0, 2)]
        if not writable:
            raise InvalidParameterError(f"{where}.enum has no value that this model's format of calls can write.")
        return self._either([self._rules.literal(text) for text in writable])

    def _any(self) -> str:
        """Any value, as a rule that stands in its own body."""
        if not self._anything:
            self._anything = self._rules.name("anything")
            kinds = ("string", "number", "boolean", "null", "array")
            body = [self._of_kind("", {}, kind) for kind in kinds] + [self._mapping(self._anything)]
            self._rules.write(self._anything, " | ".join(body))
        return self._anything

    def _reference(self, where: str, reference: Any) -> str:
        found: Any = self._tool.parameters
        parts = str(reference).split("/")
        try:
            if parts[0] != "#":
                raise KeyError(reference)
            for part in parts[1:]:
                found = found[part.replace("~1", "/").replace("~0", "~")]
        except (KeyError, TypeError):
            raise InvalidParameterError(f"{where}.$ref names {str(reference)[:80]!r}, which is not there.") from None
        if reference not in self._referred:
            self._referred[reference] = self._rules.name("referred")
            self._rules.write(self._referred[reference], self._value(where, found))
        return self._referred[reference]

    def _either(self, expressions: Sequence[str]) -> str:
        return expressions[0] if len(expressions) == 1 else self._rules.add("either", " | ".join(expressions))

    @staticmethod
    def _list(where: str, value: Any) -> list[Any]:
        if not isinstance(value, list) or (not value and not where.endswith(".type")):
            raise InvalidParameterError(f"{where} must be a list that is not empty.")
        return value

    @staticmethod
    def _bounds(where: str, schema: Mapping[str, Any], least: str, most: str) -> tuple[int, int | str]:
        low, high = schema.get(least, 0), schema.get(most, "")
        if not isinstance(low, int) or not (isinstance(high, int) or high == ""):
            raise InvalidParameterError(f"{where}: {least} and {most} must be integers.")
        return low, high


class _BraceScanner:
    """Reads members up to the brace that closes them, which is not used. A `None` is read as null."""

    _WORDS = {"true": "true", "false": "false", "null": "null", "None": "null"}  # noqa: RUF012  # never written to
    _NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")

    def __init__(self, quote: str) -> None:
        self.done = False
        self._quote = quote
        self._closings = ["}"]
        self._written = "{"
        self._next: Callable[[str], tuple[str, str] | None] = self._first

    def feed(self, text: str) -> tuple[str, str]:
        json_text, self._written = self._written, ""
        while text and not self.done:
            found = self._next(text)
            if found is None:  # more text is needed
                break
            piece, text = found
            json_text += piece
        return json_text, text

    def _first(self, text: str) -> tuple[str, str] | None:
        return self._close(text) if text[0] == self._closings[-1] else self._item(text)

    def _item(self, text: str) -> tuple[str, str] | None:
        if self._closings[-1] == "]":
            return self._value(text)
        is_quoted = text.startswith(self._quote)
        if not is_quoted and self._quote.startswith(text):
            return None
        end = f"{self._quote}:" if is_quoted else ":"
        key, found, rest = text[len(self._quote) * is_quoted :].partition(end)
        if found and (is_quoted or re.fullmatch(_KEY, key)):
            self._next = self._value
            return f"{json.dumps(key, ensure_ascii=False)}: ", rest
        if found or not (is_quoted or re.fullmatch(_KEY, key)):
            raise Mismatch
        return None

    def _value(self, text: str) -> tuple[str, str] | None:
        if text.startswith(self._quote):
            self._next = self._string
            return '"', text[len(self._quote) :]
        if self._quote.startswith(text):
            return None
        if text[0] in "{[":
            self._closings.append("}" if text[0] == "{" else "]")
            self._next = self._first
            return text[0], text[1:]
        found = re.match(r"[\w.+-]+", text)
        if found is None:
            raise Mismatch
        if found.end() == len(text):  # it may go on
            return None
        word = self._WORDS.get(found[0], found[0])
        if word == found[0] not in self._WORDS and not self._NUMBER.fullmatch(word):
            raise Mismatch
        self._next = self._behind
        return word, text[found.end() :]

    def _string(self, text: str) -> tuple[str, str] | None:
        said, found, rest = text.partition(self._quote)
        if found:
            self._next = self._behind
            return escaped(said) + '"', rest
        held = held_back(text, self._quote)
        return (escaped(text[: len(text) - held]), text[len(text) - held :]) if held < len(text) else None

    def _behind(self, text: str) -> tuple[str, str]:
        if text[0] == ",":
            self._next = self._item
            return ", ", text[1:]
        return self._close(text)

    def _close(self, text: str) -> tuple[str, str]:
        if text[0] != self._closings[-1]:
            raise Mismatch
        self._closings.pop()
        self.done = not self._closings
        self._next = self._behind
        return text[0], text if self.done else text[1:]
