"""OpenAI's Responses API: its requests as chats, and its answers.

instructions, input of items  -->  messages of a chat      function_call --> tool_calls, ..._output --> role "tool"
text.format, tools, reasoning -->  response_format, tools, reasoning_effort
previous_response_id, item_reference  -->  messages of that conversation, that item: from a `ResponseStore`
"""

import time
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from jpaged.api.outputs import CompletionOutput, Logprob, PositionLogprobs
from jpaged.api.sampling_params import SamplingParams
from jpaged.serving.answers import AnswerContext
from jpaged.serving.dialects.conversations import PARAGRAPH, without_late_systems
from jpaged.serving.dialects.event_record import EventRecord
from jpaged.serving.dialects.items import Item, ItemsAnswer, named_event, renamed
from jpaged.serving.dialects.response_store import ResponseStore
from jpaged.serving.dialects.text_logprobs import TextTokens
from jpaged.serving.errors import ApiError
from jpaged.serving.protocol import ChatCompletionRequest, Integer, LogitBias
from jpaged.text.turns.parser import TurnDelta

Unsupported = Any

_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of a chat, and what they are called here."""


_OF_CHATS = (
    *("top_k", "min_p", "repetition_penalty", "seed", "stop", "logit_bias", "ignore_eos"),
    *("chat_template_kwargs", "priority", "cache_salt", "structured_outputs", "thinking_token_budget"),
    *("min_tokens", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "allowed_token_ids"),
    *("bad_words", "vllm_xargs", "mm_processor_kwargs"),
)
"""Fields that are called as in a chat and mean the same; OpenAI has them not."""


def error_body(error: ApiError) -> bytes:
    """The JSON of an error."""
    return renamed(error, _NAMES).body()


PLAIN_REASONING = "reasoning.encrypted_content"
"""A value of `include`. With or without it reasoning comes as plain text, and nothing is encrypted: a client that sends
the items back has lost nothing.
"""
TEXT_LOGPROBS = "message.output_text.logprobs"
"""A value of `include`: log-probabilities of the tokens of texts."""


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
    background: bool | None = None
    metadata: dict[str, str] | None = None
    truncation: str | None = None
    include: list[str] | None = None
    top_logprobs: Integer | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None

    # vLLM's
    top_k: Integer | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: LogitBias | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: Integer | None = None
    min_tokens: Integer | None = None
    stop_token_ids: list[Integer] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[Integer] | None = None
    bad_words: list[str] | None = None
    vllm_xargs: Unsupported = None
    mm_processor_kwargs: Unsupported = None
    enable_response_messages: Unsupported = None

    conversation: Unsupported = None
    prompt: Unsupported = None
    max_tool_calls: Unsupported = None


def chat_of(body: ResponsesRequest, store: ResponseStore) -> ChatCompletionRequest:
    """The chat that a request stands for.

    Raises:
        ApiError: it is malformed, or asks for what is not supported.
    """
    for name in ("conversation", "prompt", "max_tool_calls", "enable_response_messages"):
        if getattr(body, name):
            raise ApiError(400, f"{name} is not supported; leave it out.", param=name, code="unsupported_parameter")
    for value in body.include or ():
        if value not in (PLAIN_REASONING, TEXT_LOGPROBS):
            raise ApiError(
                400,
                f"include: {value[:80]!r} is not supported; leave it out.",
                param="include",
                code="unsupported_parameter",
            )
    if body.background and body.store is False:
        raise ApiError(
            400, "background can only be used when `store` is true: leave one of them out.", param="background"
        )
    has_logprobs = TEXT_LOGPROBS in (body.include or ())
    if body.top_logprobs and not has_logprobs:
        raise ApiError(400, f'top_logprobs needs include: ["{TEXT_LOGPROBS}"].', param="top_logprobs")
    if (body.text or {}).get("verbosity") not in (None, "medium"):
        raise ApiError(400, "text.verbosity must be medium; other values are not supported.", param="text.verbosity")
    if body.truncation not in (None, "disabled"):
        raise ApiError(400, "truncation must be disabled; other values are not supported.", param="truncation")
    messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    if body.previous_response_id is not None:
        messages += store.get(body.previous_response_id)
    messages = without_late_systems([*messages, *_messages(body.input, store)])
    while len(messages) > 1 and messages[0]["role"] == messages[1]["role"] == "system":  # templates know one
        messages[:2] = [{"role": "system", "content": PARAGRAPH.join(one["content"] for one in messages[:2])}]
    _summarizes(body)
    return ChatCompletionRequest(
        model=body.model,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        stream=body.stream or body.background,  # which says how far it is
        temperature=body.temperature,
        top_p=body.top_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        tools=[_tool(f"tools[{i}]", tool) for i, tool in enumerate(body.tools or ())] or None,
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        logprobs=has_logprobs or None,
        top_logprobs=body.top_logprobs or 0 if has_logprobs else None,
        reasoning_effort=(body.reasoning or {}).get("effort"),
        response_format=_format(body.text),
        **{name: getattr(body, name) for name in _OF_CHATS},
    )


def _summarizes(body: ResponsesRequest) -> bool:
    """Whether reasoning shall come as summaries. They are the reasoning itself, the most detailed ones there are."""
    asked = body.reasoning or {}
    kind = asked.get("summary") or asked.get("generate_summary")
    if kind not in (None, "auto", "detailed"):
        raise ApiError(
            400,
            f"reasoning.summary must be auto or detailed, got {str(kind)[:80]!r}: reasoning is given as it is, and not"
            " made shorter.",
            param="reasoning.summary",
        )
    return kind is not None


def _choice(given: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """The choice of tools, as a chat has it."""
    if not isinstance(given, dict):
        return given
    if given.get("type") != "allowed_tools":
        return {"type": given.get("type"), "function": {"name": given.get("name")}}
    listed = given.get("tools")
    named = []
    for i, one in enumerate(listed if isinstance(listed, list) else ()):
        if not isinstance(one, Mapping) or one.get("type") != "function" or not isinstance(one.get("name"), str):
            raise ApiError(
                400, f'tool_choice.tools[{i}] must be {{"type": "function", "name": ...}}.', param="tool_choice"
            )
        named.append({"type": "function", "function": {"name": one["name"]}})
    return {"type": "allowed_tools", "allowed_tools": {"mode": given.get("mode"), "tools": named}}


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


def _messages(given: str | list[dict[str, Any]], store: ResponseStore) -> list[dict[str, Any]]:
    """Items as messages of a chat. What an assistant thought, said and called in one turn is one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        where, kind = f"input[{i}]", item.get("type") or "message"
        if refers(item):
            item = store.item(str(item.get("id")))
            kind = item["type"]
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
            said["content"] += _text(f"{where}.content", item.get("content"), "")
        elif kind == "reasoning":
            thought = _text(f"{where}.content", item.get("content") or item.get("summary") or "")
            said["reasoning_content"] = said.get("reasoning_content", "") + thought
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            said.setdefault("tool_calls", []).append(
                {"id": item.get("call_id"), "type": "function", "function": function}
            )
        else:
            raise ApiError(400, f"{where}.type is {str(kind)[:80]!r}, which is not supported.", param="input")
    return messages


