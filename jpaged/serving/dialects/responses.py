"""OpenAI's Responses API: its requests as chats, and its answers.

instructions, input of items  -->  messages of a chat      function_call --> tool_calls, ..._output --> role "tool"
text.format, tools, reasoning -->  response_format, tools, reasoning_effort
previous_response_id          -->  the messages of that conversation, from a `ResponseStore`
"""

import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from jpaged.api.sampling_params import SamplingParams
from jpaged.serving.answers import AnswerContext
from jpaged.serving.dialects.items import Item, ItemsAnswer, named_event
from jpaged.serving.errors import ApiError
from jpaged.serving.protocol import ChatCompletionRequest, Integer

Unsupported = Any

MAX_STORED = 1024
MAX_STORED_BYTES = 64 << 20
"""Of conversations that are kept for `previous_response_id`; the oldest give way."""


class ResponsesRequest(Struct, kw_only=True):
    """POST /v1/responses."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    truncation: str | None = None
    top_logprobs: Integer | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    background: Unsupported = None
    conversation: Unsupported = None
    prompt: Unsupported = None
    include: Unsupported = None
    max_tool_calls: Unsupported = None


class ResponseStore:
    """The conversations behind the last responses, in memory."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[list[dict[str, Any]], int]] = OrderedDict()
        self._num_bytes = 0

    def get(self, response_id: str) -> list[dict[str, Any]]:
        """The messages up to a response, and it.

        Raises:
            ApiError: it is not kept, or not any more.
        """
        found = self._kept.get(response_id)
        if found is None:
            raise ApiError(
                404,
                f"previous_response_id: {response_id[:80]!r} is not kept here: the last {MAX_STORED} are, until"
                " the server ends. Send the whole conversation as input.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        self._kept.move_to_end(response_id)
        return found[0]

    def put(self, response_id: str, messages: list[dict[str, Any]]) -> None:
        """Keeps a conversation."""
        num_bytes = len(msgspec.json.encode(messages))
        if num_bytes > MAX_STORED_BYTES:
            return
        self._kept[response_id] = (messages, num_bytes)
        self._num_bytes += num_bytes
        while len(self._kept) > MAX_STORED or self._num_bytes > MAX_STORED_BYTES:
            _, (_, freed) = self._kept.popitem(last=False)
            self._num_bytes -= freed


def chat_of(body: ResponsesRequest, store: ResponseStore) -> ChatCompletionRequest:
    """The chat that a request stands for.

    Raises:
        ApiError: it is malformed, or asks for what is not supported.
    """
    for name in ("background", "conversation", "prompt", "include", "max_tool_calls", "top_logprobs"):
        if getattr(body, name):
            raise ApiError(400, f"{name} is not supported; leave it out.", param=name, code="unsupported_parameter")
    if body.truncation not in (None, "disabled"):
        raise ApiError(400, "truncation must be disabled; other values are not supported.", param="truncation")
    messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    if body.previous_response_id is not None:
        messages += store.get(body.previous_response_id)
    messages += _messages(body.input)
    reasoning = body.reasoning or {}
    choice = body.tool_choice
    if isinstance(choice, dict):
        choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    return ChatCompletionRequest(
        model=body.model,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        tools=[_tool(f"tools[{i}]", tool) for i, tool in enumerate(body.tools or ())] or None,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=reasoning.get("effort"),
        response_format=_format(body.text),
    )


def _format(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    given = (text or {}).get("format")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ApiError(400, "text.format must be an object.", param="text")
    if given.get("type") != "json_schema":
        return dict(given)
    described = {key: given[key] for key in ("name", "schema", "strict", "description") if key in given}
    return {"type": "json_schema", "json_schema": described}


def _tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ApiError(
            400, f"{where}.type is {str(tool.get('type'))[:80]!r}; only functions are supported.", param="tools"
        )
    function = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


_FUNCTION: dict[str, Any] = {"description": None, "parameters": None, "strict": None}
"""What answers say of a function that the request does not."""


def _messages(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as messages of a chat. What an assistant thought, said and called in one turn is one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        where, kind = f"input[{i}]", item.get("type", "message")
        if kind == "function_call_output":
            content = _text(f"{where}.output", item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            continue
        if kind == "message" and item.get("role") != "assistant":
            role = "system" if item.get("role") == "developer" else item.get("role")
            messages.append({"role": role, "content": _text(f"{where}.content", item.get("content"))})
            continue
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        said = messages[-1]
        if kind == "message":
            said["content"] += _text(f"{where}.content", item.get("content"))
        elif kind == "reasoning":
            said["reasoning_content"] = _text(f"{where}.content", item.get("content") or "")
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            said.setdefault("tool_calls", []).append(
                {"id": item.get("call_id"), "type": "function", "function": function}
            )
        else:
            raise ApiError(400, f"{where}.type is {str(kind)[:80]!r}, which is not supported.", param="input")
    return messages


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    for part in content if isinstance(content, list) else [None]:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise ApiError(400, f"{where} must be a string, or a list of parts with text.", param="input")
    return "".join(part["text"] for part in content)


class ResponsesAnswer(ItemsAnswer):
    """The answer to /v1/responses. body: the request; chat: what it stands for. It is kept in the store at its end."""

    def __init__(
        self, chat: ChatCompletionRequest, context: AnswerContext, body: ResponsesRequest, store: ResponseStore
    ) -> None:
        super().__init__(chat, context)
        self.response_id = context.request_id.replace("chatcmpl-", "resp_", 1)
        self._body = body
        self._chat = chat
        self._store = store
        self._sampling = context.sampling or SamplingParams()
        self._sequence_number = 0

    def end(self) -> bytes:
        message = self._message()
        return self._named(f"response.{message['status']}", response=message)

    def failed(self, error: ApiError) -> bytes:
        return self._named("error", code=error.code, message=error.message, param=error.param)

    def _named(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return named_event(body)

    def _start(self) -> bytes:
        message = self._message()
        return self._named("response.created", response=message) + self._named("response.in_progress", response=message)

    def _begin(self, item: Item) -> bytes:
        events = self._named(
            "response.output_item.added", output_index=item.number, item=self._item(item, "in_progress")
        )
        if item.kind != "call":
            events += self._of("response.content_part.added", item, part=self._part(item, ""))
        return events

    def _more(self, item: Item, text: str) -> bytes:
        if item.kind == "call":
            return self._of_call("response.function_call_arguments.delta", item, delta=text)
        if item.kind == "reasoning":
            return self._of("response.reasoning_text.delta", item, delta=text)
        return self._of("response.output_text.delta", item, delta=text, logprobs=[])

    def _end_of(self, item: Item) -> bytes:
        if item.kind == "call":
            events = self._of_call("response.function_call_arguments.done", item, arguments=item.text, name=item.name)
        elif item.kind == "reasoning":
            events = self._of("response.reasoning_text.done", item, text=item.text)
        else:
            events = self._of("response.output_text.done", item, text=item.text, logprobs=[])
        if item.kind != "call":
            events += self._of("response.content_part.done", item, part=self._part(item, item.text))
        return events + self._named("response.output_item.done", output_index=item.number, item=self._item(item))

    def _of(self, kind: str, item: Item, **fields: Any) -> bytes:
        return self._named(kind, item_id=self._item_id(item), output_index=item.number, content_index=0, **fields)

    def _of_call(self, kind: str, item: Item, **fields: Any) -> bytes:
        return self._named(kind, item_id=self._item_id(item), output_index=item.number, **fields)

    def _item_id(self, item: Item) -> str:
        prefix = {"reasoning": "rs", "text": "msg", "call": "fc"}[item.kind]
        return f"{prefix}_{self.response_id.removeprefix('resp_')}_{item.number}"

    def _part(self, item: Item, text: str) -> dict[str, Any]:
        if item.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _item(self, item: Item, status: str | None = None) -> dict[str, Any]:
        begins = status is not None
        if status is None:
            is_last = item is self.items[-1]
            status = "incomplete" if is_last and self.reason == "length" else "completed"
        made: dict[str, Any] = {"id": self._item_id(item), "status": status}
        if item.kind == "call":
            return made | {"type": "function_call", "call_id": item.id, "name": item.name, "arguments": item.text}
        content = [] if begins else [self._part(item, item.text)]
        if item.kind == "reasoning":
            return made | {"type": "reasoning", "summary": [], "content": content}
        return made | {"type": "message", "role": "assistant", "content": content}

    def _message(self) -> dict[str, Any]:
        body, cached = self._body, sum(self._num_cached)
        status, details = "in_progress", None
        if self.reason is not None:
            is_cut = self.reason == "length"
            status, details = "completed", None
            if is_cut:
                status, details = "incomplete", {"reason": "max_output_tokens"}
            if body.store is not False:
                self._store.put(self.response_id, self._conversation())
        usage = {
            "input_tokens": self._num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": self._num_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens()},
            "total_tokens": self._num_prompt_tokens + self._num_tokens,
        }
        sampling = self._sampling
        return {  # every field that openresponses.org requires of a response
            "background": False,
            "frequency_penalty": sampling.frequency_penalty,
            "max_tool_calls": None,
            "presence_penalty": sampling.presence_penalty,
            "prompt_cache_key": body.prompt_cache_key,
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "top_logprobs": 0,
            "user": body.user,
            "id": self.response_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None if self.reason is None else int(time.time()),  # noqa: TID251  # a date
            "status": status,
            "error": None,
            "incomplete_details": details,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [self._item(item) for item in self.items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "store": body.store is not False,
            "temperature": sampling.temperature,
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [_FUNCTION | tool for tool in body.tools or ()],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if self.reason is None else usage,
        }

    def _num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning's text; those around it count as the answer's."""
        text = "".join(item.text for item in self.items if item.kind == "reasoning")
        return len(self._tokenizer.encode(text, add_special_tokens=False)) if text and self._tokenizer else 0

    def _conversation(self) -> list[dict[str, Any]]:
        """The messages of the request, but for its instructions, and the answer."""
        messages = self._chat.messages[0 if self._body.instructions is None else 1 :]
        said: dict[str, Any] = {"role": "assistant", "content": ""}
        for item in self.items:
            if item.kind == "text":
                said["content"] += item.text
            elif item.kind == "reasoning":
                said["reasoning_content"] = item.text
            else:
                function = {"name": item.name, "arguments": item.text or "{}"}
                said.setdefault("tool_calls", []).append({"id": item.id, "type": "function", "function": function})
        return [*messages, said]
