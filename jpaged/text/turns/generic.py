"""Tools for models whose chat template knows none: they are told of in the system's message, and calls and results in a
conversation are written as text. Where a template knows tools but prints no calls, only these are.

    system      ...                              system      ...  You may call these functions: ...
    assistant   tool_calls: [...]        -->     assistant   <tool_call>{"name": ...}</tool_call>
    tool        "20 degrees"                     user        <tool_response>20 degrees</tool_response>
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.text.turns.declarations import Tool, ToolFormat
from jpaged.text.turns.formats import GENERIC

_INTRODUCTION = (
    "You may call functions. Their JSON schemas, one a line:\n{tools}\n\nTo call a function, end your answer with one"
    " line for each call, and nothing behind it:\n"
    '<tool_call>{{"name": "the function\'s name", "arguments": {{its arguments as JSON}}}}</tool_call>\n'
    "The results come in <tool_response> tags."
)


def without_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation in which tools, calls and results are text.

    messages: as `jpaged.text.tokenizer.check_messages` returns them; arguments of calls are dictionaries,
        or strings, which stay as they are.
    tools: as of a request; none where none may be called.
    """
    result: list[dict[str, Any]] = []
    messages = list(messages)
    if tools:
        schemas = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        told = [_INTRODUCTION.format(tools=schemas)]
        if messages and messages[0].get("role") == "system":
            told.insert(0, messages.pop(0)["content"])
        result.append({"role": "system", "content": "\n\n".join(told)})
    was_result = False
    for message in messages:
        text = message.get("content") or ""
        is_result = message.get("role") == "tool"
        if is_result and was_result:  # templates may want the roles to take turns
            result[-1]["content"] += f"\n<tool_response>{text}</tool_response>"
            continue
        was_result = is_result
        one = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id", "name")}
        if is_result:
            one = {"role": "user", "content": f"<tool_response>{text}</tool_response>"}
        elif message.get("tool_calls"):
            one["content"] = text + _calls(message, GENERIC)
        result.append(one)
    return result


def with_calls_as_text(messages: Sequence[Mapping[str, Any]], form: ToolFormat) -> list[dict[str, Any]]:
    """A conversation whose calls are text, in the format in which the model writes them. Results are as they were.

    messages: as of `without_tools`.
    """
    result = []
    for message in messages:
        one = dict(message)
        if calls := one.pop("tool_calls", None):
            one["content"] = (message.get("content") or "") + _calls({"tool_calls": calls}, form)
        result.append(one)
    return result


def _calls(message: Mapping[str, Any], form: ToolFormat) -> str:
    functions = [call["function"] for call in message["tool_calls"]]
    return form.render([(Tool(function["name"], {}), function["arguments"]) for function in functions])
