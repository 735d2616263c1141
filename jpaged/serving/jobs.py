"""Turns a decoded request body into a `Job` for the engine, after all checks.

    body --model, limits, unsupported fields--> --sampling--> parameters --.
    prompt or messages --template, tokenizer, truncation--> token ids ----+--> Job

Nothing is queued before all checks have passed, so a request that is refused has cost others nothing but this.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jpaged.api.beam_search_params import BeamSearchParams
from jpaged.api.errors import InvalidParameterError, InvalidPromptError
from jpaged.api.sampling_params import SamplingParams
from jpaged.frontend.inputs import ProcessedInput, as_prompt_list
from jpaged.processes.async_llm_engine import AsyncLLMEngine
from jpaged.serving.admission import Admission, Ticket
from jpaged.serving.answers import Answer, AnswerContext, answer_to
from jpaged.serving.chat_template import template_arguments
from jpaged.serving.constraints import Constraint, takes_long
from jpaged.serving.embedding_protocol import PoolingRequest
from jpaged.serving.errors import ApiError
from jpaged.serving.options import AppOptions
from jpaged.serving.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    TokenizeRequest,
    refuse_unsupported,
)
from jpaged.serving.sampling import InWordsOf, sampling_of
from jpaged.serving.turns import Reading, Turn, named_tool, reading_of, turn_of
from jpaged.text.chat_prompts import ChatPrompt

INLINE_LOGPROBS = 4096
"""Answers and events with more log-probabilities are written in a thread."""
_BLAME_S = 5.0
"""For finding out whose schema it is that cannot be used."""

MakeAnswer = Callable[[Any, AnswerContext], Answer]
"""Makes the answer to a request, which is a CompletionRequest or a ChatCompletionRequest."""


@dataclass(frozen=True)
class Job:
    """A request that has passed all checks: what to generate, and what to say about it.

    request_id: unlike any other's; several clients may call theirs the same, and meet in one API process or not.
    ticket: its place in the queue; whoever runs the job closes it.
    is_large: its answer takes long to write, which is done in a thread.
    max_unsent_bytes: of its streams, that may wait for the client.
    trace_headers: of the client's request, for those who watch requests.
    """

    request_id: str
    prompts: list[ProcessedInput]
    params: SamplingParams | BeamSearchParams
    answer: Answer
    ticket: Ticket
    priority: int
    cache_salt: str | None
    streams: bool
    is_large: bool
    fields: Sequence[str]
    prompt_field: str
    max_unsent_bytes: int
    trace_headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def max_backlog_bytes(self) -> int | None:
        """Of a prompt's log-probabilities that may wait for the client."""
        return self.max_unsent_bytes // len(self.prompts) if self.streams else None


