"""What the text of an answer must look like: a JSON schema, a regular expression, a grammar. Names follow vLLM."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from jpaged.api.checks import check_bool
from jpaged.api.errors import InvalidParameterError, shown
from jpaged.api.unknown_names import STRUCTURED_OUTPUTS, explains_unknown

MAX_GRAMMAR_BYTES = 256 * 1024
"""The longest schema, expression, grammar or list of choices, in bytes of UTF-8."""
MAX_GRAMMAR_DEPTH = 64
"""How deeply a JSON schema may nest."""

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


FEW_TOKENS = 64
"""Where a constraint allows no more tokens than these, they are listed instead of masked."""


@explains_unknown(STRUCTURED_OUTPUTS)
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint on an answer's text. Exactly one of the first six is given.

    Args:
        json: a JSON schema, as a dictionary or as text. The answer is a JSON value that it accepts.
        regex: a regular expression in the syntax of Rust's `regex` crate, without lookaround and back references. The
            whole answer matches it.
        choice: the answer is one of these strings.
        grammar: a context-free grammar in llguidance's Lark syntax, or in GBNF (`root ::= ...`).
        json_object: True: the answer is any JSON object.
        structural_tag: a text of parts, each constrained in its own way, as JSON text or a dictionary:
            {"type": "structural_tag", "format": {...}} as XGrammar has it (`jpaged.text.structural_tags`), or
            {"type": "structural_tag", "triggers": ["<function="], "structures": [{"begin": "<function=f>", "schema":
            {...}, "end": "</function>"}]}. Every `begin` starts with one of the triggers.
        disable_any_whitespace: of JSON: no white space but a space after each colon and comma.
        whitespace_pattern: of JSON: a regular expression for the white space that may stand between its tokens. By
            default a space, or a newline and up to 24 spaces or 8 tabs: where they may, models tend to go on with white
            space for ever.

    Raises:
        InvalidParameterError: not exactly one constraint, or one that is malformed, too long or too deep.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        own = vars(self)
        given = [name for name in _KINDS if own[name] is not None and own[name] is not False]
        if self.json_object is not None:
            check_bool("structured_outputs.json_object", self.json_object)
        if len(given) != 1:
            said = f"got {' and '.join(given)}" if given else "none is given"
            raise InvalidParameterError(f"structured_outputs needs exactly one of {', '.join(_KINDS)}; {said}.")
        for name in ("json", "structural_tag"):
            own[name] = _json_text(f"structured_outputs.{name}", own[name])
        for name in ("regex", "grammar", "whitespace_pattern"):
            _check_text(f"structured_outputs.{name}", own[name])
        own["choice"] = _choices(self.choice)
        check_bool("structured_outputs.disable_any_whitespace", self.disable_any_whitespace)
        self._check_options()

    @classmethod
    def of_checked(cls, values: Mapping[str, Any]) -> "StructuredOutputsParams":
        """Those whose `vars` are given, as a message brings them. They were checked when they were made, and are not
        again: of a large schema that takes milliseconds."""
        made = object.__new__(cls)
        choice = values["choice"]
        vars(made).update(values, choice=None if choice is None else tuple(choice))
        return made

    @property
    def kind(self) -> str:
        """Which constraint is given: "json", "regex", ..."""
        return next(name for name in _KINDS if getattr(self, name))

    def _check_options(self) -> None:
        is_json = self.kind in ("json", "json_object")
        for name in ("disable_any_whitespace", "whitespace_pattern"):
            if getattr(self, name) and not is_json:
                raise InvalidParameterError(f"structured_outputs.{name} is for json and json_object, not {self.kind}.")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise InvalidParameterError(
                "structured_outputs.whitespace_pattern contradicts disable_any_whitespace=True; give one of them."
            )


def structured_outputs(value: object) -> StructuredOutputsParams | None:
    """The parameter `structured_outputs`: its parameters, a dictionary of them, or None.

    Raises:
        InvalidParameterError: something else, or an unknown key.
    """
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise InvalidParameterError(f"structured_outputs must be StructuredOutputsParams, got {shown(value)}.")
    known = [field.name for field in fields(StructuredOutputsParams)]
    for key in value:
        if key not in known:
            raise InvalidParameterError(f"structured_outputs has no {shown(key)}; it takes {', '.join(known)}.")
    given = {name: given for name, given in value.items() if given is not None}
    return StructuredOutputsParams(**given)


def _choices(choice: object) -> tuple[str, ...] | None:
    if choice is None:
        return None
    name = "structured_outputs.choice"
    if isinstance(choice, str) or not isinstance(choice, Sequence):
        raise InvalidParameterError(f"{name} must be a list of strings, got {shown(choice)}.")
    if not choice:
        raise InvalidParameterError(f"{name} is empty; give at least one string.")
    for text in choice:
        if not isinstance(text, str) or not text:
            raise InvalidParameterError(f"{name} must hold non-empty strings, got {shown(text)}.")
        _check_text(name, text)
    num_bytes = sum(len(text.encode()) for text in choice)
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidParameterError(f"{name} has {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are supported.")
    return tuple(choice)


def _json_text(name: str, value: object) -> str | None:
    """JSON as text, from text or a dictionary, which is checked to be an object."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return _dumped(name, value)
    if not isinstance(value, str):
        raise InvalidParameterError(f"{name} must be a dictionary or JSON text, got {shown(value)}.")
    _check_text(name, value)
    try:
        parsed = _parsed(value)
    except ValueError as error:
        raise InvalidParameterError(f"{name} is no JSON: {error}.") from None
    except RecursionError:
        raise InvalidParameterError(f"{name} nests deeper than {MAX_GRAMMAR_DEPTH} levels; flatten it.") from None
    if not isinstance(parsed, dict):
        raise InvalidParameterError(f"{name} must be a JSON object, got {shown(parsed)}.")
    _dumped(name, parsed)
    return value


