"""Turns the engine's outputs into OpenAI's answers: whole, or chunk by chunk.

One `Answer` belongs to one HTTP request. Its prompts are numbered, and a prompt's sequences follow each other: choice
`prompt * n + sequence`.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from jpaged.api.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from jpaged.api.sampling_params import SamplingParams
from jpaged.frontend.inputs import ProcessedInput
from jpaged.serving.errors import ApiError
from jpaged.serving.protocol import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    ChatResponse,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    CompletionTokensDetails,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    ToolCall,
    TopLogprob,
    Usage,
)
from jpaged.serving.reasoning_tokens import ReasoningTokens
from jpaged.serving.turns import Reading
from jpaged.text.tokenizer import Tokenizer, check_messages
from jpaged.text.turns.parser import CallDelta, TurnDelta, TurnParser

_encode = msgspec.json.Encoder().encode
DONE_EVENT = b"data: [DONE]\n\n"


def event(body: bytes) -> bytes:
    """A server-sent event."""
    return b"data: " + body + b"\n\n"


@dataclass(frozen=True)
class AnswerContext:
    """What the answer to a request is made with.

    request_id: as the client sees it. model: its name, as the client gave it. prompts: as they went to the engine.
    tokenizer: None without text. reading: of a chat whose text is not all content.
    sampling: how its tokens are drawn; None for a search. skips_special_tokens: whether its text leaves special tokens
    out.
    """

    request_id: str
    model: str
    prompts: Sequence[ProcessedInput]
    tokenizer: Tokenizer | None
    reading: Reading | None = None
    sampling: SamplingParams | None = None
    skips_special_tokens: bool = True

    def reasoning_tokens(self) -> ReasoningTokens:
        """A new count for a choice of an answer to one prompt."""
        prompt = self.prompts[0].prompt_token_ids
        return ReasoningTokens(self.tokenizer, prompt, skips_special_tokens=self.skips_special_tokens)


class Answer:
    """The answer to one request."""

    _announces = False
    """Whether a stream announces each choice before its first text."""

    def __init__(self, request: CompletionRequest | ChatCompletionRequest, context: AnswerContext) -> None:
        prompts = context.prompts
        self.request_id = context.request_id
        self._model = context.model
        self._prompts = prompts
        self._tokenizer = context.tokenizer
        self._created = int(time.time())  # noqa: TID251  # a date
        self._n = request.n or 1
        self._as_ids = bool(request.return_tokens_as_token_ids)
        self._token_ids = bool(request.return_token_ids)
        self._wants_prompt_logprobs = request.prompt_logprobs is not None
        options = request.stream_options
        self._usage_at_end = options is not None and bool(options.include_usage)
        self._usage_always = self._usage_at_end and options is not None and bool(options.continuous_usage_stats)
        self._num_prompt_tokens = sum(len(prompt.prompt_token_ids) for prompt in prompts)
        self._num_cached = [0] * len(prompts)
        self._num_tokens = 0
        self._begun: set[int] = set()

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The JSON of an answer that is not streamed. outputs: the finished output of each prompt."""
        raise NotImplementedError

    def chunk(self, prompt: int, output: RequestOutput) -> bytes:
        """The events for the news of a prompt; empty while there are none."""
        self._num_cached[prompt] = output.num_cached_tokens
        events = []
        for completion in output.outputs:
            if self._announces and completion.index not in self._begun:
                events.append(self._beginning(completion.index))  # which counts none of the tokens that follow
            self._num_tokens += self._count(completion)
            events.append(self._choice_events(prompt, output, completion))
        return b"".join(events)

    def end(self) -> bytes:
        """The events that end a stream."""
        if not self._usage_at_end:
            return DONE_EVENT
        return event(_encode(self._chunk([], self._usage()))) + DONE_EVENT

    def error_body(self, error: ApiError) -> bytes:
        """The JSON of an answer that failed before it began."""
        return error.body()

    def failed(self, error: ApiError) -> bytes:
        """The events that end a stream which failed."""
        return event(error.body()) + DONE_EVENT

    def _beginning(self, index: int) -> bytes:
        """The events before the first news of a choice, where the answer announces them."""
        raise NotImplementedError

    def _choice_events(self, prompt: int, output: RequestOutput, completion: CompletionOutput) -> bytes:
        raise NotImplementedError

    def _chunk(self, choices: list[Any], usage: Usage | msgspec.UnsetType | None) -> msgspec.Struct:
        raise NotImplementedError

    def _event(self, choice: msgspec.Struct) -> bytes:
        usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
        if self._usage_always:
            usage = self._usage()
        elif self._usage_at_end:
            usage = None
        return event(_encode(self._chunk([choice], usage)))

    def _count(self, completion: CompletionOutput) -> int:
        return len(completion.token_ids)

    def _usage(self) -> Usage:
        prompt, tokens = self._num_prompt_tokens, self._num_tokens
        return Usage(prompt, tokens, prompt + tokens, PromptTokensDetails(sum(self._num_cached)))

    def _take_counts(self, outputs: Sequence[RequestOutput]) -> None:
        self._num_cached = [output.num_cached_tokens for output in outputs]
        self._num_tokens = sum(self._count(c) for output in outputs for c in output.outputs)

    def _index(self, prompt: int, completion: CompletionOutput) -> int:
        return prompt * self._n + completion.index

    def _token(self, token: int, logprob: Logprob | None = None) -> str:
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token}"
        if logprob is not None and logprob.decoded_token is not None:
            return logprob.decoded_token
        return self._tokenizer.token_text(token)

    def _prompt_logprobs(self, output: RequestOutput) -> PromptLogprobs | None:
        if not self._wants_prompt_logprobs or output.prompt_logprobs is None:
            return None
        return [
            None
            if position is None
            else {t: PromptLogprob(p.logprob, p.rank, p.decoded_token) for t, p in position.items()}
            for position in output.prompt_logprobs
        ]


