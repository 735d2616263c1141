"""Anthropic's Messages API: its requests as chats, and its answers.

system, messages of blocks  -->  messages of a chat        tool_use --> tool_calls, tool_result --> role "tool"
max_tokens, stop_sequences, tools, tool_choice, thinking  -->  max_tokens, stop, tools, ..., thinking_token_budget
output_config.format, output_format  -->  response_format
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Struct

from jpaged.api.outputs import RequestOutput
from jpaged.serving.dialects.conversations import as_one_turn, without_late_systems
from jpaged.serving.dialects.items import Item, ItemsAnswer, named_event, renamed
from jpaged.serving.errors import ApiError
from jpaged.serving.protocol import ChatCompletionRequest, Integer, ModelCard

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
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    cache_salt: str | None = None  # vLLM's

    compaction: Unsupported = None
    container: Unsupported = None
    kv_transfer_params: Unsupported = None
    mcp_servers: Unsupported = None
    thread: Unsupported = None
    vllm_xargs: Unsupported = None


_UNSUPPORTED = ("compaction", "container", "kv_transfer_params", "mcp_servers", "thread", "vllm_xargs")
_BILLING = "x-anthropic-billing-header:"
"""Begins a line of the system's prompt, mostly a block by itself, in which Claude Code says whose request it is. It
differs from request to request, which no prefix cache could hit, and is not for the model.
"""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_KINDS |= {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}
_NAMES = {
    **{"thinking_token_budget": "thinking", "stop": "stop_sequences", "response_format": "output_config.format"},
    "parameters": "input_schema",
}
"""Fields of a chat, and what they are called here."""


def model_list(cards: Sequence[ModelCard]) -> dict[str, Any]:
    """The answer to /v1/models."""
    ids = [card.id for card in cards]
    return {"data": [model_info(card) for card in cards], "has_more": False, "first_id": ids[0], "last_id": ids[-1]}


def model_info(card: ModelCard) -> dict[str, Any]:
    """One model."""
    created = datetime.fromtimestamp(card.created, UTC)
    return {
        "type": "model",
        "id": card.id,
        "display_name": card.id,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": card.max_model_len,
    }


def error_body(error: ApiError) -> bytes:
    """The JSON of an error."""
    kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = renamed(error, _NAMES).message
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


def chat_of(body: MessagesRequest, *, counts: bool = False) -> ChatCompletionRequest:
    """The chat that a request stands for. counts: only its prompt is asked for.

    Raises:
        ApiError: it is malformed, or asks for what is not supported.
    """
    for name in _UNSUPPORTED:
        if getattr(body, name):
            raise ApiError(400, f"{name} is not supported; leave it out.", param=name)
    if body.max_tokens is None and not counts:
        raise ApiError(400, "max_tokens is needed; give it.", param="max_tokens")
    messages: list[dict[str, Any]] = []
    if system := _without_billing("system", body.system or ""):
        messages.append({"role": "system", "content": system})
    messages += [one for i, message in enumerate(body.messages) for one in _messages(f"messages[{i}]", message)]
    messages = _merged(without_late_systems(messages))
    _clear_thinking(body, messages)
    budget, variables = _thinking(body)
    choice, parallel = _choice(body)
    last = messages[-1] if messages else {}
    # The API's way of putting words into the model's mouth: the answer goes on from an assistant's last message.
    continues = last.get("role") == "assistant" and bool(last["content"].strip()) and "tool_calls" not in last
    if continues and variables["thinking"]:
        raise ApiError(
            400,
            "thinking cannot be enabled where the last message is the assistant's: the answer goes on from it. Disable"
            " thinking, or end with a user's message.",
            param="thinking",
        )
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
        include_reasoning=variables["thinking"] and (body.thinking or {}).get("display") != "omitted",
        chat_template_kwargs=variables,
        response_format=_format(body),
        continue_final_message=continues or None,
        cache_salt=body.cache_salt,
    )


def _merged(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A chat in which turns of one role that follow each other are one turn, as the API says; but results."""
    made: list[dict[str, Any]] = []
    for one in messages:
        if not made or one["role"] != made[-1]["role"] or one["role"] == "tool":
            made.append(dict(one))
        else:
            made[-1] = as_one_turn(made[-1], one)
    return made


