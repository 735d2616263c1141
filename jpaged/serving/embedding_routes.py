"""The routes of embeddings, scores and rankings: /v1/embeddings, /v1/score and /v1/rerank."""

import asyncio
import contextlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jpaged.api.errors import JPagedError, NonFiniteLogitsError
from jpaged.api.outputs import RequestOutput
from jpaged.frontend.inputs import Params, ProcessedInput
from jpaged.frontend.reranking import Reranker
from jpaged.processes.async_llm_engine import AsyncLLMEngine
from jpaged.serving.admission import Admission, Ticket, client_of
from jpaged.serving.embedding_protocol import EmbeddingRequest, RerankRequest
from jpaged.serving.embeddings import (
    ID_PREFIXES,
    PATHS,
    PROMPT_FIELDS,
    PoolingBody,
    answer,
    conversation_of,
    judgements,
    params_of,
    prompts_of,
)
from jpaged.serving.errors import ApiError, api_error
from jpaged.serving.http import guarded, unless_disconnected
from jpaged.serving.jobs import JobMaker, truncated
from jpaged.serving.middleware import trace_headers
from jpaged.serving.openai_routes import decode_body
from jpaged.serving.options import AppOptions
from jpaged.serving.protocol import json_decoder, refuse_unsupported
from jpaged.serving.streams import all_outputs


def embedding_routes(engine: AsyncLLMEngine, options: AppOptions, admission: Admission) -> list[Route]:
    """Each kind of request at each of its paths."""
    server = _Handlers(engine, options, admission)
    return [
        Route(path, guarded(partial(server.serve, json_decoder(kind))), methods=["POST"])
        for kind, paths in PATHS.items()
        for path in paths
    ]


@dataclass(frozen=True)
class PooledJob:
    """A request that has passed all checks (`streams.Work`)."""

    request_id: str
    prompts: list[ProcessedInput]
    params: Params
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

    @cached_property
    def _reranker(self) -> Reranker | None:
        return None if self._engine.args.reranker is None else Reranker(self._engine.tokenizer)

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
            reranker = None
            if self._reranker is not None and not isinstance(body, EmbeddingRequest):
                reranker = self._reranker
                prompts = await self._engine.in_thread(partial(judgements, body, reranker))
            elif conversation is None:
                prompts = prompts_of(body)
            else:
                prompt_field = "messages"
                _, tokens, _ = await self._jobs.chat_prompt(conversation)
                prompts = [tokens]
            self._options.limits.check_prompts(len(prompts), prompt_field)
            client = client_of(request, self._options.api_keys)
            with contextlib.closing(self._admission.enter(client, len(prompts))) as ticket:
                params = params_of(body, self._engine.embeddings) if reranker is None else reranker.params()
                job = await self._job(body, params, prompts, ticket, prompt_field, trace_headers(request))
                outputs = await unless_disconnected(request.receive, all_outputs(self._engine, job))
                scores = None
                if reranker is not None:
                    scores = await unless_disconnected(request.receive, self._scores(reranker, job, outputs))
            if reranker is None and any(output.embedding is None for output in outputs):
                raise _aborted()  # what is not finite has raised by now
            name = f"{ID_PREFIXES[type(body)]}-{body.request_id or secrets.token_hex(16)}"
            model = body.model or self._options.served_model_names[0]
            # Thousands of numbers each take long to write.
            written = await self._engine.in_thread(
                lambda: msgspec.json.encode(answer(body, name, model, outputs, scores))
            )
        except JPagedError as error:
            raise api_error(error, body.__struct_fields__, prompt_field) from error
        return Response(written, media_type="application/json")

    async def _scores(self, reranker: Reranker, job: PooledJob, outputs: Sequence[RequestOutput]) -> list[float]:
        """Of the judgements: where one of the two answers is not among the likeliest tokens, it is asked for apart."""
        found = [reranker.found(_judged(output)) for output in outputs]
        for token in {reranker.missing(one) for one in found} - {None}:
            again = [i for i, one in enumerate(found) if reranker.missing(one) == token]
            own_id, prompts = f"{job.request_id}-{token}", [job.prompts[i] for i in again]
            asked = replace(job, request_id=own_id, prompts=prompts, params=reranker.params(token))
            for i, output in zip(again, await all_outputs(self._engine, asked), strict=True):
                found[i] |= reranker.found(_judged(output))
        return [reranker.score(one) for one in found]

    async def _job(
        self,
        body: PoolingBody,
        params: Params,
        prompts: list[Any],
        ticket: Ticket,
        prompt_field: str,
        headers: Mapping[str, str],
    ) -> PooledJob:
        limits = (await self._engine.ready()).limits
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


def _judged(output: RequestOutput) -> RequestOutput:
    """Raises ApiError if the model has not answered."""
    (answered,) = output.outputs
    if answered.finish_reason == "error":
        raise api_error(NonFiniteLogitsError(), (), "documents")
    if not answered.logprobs:
        raise _aborted()
    return output


def _aborted() -> ApiError:
    return ApiError(503, "The request was aborted; ask again.", code="aborted")
