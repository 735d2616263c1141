"""Conversations as most chat templates take them."""

from collections.abc import Sequence
from typing import Any

PARAGRAPH = "\n\n"
"""Between texts of two messages that become one."""


def without_late_systems(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A chat whose system messages stand at its start; most templates know none in the midst.

    Such a one joins the user's turn or the result in front of it. Behind an assistant's turn it joins the results of
    its calls, the user's turn that follows, or is a user's turn of its own: nothing comes between a call and its
    result. So calls in front of it and behind it are one turn.

    messages: with strings as contents. They are not changed.
    """
    made: list[dict[str, Any]] = []
    held: list[str] = []
    for one in [*messages, None]:
        last = made[-1]["role"] if made else "system"
        if one is not None and one["role"] == "system" and last != "system":
            if last == "assistant" or held:
                held.append(one["content"])
            else:
                made[-1] = _joined(made[-1], made[-1]["content"], one["content"])
            continue
        if held and one is not None and one["role"] == "assistant" and made[-1].get("tool_calls"):
            made[-1] = as_one_turn(made[-1], one)
            continue
        if held and (one is None or one["role"] != "tool"):
            if last == "tool":
                made[-1] = _joined(made[-1], made[-1]["content"], *held)
            elif one is not None and one["role"] == "user":
                one = _joined(one, *held, one["content"])
            else:
                made.append(_joined({"role": "user"}, *held))
            held = []
        if one is not None:
            made.append(one)
    return made


def as_one_turn(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two messages of one role, the second right behind the first, as one message. They are not changed."""
    made = _joined(first, first["content"], second["content"])
    if "reasoning_content" in second:
        made["reasoning_content"] = first.get("reasoning_content", "") + second["reasoning_content"]
    if "tool_calls" in second:
        made["tool_calls"] = [*first.get("tool_calls", ()), *second["tool_calls"]]
    return made


def _joined(message: dict[str, Any], *texts: str) -> dict[str, Any]:
    return {**message, "content": PARAGRAPH.join(text for text in texts if text)}