def _clear_thinking(body: MessagesRequest, messages: list[dict[str, Any]]) -> None:
    """Takes the reasoning out of the turns for which `context_management` does not keep it."""
    edits = (body.context_management or {}).get("edits") or []
    for i, edit in enumerate(edits if isinstance(edits, list) else [None]):
        kind = edit.get("type") if isinstance(edit, Mapping) else None
        keep = edit.get("keep", {"type": "thinking_turns", "value": 1}) if isinstance(edit, Mapping) else None
        keep = {"type": keep} if isinstance(keep, str) else keep
        kept = keep.get("value") if isinstance(keep, Mapping) and keep.get("type") == "thinking_turns" else None
        is_all = isinstance(keep, Mapping) and keep.get("type") == "all"
        if kind != "clear_thinking_20251015" or not (is_all or (type(kept) is int and kept > 0)):
            raise ApiError(
                400,
                f"context_management.edits[{i}] is not supported; only clear_thinking_20251015 is, which keeps"
                ' "all" or {"type": "thinking_turns", "value": 1 or more}.',
                param="context_management",
            )
        thought = [message for message in messages if "reasoning_content" in message]
        for message in [] if kept is None else thought[:-kept]:
            del message["reasoning_content"]


def _format(body: MessagesRequest) -> dict[str, Any] | None:
    """The schema that the text must fit, which earlier clients gave as `output_format`. `effort`, which agents send
    unasked, is for models that were trained to follow it: it has no effect."""
    config = body.output_config or {}
    if others := [name for name, value in config.items() if name not in ("format", "effort") and value is not None]:
        name = f"output_config.{others[0][:80]}"
        raise ApiError(400, f"{name} is not supported; leave it out.", param="output_config")
    given = config.get("format")
    if given is not None and body.output_format is not None:
        raise ApiError(400, "output_config.format and output_format are the same; give one.", param="output_format")
    given = body.output_format if given is None else given
    if given is None:
        return None
    if (
        not isinstance(given, Mapping)
        or given.get("type") != "json_schema"
        or not isinstance(given.get("schema"), dict)
    ):
        raise ApiError(
            400,
            'output_config.format must be {"type": "json_schema", "schema": {...}}; other forms are not supported.',
            param="output_config",
        )
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given["schema"], "strict": True}}


def _thinking(body: MessagesRequest) -> tuple[int | None, dict[str, Any]]:
    """The budget, and variables for chat templates that switch reasoning: off unless it is asked for."""
    given = body.thinking or {"type": "disabled"}
    kind, budget = given.get("type"), given.get("budget_tokens")
    if given.get("display") not in (None, "summarized", "omitted"):
        raise ApiError(400, "thinking.display must be summarized or omitted.", param="thinking")
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
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise ApiError(400, "tool_choice.type must be auto, any, tool or none.", param="tool_choice")
    return _CHOICES[kind], parallel


