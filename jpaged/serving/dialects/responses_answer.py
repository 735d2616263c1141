"""The answer of OpenAI's Responses API: an engine's outputs as events, and as a response.

in_progress --> completed, incomplete (cut by its length) or failed
queued --> in_progress --> one of these, or cancelled          in the background
"""

import time
from typing import Any

import msgspec

from jpaged.api.outputs import CompletionOutput, Logprob, PositionLogprobs
from jpaged.api.sampling_params import SamplingParams
from jpaged.serving.answers import AnswerContext
from jpaged.serving.dialects.conversations import PARAGRAPH
from jpaged.serving.dialects.event_record import EventRecord
from jpaged.serving.dialects.items import Item, ItemsAnswer, named_event
from jpaged.serving.dialects.response_store import ResponseStore
from jpaged.serving.dialects.responses import (
    ResponsesRequest,
    error_body,
    in_words_of_responses,
    summarizes,
)
from jpaged.serving.dialects.text_logprobs import TextTokens
from jpaged.serving.errors import ApiError
from jpaged.serving.protocol import ChatCompletionRequest
from jpaged.serving.reasoning_tokens import ReasoningTokens
from jpaged.text.turns.parser import TurnDelta

_ITEM_BYTES, _END_BYTES = 400, 1000
"""Of an item without its text, in the answer and in the conversation; of what is said of an answer at its end."""
_LOGPROB_BYTES = 400
"""Of memory for what is said of a token: a dictionary with its text, its bytes and a number."""
_FUNCTION: dict[str, Any] = {"description": None, "parameters": None, "strict": None}
"""Fields of a function that answers have even where the request leaves them out."""


class ResponsesAnswer(ItemsAnswer):
    """The answer to /v1/responses. body: the request; chat: what it stands for.

    A whole answer goes into the store when it ends. One that runs in the background goes there when its run calls
    `keep`, however it ends.
    """

    def __init__(
        self, chat: ChatCompletionRequest, context: AnswerContext, body: ResponsesRequest, store: ResponseStore
    ) -> None:
        super().__init__(chat, context)
        self.response_id = context.request_id.replace("chatcmpl-", "resp_", 1)
        self._body = body
        self._chat = chat
        self._store = store
        self._summarizes = summarizes(body)
        self._sampling = context.sampling or SamplingParams()
        self._sequence_number = 0
        self._is_cancelled = False
        self._completed_at = 0
        self._num_first_bytes = 0
        self._num_text_bytes = 0  # of items, as JSON
        self._num_logprobs = 0  # of the tokens of texts, with their alternatives
        self._reasoning: ReasoningTokens = context.reasoning_tokens()
        self._tokens: TextTokens[dict[str, Any]] = TextTokens()
        self._logprobs: list[dict[str, Any]] = []  # of the tokens of new text

    @property
    def num_bytes(self) -> int:
        """Of memory, by and large: its conversation and what has come of it, which will be in both when it is kept.

        The store counts no more of it when it has ended: one that found room to run finds room to be kept.
        """
        if not self._num_first_bytes:
            self._num_first_bytes = len(msgspec.json.encode([self._chat.messages, self.message()])) + _END_BYTES
        num_item_bytes = sum(_ITEM_BYTES + 2 * len(item.name) for item in self.items) + 2 * self._num_text_bytes
        return self._num_first_bytes + num_item_bytes + _LOGPROB_BYTES * self._num_logprobs

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
        error = in_words_of_responses(error)
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
        self._num_text_bytes += len(msgspec.json.encode(text)) - 2
        if item.kind == "call":
            return self._of_call("response.function_call_arguments.delta", item, delta=text)
        if self._is_summary(item):
            return self._of_summary("response.reasoning_summary_text.delta", item, delta=text)
        if item.kind == "reasoning":
            return self._of("response.reasoning_text.delta", item, delta=text)
        item.logprobs += self._logprobs
        self._num_logprobs += sum(1 + len(one["top_logprobs"]) for one in self._logprobs)
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
            "output_tokens_details": {"reasoning_tokens": self._reasoning.num_tokens},
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