def _parsed(text: str) -> Any:
    """What JSON text says. Python's own parser is slower, but explains errors; it takes NaN, which is refused later."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError):
        return json.loads(text)


def _dumped(name: str, value: Mapping[str, Any]) -> str:
    """A JSON object as text. Refuses what is none: too deep, or with NaN or halves of characters, which Python reads.

    Plain objects go by msgspec: Python's encoder holds the interpreter for milliseconds, and all streams wait.
    """
    is_plain = _check_depth(name, value)
    try:
        text = _encoded(value) if is_plain else json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidParameterError(f"{name} is no JSON: {error}.") from None
    _check_text(name, text)
    if name == "structured_outputs.json" and not isinstance(value.get("x-guidance", {}), Mapping):
        raise InvalidParameterError(f"{name}: x-guidance must be an object, got {shown(value['x-guidance'])}.")
    return text


def _encoded(value: Mapping[str, Any]) -> str:
    """JSON text of a plain object, with Python's white space; a lone surrogate stays one, which is refused later."""
    try:
        return msgspec.json.format(msgspec.json.encode(value), indent=0).decode()
    except UnicodeEncodeError:
        return json.dumps(value, ensure_ascii=False)


def _check_depth(name: str, value: Any) -> bool:
    """Refuses what nests too deeply. Returns whether all of it is plain: of JSON's own types, with finite numbers and
    strings as keys."""
    level, depth, is_plain = [value], 0, True
    while level:
        depth += 1
        if depth > MAX_GRAMMAR_DEPTH:
            raise InvalidParameterError(f"{name} nests deeper than {MAX_GRAMMAR_DEPTH} levels; flatten it.")
        inner: list[Any] = []
        keys: list[Any] = []
        for one in level:
            if type(one) is dict or isinstance(one, Mapping):
                keys += one
                inner += one.values()
            else:
                inner += one
        kinds = set(map(type, inner))
        is_plain = is_plain and kinds <= _PLAIN and set(map(type, keys)) <= {str}
        if float in kinds:
            is_plain = is_plain and all(map(math.isfinite, [one for one in inner if type(one) is float]))
        level = [one for one in inner if type(one) not in _SCALARS and _is_container(one)]
    return is_plain


def _is_container(value: Any) -> bool:
    # Abstract classes come last: to ask about one takes ten times as long.
    return type(value) in (dict, list) or isinstance(value, list | tuple | Mapping)


_SCALARS = {str, int, float, bool, type(None)}
_PLAIN = _SCALARS | {dict, list}


def _check_text(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not value:
        raise InvalidParameterError(f"{name} must be a non-empty string, got {shown(value)}.")
    try:
        num_bytes = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidParameterError(f"{name} holds a lone surrogate, which is no text: {shown(value)}.") from None
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidParameterError(f"{name} has {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are supported.")
