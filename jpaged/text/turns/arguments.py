"""Ways of writing the arguments of a call.

    JSON            {"city": "Paris", "days": 3}
    PARAMETERS      <parameter=city>
                    Paris
                    </parameter>
                    <parameter=days>
                    3
                    </parameter>
    TAGS            <arg_key>city</arg_key>
                    <arg_value>Paris</arg_value>
    KEYWORDS        city="Paris", days=3

Each writes the grammar of a tool's arguments, reads arguments as they arrive, and writes given ones. JSON is written
with a space behind colons and commas, as models are trained to.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jpaged.api.checks import is_integer
from jpaged.api.errors import InvalidParameterError
from jpaged.text.turns.declarations import Mismatch, RuleWriter, Scanner, Tool

JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""For llguidance: where JSON has spaces."""
_OF_ROOT = ("$defs", "definitions")
NAME_PATTERN = r"[\w.$-]+"
"""Of a property, where it stands in a call as it is."""
_MOST = 2**31 - 1
"""Of a string's characters, or a list's items, where their number is limited: llguidance counts no further."""


class JsonArguments:
    """A JSON object."""

    texts: tuple[str, ...] = ()

    def grammar(self, tool: Tool, rules: RuleWriter) -> str:
        return rules.add("arguments", _json_rule({"type": "object", **tool.parameters}, tool))

    def scanner(self, tool: Tool) -> Scanner:
        return _JsonScanner("{")

    def render(self, tool: Tool, arguments: Mapping[str, Any] | str) -> str:
        """arguments: a string is written as it is: JSON that was cut."""
        return arguments if isinstance(arguments, str) else _json(arguments)


@dataclass(frozen=True)
class ParameterArguments:
    """An element for each argument; strings stand in it as they are, other values as JSON.

    A string ends at the closing tag. Where null is allowed besides, `null` is null.

    Args:
        opening, name_end, closing: what stands in front of an argument's name, behind it, and behind the value.
        string_name_end: what stands behind the name of a string, if that differs.
    """

    opening: str
    name_end: str
    closing: str
    string_name_end: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.opening, self.name_end, self.string_name_end, self.closing)

    def grammar(self, tool: Tool, rules: RuleWriter) -> str:
        expressions = []
        for name, schema, required in properties_of(tool.parameters):
            kind, opening = _string_kind(schema), f"{self.opening}{name}"
            value = self._value(name, schema, tool, rules)
            if kind is None or not self.string_name_end:
                body = f"{rules.literal(opening + self.name_end)} {value}"
            else:
                body = f"{rules.literal(opening + self.string_name_end)} {value}"
                if kind == "null":
                    body += f" | {rules.literal(f'{opening}{self.name_end}null{self.closing}')}"
            element = rules.add("parameter", body)
            expressions.append(element if required else element + "?")
        return " ".join(expressions) or rules.literal("")

    def scanner(self, tool: Tool) -> Scanner:
        return _ParameterScanner(self, {name: schema for name, schema, _ in properties_of(tool.parameters)})

    def render(self, tool: Tool, arguments: Mapping[str, Any]) -> str:
        written = []
        for name, value in arguments.items():
            is_text = isinstance(value, str)
            end = (self.string_name_end if is_text else "") or self.name_end
            written.append(f"{self.opening}{name}{end}{value if is_text else _json(value)}{self.closing}")
        return "".join(written)

    def _value(self, name: str, schema: Mapping[str, Any], tool: Tool, rules: RuleWriter) -> str:
        closing = rules.literal(self.closing)
        kind = _string_kind(schema)
        if kind is None:
            return f"{rules.add('value', _json_rule(schema, tool))} {closing}"
        of_string = next((one for one in schema.get("anyOf", ()) if one.get("type") == "string"), schema)
        choices = of_string.get("enum", [of_string["const"]] if "const" in of_string else None)
        if choices is not None:
            texts = [one for one in choices if isinstance(one, str)]
            texts += ["null"] * (kind == "null" and not self.string_name_end)
            return f"({' | '.join(map(rules.literal, texts))}) {closing}"
        low, high = bounds_of(f"properties.{name}", of_string, "minLength", "maxLength")
        known = {"type", "anyOf", "minLength", "maxLength", "title", "description", "default", "examples"}
        unknown = sorted({*schema, *of_string} - known)
        if tool.strict and unknown:
            raise InvalidParameterError(
                f"properties.{name}: {unknown[0]} cannot be enforced for strings in this model's format of calls; leave"
                " it out, or strict."
            )
        return text_before(self.closing, low, high, rules)


