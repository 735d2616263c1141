"""What values a JSON schema without recursion allows, as llguidance reads it.

A schema's keywords are intersected in their order; so are those of `allOf` and what a `$ref` leads to. What is not
translated raises `NotCovered`: `patternProperties`, counted properties, multiples and bounds of other numbers than
integers, unknown formats, references that lead to themselves, and options of `x-guidance` other than `lenient`. A
keyword that llguidance cannot enforce is passed over: it ignores it if the schema is lenient, and refuses the schema
otherwise, which then never gets this far.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jpaged.text.regular.automata import NotCovered
from jpaged.text.regular.expressions import Expression, Text
from jpaged.text.regular.regexes import found, whole

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_NOT_COVERED = ("patternProperties", "minProperties", "maxProperties", "additionalItems", "x-guidance")
_NO_CONSTRAINTS = (
    *("$anchor", "$comment", "$defs", "$id", "$schema", "contentEncoding", "contentMediaType", "default"),
    *("definitions", "description", "examples", "id", "readOnly", "title", "writeOnly"),
)
_APPLIED = ("const", "enum", "allOf", "anyOf", "oneOf", "$ref")
"""Keywords that stand for whole schemas."""
_MONTH_AND_DAY = r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|[12][0-9]))"
_DATE = f"[0-9]{{4}}-{_MONTH_AND_DAY}"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)(\.[0-9]+)?([zZ]|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_ADDRESS = rf"({_BYTE}\.){{3}}{_BYTE}"
_ATOM, _NAME = r"[a-zA-Z0-9!#$%&'*+\-/=?\^_`{|}~]+", "[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "ipv4": _ADDRESS,
    "email": rf"{_ATOM}(\.{_ATOM})*@({_NAME}(\.{_NAME})*|\[{_ADDRESS}\])",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
}


def allowed_values(schema: Mapping[str, Any]) -> "Value":
    """The values that a schema allows. Raises NotCovered."""
    options = schema.get("x-guidance", {})
    if isinstance(options, Mapping) and options.keys() <= {"lenient"}:
        schema = {name: given for name, given in schema.items() if name != "x-guidance"}
    return _Reader(schema).read(schema)


@dataclass(frozen=True)
class Value:
    """Values that are allowed: here, all."""


@dataclass(frozen=True)
class AnyOf(Value):
    """None of these: nothing is allowed."""

    options: tuple[Value, ...]


@dataclass(frozen=True)
class Literal(Value):
    """null, true or false."""

    text: str


@dataclass(frozen=True)
class Number(Value):
    """A number from minimum to maximum, both included, and between above and below, both excluded."""

    is_integer: bool
    minimum: float
    maximum: float
    above: float = -math.inf
    below: float = math.inf
    multiple_of: int | None = None


@dataclass(frozen=True)
class String(Value):
    """A string of least to most characters. contents: all of which it must match."""

    least: int = 0
    most: int | None = None
    contents: tuple[Expression, ...] = ()


@dataclass(frozen=True)
class Array(Value):
    """An array of least to most items. first: what its first items are. others: what those behind them are."""

    least: int
    most: int | None
    first: tuple[Value, ...]
    others: Value


@dataclass(frozen=True)
class Object(Value):
    """An object. required: names, in their order (a set that keeps it). additional: what other properties may be."""

    properties: Mapping[str, Value]
    required: Mapping[str, None]
    additional: Value


ANY, NONE = Value(), AnyOf(())
_BOOLEAN = AnyOf((Literal("true"), Literal("false")))


class _Reader:
    """Reads the schemas of a document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document
        self._open: list[str] = []

    def read(self, schema: Any) -> Value:
        if isinstance(schema, bool):
            return ANY if schema else NONE
        if not isinstance(schema, Mapping) or any(name in schema for name in _NOT_COVERED):
            raise NotCovered("a schema with keywords that are not covered")
        value, own = ANY, dict[str, Any]()
        for name, given in schema.items():
            if name in _APPLIED:
                value = _both(_both(value, self._own(own, schema)), self._applied(name, given))
                own = {}
            elif name not in _NO_CONSTRAINTS:
                own[name] = given
        return _both(value, self._own(own, schema))

    def _own(self, own: Mapping[str, Any], schema: Mapping[str, Any]) -> Value:
        """What keywords that stand for themselves allow. They bring those that they depend on."""
        if not own:
            return ANY
        types = schema.get("type", _TYPES)
        beside = {name: schema[name] for name in ("properties", "prefixItems") if name in schema}
        options = [self._of_type(one, {**beside, **own}) for one in ([types] if isinstance(types, str) else types)]
        return _any_of(options)

    def _applied(self, name: str, given: Any) -> Value:
        if name == "$ref":
            return self._referred(given)
        if name == "const":
            return _constant(given)
        if name == "enum":
            return _any_of([_constant(one) for one in given])
        values = [self.read(one) for one in given]
        if name != "allOf":
            return _any_of(values)
        both = ANY
        for value in values:
            both = _both(both, value)
        return both

    def _referred(self, reference: str) -> Value:
        if not reference.startswith("#/") or reference in self._open:
            raise NotCovered("a reference to another document, or to what it is part of")
        found: Any = self._document
        for part in reference.removeprefix("#/").split("/"):
            if not isinstance(found, Mapping) or part not in found:
                raise NotCovered("a reference that is spelled in an unusual way")
            found = found[part]
        self._open.append(reference)
        value = self.read(found)
        self._open.pop()
        return value

    def _of_type(self, kind: str, own: Mapping[str, Any]) -> Value:
        if kind == "null":
            return Literal("null")
        if kind == "boolean":
            return _BOOLEAN
        if kind in ("integer", "number"):
            return _number(kind == "integer", own)
        if kind == "string":
            return _string(own)
        if kind == "array":
            first = tuple(self.read(one) for one in own.get("prefixItems", ()))
            others = self.read(own.get("items", True))
            return Array(own.get("minItems", 0), own.get("maxItems"), first, others)
        if kind == "object":
            properties = {name: self.read(one) for name, one in own.get("properties", {}).items()}
            additional = self.read(own.get("additionalProperties", True))
            return Object(properties, dict.fromkeys(own.get("required", ())), additional)
        raise NotCovered("an unknown type")


