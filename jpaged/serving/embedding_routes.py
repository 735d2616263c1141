"""The routes of embeddings, scores and rankings: /v1/embeddings, /v1/score and /v1/rerank."""

import asyncio
import contextlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jpaged.api.errors import JPagedError
from jpaged.api.pooling_params import PoolingParams
from jpaged.frontend.inputs import ProcessedInput
from jpaged.processes.async_llm_engine import AsyncLLMEngine
from jpaged.serving.admission import Admission, Ticket, client_of
from jpaged.serving.embedding_protocol import EmbeddingRequest, RerankRequest, ScoreRequest
from jpaged.serving.embeddings import PROMPT_FIELDS, PoolingBody, answer, conversation_of, params_of, prompts_of
from jpaged.serving.errors import ApiError, api_error
from jpaged.serving.http import guarded, unless_disconnected
from jpaged.serving.jobs import JobMaker, truncated
from jpaged.serving.middleware import trace_headers
from jpaged.serving.openai_routes import decode_body
from jpaged.serving.options import AppOptions
from jpaged.serving.protocol import json_decoder, refuse_unsupported
from jpaged.serving.streams import all_outputs

_KINDS: dict[type[PoolingBody], tuple[str, ...]] = {
    EmbeddingRequest: ("/v1/embeddings",),
    ScoreRequest: ("/v1/score", "/score"),
    RerankRequest: ("/v1/rerank", "/v2/rerank", "/rerank"),
}

_PREFIXES: dict[type[PoolingBody], str] = {EmbeddingRequest: "embd", ScoreRequest: "score", RerankRequest: "rerank"}
"""How answers' ids begin."""


def embedding_routes(engine: AsyncLLMEngine, options: AppOptions, admission: Admission) -> list[Route]:
    """Each kind of request at each of its paths."""
    server = _Handlers(engine, options, admission)
    return [
        Route(path, guarded(partial(server.serve, json_decoder(kind))), methods=["POST"])
        for kind, paths in _KINDS.items()
        for path in paths
    ]


@dataclass(frozen=True)
class PooledJob:
    """A request that has passed all checks (`streams.Work`)."""

    request_id: str
    prompts: list[ProcessedInput]
    params: PoolingParams
    ticket: Ticket
    priority: int
    cache_salt: str | None
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    max_backlog_bytes: None = None


class _Handlers:
    def __init__(self, engine: AsyncLLMEngine, options: AppOptions, admission: Admission) -> None:
        self._engine = engine
        self._options = options
        self._admission = admission
        self._jobs = JobMaker(engine, options, admission)

    async def serve(self, decoder: msgspec.json.Decoder[Any], request: Request) -> Response:
        body: PoolingBody = await decode_body(self._engine, self._options, request, decoder)
        self._jobs.check_model(body.model)
        refuse_unsupported(body)
        self._jobs.check_priority(body.priority)
        if body.request_id is not None and not 1 <= len(body.request_id) <= 128:
            raise ApiError(400, "request_id must have 1 to 128 characters.", param="request_id")
        prompt_field = PROMPT_FIELDS[type(body)]
        try:
            if isinstance(body, RerankRequest):
                self._options.limits.check_prompts(1 + len(body.documents), prompt_field)
            conversation = conversation_of(body)
            if conversation is None:
                prompts = prompts_of(body)
            else:
                prompt_field = "messages"
                _, tokens, _ = await self._jobs.chat_prompt(conversation)
                prompts = [tokens]
            self._options.limits.check_prompts(len(prompts), prompt_field)
            client = client_of(request, self._options.api_keys)
            with contextlib.closing(self._admission.enter(client, len(prompts))) as ticket:
                job = await self._job(body, prompts, ticket, prompt_field, trace_headers(request))
                outputs = await unless_disconnected(request.receive, all_outputs(self._engine, job))
            if any(output.embedding is None for output in outputs):  # what is not finite has raised by now
                raise ApiError(503, "The request was aborted; ask again.", code="aborted")
            name = f"{_PREFIXES[type(body)]}-{body.request_id or secrets.token_hex(16)}"
            model = body.model or self._options.served_model_names[0]
            # Thousands of numbers each take long to write.
            written = await self._engine.in_thread(lambda: msgspec.json.encode(answer(body, name, model, outputs)))
        except JPagedError as error:
            raise api_error(error, body.__struct_fields__, prompt_field) from error
        return Response(written, media_type="application/json")

    async def _job(
        self, body: PoolingBody, prompts: list[Any], ticket: Ticket, prompt_field: str, headers: Mapping[str, str]
    ) -> PooledJob:
        limits = (await self._engine.ready()).limits
        params = params_of(body, self._engine.embeddings)
        special, processed = body.add_special_tokens in (None, True), []
        for prompt in prompts:
            given = prompt
            if not special or body.truncate_prompt_tokens is not None:
                if isinstance(prompt, str):
                    given = await self._engine.encode(prompt, add_special_tokens=special)
                given = truncated(body, given, min(limits.max_model_len, limits.pool_tokens) - 1)
            processed.append(await self._engine.process(given, params))
            await asyncio.sleep(0)  # a thousand prompts take a while; others are served meanwhile
        for one in processed:
            self._options.limits.check_prompt_tokens(one.prompt_token_ids, prompt_field)
        self._admission.take_tokens(ticket, sum(len(one.prompt_token_ids) for one in processed))
        own_id = f"pool-{secrets.token_hex(16)}"
        return PooledJob(own_id, processed, params, ticket, body.priority or 0, body.cache_salt, headers)