class CompletionAnswer(Answer):
    """The answer to /v1/completions."""

    def __init__(self, request: CompletionRequest, context: AnswerContext) -> None:
        super().__init__(request, context)
        self._echo = bool(request.echo)
        self._logprobs = request.logprobs
        self._echo_only = self._echo and request.max_tokens == 0
        self._skips_special = request.skip_special_tokens is not False
        self._offsets: dict[int, int] = {}

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        self._take_counts(outputs)
        choices = [
            self._choice(prompt, output, completion)
            for prompt, output in enumerate(outputs)
            for completion in output.outputs
        ]
        return _encode(CompletionResponse(self.request_id, self._created, self._model, choices, self._usage()))

    def _choice_events(self, prompt: int, output: RequestOutput, completion: CompletionOutput) -> bytes:
        choice = self._choice(prompt, output, completion)
        says = choice.text or choice.finish_reason or choice.logprobs is not None or choice.token_ids
        return self._event(choice) if says else b""

    def _chunk(self, choices: list[Any], usage: Usage | msgspec.UnsetType | None) -> CompletionResponse:
        return CompletionResponse(self.request_id, self._created, self._model, choices, usage)

    def _count(self, completion: CompletionOutput) -> int:
        return 0 if self._echo_only else len(completion.token_ids)

    def _choice(self, prompt: int, output: RequestOutput, completion: CompletionOutput) -> CompletionChoice:
        """A choice, or its news. What is sent only once is in the first."""
        index = self._index(prompt, completion)
        first = index not in self._begun
        self._begun.add(index)
        echoes = self._echo and first
        text = "" if self._echo_only else completion.text
        if echoes:
            text = self._prompt_text(prompt) + text
        choice = CompletionChoice(
            index=index,
            text=text,
            logprobs=None if self._logprobs is None else self._logprobs_of(index, output, completion, echoes),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
        if self._echo_only and completion.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = "length", None
        if first:
            choice.prompt_logprobs = self._prompt_logprobs(output)
        if self._token_ids:
            choice.token_ids = [] if self._echo_only else completion.token_ids
            if first:
                choice.prompt_token_ids = self._prompts[prompt].prompt_token_ids
        return choice

    def _prompt_text(self, prompt: int) -> str:
        given = self._prompts[prompt]
        if given.prompt is not None:
            return given.prompt
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(given.prompt_token_ids, skip_special_tokens=self._skips_special)

    def _logprobs_of(
        self, index: int, output: RequestOutput, completion: CompletionOutput, echoes: bool
    ) -> CompletionLogprobs:
        positions: list[tuple[int, PositionLogprobs | None]] = []
        if echoes:
            positions += zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
        if not self._echo_only:
            positions += zip(completion.token_ids, completion.logprobs or (), strict=True)
        result = CompletionLogprobs([], [], [], [])
        offset = self._offsets.get(index, 0)
        for token, position in positions:
            text = self._token(token, position[token] if position else None)
            result.tokens.append(text)
            result.token_logprobs.append(position[token].logprob if position else None)
            result.top_logprobs.append(self._top(token, position) if position else None)
            result.text_offset.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        return result

    def _top(self, token: int, position: PositionLogprobs) -> dict[str, float]:
        """The most likely tokens first, then the token itself. Of tokens with the same text, the likeliest counts."""
        most = self._logprobs or 0
        found: dict[str, float] = {}
        for other, logprob in sorted(position.items(), key=lambda item: item[1].rank or 0):
            if other == token or (logprob.rank or 0) <= most:
                found.setdefault(self._token(other, logprob), logprob.logprob)
        return found


class ChatAnswer(Answer):
    """The answer to /v1/chat/completions."""

    _announces = True

    def __init__(self, request: ChatCompletionRequest, context: AnswerContext) -> None:
        super().__init__(request, context)
        self._top_logprobs = request.top_logprobs or 0
        self._service_tier = msgspec.UNSET if request.service_tier is None else "default"
        self._reading = context.reading
        self._prefix, self._prefix_reasoning = _final_text(request) if request.echo else "", ""
        if self._prefix and self._reading is not None:
            self._prefix_reasoning, self._prefix = self._reading.prefix(self._prefix)
        self._parsers: dict[int, TurnParser] = {}
        self._reasons = self._reading is not None and self._reading.turn.reasoning is not None
        self._reasoning: dict[int, ReasoningTokens] = defaultdict(context.reasoning_tokens)

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        self._take_counts(outputs)
        (output,) = outputs
        choices = []
        for completion in output.outputs:
            message, finish_reason = ChatMessage(completion.text), completion.finish_reason
            if self._reading is not None:
                message, finish_reason = self._read(self._reading, completion)
            if self._prefix:
                message.content = self._prefix + (message.content or "")
            if self._prefix_reasoning:
                message.reasoning_content = self._prefix_reasoning + (message.reasoning_content or "")
                message.reasoning = message.reasoning_content
            choice = ChatChoice(
                index=completion.index,
                message=message,
                logprobs=self._logprobs_of(completion),
                finish_reason=finish_reason,
                stop_reason=completion.stop_reason,
            )
            if self._token_ids:
                choice.token_ids = completion.token_ids
            choices.append(choice)
        response = ChatResponse(self.request_id, self._created, self._model, choices, self._usage())
        response.prompt_logprobs = self._prompt_logprobs(output)
        response.service_tier = self._service_tier
        if self._token_ids:
            response.prompt_token_ids = output.prompt_token_ids
        return _encode(response)

    def _usage(self) -> Usage:
        usage = super()._usage()
        if self._reasons:  # shown or not
            num_tokens = sum(count.num_tokens for count in self._reasoning.values())
            usage.completion_tokens_details = CompletionTokensDetails(num_tokens)
        return usage

    def _beginning(self, index: int) -> bytes:
        self._begun.add(index)
        events = self._event(ChatChunkChoice(index, ChatDelta(role="assistant", content=""), None, None, None))
        if self._prefix_reasoning:
            said = self._prefix_reasoning
            delta = ChatDelta(reasoning_content=said, reasoning=said)
            events += self._event(ChatChunkChoice(index, delta, None, None, None))
        if self._prefix:
            events += self._event(ChatChunkChoice(index, ChatDelta(content=self._prefix), None, None, None))
        return events

    def _choice_events(self, prompt: int, output: RequestOutput, completion: CompletionOutput) -> bytes:
        logprobs = self._logprobs_of(completion)
        finish_reason, says = completion.finish_reason, bool(completion.text)
        delta = ChatDelta(content=completion.text) if completion.text else ChatDelta()
        if self._reading is not None:
            delta, finish_reason, says = self._news(self._reading, completion)
        if not (says or finish_reason or logprobs or (self._token_ids and completion.token_ids)):
            return b""
        if not says:  # clients look for text in each chunk
            delta.content = ""
        choice = ChatChunkChoice(completion.index, delta, logprobs, finish_reason, completion.stop_reason)
        if self._token_ids:
            choice.token_ids = completion.token_ids
        return self._event(choice)

    def _chunk(self, choices: list[Any], usage: Usage | msgspec.UnsetType | None) -> ChatChunk:
        chunk = ChatChunk(self.request_id, self._created, self._model, choices, usage, service_tier=self._service_tier)
        if self._token_ids and choices and choices[0].delta.role is not msgspec.UNSET:
            chunk.prompt_token_ids = self._prompts[0].prompt_token_ids
        return chunk

    def _read(self, reading: Reading, completion: CompletionOutput) -> tuple[ChatMessage, str | None]:
        """The message of a choice that is complete, and why it ended."""
        parser = reading.parser()
        delta = news_of(completion, parser, self._reasoning[completion.index])
        message = ChatMessage(delta.content)
        if delta.calls:
            message.content = delta.content or None
            message.tool_calls = [
                ToolCall(CalledFunction(news.arguments, news.name or ""), news.id or reading.call_id(), "function")
                for news in delta.calls
            ]
        if delta.reasoning and reading.shows_reasoning:
            message.reasoning_content = message.reasoning = delta.reasoning
        return message, finish_reason_of(parser, completion)

    def _news(self, reading: Reading, completion: CompletionOutput) -> tuple[ChatDelta, str | None, bool]:
        """What is new in a choice, why it ended, and whether there is anything new."""
        parser = self._parsers.get(completion.index)
        if parser is None:
            parser = self._parsers[completion.index] = reading.parser()
        news = news_of(completion, parser, self._reasoning[completion.index])
        delta = ChatDelta()
        if news.reasoning and reading.shows_reasoning:
            delta.reasoning_content = delta.reasoning = news.reasoning
        if news.content:
            delta.content = news.content
        if news.calls:
            delta.tool_calls = [_call_delta(reading, call) for call in news.calls]
        says = bool(news.content or news.calls or (news.reasoning and reading.shows_reasoning))
        return delta, finish_reason_of(parser, completion), says

    def _logprobs_of(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if completion.logprobs is None:
            return None
        content = []
        for token, position in zip(completion.token_ids, completion.logprobs, strict=True):
            ranked = sorted((logprob.rank or 0, other) for other, logprob in position.items())
            top = [self._top(other, position[other]) for rank, other in ranked if rank <= self._top_logprobs]
            entry = self._top(token, position[token])
            content.append(ChatLogprob(entry.token, entry.logprob, entry.bytes, top))
        return ChatLogprobs(content)

    def _top(self, token: int, logprob: Logprob) -> TopLogprob:
        data = b"" if self._tokenizer is None else self._tokenizer.token_bytes(token)
        return TopLogprob(self._token(token, logprob), logprob.logprob, list(data))


def _final_text(request: ChatCompletionRequest) -> str:
    """The text of the message that an answer continues."""
    (message,) = check_messages(request.messages[-1:])
    return message["content"] or ""


def news_of(completion: CompletionOutput, parser: TurnParser, reasoning: ReasoningTokens | None = None) -> TurnDelta:
    """What is new in a choice, as its parser reads it. reasoning: where the tokens of its reasoning are counted."""
    ended = completion.finish_reason is not None
    cut = ended and is_cut(completion)
    if reasoning is not None and parser.may_reason:  # else all of it is counted, and need not be decoded again
        has_stop_token = ended and not cut
        reasoning.add(completion.token_ids[:-1] if has_stop_token else completion.token_ids, ended=ended)
    delta = parser.feed(completion.text, final=ended, cut=cut)
    if reasoning is not None:
        reasoning.settle(parser, ended=ended)
    return delta


def is_cut(completion: CompletionOutput) -> bool:
    """Whether something else than the model ended a choice: max_tokens, a stop string, an abort."""
    return completion.finish_reason != "stop" or isinstance(completion.stop_reason, str)


def finish_reason_of(parser: TurnParser, completion: CompletionOutput) -> str | None:
    """Why a choice ended: "tool_calls" if it calls tools and no stop string cut it off."""
    reason = completion.finish_reason
    calls = parser.num_calls and not parser.is_inside_call
    return "tool_calls" if reason == "stop" and calls else reason


def _call_delta(reading: Reading, call: CallDelta) -> ToolCall:
    if call.name is None:
        return ToolCall(CalledFunction(call.arguments), index=call.index)
    return ToolCall(CalledFunction(call.arguments, call.name), call.id or reading.call_id(), "function", call.index)


def answer_to(request: CompletionRequest | ChatCompletionRequest, context: AnswerContext) -> Answer:
    """The answer of the request's endpoint."""
    if isinstance(request, ChatCompletionRequest):
        return ChatAnswer(request, context)
    return CompletionAnswer(request, context)
