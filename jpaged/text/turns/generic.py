"""Tools for models whose chat template knows none: they are told of in the system's message, and calls and results in a
conversation are written as text.

    system      ...                              system      ...  You may call these functions: ...
    assistant   tool_calls: [...]        -->     assistant   <tool_call>{"name": ...}</tool_call>
    tool        "20 degrees"                     user        <tool_response>20 degrees</tool_response>
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.text.turns.declarations import Tool
from jpaged.text.turns.formats import GENERIC

_INTRODUCTION = (
    "You may call functions. Their JSON schemas, one a line:\n{tools}\n\nTo call a function, end your answer with one"
    " line for each call, and nothing behind it:\n"
    '<tool_call>{{"name": "the function\'s name", "arguments": {{its arguments as JSON}}}}</tool_call>\n'
    "The results come in <tool_response> tags."
)


def without_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation in which tools, calls and results are text.

    messages: calls have their arguments as dictionaries. tools: as of a request; none where none may be called.
    """
    result: list[dict[str, Any]] = []
    if tools:
        schemas = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        result.append({"role": "system", "content": _INTRODUCTION.format(tools=schemas)})
    for message in messages:
        one = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id", "name")}
        text = _text(message.get("content"))
        if message.get("role") == "tool":
            one = {"role": "user", "content": f"<tool_response>{text}</tool_response>"}
        elif message.get("tool_calls"):
            calls = [
                (Tool(call["function"]["name"], {}), call["function"]["arguments"]) for call in message["tool_calls"]
            ]
            one["content"] = text + GENERIC.render(calls)
        elif message.get("role") == "system" and result and tools and len(result) == 1:
            result[0]["content"] = f"{text}\n\n{result[0]['content']}"
            continue
        if result and one["role"] == "user" and result[-1]["role"] == "user" and message.get("role") == "tool":
            result[-1]["content"] += "\n" + one["content"]  # templates may want the roles to take turns
            continue
        result.append(one)
    return result


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) if isinstance(part, Mapping) else str(part) for part in content)
    return content or ""