def _any_of(options: Sequence[Value]) -> Value:
    if ANY in options:
        return ANY
    flat = [one for option in options for one in (option.options if isinstance(option, AnyOf) else (option,))]
    return flat[0] if len(flat) == 1 else AnyOf(tuple(flat))


def _number(is_integer: bool, own: Mapping[str, Any]) -> Number:
    low, high = own.get("minimum", -math.inf), own.get("maximum", math.inf)
    above, below = own.get("exclusiveMinimum", False), own.get("exclusiveMaximum", False)
    if isinstance(above, bool):  # of the other bound, in old drafts
        above = low if above else -math.inf
    if isinstance(below, bool):
        below = high if below else math.inf
    multiple_of = own.get("multipleOf", 1)
    if multiple_of not in range(1, 1000):
        raise NotCovered("multiples of a number that is large or no integer")
    return Number(is_integer, low, high, above, below, own.get("multipleOf"))


def _string(own: Mapping[str, Any]) -> String:
    contents = []
    if "pattern" in own:
        contents.append(found(own["pattern"]))
    if "format" in own:
        if own["format"] not in _FORMATS:
            raise NotCovered("a format that is not translated")
        contents.append(whole(_FORMATS[own["format"]]))
    return String(own.get("minLength", 0), own.get("maxLength"), tuple(contents))


def _constant(value: Any) -> Value:
    if value is None or isinstance(value, bool):
        return Literal(json.dumps(value))
    if isinstance(value, int):
        return Number(True, value, value)
    if isinstance(value, float):
        return Number(False, value, value)
    if isinstance(value, str):
        return String(contents=(Text(value.encode()),))
    if isinstance(value, list):
        return Array(len(value), len(value), tuple(map(_constant, value)), NONE)
    if isinstance(value, dict):
        return Object({name: _constant(one) for name, one in value.items()}, dict.fromkeys(value), NONE)
    raise NotCovered("a constant of another type")


def _both(a: Value, b: Value) -> Value:
    """What two schemas allow, in the first one's order."""
    if a == ANY or b == ANY:
        return b if a == ANY else a
    if isinstance(a, AnyOf):
        return _any_of([_both(one, b) for one in a.options])
    if isinstance(b, AnyOf):
        return _any_of([_both(a, one) for one in b.options])
    if isinstance(a, Literal) and a == b:
        return a
    if isinstance(a, Number) and isinstance(b, Number):
        multiples = [one.multiple_of for one in (a, b) if one.multiple_of is not None]
        return Number(
            a.is_integer or b.is_integer,
            max(a.minimum, b.minimum),
            min(a.maximum, b.maximum),
            max(a.above, b.above),
            min(a.below, b.below),
            math.lcm(*multiples) if multiples else None,
        )
    if isinstance(a, String) and isinstance(b, String):
        return String(max(a.least, b.least), _least(a.most, b.most), a.contents + b.contents)
    if isinstance(a, Array) and isinstance(b, Array):
        count = max(len(a.first), len(b.first))
        of_both = [[*one.first, *[one.others] * (count - len(one.first))] for one in (a, b)]
        first = tuple(_both(*pair) for pair in zip(*of_both, strict=True))
        return Array(max(a.least, b.least), _least(a.most, b.most), first, _both(a.others, b.others))
    if isinstance(a, Object) and isinstance(b, Object):
        names = {**a.properties, **b.properties}
        properties = {
            name: _both(a.properties.get(name, a.additional), b.properties.get(name, b.additional)) for name in names
        }
        return Object(properties, {**a.required, **b.required}, _both(a.additional, b.additional))
    return NONE


def _least(a: int | None, b: int | None) -> int | None:
    return min((one for one in (a, b) if one is not None), default=None)
