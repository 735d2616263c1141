"""The HTTP application: routes, what each does with `AsyncLLMEngine`, and how streams are sent.

    body --read_body--> bytes --msgspec--> request --limits, sampling, prompts--> _Job --> AsyncLLMEngine.generate
                                                                                             |
    client <-- JSON, or one ASGI message for all that has come since the last <-- Answer <---+

A stream is sent from the task that reads the engine's outputs. While a client is slow to take what was sent, its
tokens gather in the engine's stream and leave together.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jpaged.beam_search_params import BeamSearchParams
from jpaged.errors import InvalidParameterError, InvalidPromptError
from jpaged.inputs import ProcessedInput, as_prompt_list
from jpaged.outputs import RequestOutput
from jpaged.sampling_params import SamplingParams
from jpaged.serving.answers import Answer, ChatAnswer, CompletionAnswer, event
from jpaged.serving.async_llm_engine import AsyncLLMEngine
from jpaged.serving.chat_template import render_chat, template_arguments
from jpaged.serving.errors import ApiError, api_error, decoding_error
from jpaged.serving.http import (
    ApiKeys,
    ClientDisconnected,
    RequestIds,
    error_response,
    read_body,
    unless_disconnected,
)
from jpaged.serving.limits import ServerLimits
from jpaged.serving.live import LiveView
from jpaged.serving.openapi import openapi
from jpaged.serving.page import page_routes
from jpaged.serving.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
    refuse_unsupported,
)
from jpaged.serving.sampling import sampling_of
from jpaged.version import __version__

log = logging.getLogger("jpaged.server")
DEMO_MODEL_NAME = "jpaged-demo"

_T = TypeVar("_T", bound=msgspec.Struct)
_EVENT_STREAM = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
)


@dataclass(frozen=True, kw_only=True)
class AppOptions:
    """How the application answers.

    Args:
        served_model_names: what clients may call the model; the first is what answers say.
        api_keys: of which a request must have one; with none, all are served.
        allowed_origins: web pages of these origins may ask; "*": of any.
        metrics_prefix: of the names in /metrics.
        trust_request_chat_template: take `chat_template` from requests. It runs in a sandbox under a time limit, yet a
            single operation of it may take all memory.
        limits: of requests.

    Raises:
        InvalidParameterError: an empty name or key, or a string where a list belongs.
    """

    served_model_names: Sequence[str] = (DEMO_MODEL_NAME,)
    api_keys: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    metrics_prefix: str = "jpaged"
    trust_request_chat_template: bool = False
    limits: ServerLimits = field(default_factory=ServerLimits)

    def __post_init__(self) -> None:
        for name in ("served_model_names", "api_keys", "allowed_origins"):
            if isinstance(getattr(self, name), str):  # a sequence too: of its letters
                raise InvalidParameterError(f"{name} must be a list of strings, got one string.")
            if not all(getattr(self, name)):
                raise InvalidParameterError(f"{name} holds an empty string; leave it out or give a value.")
        if not self.served_model_names:
            raise InvalidParameterError("served_model_names is empty; give at least one name.")
        if not self.metrics_prefix.isidentifier():
            raise InvalidParameterError(
                f"metrics_prefix must be letters, digits and underscores, got {self.metrics_prefix!r}."
            )


def build_app(engine: AsyncLLMEngine, options: AppOptions) -> Starlette:
    """The ASGI application that serves an engine. `app.state.live.close()` ends the streams that never end."""
    live = LiveView(engine, options.limits.max_watchers)
    server = _Handlers(engine, options, live)
    routes = [
        *page_routes(),
        Route("/live", _guarded(server.live), methods=["GET"]),
        Route("/v1/completions", _guarded(server.completions), methods=["POST"]),
        Route("/v1/chat/completions", _guarded(server.chat_completions), methods=["POST"]),
        Route("/v1/models", _guarded(server.models), methods=["GET"]),
        Route("/v1/models/{model:path}", _guarded(server.model), methods=["GET"]),
        Route("/tokenize", _guarded(server.tokenize), methods=["POST"]),
        Route("/detokenize", _guarded(server.detokenize), methods=["POST"]),
        Route("/health", _guarded(server.health), methods=["GET"]),
        Route("/ping", _guarded(server.health), methods=["GET", "POST"]),
        Route("/version", _guarded(server.version), methods=["GET"]),
        Route("/load", _guarded(server.load), methods=["GET"]),
        Route("/metrics", _guarded(server.metrics), methods=["GET"]),
        Route("/reset_prefix_cache", _guarded(server.reset_prefix_cache), methods=["POST"]),
        Route("/openapi.json", _guarded(server.openapi), methods=["GET"]),
    ]
    middleware = [Middleware(RequestIds)]
    if options.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(options.allowed_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id"],
            )
        )
    if options.api_keys:
        middleware.append(Middleware(ApiKeys, keys=options.api_keys))
    app = Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _http_error})
    app.state.live = live
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}."
    return error_response(ApiError(error.status_code, message, headers=error.headers))


Handler = Callable[[Request], Awaitable[Response]]


def _guarded(handler: Handler) -> Handler:
    """Errors become answers; nobody is told of one who went away."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnected:
            return Response(status_code=499)
        except Exception as error:
            return error_response(_reported(error))

    return endpoint


