"""Requests of OpenAI's Responses API as chats. Their answers are `responses_answer.ResponsesAnswer`.

instructions, input of items  -->  messages of a chat      function_call --> tool_calls, ..._output --> role "tool"
text.format, tools, reasoning -->  response_format, tools, reasoning_effort
previous_response_id, item_reference  -->  messages of that conversation, that item: from a `ResponseStore`
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from jpaged.serving.dialects.conversations import PARAGRAPH, without_late_systems
from jpaged.serving.dialects.items import renamed
from jpaged.serving.dialects.response_store import ResponseStore
from jpaged.serving.errors import ApiError
from jpaged.serving.protocol import ChatCompletionRequest, Integer, LogitBias

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
"""Fields that are called as in a chat and mean the same; OpenAI does not have them."""

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


def in_words_of_responses(error: ApiError) -> ApiError:
    """An error that names fields as a request of this API does."""
    return renamed(error, _NAMES)


def error_body(error: ApiError) -> bytes:
    """The JSON of an error."""
    return in_words_of_responses(error).body()


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
    summarizes(body)
    return ChatCompletionRequest(
        model=body.model,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        stream=body.stream or body.background,  # a run in the background reports its progress
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


def summarizes(body: ResponsesRequest) -> bool:
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
            messages.append({"role": "tool", "tool_call_id": _call_id(where, item), "content": content})
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
                {"id": _call_id(where, item), "type": "function", "function": function}
            )
        else:
            raise ApiError(400, f"{where}.type is {str(kind)[:80]!r}, which is not supported.", param="input")
    return messages


def _call_id(where: str, item: Mapping[str, Any]) -> str:
    call_id = item.get("call_id")
    if not isinstance(call_id, str) or not call_id:
        raise ApiError(400, f"{where}.call_id must be a string that is not empty.", param="input")
    return call_id


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