class KeywordArguments:
    """Python's keyword arguments. Values are JSON, but `True` and `False` where a boolean stands by itself. Strings in
    single quotes, which some models write unasked, are read as well.
    """

    texts: tuple[str, ...] = ()

    def grammar(self, tool: Tool, rules: RuleWriter) -> str:
        written = [
            (rules.add("argument", f"{rules.literal(name + '=')} {self._value(schema, tool, rules)}"), required)
            for name, schema, required in properties_of(tool.parameters)
        ]
        return listed(written, ", ", rules)

    def scanner(self, tool: Tool) -> Scanner:
        return _KeywordScanner()

    def render(self, tool: Tool, arguments: Mapping[str, Any]) -> str:
        return ", ".join(f"{n}={str(v) if isinstance(v, bool) else _json(v)}" for n, v in arguments.items())

    def _value(self, schema: Mapping[str, Any], tool: Tool, rules: RuleWriter) -> str:
        if schema.get("type") == "boolean" and "enum" not in schema and "const" not in schema:
            return rules.add("boolean", '"True" | "False"')
        return rules.add("value", _json_rule(schema, tool))


JSON, KEYWORDS = JsonArguments(), KeywordArguments()
PARAMETERS = ParameterArguments("<parameter=", ">\n", "\n</parameter>\n")
TAGS = ParameterArguments("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
SEED_PARAMETERS = ParameterArguments("<parameter=", ">", "</parameter>\n")
NAMED_PARAMETERS = ParameterArguments('<parameter name="', '">', "</parameter>\n")
TAGS_IN_LINE = ParameterArguments("<arg_key>", "</arg_key><arg_value>", "</arg_value>")


def json_expression(schema: Mapping[str, Any], *, lenient: bool, style: Mapping[str, Any] = JSON_STYLE) -> str:
    """The expression for a JSON value. lenient: leave out keywords that cannot be enforced."""
    return "%json " + json.dumps({**schema, "x-guidance": {**style, "lenient": lenient}}, ensure_ascii=False)


def bounds_of(where: str, schema: Mapping[str, Any], least: str, most: str) -> tuple[int, int | str]:
    """What two keywords of a schema say, in regular expressions' terms: "" for any number.

    Raises:
        InvalidParameterError: they are no numbers that fit each other.
    """
    low, high = schema.get(least, 0), schema.get(most, _MOST)
    if not is_integer(low) or not is_integer(high) or not 0 <= low <= high <= _MOST:
        raise InvalidParameterError(
            f"{where}: {least} and {most} must be integers from 0 to {_MOST}, {most} not below {least}; got"
            f" {low!r:.20} and {high!r:.20}."
        )
    return low, high if most in schema else ""


def text_before(closing: str, low: int, high: int | str, rules: RuleWriter) -> str:
    """The expression for a text that ends at its closing. low, high: characters of the text; "" for any number."""
    pattern = f"(?s:.{{{low},{high}}})" if low or high != "" else "(?s:.*)"
    mark = rules.first(closing)
    if mark is None:
        return rules.add("text", f"/{pattern}/ {json.dumps(closing)}", "lazy")
    before, token, rest = mark  # the text's expression would swallow what stands before the token
    behind = f"{token} {rules.literal(rest)}" if rest else token
    return f"{rules.add('text', f'/{pattern}{regex(before)}/')} {behind}"


def listed(elements: Sequence[tuple[str, bool]], comma: str, rules: RuleWriter) -> str:
    """The expression for elements in their order, with commas between them. elements: their expressions, and whether
    each is required.
    """
    first = behind = ""  # what may follow, where nothing has been written yet and where something has
    between = rules.literal(comma)
    for one, required in reversed(elements):
        rest = [f"{one} {behind}".rstrip()]
        more = [f"{between} {one} {behind}".rstrip()]
        if not required:
            rest.append(first or rules.literal(""))
            more.append(behind or rules.literal(""))
        first, behind = rules.add("first", " | ".join(rest)), rules.add("more", " | ".join(more))
    return first or rules.literal("")


def _json_rule(schema: Mapping[str, Any], tool: Tool) -> str:
    shared = {key: tool.parameters[key] for key in _OF_ROOT if key in tool.parameters}
    return json_expression({**schema, **shared}, lenient=not tool.strict)


def regex(text: str) -> str:
    """A text as a regular expression between slashes."""
    return re.sub(r"([\\.+*?()|\[\]{}^$/#&~-])", r"\\\1", text).replace("\n", "\\n")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def properties_of(schema: Mapping[str, Any], where: str = "") -> list[tuple[str, Mapping[str, Any], bool]]:
    """Name, schema, and whether it is required, of each property of an object. where: what errors begin with.

    Raises:
        InvalidParameterError: the schema is not a plain list of properties.
    """
    for key in ("$ref", "anyOf", "oneOf", "allOf", "patternProperties"):
        if key in schema:
            place = f"beside {where}properties" if where else "at the top of a schema"
            raise InvalidParameterError(
                f"{key} {place} is not supported in this model's format of calls; list properties."
            )
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping):
        raise InvalidParameterError(f"{where}properties must be an object.")
    if not _is_list_of(str, required):
        raise InvalidParameterError(f"{where}required must be a list of names.")
    found = []
    for name, given in properties.items():
        if not re.fullmatch(NAME_PATTERN, name):
            raise InvalidParameterError(
                f"{where}properties.{name[:80]}: a name may have letters, digits and _ . $ - in this model's format of"
                " calls."
            )
        _check_property(f"{where}properties.{name}", given)
        found.append((name, given if isinstance(given, Mapping) else {}, name in required))
    missing = next((name for name in required if name not in properties), None)
    if missing is not None:
        raise InvalidParameterError(f"{where}required names {missing!r}, which is not among the properties.")
    return found


