"""An answer as items that follow each other: reasoning, text, calls. Anthropic calls them blocks, Responses items.

TurnDelta --> begin(reasoning) more(...) end   begin(text) more(...) end   begin(call) more(...) end
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from jpaged.api.outputs import CompletionOutput, RequestOutput
from jpaged.serving.answers import Answer, AnswerContext, finish_reason_of, news_of
from jpaged.serving.errors import ApiError
from jpaged.serving.protocol import ChatCompletionRequest
from jpaged.serving.reasoning_tokens import ReasoningTokens
from jpaged.serving.turns import Reading
from jpaged.text.turns.parser import TurnDelta, TurnParser


@dataclass
class Item:
    """One of an answer. number: from 0. id, name: of a call. text: what has come of it; of a call its arguments.
    logprobs: of the tokens of a text, where a dialect gives them."""

    kind: Literal["reasoning", "text", "call"]
    number: int
    id: str = ""
    name: str = ""
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)


_OF_FUNCTION = re.compile(r"^(tools\[\d+\]\.)function\.(\w+)")


def named_event(body: dict[str, Any]) -> bytes:
    """A server-sent event that is named by its type."""
    return b"event: %b\ndata: %b\n\n" % (body["type"].encode(), msgspec.json.encode(body))


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """An error that names fields as a dialect does. In both dialects a tool has no "function" inside it.

    names: the dialect's fields, by those of the chat that its request stands for.
    """
    message = _OF_FUNCTION.sub(lambda found: found[1] + names.get(found[2], found[2]), error.message)
    param = error.param
    first: str = re.split(r"[^a-z_]", message, maxsplit=1)[0]
    field = param if param is not None and param in names else first
    if field in names:
        message, param = re.sub(rf"\b{field}\b", names[field], message, count=1), names[field]
    return ApiError(error.status, message, param=param, code=error.code, kind=error.kind, headers=error.headers)


class ItemsAnswer(Answer):
    """An answer with one choice. A dialect says how an item begins, goes on and ends.

    Attributes:
        items: that have begun. reason: why the answer ended, as a chat says; None before. stop: the stop string.
        failure: why it could not be finished; None if it was.
    """

    _announces = True

    def __init__(self, request: ChatCompletionRequest, context: AnswerContext) -> None:
        super().__init__(request, context)
        self.items: list[Item] = []
        self.reason: str | None = None
        self.stop: str | None = None
        self.failure: ApiError | None = None
        self._reading = context.reading
        self._parser = TurnParser() if context.reading is None else context.reading.parser()
        self._reasoning: ReasoningTokens | None = None  # set by a dialect whose usage counts them
        self._is_open = False

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        self._take_counts(outputs)
        self._take(outputs[0].outputs[0])
        return msgspec.json.encode(self._ended())

    def _beginning(self, index: int) -> bytes:
        self._begun.add(index)
        return self._start()

    def _choice_events(self, prompt: int, output: RequestOutput, completion: CompletionOutput) -> bytes:
        return self._take(completion)

    def failed(self, error: ApiError) -> bytes:
        return named_event({"type": "error", **msgspec.json.decode(self.error_body(error))})

    def _take(self, completion: CompletionOutput) -> bytes:
        """Takes news into the items; returns the events for them."""
        events = self._news(news_of(completion, self._parser, self._reasoning))
        if completion.finish_reason is not None:
            self.reason = finish_reason_of(self._parser, completion)
            why = completion.stop_reason if isinstance(completion.stop_reason, str) else None
            if completion.finish_reason in ("abort", "error"):
                said = f"The answer was not finished: {why or 'it was aborted'}."
                # For a reason it is the request's own fault, and would fail again; otherwise somebody has aborted it.
                self.failure = ApiError(500, said, code="answer_failed") if why else ApiError(503, said, code="aborted")
            else:
                self.stop = why
            events += self._close()
        return events

    def _news(self, delta: TurnDelta) -> bytes:
        events = b""
        if delta.reasoning and self._reading is not None and self._reading.shows_reasoning:
            events += self._add("reasoning", delta.reasoning)
        if delta.content:
            events += self._add("text", delta.content)
        for call in delta.calls:
            if call.name is not None:
                assert isinstance(self._reading, Reading)
                events += self._open(Item("call", len(self.items), call.id or self._reading.call_id(), call.name))
            events += self._more_of(call.arguments)
        return events

    def _add(self, kind: Literal["reasoning", "text"], text: str) -> bytes:
        events = b""
        if not self._is_open or self.items[-1].kind != kind:
            events = self._open(Item(kind, len(self.items)))
        return events + self._more_of(text)

    def _open(self, item: Item) -> bytes:
        events = self._close()
        self.items.append(item)
        self._is_open = True
        return events + self._begin(item)

    def _more_of(self, text: str) -> bytes:
        if not text:
            return b""
        self.items[-1].text += text
        return self._more(self.items[-1], text)

    def _close(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        return self._end_of(self.items[-1])

    def _start(self) -> bytes:
        """The events before the first item."""
        raise NotImplementedError

    def _begin(self, item: Item) -> bytes:
        raise NotImplementedError

    def _more(self, item: Item, text: str) -> bytes:
        raise NotImplementedError

    def _end_of(self, item: Item) -> bytes:
        raise NotImplementedError

    def message(self) -> dict[str, Any]:
        """The whole answer, with all items that have come."""
        raise NotImplementedError

    def _ended(self) -> dict[str, Any]:
        """`message` of an answer at its end, which a dialect may keep."""
        return self.message()