def _reported(error: Exception, fields: Sequence[str] = (), prompt_field: str | None = None) -> ApiError:
    answer = api_error(error, fields, prompt_field)
    if answer.status == 500:
        log.error("A request failed.", exc_info=error)
    return answer


@dataclass(frozen=True)
class _Job:
    """A request that has passed all checks: what to generate, and what to say about it.

    request_id: unlike any other's; several clients may call theirs the same, and meet in one API process or not.
    """

    request_id: str
    prompts: list[ProcessedInput]
    params: SamplingParams | BeamSearchParams
    answer: Answer
    priority: int
    cache_salt: str | None
    streams: bool
    fields: Sequence[str]
    prompt_field: str


class _Handlers:
    """What each route does."""

    def __init__(self, engine: AsyncLLMEngine, options: AppOptions, live: LiveView) -> None:
        self._engine = engine
        self._options = options
        self._live = live
        self._limits = options.limits
        self._completion = msgspec.json.Decoder(CompletionRequest)
        self._chat = msgspec.json.Decoder(ChatCompletionRequest)
        self._tokenize = msgspec.json.Decoder(TokenizeRequest)
        self._detokenize = msgspec.json.Decoder(DetokenizeRequest)
        self._created = int(time.time())

    async def completions(self, request: Request) -> Response:
        body = await self._decode(request, self._completion)
        return await self._generate(request, body, "prompt", self._completion_job(body))

    async def chat_completions(self, request: Request) -> Response:
        body = await self._decode(request, self._chat)
        return await self._generate(request, body, "messages", self._chat_job(body))

    async def models(self, request: Request) -> Response:
        cards = [await self._card(name) for name in self._options.served_model_names]
        return _json(ModelList(cards))

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self._check_model(name)
        return _json(await self._card(name))

    async def tokenize(self, request: Request) -> Response:
        body = await self._decode(request, self._tokenize)
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "prompt or messages is needed, and not both.", param="prompt")
        field = "prompt" if body.messages is None else "messages"
        try:
            if body.messages is not None:
                tokens = await self._chat_tokens(body)
            else:
                special = True if body.add_special_tokens is None else body.add_special_tokens
                tokens = await self._engine.encode(body.prompt or "", add_special_tokens=special)
        except InvalidPromptError as error:
            raise api_error(error, (), field) from error
        strings = None
        if body.return_token_strs and self._engine.tokenizer is not None:
            strings = [self._engine.tokenizer.token_text(token) for token in tokens]
        return _json(TokenizeResponse(len(tokens), (await self._engine.ready()).max_model_len, tokens, strings))

    async def detokenize(self, request: Request) -> Response:
        body = await self._decode(request, self._detokenize)
        self._check_model(body.model)
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise ApiError(400, "The engine was started without a tokenizer.")
        vocab_size = (await self._engine.ready()).vocab_size
        for i, token in enumerate(body.tokens):
            if not 0 <= token < vocab_size:
                raise ApiError(
                    400, f"tokens[{i}] is {token}, outside the vocabulary of {vocab_size} tokens.", param="tokens"
                )
        text = await self._engine.in_thread(lambda: tokenizer.decode(body.tokens))
        return _json(DetokenizeResponse(text))

    async def health(self, request: Request) -> Response:
        await self._engine.check_health()
        return Response(status_code=200)

    async def version(self, request: Request) -> Response:
        return _json({"version": __version__})

    async def load(self, request: Request) -> Response:
        return _json({"server_load": self._engine.num_unfinished})

    async def metrics(self, request: Request) -> Response:
        stats = await self._engine.get_replica_metrics()
        options = self._options
        text = self._engine.metrics.exposition(options.metrics_prefix, options.served_model_names[0], stats)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def reset_prefix_cache(self, request: Request) -> Response:
        if not await self._engine.reset_prefix_cache():
            raise ApiError(409, "Requests are running; the prefix cache can be reset when there are none.", code="busy")
        return _json({"reset": True})

    async def live(self, request: Request) -> Response:
        return _LiveStream(self._live)

    async def openapi(self, request: Request) -> Response:
        return _json(openapi())

    async def _decode(self, request: Request, decoder: msgspec.json.Decoder[_T]) -> _T:
        body = await read_body(request, self._limits.max_body_bytes, self._limits.body_timeout_s)
        try:
            return decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError) as error:
            raise decoding_error(error) from error

    async def _generate(
        self,
        request: Request,
        body: CompletionRequest | ChatCompletionRequest,
        prompt_field: str,
        job: Awaitable[_Job],
    ) -> Response:
        try:
            prepared = await job
            if prepared.streams:
                return _Stream(self._engine, prepared)
            outputs = await unless_disconnected(request.receive, self._all_outputs(prepared))
        except ClientDisconnected:
            raise
        except Exception as error:
            raise _reported(error, body.__struct_fields__, prompt_field) from error
        return Response(prepared.answer.whole(outputs), media_type="application/json")

    async def _all_outputs(self, job: _Job) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        async with contextlib.aclosing(_outputs(self._engine, job)) as arriving:
            async for i, output in arriving:
                outputs[i] = output
        return [outputs[i] for i in range(len(job.prompts))]

    async def _completion_job(self, body: CompletionRequest) -> _Job:
        self._check(body)
        prompts = as_prompt_list(body.prompt)
        if not prompts:
            raise ApiError(400, "prompt is an empty list; give at least one prompt.", param="prompt")
        self._limits.check_prompts(len(prompts))
        self._limits.check_queue(self._engine.num_queued, len(prompts))
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
            processed.append(await self._engine.process(given, params))
            await asyncio.sleep(0)  # a thousand prompts take a while; others are served meanwhile
        return self._job(body, params, processed, "prompt")

    async def _chat_job(self, body: ChatCompletionRequest) -> _Job:
        self._check(body)
        self._limits.check_queue(self._engine.num_queued, 1)
        params = await self._params(body)
        tokens = await self._chat_tokens(body)
        tokens = await self._truncated(body, tokens, params)
        return self._job(body, params, [await self._engine.process(tokens, params)], "messages")

    def _check(self, body: CompletionRequest | ChatCompletionRequest) -> None:
        """What can be told from the request alone."""
        self._check_model(body.model)
        refuse_unsupported(body)
        self._limits.check(body)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream: true.", param="stream_options")
        if body.stream and body.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs is not available with stream: true.", param="prompt_logprobs")
        if body.priority and self._engine.args.scheduling_policy != "priority":
            raise ApiError(
                400,
                'priority has no effect here: the server was not started with --scheduling-policy "priority".',
                param="priority",
            )

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._options.served_model_names:
            served = ", ".join(self._options.served_model_names)
            raise ApiError(
                404,
                f"model: {name[:200]!r} is not served here; there is {served}.",
                param="model",
                code="model_not_found",
            )

    async def _params(self, body: CompletionRequest | ChatCompletionRequest) -> SamplingParams | BeamSearchParams:
        ready = await self._engine.ready()
        return sampling_of(body, ready.default_sampling_params)

    async def _chat_tokens(self, body: ChatCompletionRequest | TokenizeRequest) -> list[int]:
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise InvalidPromptError("A chat needs a tokenizer, but the engine was started without one.")
        if body.chat_template is not None and not self._options.trust_request_chat_template:
            raise ApiError(
                400,
                "chat_template of a request is not taken; start the server with --trust-request-chat-template.",
                param="chat_template",
            )
        arguments = template_arguments(body, tokenizer)
        text = await render_chat(tokenizer, body.messages or [], self._limits.template_timeout_s, arguments)
        return await self._engine.encode(text, add_special_tokens=False)

    async def _truncated(
        self,
        body: CompletionRequest | ChatCompletionRequest,
        tokens: list[int],
        params: SamplingParams | BeamSearchParams,
    ) -> list[int]:
        """The last tokens of a prompt, as many as were asked for; with -1 as many as leave room for the answer."""
        keep = body.truncate_prompt_tokens
        if keep is None:
            return tokens
        if keep == -1:
            ready = await self._engine.ready()
            keep = max(1, min(ready.max_model_len, ready.pool_tokens) - (params.max_tokens or 1))
        if keep < 1:
            raise ApiError(
                400, f"truncate_prompt_tokens must be -1 or at least 1, got {keep}.", param="truncate_prompt_tokens"
            )
        return tokens[-keep:]

    def _job(
        self,
        body: CompletionRequest | ChatCompletionRequest,
        params: SamplingParams | BeamSearchParams,
        prompts: list[ProcessedInput],
        prompt_field: str,
    ) -> _Job:
        for prompt in prompts:
            self._limits.check_prompt_tokens(prompt.prompt_token_ids, prompt_field)
        num_tokens = sum(len(prompt.prompt_token_ids) for prompt in prompts)
        self._limits.check_queued_tokens(self._engine.num_queued_tokens, num_tokens)
        is_chat = isinstance(body, ChatCompletionRequest)
        if body.request_id is not None and not 1 <= len(body.request_id) <= 128:
            raise ApiError(400, "request_id must have 1 to 128 characters.", param="request_id")
        kind, own_id = "chatcmpl" if is_chat else "cmpl", uuid.uuid4().hex
        request_id = f"{kind}-{body.request_id or own_id}"
        model, tokenizer = self._options.served_model_names[0], self._engine.tokenizer
        answer: Answer
        if isinstance(body, ChatCompletionRequest):
            answer = ChatAnswer(body, request_id, body.model or model, prompts, tokenizer)
        else:
            answer = CompletionAnswer(body, request_id, body.model or model, prompts, tokenizer)
        return _Job(
            f"{kind}-{own_id}",
            prompts,
            params,
            answer,
            body.priority or 0,
            body.cache_salt,
            bool(body.stream),
            body.__struct_fields__,
            prompt_field,
        )

    async def _card(self, name: str) -> ModelCard:
        root = self._engine.args.model or DEMO_MODEL_NAME
        return ModelCard(name, self._created, root, (await self._engine.ready()).max_model_len)


