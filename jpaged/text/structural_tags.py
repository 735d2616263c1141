"""Structural tags in llguidance's Lark: texts made of parts, each constrained in its own way.

    {"type": "structural_tag", "triggers": [...], "structures": [{"begin", "schema", "end"}, ...]}      the older form
    {"type": "structural_tag", "format": FORMAT}      const_string, json_schema, regex, grammar, any_text, sequence, or,
                                                      tag, triggered_tags, tags_with_separator

Fields and meanings are XGrammar's, and so vLLM's and SGLang's (https://xgrammar.mlc.ai/docs/tutorials/structural_tag).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jpaged.api.errors import InvalidParameterError
from jpaged.api.structured_outputs import StructuredOutputsParams

_NAME = "structured_outputs.structural_tag"
_TEXT = "TEXT"
Expression = Callable[[StructuredOutputsParams], str]
"""Turns a constraint into an expression within a grammar (`jpaged.text.grammars.grammar_expression`)."""

_FIELDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("value", "pattern", "grammar", "begin", "end", "separator"), (str,)),
    **dict.fromkeys(("elements", "tags", "triggers"), (list,)),
    "json_schema": (dict,),
    "content": (dict,),
    **{name: (bool, type(None)) for name in ("at_least_one", "stop_after_first")},
}
"""The types that a field may have."""

_OF_KINDS: dict[str, tuple[str, ...]] = {
    "const_string": ("value",),
    "json_schema": ("json_schema",),
    "regex": ("pattern",),
    "grammar": ("grammar",),
    "any_text": (),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
}
"""The fields of each kind of part."""

_USUAL: tuple[tuple[str, Any], ...] = (("style", "json"), ("excludes", []))
"""Other fields of XGrammar's, where they ask for nothing."""


def tags_as_lark(text: str, expression: Expression) -> str:
    """The grammar of a structural tag, given as JSON.

    Raises:
        InvalidParameterError: it is malformed, or of a form that is not supported. The error names the place.
    """
    given = json.loads(text)
    writer = _Writer(expression)
    if not isinstance(given, dict) or given.get("type") != "structural_tag":
        raise _refused('must be {"type": "structural_tag", "format": {...}}, or with "structures" and "triggers".')
    if "format" in given:
        _only(given, ("type", "format"))
        start = writer.part("format", given["format"], last=True)
    else:
        start = writer.triggered("", _of_structures(given))
    return "\n".join(["%llguidance {}", f"start: {start}", *writer.rules, f"{_TEXT}: /(.|\\n)*/"])


def _of_structures(given: Mapping[str, Any]) -> dict[str, Any]:
    """The older form as the newer one."""
    structures, triggers = given.get("structures"), given.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise _refused('needs "format", or "structures" and "triggers".')
    _only(given, ("type", "structures", "triggers"))
    tags = []
    for i, one in enumerate(structures):
        fields = one if isinstance(one, dict) else {}
        _only(fields, ("begin", "schema", "end"), f"structures[{i}]")
        begin, schema, end = fields.get("begin"), fields.get("schema"), fields.get("end")
        if not isinstance(begin, str) or not isinstance(schema, dict) or not isinstance(end, str):
            raise _refused('needs "begin", "schema" and "end".', f"structures[{i}]")
        tags.append({"begin": begin, "content": {"type": "json_schema", "json_schema": schema}, "end": end})
    if not tags:
        raise _refused("has no structures; give at least one.")
    return {"triggers": triggers, "tags": tags}


def _only(given: Mapping[str, Any], names: Sequence[str], where: str = "") -> None:
    """Raises InvalidParameterError for a field that a tag, or a part of the older form, does not have."""
    for name, value in given.items():
        if name not in names and value is not None:
            raise _refused("is not supported; leave it out.", f"{where}.{name[:80]}" if where else name[:80])


def _refused(said: str, where: str = "") -> InvalidParameterError:
    """where: the place in the tag; "" for the tag itself."""
    return InvalidParameterError(f"{_NAME}: {where} {said}" if where else f"{_NAME} {said}")