def _check_property(where: str, schema: Any) -> None:
    """Raises InvalidParameterError for a schema that is malformed where `_string_kind` and `_value` look."""
    if schema is True:
        return
    if not isinstance(schema, Mapping):
        raise InvalidParameterError(f"{where} must be a JSON schema.")
    kinds = schema.get("type")
    if not (kinds is None or isinstance(kinds, str) or _is_list_of(str, kinds)):
        raise InvalidParameterError(f"{where}.type must be a string or a list of strings.")
    if not isinstance(schema.get("enum", []), list):
        raise InvalidParameterError(f"{where}.enum must be a list.")
    if not _is_list_of(Mapping, schema.get("anyOf", [])):
        raise InvalidParameterError(f"{where}.anyOf must be a list of JSON schemas.")
    for i, one in enumerate(schema.get("anyOf", [])):
        _check_property(f"{where}.anyOf[{i}]", one)


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, kind) for one in value)


def _string_kind(schema: Mapping[str, Any]) -> str | None:
    """What an argument's text stands for: "string"; "null": a string or null; None: JSON."""
    kinds = schema.get("type")
    if kinds is None and isinstance(schema.get("anyOf"), list):
        kinds = [one.get("type") if isinstance(one, Mapping) else None for one in schema["anyOf"]]
        choices = [one for one in schema["anyOf"] if isinstance(one, Mapping) and one.get("type") == "string"]
        if len(choices) != 1:
            return None
    if kinds is None:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        return "string" if values and all(isinstance(value, str) for value in values) else None
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if "string" not in kinds or set(kinds) - {"string", "null"}:
        return None
    return "null" if "null" in kinds else "string"


_JSON_STOPS = re.compile(r'["{}\[\]]')
_STRING_STOPS = re.compile(r'["\\]')
_QUOTED_STOPS = re.compile(r"['\\]")