def refers(item: Mapping[str, Any]) -> bool:
    """Whether an item stands for one of an earlier response."""
    return item.get("type") == "item_reference" or item.keys() == {"id"}


def _text(where: str, content: Any, joint: str = "\n") -> str:
    if isinstance(content, str):
        return content
    texts = []
    for j, part in enumerate(content if isinstance(content, list) else [None]):
        if not isinstance(part, Mapping):
            raise ApiError(400, f"{where} must be a string, or a list of parts with text.", param="input")
        text = part.get("refusal" if part.get("type") == "refusal" else "text")
        if not isinstance(text, str):
            kind = str(part.get("type"))[:80]
            raise ApiError(
                400, f"{where}[{j}] is of type {kind!r} and has no text; only text is supported.", param="input"
            )
        texts.append(text)
    return joint.join(texts)


class ResponsesAnswer(ItemsAnswer):
    """The answer to /v1/responses. body: the request; chat: what it stands for. It is kept in the store at its end; one
    that runs in the background when `keep` says so, however it ends.
    """

    def __init__(
        self, chat: ChatCompletionRequest, context: AnswerContext, body: ResponsesRequest, store: ResponseStore
    ) -> None:
        super().__init__(chat, context)
        self.response_id = context.request_id.replace("chatcmpl-", "resp_", 1)
        self._body = body
        self._chat = chat
        self._store = store
        self._summarizes = _summarizes(body)
        self._sampling = context.sampling or SamplingParams()
        self._sequence_number = 0
        self._is_cancelled = False
        self._completed_at = 0
        self._tokens: TextTokens[dict[str, Any]] = TextTokens()
        self._logprobs: list[dict[str, Any]] = []  # of the tokens of new text

    def end(self) -> bytes:
        message = self._ended()
        return self._named(f"response.{message['status']}", response=message)

    def error_body(self, error: ApiError) -> bytes:
        return error_body(error)

    def queued(self) -> bytes:
        """The events before anything has come, in the background."""
        message = self.message()
        return self._named("response.created", response=message) + self._named("response.queued", response=message)

    def cancelled(self) -> bytes:
        """The events that end a response which was cancelled."""
        self._is_cancelled = True
        return self._close() + self.end()

    def failed(self, error: ApiError) -> bytes:
        error = renamed(error, _NAMES)
        if self._body.background:
            self.failure = error
            return self._close() + self.end()
        return self._named("error", code=error.code, message=error.message, param=error.param)

    def _take(self, completion: CompletionOutput) -> bytes:
        if completion.finish_reason is not None:
            self._completed_at = int(time.time())  # noqa: TID251  # a date
        if completion.logprobs is None:
            return super()._take(completion)
        said = zip(completion.token_ids, completion.logprobs, strict=True)
        tokens = [(self._token(token, position[token]), self._logprob(token, position)) for token, position in said]
        self._tokens.add(completion.text, tokens)
        return super()._take(completion)

    def _news(self, delta: TurnDelta) -> bytes:
        self._logprobs = self._tokens.taken(delta.places, self._parser.num_read)
        return super()._news(delta)

    def _logprob(self, token: int, position: PositionLogprobs) -> dict[str, Any]:
        """What is said of a token: its log-probability, and those of the most likely ones."""
        most = self._body.top_logprobs or 0
        ranked = sorted((logprob.rank or 0, other) for other, logprob in position.items())
        top = [self._one_logprob(other, position[other]) for rank, other in ranked if rank <= most]
        return self._one_logprob(token, position[token]) | {"top_logprobs": top}

    def _one_logprob(self, token: int, logprob: Logprob) -> dict[str, Any]:
        data = b"" if self._tokenizer is None else self._tokenizer.token_bytes(token)
        return {"token": self._token(token, logprob), "logprob": logprob.logprob, "bytes": list(data)}

    def _named(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return named_event(body)

    def _start(self) -> bytes:
        message = self.message()
        events = b"" if self._body.background else self._named("response.created", response=message)
        return events + self._named("response.in_progress", response=message)

    def _begin(self, item: Item) -> bytes:
        events = self._named(
            "response.output_item.added", output_index=item.number, item=self._item(item, "in_progress")
        )
        if self._is_summary(item):
            events += self._of_summary("response.reasoning_summary_part.added", item, part=self._part(item, "", []))
        elif item.kind != "call":
            events += self._of("response.content_part.added", item, part=self._part(item, "", []))
        return events

    def _more(self, item: Item, text: str) -> bytes:
        if item.kind == "call":
            return self._of_call("response.function_call_arguments.delta", item, delta=text)
        if self._is_summary(item):
            return self._of_summary("response.reasoning_summary_text.delta", item, delta=text)
        if item.kind == "reasoning":
            return self._of("response.reasoning_text.delta", item, delta=text)
        item.logprobs += self._logprobs
        return self._of("response.output_text.delta", item, delta=text, logprobs=self._logprobs)

    def _end_of(self, item: Item) -> bytes:
        if item.kind == "call":
            events = self._of_call("response.function_call_arguments.done", item, arguments=item.text, name=item.name)
        elif self._is_summary(item):
            events = self._of_summary("response.reasoning_summary_text.done", item, text=item.text)
            part = self._part(item, item.text, [])
            events += self._of_summary("response.reasoning_summary_part.done", item, part=part)
        elif item.kind == "reasoning":
            events = self._of("response.reasoning_text.done", item, text=item.text)
        else:
            events = self._of("response.output_text.done", item, text=item.text, logprobs=item.logprobs)
        if item.kind != "call" and not self._is_summary(item):
            events += self._of("response.content_part.done", item, part=self._part(item, item.text, item.logprobs))
        return events + self._named("response.output_item.done", output_index=item.number, item=self._item(item))

    def _of(self, kind: str, item: Item, **fields: Any) -> bytes:
        return self._named(kind, item_id=self._item_id(item), output_index=item.number, content_index=0, **fields)

    def _is_summary(self, item: Item) -> bool:
        return item.kind == "reasoning" and self._summarizes

    def _of_summary(self, kind: str, item: Item, **fields: Any) -> bytes:
        return self._named(kind, item_id=self._item_id(item), output_index=item.number, summary_index=0, **fields)

    def _of_call(self, kind: str, item: Item, **fields: Any) -> bytes:
        return self._named(kind, item_id=self._item_id(item), output_index=item.number, **fields)

    def _item_id(self, item: Item) -> str:
        prefix = {"reasoning": "rs", "text": "msg", "call": "fc"}[item.kind]
        return f"{prefix}_{self.response_id.removeprefix('resp_')}_{item.number}"

    def _part(self, item: Item, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        if item.kind == "reasoning":
            return {"type": "summary_text" if self._summarizes else "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _item(self, item: Item, status: str | None = None) -> dict[str, Any]:
        begins = status is not None
        if status is None:
            is_last = item is self.items[-1]
            is_cut = self.reason == "length" or self.failure is not None or self._is_cancelled
            status = "incomplete" if is_last and is_cut else "completed"
        made: dict[str, Any] = {"id": self._item_id(item), "status": status}
        if item.kind == "call":
            return made | {"type": "function_call", "call_id": item.id, "name": item.name, "arguments": item.text}
        content = [] if begins else [self._part(item, item.text, item.logprobs)]
        if item.kind == "reasoning":
            summary, content = (content, []) if self._summarizes else ([], content)
            return made | {"type": "reasoning", "summary": summary, "content": content}
        return made | {"type": "message", "role": "assistant", "content": content}

    def message(self) -> dict[str, Any]:
        """The response as far as it has come."""
        body, cached = self._body, sum(self._num_cached)
        status, details, error = "queued" if body.background and not self._begun else "in_progress", None, None
        if self._is_cancelled:
            status = "cancelled"
        elif self.failure is not None:
            status, error = "failed", {"code": "server_error", "message": self.failure.message}
        elif self.reason is not None:
            is_cut = self.reason == "length"
            status, details = "completed", None
            if is_cut:
                status, details = "incomplete", {"reason": "max_output_tokens"}
        usage = {
            "input_tokens": self._num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": self._num_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens()},
            "total_tokens": self._num_prompt_tokens + self._num_tokens,
        }
        sampling, asked = self._sampling, body.reasoning or {}
        return {  # every field that openresponses.org requires of a response
            "background": bool(body.background),
            "frequency_penalty": sampling.frequency_penalty,
            "max_tool_calls": None,
            "presence_penalty": sampling.presence_penalty,
            "prompt_cache_key": body.prompt_cache_key,
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "top_logprobs": body.top_logprobs or 0,
            "user": body.user,
            "id": self.response_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": self._completed_at if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": details,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [self._item(item) for item in self.items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": asked.get("effort"), "summary": asked.get("summary")},
            "store": body.store is not False,
            "temperature": sampling.temperature,
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [_FUNCTION | tool for tool in body.tools or ()],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if self.reason is None else usage,
        }

    def _ended(self) -> dict[str, Any]:
        is_whole = self.reason is not None and self.failure is None
        if is_whole and self._body.store is not False and not self._body.background:
            return self.keep()
        return self.message()

    def keep(self, record: EventRecord | None = None) -> dict[str, Any]:
        """Puts the response into the store, and returns it. record: of its events."""
        is_whole, message = self.reason is not None and self.failure is None, self.message()
        self._store.put(self._conversation() if is_whole else None, message, record)
        return message

    def _num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning's text; those around it count as the answer's."""
        text = "".join(item.text for item in self.items if item.kind == "reasoning")
        return len(self._tokenizer.encode(text, add_special_tokens=False)) if text and self._tokenizer else 0

    def _conversation(self) -> list[dict[str, Any]]:
        """The messages of the request, but for its instructions, and the answer."""
        messages, instructions = self._chat.messages, self._body.instructions
        if instructions is not None:
            joined = messages[0]["content"].removeprefix(instructions).removeprefix(PARAGRAPH)
            messages = [*([{"role": "system", "content": joined}] if joined else []), *messages[1:]]
        said: dict[str, Any] = {"role": "assistant", "content": ""}
        for item in self.items:
            if item.kind == "text":
                said["content"] += item.text
            elif item.kind == "reasoning":
                said["reasoning_content"] = said.get("reasoning_content", "") + item.text
            else:
                function = {"name": item.name, "arguments": item.text or "{}"}
                said.setdefault("tool_calls", []).append({"id": item.id, "type": "function", "function": function})
        return [*messages, said]