class _Writer:
    """Writes parts of a format as expressions. rules: that these refer to."""

    def __init__(self, expression: Expression) -> None:
        self.rules: list[str] = []
        self._expression = expression

    def part(self, where: str, given: Any, last: bool) -> str:
        """An expression for a part. where: its place in the tag. last: nothing follows it, so it may be any text."""
        kind = given.get("type") if isinstance(given, dict) else None
        if not isinstance(kind, str) or kind not in _OF_KINDS:
            raise _refused(f"is {str(kind)[:80]!r}, which is not supported.", f"{where}.type")
        _check_names(where, given, kind)
        if kind == "const_string":
            (value,) = _fields(where, given, "value")
            return _literal(value)
        if kind == "json_schema":
            (schema,) = _fields(where, given, "json_schema")
            return self._constrained(StructuredOutputsParams(json=json.dumps(schema)))
        if kind == "regex":
            (pattern,) = _fields(where, given, "pattern")
            return self._constrained(StructuredOutputsParams(regex=pattern))
        if kind == "grammar":
            (grammar,) = _fields(where, given, "grammar")
            return self._constrained(StructuredOutputsParams(grammar=grammar))
        if kind == "tag":
            return self._tag(where, given)
        if kind == "or":
            return self._any_of(f"{where}.elements", _fields(where, given, "elements")[0], last)
        if kind == "sequence":
            parts = _filled(f"{where}.elements", _fields(where, given, "elements")[0])
            ends = [last and i + 1 == len(parts) for i in range(len(parts))]
            written = [self.part(f"{where}.elements[{i}]", one, ends[i]) for i, one in enumerate(parts)]
            return self._rule(" ".join(written))
        if kind == "tags_with_separator":
            return self._separated(where, given)
        if not last:
            raise _refused(f"{kind} is supported at the end of the text, and any_text in a tag.", f"{where}:")
        return _TEXT if kind == "any_text" else self.triggered(where, given)

    def triggered(self, where: str, given: Mapping[str, Any]) -> str:
        """Free text; what begins with a trigger is one of the tags. where: "" for the older form."""
        triggers, tags = _fields(where, given, "triggers", "tags")
        least, first = _fields(where, given, "at_least_one", "stop_after_first")
        written = []
        for i, tag in enumerate(_filled(f"{where}.tags", tags)):
            place = f"{where}.tags[{i}]" if where else f"structures[{i}]"
            begin = _fields(place, tag, "begin")[0]
            trigger = next((t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None)
            if trigger is None:
                raise _refused("begins with none of the triggers.", place)
            opened = self._rule(f"{_TEXT} {_literal(trigger)}", "[lazy]")
            written.append(self._rule(f"{opened} {self._tag(place, tag, begin[len(trigger) :])}"))
        tag = f"({' | '.join(written)})"
        if first:
            return tag if least else self._rule(f"{tag} | {_TEXT}")
        return self._rule(f"{tag}{'+' if least else '*'} {_TEXT}")

    def _tag(self, where: str, given: Any, begin: str | None = None) -> str:
        """A tag. begin: what is left of its beginning."""
        opening, content, end = _fields(where, given, "begin", "content", "end")
        _check_names(where, given, "tag")
        opening = opening if begin is None else begin
        if content.get("type") == "any_text":
            _check_names(f"{where}.content", content, "any_text")
            if not end:
                raise _refused("a tag with any_text needs an end.", f"{where}:")
            inside = self._rule(f"{_TEXT} {_literal(end)}", "[lazy]")
        else:
            inside = f"{self.part(f'{where}.content', content, last=False)} {_literal(end)}"
        return self._rule(f"{_literal(opening)} {inside}")

    def _separated(self, where: str, given: Mapping[str, Any]) -> str:
        tags, separator = _fields(where, given, "tags", "separator")
        least, first = _fields(where, given, "at_least_one", "stop_after_first")
        filled = enumerate(_filled(f"{where}.tags", tags))
        one = self._rule(" | ".join(self._tag(f"{where}.tags[{i}]", tag) for i, tag in filled))
        several = one if first else self._rule(f"{one} ({_literal(separator)} {one})*")
        return several if least else f"{several}?"

    def _any_of(self, where: str, parts: Sequence[Any], last: bool) -> str:
        written = [self.part(f"{where}[{i}]", one, last) for i, one in enumerate(_filled(where, parts))]
        return f"({' | '.join(written)})"

    def _constrained(self, params: StructuredOutputsParams) -> str:
        return self._rule(self._expression(params))

    def _rule(self, body: str, options: str = "") -> str:
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name


def _literal(text: str) -> str:
    """A text in Lark. The empty text is nothing."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f") if text else ""


def _check_names(where: str, given: Mapping[str, Any], kind: str) -> None:
    """Raises InvalidParameterError for a field that a part of this kind does not have here: it would not hold."""
    for name, value in given.items():
        if name == "type" or name in _OF_KINDS[kind] or value is None or (name, value) in _USUAL:
            continue
        raise _refused("is not supported; leave it out.", f"{where}.{name[:80]}")


def _fields(where: str, given: Any, *names: str) -> list[Any]:
    """Fields of a part. Raises InvalidParameterError for one that has not its type."""
    values = []
    for name in names:
        value = given.get(name) if isinstance(given, dict) else None
        if not isinstance(value, _FIELDS[name]):
            raise _refused("is missing or not of its type.", f"{where}.{name}" if where else name)
        values.append(value)
    return values


def _filled(where: str, parts: Sequence[Any]) -> Sequence[Any]:
    if not parts:
        raise _refused("is empty; give at least one.", where)
    return parts