class JobMaker:
    """Makes jobs for an engine, under the server's options."""

    def __init__(self, engine: AsyncLLMEngine, options: AppOptions, admission: Admission) -> None:
        self._admission = admission
        self._engine = engine
        self._options = options
        self._limits = options.limits
        # Renderings take turns anyway; those of given templates, which may take long, have turns of their own.
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="jpaged-chat")
        self._threads_of_given = ThreadPoolExecutor(1, thread_name_prefix="jpaged-given-chat")

    async def completion(self, body: CompletionRequest, client: bytes) -> Job:
        """The job of a completion. client: whose it is (`client_of`).

        Raises:
            ApiError: what is asked is not served here, or too much, or the queue is full or the client's share used.
            JPagedError: the prompt or a parameter cannot be served, or the engine is dead.
        """
        self._check(body)
        prompts = as_prompt_list(body.prompt)
        if not prompts:
            raise ApiError(400, "prompt is an empty list; give at least one prompt.", param="prompt")
        self._limits.check_prompts(len(prompts))
        async with self._place(client, len(prompts)) as ticket:
            params = await self._params(body)
            processed = []
            for prompt in prompts:
                given: Any = prompt
                plain = body.add_special_tokens in (None, True) and body.truncate_prompt_tokens is None
                if not plain:
                    text = prompt if isinstance(prompt, str) else None
                    tokens: Any = prompt
                    if text is not None:
                        special = body.add_special_tokens in (None, True)
                        tokens = await self._engine.encode(text, add_special_tokens=special)
                    given = await self._truncated(body, tokens, params)
                with InWordsOf(body):
                    processed.append(await self._engine.process(given, params))
                await asyncio.sleep(0)  # a thousand prompts take a while; others are served meanwhile
            return await self._job(body, params, processed, "prompt", ticket)

    async def chat(
        self,
        body: ChatCompletionRequest,
        client: bytes,
        make_answer: MakeAnswer = answer_to,
        *,
        ends_whole: bool = False,
    ) -> Job:
        """The job of a chat. Other arguments and errors as of `completion`.

        make_answer: another dialect's. ends_whole: a stream's end repeats all of it, log-probabilities too.
        """
        self._check(body)
        async with self._place(client, 1) as ticket:
            params = await self._params(body)
            text, tokens, turn = await self.chat_prompt(body)
            tokens = await self._truncated(body, tokens, params)
            reading = None
            if turn.is_plain:
                with InWordsOf(body):
                    processed = await self._engine.process(tokens, params)
            else:
                reading = reading_of(turn, body, text)
                params, processed = await self._processed(body, tokens, params, reading)
            return await self._job(body, params, [processed], "messages", ticket, reading, make_answer, ends_whole)

    async def _processed(
        self,
        body: ChatCompletionRequest,
        tokens: list[int],
        params: SamplingParams | BeamSearchParams,
        reading: Reading,
    ) -> tuple[SamplingParams | BeamSearchParams, ProcessedInput]:
        """The parameters and the checked prompt of a turn with reasoning or tools."""
        turn, tokenizer = reading.turn, self._engine.tokenizer
        assert tokenizer is not None

        def applied() -> tuple[Constraint | None, SamplingParams | BeamSearchParams]:
            with InWordsOf(body):
                constraint = turn.constraint(body, reading.reasons, tokenizer)
            with InWordsOf(body, constraint):
                return constraint, turn.applied(params, constraint, tokenizer)

        is_long = bool(turn.tools) or (isinstance(params, SamplingParams) and params.structured_outputs is not None)
        constraint, applied_params = await self._engine.in_thread(applied) if is_long else applied()
        if turn.calls == "required" and body.response_format is not None:  # there is no content that it could shape
            with InWordsOf(body):
                await self._engine.process([0], params)
        try:
            with InWordsOf(body, constraint):
                return applied_params, await self._engine.process(tokens, applied_params)
        except InvalidParameterError as error:
            if constraint is not None and str(error).startswith("tools"):
                await self._blame_tool(body, turn)
            raise

    async def _blame_tool(self, body: ChatCompletionRequest, turn: Turn) -> None:
        """Raises InvalidParameterError if one of the first tools alone has a schema that cannot be used."""
        end = time.monotonic() + _BLAME_S
        names = [tool["function"]["name"] for tool in body.tools or ()]
        for tool in turn.tools:
            if time.monotonic() > end:
                return
            where = f"tools[{names.index(tool.name)}].function.parameters"
            try:
                constraint = {"json": {**tool.parameters, "x-guidance": {"lenient": not tool.strict}}}
                make = partial(SamplingParams, structured_outputs=constraint)  # type: ignore[arg-type]
                alone = await self._engine.in_thread(make)
                await self._engine.process([0], alone)
            except InvalidParameterError as error:
                raise named_tool(error, where) from error

    async def chat_prompt(self, body: ChatCompletionRequest | TokenizeRequest) -> tuple[str, list[int], Turn]:
        """A conversation's prompt: its text and its token ids; and the turn that it asks for.

        Raises:
            ApiError, InvalidPromptError: there is none.
        """
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise InvalidPromptError("A chat needs a tokenizer, but the engine was started without one.")
        if body.chat_template is not None and not self._options.trust_request_chat_template:
            raise ApiError(
                400,
                "chat_template of a request is not taken; start the server with --trust-request-chat-template.",
                param="chat_template",
            )
        options = self._options

        def render() -> tuple[Turn, ChatPrompt]:
            turn = turn_of(body, tokenizer, options.tool_parser, options.reasoning_parser)
            arguments = template_arguments(body, turn, tokenizer) | {
                "timeout_s": self._limits.template_timeout_s,
                "control_tokens_in_messages": options.control_tokens_in_messages,
            }
            return turn, tokenizer.chat_prompt(turn.messages, **arguments)

        threads = self._threads if body.chat_template is None else self._threads_of_given
        turn, prompt = await asyncio.get_running_loop().run_in_executor(threads, render)
        if prompt.marks is None:
            tokens = await self._engine.encode(prompt.text, add_special_tokens=False)
        else:
            self._engine.check_length(prompt.text)
            tokens = await self._engine.in_thread(lambda: tokenizer.encode_prompt(prompt))
        return prompt.text, tokenizer.with_special_tokens(tokens) if body.add_special_tokens else tokens, turn

    def check_model(self, name: str | None) -> None:
        """Raises ApiError if the model that a request names is another than the one that is served."""
        if name is not None and name not in self._options.served_model_names and name != self._engine.args.model:
            served = ", ".join(self._options.served_model_names)
            raise ApiError(
                404,
                f"model: {name[:200]!r} is not served here; there is {served}.",
                param="model",
                code="model_not_found",
            )

    def _check(self, body: CompletionRequest | ChatCompletionRequest) -> None:
        """Checks what can be checked from the request alone."""
        self.check_model(body.model)
        refuse_unsupported(body)
        self._limits.check(body)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream: true.", param="stream_options")
        if body.stream and body.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs is not available with stream: true.", param="prompt_logprobs")
        self.check_priority(body.priority)

    def check_priority(self, priority: int | None) -> None:
        """Raises ApiError if a request has a priority that nothing heeds."""
        if priority and self._engine.args.scheduling_policy != "priority":
            raise ApiError(
                400,
                'priority has no effect here: the server was not started with --scheduling-policy "priority".',
                param="priority",
            )

    async def _params(self, body: CompletionRequest | ChatCompletionRequest) -> SamplingParams | BeamSearchParams:
        ready = await self._engine.ready()
        work = partial(sampling_of, body, ready.default_sampling_params)
        return await self._engine.in_thread(work) if takes_long(body) else work()

    async def _truncated(
        self,
        body: CompletionRequest | ChatCompletionRequest,
        tokens: list[int],
        params: SamplingParams | BeamSearchParams,
    ) -> list[int]:
        limits = (await self._engine.ready()).limits
        return truncated(body, tokens, min(limits.max_model_len, limits.pool_tokens) - (params.max_tokens or 1))

    @asynccontextmanager
    async def _place(self, client: bytes, num_prompts: int) -> AsyncIterator[Ticket]:
        """Room in the queue for the making of a job, which keeps it unless the making fails."""
        ticket = self._admission.enter(client, num_prompts)
        try:
            yield ticket
        except BaseException:
            ticket.close()
            raise

    async def _job(
        self,
        body: CompletionRequest | ChatCompletionRequest,
        params: SamplingParams | BeamSearchParams,
        prompts: list[ProcessedInput],
        prompt_field: str,
        ticket: Ticket,
        reading: Reading | None = None,
        make_answer: MakeAnswer = answer_to,
        ends_whole: bool = False,
    ) -> Job:
        for prompt in prompts:
            self._limits.check_prompt_tokens(prompt.prompt_token_ids, prompt_field)
        prompt_lens = [len(prompt.prompt_token_ids) for prompt in prompts]
        num_logprobs = 0
        if isinstance(params, SamplingParams):
            longest = (await self._engine.ready()).limits.max_model_len
            grows = bool(body.stream) and not ends_whole
            num_logprobs = self._limits.check_logprobs(prompt_lens, params, longest, streams=grows)
        num_tokens = sum(prompt_lens)
        self._admission.take_tokens(ticket, num_tokens)
        is_chat = isinstance(body, ChatCompletionRequest)
        if body.request_id is not None and not 1 <= len(body.request_id) <= 128:
            raise ApiError(400, "request_id must have 1 to 128 characters.", param="request_id")
        kind, own_id = "chatcmpl" if is_chat else "cmpl", secrets.token_hex(16)
        request_id = f"{kind}-{body.request_id or own_id}"
        model, tokenizer = self._options.served_model_names[0], self._engine.tokenizer
        sampling = params if isinstance(params, SamplingParams) else None
        context = AnswerContext(
            request_id,
            body.model or model,
            prompts,
            tokenizer,
            reading,
            sampling,
            skips_special_tokens=params.skip_special_tokens,
        )
        answer = make_answer(body, context)
        return Job(
            f"{kind}-{own_id}",
            prompts,
            params,
            answer,
            ticket,
            body.priority or 0,
            body.cache_salt,
            bool(body.stream),
            num_logprobs > INLINE_LOGPROBS,
            body.__struct_fields__,
            prompt_field,
            self._limits.max_unsent_bytes,
        )


def truncated(body: GenerationRequest | PoolingRequest, tokens: list[int], longest: int) -> list[int]:
    """The last tokens of a prompt, or the first: as many as asked for, or for -1 at most `longest`. Raises ApiError."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return tokens
    if keep == -1:
        keep = max(1, longest)
    if keep < 1:
        raise ApiError(
            400, f"truncate_prompt_tokens must be -1 or at least 1, got {keep}.", param="truncate_prompt_tokens"
        )
    return tokens[:keep] if body.truncation_side == "right" else tokens[-keep:]