class _JsonScanner:
    """Passes on one JSON object, array or string, to its closing bracket or quote. opening: what it begins with."""

    def __init__(self, opening: str) -> None:
        self._opening = opening
        self._begun = self.done = False
        self._depth = 0
        self._in_string = self._is_escaped = False

    def feed(self, text: str) -> tuple[str, str]:
        at = 0
        if not self._begun and text:
            if text[0] not in self._opening:
                raise Mismatch
            self._begun = True
        while at < len(text) and not self.done:
            at = self._past_string(text, at) if self._in_string else self._past_other(text, at)
        return text[:at], text[at:]

    def _past_string(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        found = _STRING_STOPS.search(text, at)
        if found is None:
            return len(text)
        if found[0] == "\\":
            self._is_escaped = True
        else:
            self._in_string = False
            self.done = self._depth == 0
        return found.end()

    def _past_other(self, text: str, at: int) -> int:
        found = _JSON_STOPS.search(text, at)
        if found is None:
            return len(text)
        if found[0] == '"':
            self._in_string = True
        else:
            self._depth += 1 if found[0] in "{[" else -1
            self.done = self._depth == 0
        return found.end()


class _ParameterScanner:
    """form: how they are written. schemas: of the arguments, by name."""

    def __init__(self, form: ParameterArguments, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self.done = False
        self._form = form
        self._schemas = schemas
        self._written = "{"
        self._kind: str | None = None
        self._in_value = False
        self._is_first = True

    def feed(self, text: str) -> tuple[str, str]:
        json_text, self._written = self._written, ""
        format_ = self._form
        while not self.done:
            if self._in_value:
                piece, rest, ended = self._value(text)
                json_text += piece
                text = rest
                if not ended:
                    break
                self._in_value = False
                continue
            if not text.startswith(format_.opening):
                if format_.opening.startswith(text):
                    break
                self.done = True
                json_text += "}"
                break
            name, end, rest = self._name(text[len(format_.opening) :])
            if not end:
                break
            if name not in self._schemas:
                raise Mismatch
            if format_.string_name_end:
                self._kind = "string" if end == format_.string_name_end else None
            else:
                self._kind = _string_kind(self._schemas[name])
            self._in_value, text = True, rest
            json_text += ("" if self._is_first else ", ") + json.dumps(name) + ": "
            json_text += '"' if self._kind == "string" else ""
            self._is_first = False
        return json_text, text

    def _name(self, text: str) -> tuple[str, str, str]:
        """A name, what stands behind it, and the rest of the text; "" and "" if more text is needed."""
        ends = [end for end in (self._form.name_end, self._form.string_name_end) if end and end in text]
        if not ends:
            return "", "", text
        end = min(ends, key=text.index)
        name, _, rest = text.partition(end)
        return name, end, rest

    def _value(self, text: str) -> tuple[str, str, bool]:
        """JSON of a value, what is left of the text, and whether the value has ended."""
        closing = self._form.closing
        value, found, rest = text.partition(closing)
        if self._kind == "string":
            if found:
                return escaped(value) + '"', rest, True
            held = held_back(text, closing)
            return escaped(text[: len(text) - held]), text[len(text) - held :], False
        if not found:
            return "", text, False
        if self._kind == "null" and value != "null":
            return f'"{escaped(value)}"', rest, True
        return value, rest, True


class _QuotedScanner:
    """Passes on one string in single quotes, as JSON. Escapes are those of JSON and of the quote; before anything else
    a backslash stands for itself, as in Python."""

    def __init__(self) -> None:
        self._begun = self.done = False

    def feed(self, text: str) -> tuple[str, str]:
        written, at = ("", 0) if self._begun else ('"', 1)
        self._begun = True
        while at < len(text) and not self.done:
            found = _QUOTED_STOPS.search(text, at)
            end = len(text) if found is None else found.start()
            written += escaped(text[at:end])
            at = end
            if text[at:] == "\\":
                break
            if found is not None and found[0] == "\\":
                behind = text[at + 1]
                known = behind in '"\\/bfnrtu'
                written += text[at : at + 2] if known else escaped(behind if behind == "'" else text[at : at + 2])
                at += 2
            elif found is not None:
                written += '"'
                at += 1
                self.done = True
        return written, text[at:]


class _KeywordScanner:
    _WORDS = {"True": "true", "False": "false", "None": "null"}  # noqa: RUF012  # never written to

    def __init__(self) -> None:
        self.done = False
        self._written = "{"
        self._value: _JsonScanner | _QuotedScanner | None = None
        self._state = "name"
        self._is_first = True

    def feed(self, text: str) -> tuple[str, str]:
        json_text, self._written = self._written, ""
        while text and not self.done:
            if self._state == "name":
                text, piece = self._name(text)
                if piece is None:
                    break
                json_text += piece
            elif self._state == "value" and text[0] not in "{[\"'":
                found = re.match(r"[\w.+-]+", text)
                if found is None:
                    raise Mismatch
                if found.end() == len(text):  # it may go on
                    break
                json_text += self._WORDS.get(found[0], found[0])
                text, self._state = text[found.end() :], "name"
            else:
                if self._value is None:
                    self._value = _QuotedScanner() if text[0] == "'" else _JsonScanner('{["')
                    self._state = "inside"
                piece, text = self._value.feed(text)
                json_text += piece
                if not self._value.done:
                    break
                self._value, self._state = None, "name"
        return json_text, text

    def _name(self, text: str) -> tuple[str, str | None]:
        """What is left of the text behind a name, and the JSON for it; None if more text is needed."""
        if text[0] == ")":
            self.done = True
            return text, "}"
        comma = "" if self._is_first else ", "
        if not text.startswith(comma):
            if comma.startswith(text):
                return text, None
            raise Mismatch
        name, found, rest = text[len(comma) :].partition("=")
        if not re.fullmatch(r"[\w.$-]*", name):
            raise Mismatch
        if not found or not rest:
            return text, None
        self._is_first, self._state = False, "value"
        return rest, f"{comma}{json.dumps(name)}: "


def held_back(text: str, marker: str) -> int:
    """How many characters at the end of a text may be the beginning of a marker."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


def escaped(text: str) -> str:
    """A text as it stands in a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