def _tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise ApiError(
            400, f"{where}.type is {str(tool['type'])[:80]!r}; only custom tools are supported.", param="tools"
        )
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _messages(where: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A message as those of a chat: results of tools are messages of their own, in front of what else is said."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ApiError(400, f"{where}.role must be user, assistant or system.", param="messages")
    if role == "system":
        return [{"role": role, "content": _text(f"{where}.content", content)}]
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
            text = _text(at, [block])
            said["content"] += f"\n{text}" if said["content"] and role == "user" else text
        elif kind == "thinking" and role == "assistant":
            thought = _string(at, block, "thinking", may_be_empty=True)
            said["reasoning_content"] = said.get("reasoning_content", "") + thought
        elif kind == "redacted_thinking" and role == "assistant":
            continue
        elif kind == "tool_use" and role == "assistant":
            given = block.get("input")  # a string: what a client got of a call that was cut
            if not isinstance(given, str | Mapping):
                raise ApiError(400, f"{at}.input must be an object.", param="messages")
            arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            function = {"name": _string(at, block, "name"), "arguments": arguments}
            call = {"id": _string(at, block, "id"), "type": "function", "function": function}
            said.setdefault("tool_calls", []).append(call)
        elif kind == "tool_result" and role == "user":
            text = _text(f"{at}.content", block.get("content") or "")
            id_name = "id" if "id" in block and "tool_use_id" not in block else "tool_use_id"  # SGLang takes either
            result.append({"role": "tool", "tool_call_id": _string(at, block, id_name), "content": text})
        else:
            raise ApiError(400, f"{at}: blocks of type {str(kind)[:80]!r} are not supported here.", param="messages")
    if said["content"] or "tool_calls" in said or not result:
        result.append(said)
    return result


def _string(where: str, block: Mapping[str, Any], name: str, *, may_be_empty: bool = False) -> str:
    """A field of a block that must be a string."""
    value = block.get(name)
    if not isinstance(value, str) or not (value or may_be_empty):
        wanted = "a string" if may_be_empty else "a string that is not empty"
        raise ApiError(400, f"{where}.{name} must be {wanted}.", param="messages")
    return value


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    for block in content if isinstance(content, list) else [None]:
        if not isinstance(block, Mapping) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise ApiError(
                400, f"{where}: only text is supported, as a string or as blocks of type text.", param="messages"
            )
    return "\n".join(block["text"] for block in content)


def _without_billing(where: str, content: Any) -> str:
    """The system's prompt as a text."""
    blocks = content if isinstance(content, list) else [content]
    texts = [_text(where, block if isinstance(block, str) else [block]) for block in blocks]
    texts = [text.partition("\n")[2] if text.startswith(_BILLING) else text for text in texts]
    return "\n".join(text for text in texts if text)


def _signature(thought: str) -> str:
    """A digest of reasoning: clients send blocks back only if they are signed. None is checked."""
    return hashlib.sha256(thought.encode()).hexdigest()


class MessagesAnswer(ItemsAnswer):
    """The answer to /v1/messages."""

    def error_body(self, error: ApiError) -> bytes:
        return error_body(error)

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        made = super().whole(outputs)
        if self.failure is not None:  # a message has no form for that
            raise self.failure
        return made

    def end(self) -> bytes:
        if self.failure is not None:
            return self.failed(self.failure)
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self.stop}
        return named_event({"type": "message_delta", "delta": delta, "usage": self._message_usage()}) + named_event(
            {"type": "message_stop"}
        )

    def _start(self) -> bytes:
        return named_event({"type": "message_start", "message": self.message()})

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
        events = named_event({"type": "content_block_stop", "index": item.number})
        if item.kind != "reasoning":
            return events
        delta = {"type": "signature_delta", "signature": _signature(item.text)}
        return named_event({"type": "content_block_delta", "index": item.number, "delta": delta}) + events

    def _stop_reason(self) -> str | None:
        if self.stop is not None:
            return "stop_sequence"
        return None if self.reason is None else _STOP_REASONS.get(self.reason, "end_turn")

    def _block(self, item: Item, empty: bool = False) -> dict[str, Any]:
        text = "" if empty else item.text
        if item.kind == "reasoning":
            return {"type": "thinking", "thinking": text, "signature": "" if empty else _signature(text)}
        if item.kind == "text":
            return {"type": "text", "text": text}
        try:
            arguments = json.loads(text or "{}")
        except ValueError:  # max_tokens has cut it
            arguments = {}
        return {"type": "tool_use", "id": item.id, "name": item.name, "input": arguments}

    def _message_usage(self) -> dict[str, int]:
        """The tokens so far."""
        cached = sum(self._num_cached)
        return {
            "input_tokens": self._num_prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self._num_tokens,
        }

    def message(self) -> dict[str, Any]:
        return {
            "id": self.request_id.replace("chatcmpl-", "msg_", 1),
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [self._block(item) for item in self.items],
            "stop_reason": self._stop_reason(),
            "stop_sequence": self.stop,
            "usage": self._message_usage(),
        }
