"""The constraint on an answer's text, in whichever of its fields a request gives it.

response_format                     OpenAI's: {"type": "text" | "json_object" | "json_schema" | "structural_tag"}
structured_outputs                  vLLM's, the parameters of `StructuredOutputsParams`
guided_json, guided_regex, ...      vLLM's older ones
json_schema, regex, ebnf            SGLang's
"""

from typing import Any, NamedTuple

from jpaged.serving.errors import ApiError
from jpaged.serving.protocol import GenerationRequest

_KINDS = {
    **{"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"},
    **{"json_schema": "json", "regex": "regex", "ebnf": "grammar"},
}
"""Fields that are a constraint, and which."""


class Constraint(NamedTuple):
    """field: of the request, down to where the constraint stands. params: for `SamplingParams.structured_outputs`."""

    field: str
    params: dict[str, Any]


_FEW_VALUES = 500
"""What a schema may hold that is checked on the event loop, in some 0.1 ms."""


def takes_long(request: GenerationRequest) -> bool:
    """Whether a request's constraint has so much JSON that it may take milliseconds to check."""
    found, left = 0, [request.response_format, request.structured_outputs]
    left += [getattr(request, name) for name, kind in _KINDS.items() if kind == "json"]
    while left and found <= _FEW_VALUES:
        one = left.pop()
        if isinstance(one, str):
            found += len(one) // 16
        elif isinstance(one, dict | list):
            found += len(one)
            left += one.values() if isinstance(one, dict) else one
    return found > _FEW_VALUES


def constraint_of(request: GenerationRequest) -> Constraint | None:
    """A request's constraint; None if its text is free. It is checked by `SamplingParams`.

    Raises:
        ApiError: an unknown kind of response_format, or more than one constraint.
    """
    found = [Constraint(name, {kind: v}) for name, kind in _KINDS.items() if (v := getattr(request, name)) is not None]
    if request.structured_outputs is not None:
        found.append(Constraint("structured_outputs", request.structured_outputs))
    if request.response_format is not None:
        formatted = _of_format(request.response_format)
        if formatted is not None:
            found.append(formatted)
    if len(found) > 1:
        names = " and ".join(constraint.field.partition(".")[0] for constraint in found)
        raise ApiError(
            400, f"{names} constrain the same text; give one of them.", param=found[0].field.partition(".")[0]
        )
    return found[0] if found else None


def _of_format(given: dict[str, Any]) -> Constraint | None:
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint("response_format", {"json_object": True})
    if kind == "structural_tag":
        return Constraint("response_format", {"structural_tag": given})
    if kind != "json_schema":
        raise ApiError(
            400,
            f"response_format.type must be text, json_object, json_schema or structural_tag, got {str(kind)[:80]!r}.",
            param="response_format",
        )
    described = given.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(described, dict) or not isinstance(schema, dict):
        raise ApiError(
            400,
            'response_format.json_schema must be an object with a "name" and a "schema".',
            param="response_format",
        )
    strict = described.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise ApiError(400, "response_format.json_schema.strict must be true or false.", param="response_format")
    if not strict:  # keywords that cannot be enforced are left out, as OpenAI does
        schema = {**schema, "x-guidance": {"lenient": True}}
    return Constraint("response_format.json_schema.schema", {"json": schema})
