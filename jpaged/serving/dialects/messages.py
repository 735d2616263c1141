"""Anthropic's Messages API: its requests as chats, and its answers.

system, messages of blocks  -->  messages of a chat        tool_use --> tool_calls, tool_result --> role "tool"
max_tokens, stop_sequences, tools, tool_choice, thinking  -->  max_tokens, stop, tools, ..., thinking_token_budget
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from jpaged.serving.dialects.items import Item, ItemsAnswer, named_event
from jpaged.serving.errors import ApiError
from jpaged.serving.protocol import ChatCompletionRequest, Integer

Unsupported = Any


class MessagesRequest(Struct, kw_only=True):
    """POST /v1/messages and, without max_tokens, /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[dict[str, Any]]
    max_tokens: Integer | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None

    container: Unsupported = None
    context_management: Unsupported = None
    mcp_servers: Unsupported = None
    output_format: Unsupported = None


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_KINDS |= {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}
_NAMES = {"thinking_token_budget": "thinking", "stop": "stop_sequences"}
"""Fields of a chat, and what they are called here."""


def error_body(error: ApiError) -> bytes:
    """The JSON of an error."""
    kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = error.message
    if error.param in _NAMES:
        message = message.replace(error.param, _NAMES[error.param])
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


def chat_of(body: MessagesRequest, *, counts: bool = False) -> ChatCompletionRequest:
    """The chat that a request stands for. counts: only its prompt is asked for.

    Raises:
        ApiError: it is malformed, or asks for what is not supported.
    """
    for name in ("container", "context_management", "mcp_servers", "output_format"):
        if getattr(body, name):
            raise ApiError(400, f"{name} is not supported; leave it out.", param=name)
    if body.max_tokens is None and not counts:
        raise ApiError(400, "max_tokens is needed; give it.", param="max_tokens")
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text("system", body.system)})
    for i, message in enumerate(body.messages):
        messages += _messages(f"messages[{i}]", message)
    budget, variables = _thinking(body)
    choice, parallel = _choice(body)
    return ChatCompletionRequest(
        model=body.model,
        messages=messages,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        tools=[_tool(f"tools[{i}]", tool) for i, tool in enumerate(body.tools or ())] or None,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        thinking_token_budget=budget,
        include_reasoning=variables["thinking"],
        chat_template_kwargs=variables,
    )


def _thinking(body: MessagesRequest) -> tuple[int | None, dict[str, Any]]:
    """The budget, and variables for chat templates that switch reasoning: off unless it is asked for."""
    given = body.thinking or {"type": "disabled"}
    kind, budget = given.get("type"), given.get("budget_tokens")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise ApiError(400, "thinking.type must be enabled, adaptive or disabled.", param="thinking")
    if kind == "enabled" and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
        raise ApiError(400, "thinking.budget_tokens must be a number of tokens, at least 1.", param="thinking")
    thinks = kind != "disabled"
    return budget if kind == "enabled" else None, {"enable_thinking": thinks, "thinking": thinks}


def _choice(body: MessagesRequest) -> tuple[str | dict[str, Any] | None, bool | None]:
    given = body.tool_choice
    if given is None:
        return None, None
    parallel = False if given.get("disable_parallel_tool_use") else None
    kind = given.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": given.get("name")}}, parallel
    if kind not in _CHOICES:
        raise ApiError(400, "tool_choice.type must be auto, any, tool or none.", param="tool_choice")
    return _CHOICES[kind], parallel


def _tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise ApiError(
            400, f"{where}.type is {str(tool['type'])[:80]!r}; only custom tools are supported.", param="tools"
        )
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _messages(where: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A message as those of a chat: results of tools are messages of their own, in front of what else is said."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise ApiError(400, f"{where}.role must be user or assistant.", param="messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise ApiError(400, f"{where}.content must be a string or a list of blocks.", param="messages")
    result: list[dict[str, Any]] = []
    said: dict[str, Any] = {"role": role, "content": ""}
    for i, block in enumerate(content):
        at = f"{where}.content[{i}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            said["content"] += _text(at, [block])
        elif kind == "thinking" and role == "assistant":
            said["reasoning_content"] = said.get("reasoning_content", "") + str(block.get("thinking", ""))
        elif kind == "redacted_thinking" and role == "assistant":
            continue
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}), ensure_ascii=False)}
            call = {"id": block.get("id"), "type": "function", "function": function}
            said.setdefault("tool_calls", []).append(call)
        elif kind == "tool_result" and role == "user":
            text = _text(f"{at}.content", block.get("content") or "")
            result.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        else:
            raise ApiError(400, f"{at}: blocks of type {str(kind)[:80]!r} are not supported here.", param="messages")
    if said["content"] or "tool_calls" in said or not result:
        result.append(said)
    return result


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    for block in content if isinstance(content, list) else [None]:
        if not isinstance(block, Mapping) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise ApiError(
                400, f"{where}: only text is supported, as a string or as blocks of type text.", param="messages"
            )
    return "".join(block["text"] for block in content)


class MessagesAnswer(ItemsAnswer):
    """The answer to /v1/messages."""

    def error_body(self, error: ApiError) -> bytes:
        return error_body(error)

    def end(self) -> bytes:
        usage = {"output_tokens": self._num_tokens}
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self.stop}
        return named_event({"type": "message_delta", "delta": delta, "usage": usage}) + named_event(
            {"type": "message_stop"}
        )

    def _start(self) -> bytes:
        return named_event({"type": "message_start", "message": self._message()})

    def _begin(self, item: Item) -> bytes:
        return named_event(
            {"type": "content_block_start", "index": item.number, "content_block": self._block(item, empty=True)}
        )

    def _more(self, item: Item, text: str) -> bytes:
        delta = {
            "reasoning": {"type": "thinking_delta", "thinking": text},
            "text": {"type": "text_delta", "text": text},
            "call": {"type": "input_json_delta", "partial_json": text},
        }[item.kind]
        return named_event({"type": "content_block_delta", "index": item.number, "delta": delta})

    def _end_of(self, item: Item) -> bytes:
        return named_event({"type": "content_block_stop", "index": item.number})

    def _stop_reason(self) -> str | None:
        if self.stop is not None:
            return "stop_sequence"
        return None if self.reason is None else _STOP_REASONS.get(self.reason, "end_turn")

    def _block(self, item: Item, empty: bool = False) -> dict[str, Any]:
        text = "" if empty else item.text
        if item.kind == "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
        if item.kind == "text":
            return {"type": "text", "text": text}
        try:
            arguments = json.loads(text or "{}")
        except ValueError:  # max_tokens has cut it
            arguments = {}
        return {"type": "tool_use", "id": item.id, "name": item.name, "input": arguments}

    def _message(self) -> dict[str, Any]:
        cached = sum(self._num_cached)
        return {
            "id": self.request_id.replace("chatcmpl-", "msg_", 1),
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [self._block(item) for item in self.items],
            "stop_reason": self._stop_reason(),
            "stop_sequence": self.stop,
            "usage": {
                "input_tokens": self._num_prompt_tokens - cached,
                "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": 0,
                "output_tokens": self._num_tokens,
            },
        }
