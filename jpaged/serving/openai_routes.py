"""The routes of OpenAI's API, and those for token ids.

    body --read_body--> bytes --msgspec--> request --JobMaker--> Job --> engine --> answer, whole or streamed

An error on the way names the field of the request that it blames.
"""

import contextlib
import time
from collections.abc import Awaitable
from dataclasses import replace
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jpaged.api.errors import InvalidPromptError, JPagedError
from jpaged.processes.async_llm_engine import AsyncLLMEngine
from jpaged.serving.admission import Admission, client_of
from jpaged.serving.browsers import check_json
from jpaged.serving.dialects import messages
from jpaged.serving.errors import ApiError, api_error, decoding_error
from jpaged.serving.http import Handler, guarded, json_response, read_body, unless_disconnected
from jpaged.serving.jobs import Job, JobMaker
from jpaged.serving.json_size import SMALL_BYTES, check_size
from jpaged.serving.middleware import is_anthropic, trace_headers
from jpaged.serving.options import AppOptions, public_name
from jpaged.serving.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
    json_decoder,
    refuse_unsupported,
)
from jpaged.serving.streams import JobStream, all_outputs

_T = TypeVar("_T", bound=msgspec.Struct)


def openai_routes(engine: AsyncLLMEngine, options: AppOptions, admission: Admission) -> list[Route]:
    """Completions, chats, models, and tokens."""
    server = _Handlers(engine, options, admission)
    return [
        Route("/v1/completions", guarded(server.completions), methods=["POST"]),
        Route("/v1/chat/completions", guarded(server.chat_completions), methods=["POST"]),
        Route("/v1/models", _for_either(server.models), methods=["GET"]),
        Route("/v1/models/{model:path}", _for_either(server.model), methods=["GET"]),
        Route("/tokenize", guarded(server.tokenize), methods=["POST"]),
        Route("/detokenize", guarded(server.detokenize), methods=["POST"]),
    ]


def _for_either(handler: Handler) -> Handler:
    """Guards a handler that Anthropic's clients call, too: they get errors in their form."""
    plain, anthropic = guarded(handler), guarded(handler, messages.error_body)

    async def endpoint(request: Request) -> Response:
        return await (anthropic if is_anthropic(request.scope) else plain)(request)

    return endpoint


class _Handlers:
    """The handlers of the routes."""

    def __init__(self, engine: AsyncLLMEngine, options: AppOptions, admission: Admission) -> None:
        self._engine = engine
        self._options = options
        self._jobs = JobMaker(engine, options, admission)
        self._completion = json_decoder(CompletionRequest)
        self._chat = json_decoder(ChatCompletionRequest)
        self._tokenize = json_decoder(TokenizeRequest)
        self._detokenize = json_decoder(DetokenizeRequest)
        self._created = int(time.time())  # noqa: TID251  # a date

    async def completions(self, request: Request) -> Response:
        body = await self._decode(request, self._completion)
        return await self._generate(request, body, "prompt", self._jobs.completion(body, self._client(request)))

    async def chat_completions(self, request: Request) -> Response:
        body = await self._decode(request, self._chat)
        return await self._generate(request, body, "messages", self._jobs.chat(body, self._client(request)))

    async def models(self, request: Request) -> Response:
        cards = [await self._card(name) for name in self._options.served_model_names]
        return json_response(messages.model_list(cards) if is_anthropic(request.scope) else ModelList(cards))

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self._jobs.check_model(name)
        card = await self._card(name)
        return json_response(messages.model_info(card) if is_anthropic(request.scope) else card)

    async def tokenize(self, request: Request) -> Response:
        body = await self._decode(request, self._tokenize)
        self._jobs.check_model(body.model)
        refuse_unsupported(body)
        if body.tools and body.messages is None:
            raise ApiError(400, "tools are for messages; leave them out.", param="tools")
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "prompt or messages is needed, and not both.", param="prompt")
        field = "prompt" if body.messages is None else "messages"
        try:
            if body.messages is not None:
                _, tokens, _ = await self._jobs.chat_prompt(body)
            else:
                special = True if body.add_special_tokens is None else body.add_special_tokens
                tokens = await self._engine.encode(body.prompt or "", add_special_tokens=special)
        except InvalidPromptError as error:
            raise api_error(error, (), field) from error
        strings, tokenizer = None, self._engine.tokenizer
        if body.return_token_strs and tokenizer is not None:
            strings = await self._engine.in_thread(lambda: tokenizer.tokens(tokens))
        limits = (await self._engine.ready()).limits
        return json_response(TokenizeResponse(len(tokens), limits.max_model_len, tokens, strings))

    async def detokenize(self, request: Request) -> Response:
        body = await self._decode(request, self._detokenize)
        self._jobs.check_model(body.model)
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise ApiError(400, "The engine was started without a tokenizer.")
        ready, tokens = await self._engine.ready(), body.tokens
        self._options.limits.check_detokenized(len(tokens), ready.limits.max_model_len)
        if tokens and not 0 <= min(tokens) <= max(tokens) < ready.vocab_size:
            i = next(i for i, token in enumerate(tokens) if not 0 <= token < ready.vocab_size)
            raise ApiError(
                400, f"tokens[{i}] is {tokens[i]}, outside the vocabulary of {ready.vocab_size} tokens.", param="tokens"
            )
        text = await self._engine.in_thread(lambda: tokenizer.decode(tokens))
        return json_response(DetokenizeResponse(text))

    async def _decode(self, request: Request, decoder: msgspec.json.Decoder[_T]) -> _T:
        return await decode_body(self._engine, self._options, request, decoder)

    async def _generate(
        self,
        request: Request,
        body: CompletionRequest | ChatCompletionRequest,
        prompt_field: str,
        job: Awaitable[Job],
    ) -> Response:
        try:
            prepared = await job
            if self._engine.observers:
                prepared = replace(prepared, trace_headers=trace_headers(request))
            if prepared.streams:
                return JobStream(self._engine, prepared)
            with contextlib.closing(prepared.ticket):
                outputs = await unless_disconnected(request.receive, all_outputs(self._engine, prepared))
        except JPagedError as error:
            raise api_error(error, body.__struct_fields__, prompt_field) from error
        if prepared.is_large:
            answer = await self._engine.in_thread(lambda: prepared.answer.whole(outputs))
        else:
            answer = prepared.answer.whole(outputs)
        return Response(answer, media_type="application/json")

    def _client(self, request: Request) -> bytes:
        return client_of(request, self._options.api_keys)

    async def _card(self, name: str) -> ModelCard:
        root = public_name(self._engine.args.model)
        limits = (await self._engine.ready()).limits
        return ModelCard(name, self._created, root, limits.max_model_len)


async def decode_body(
    engine: AsyncLLMEngine, options: AppOptions, request: Request, decoder: msgspec.json.Decoder[_T]
) -> _T:
    """The body of a request; a large one is decoded in a thread. Raises ApiError, ClientDisconnected."""
    check_json(request)
    body = await read_body(request, options.limits.max_body_bytes, options.limits.body_timeout_s)
    if len(body) <= SMALL_BYTES:
        return _parsed(body, decoder)
    return await engine.in_thread(lambda: _parsed(body, decoder))


def _parsed(body: bytes, decoder: msgspec.json.Decoder[_T]) -> _T:
    """The request of a body. Raises ApiError."""
    check_size(body)
    try:
        body.decode()  # msgspec passes over what stands in fields it does not know
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise decoding_error(error, body) from error