async def _outputs(engine: AsyncLLMEngine, job: _Job) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of all prompts as they come, with the prompt's number. When it is closed, all are aborted."""
    if len(job.prompts) == 1:
        async with contextlib.aclosing(_generation(engine, job, 0)) as outputs:
            async for output in outputs:
                yield 0, output
        return
    arrived: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(maxsize=len(job.prompts))

    async def forward(i: int) -> None:
        try:
            async with contextlib.aclosing(_generation(engine, job, i)) as outputs:
                async for output in outputs:
                    await arrived.put((i, output))
        except Exception as error:
            await arrived.put((i, error))
        else:
            await arrived.put((i, None))

    tasks = [asyncio.ensure_future(forward(i)) for i in range(len(job.prompts))]
    try:
        left = len(tasks)
        while left:
            i, item = await arrived.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield i, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _generation(engine: AsyncLLMEngine, job: _Job, i: int) -> AsyncGenerator[RequestOutput, None]:
    return engine.generate(
        job.prompts[i],
        job.params,
        job.request_id if len(job.prompts) == 1 else f"{job.request_id}-{i}",
        priority=job.priority,
        cache_salt=job.cache_salt,
    )


class _Stream(Response):
    """An answer as server-sent events. It begins with the first output, so what is refused until then has a status of
    its own; later errors are events.
    """

    def __init__(self, engine: AsyncLLMEngine, job: _Job) -> None:
        super().__init__()
        self._engine = engine
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnected):
            await unless_disconnected(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer, begun = self._job.answer, False
        start = {"type": "http.response.start", "status": 200, "headers": list(_EVENT_STREAM)}
        try:
            async with contextlib.aclosing(_outputs(self._engine, self._job)) as outputs:
                async for i, output in outputs:
                    chunk = answer.chunk(i, output)
                    if not begun:
                        begun = True
                        await send(start)
                    if chunk:
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
            last = answer.end()
        except Exception as error:
            failure = _reported(error, self._job.fields, self._job.prompt_field)
            if not begun:
                await error_response(failure)(scope, receive, send)
                return
            last = event(failure.body())
        await send({"type": "http.response.body", "body": last, "more_body": False})


class _LiveStream(Response):
    """Snapshots of the engine as server-sent events, until the client goes away or the server ends; to HEAD none."""

    def __init__(self, live: LiveView) -> None:
        super().__init__()
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnected):
            await unless_disconnected(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        try:
            async with contextlib.aclosing(self._live.watch()) as events:
                async for chunk in events:
                    if not begun:
                        begun = True
                        await send({"type": "http.response.start", "status": 200, "headers": list(_EVENT_STREAM)})
                    if scope["method"] == "HEAD":
                        break
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except ApiError as error:  # before the first event
            await error_response(error)(scope, receive, send)
            return
        if not begun:
            await error_response(ApiError(503, "The server is about to end."))(scope, receive, send)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
