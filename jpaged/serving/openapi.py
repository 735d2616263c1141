"""The server's OpenAPI 3.1 document, made from the schemas that decode its requests."""

from typing import Any

import msgspec

from jpaged.api.version import __version__
from jpaged.serving.dialects.messages import MessagesRequest
from jpaged.serving.dialects.responses import ResponsesRequest
from jpaged.serving.embedding_protocol import (
    EmbeddingRequest,
    EmbeddingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from jpaged.serving.protocol import (
    ChatCompletionRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    ErrorResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)

_POSTS: dict[str, tuple[str, Any, Any]] = {
    "/v1/completions": ("Complete prompts.", CompletionRequest, CompletionResponse),
    "/v1/chat/completions": ("Answer a conversation.", ChatCompletionRequest, ChatResponse),
    "/v1/messages": ("Answer a conversation, as Anthropic's API does.", MessagesRequest, dict[str, Any]),
    "/v1/messages/count_tokens": ("The tokens of such a conversation.", MessagesRequest, dict[str, int]),
    "/v1/responses": ("Answer a conversation, as OpenAI's Responses API does.", ResponsesRequest, dict[str, Any]),
    "/v1/responses/input_tokens": ("The tokens of such a request.", ResponsesRequest, dict[str, Any]),
    "/v1/embeddings": ("Turn prompts into vectors.", EmbeddingRequest, EmbeddingResponse),
    "/v1/score": ("The similarity of texts.", ScoreRequest, ScoreResponse),
    "/v1/rerank": ("Documents in the order of their similarity to a query.", RerankRequest, RerankResponse),
    "/tokenize": ("Text or a conversation to token ids.", TokenizeRequest, TokenizeResponse),
    "/detokenize": ("Token ids to text.", DetokenizeRequest, DetokenizeResponse),
}
_GETS: dict[str, tuple[str, Any]] = {
    "/v1/models": ("The model that is served, under each of its names.", ModelList),
    "/v1/models/{model}": ("One of these.", ModelCard),
    "/health": ("200 while requests can be served, else 503.", None),
    "/ping": ("As /health.", None),
    "/version": ("The version of the server.", dict[str, str]),
    "/debug/requests": ("Unfinished requests: what runs, waits and is held, without prompts.", dict[str, list]),
    "/load": ("Requests that wait or run.", dict[str, int]),
    "/is_sleeping": ("Whether the engine sleeps.", dict[str, bool]),
    "/metrics": ("Metrics in Prometheus' text format.", None),
}
_ERROR_STATUSES = ("400", "401", "403", "404", "408", "409", "413", "415", "429", "500", "503")


def openapi() -> dict[str, Any]:
    """The document."""
    types = [kind for _, *pair in _POSTS.values() for kind in pair]
    types += [kind for _, kind in _GETS.values() if kind is not None] + [ErrorResponse]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(map(str, types), schemas, strict=True))
    paths: dict[str, Any] = {}
    errors = {status: _content("An error.", schema_of[str(ErrorResponse)]) for status in _ERROR_STATUSES}
    for path, (what, request, response) in _POSTS.items():
        answer = _content("The answer.", schema_of[str(response)])
        if "stream" in {field.name for field in msgspec.structs.fields(request)}:
            answer["content"]["text/event-stream"] = {"schema": {"type": "string"}}
        body = {"required": True, "content": {"application/json": {"schema": schema_of[str(request)]}}}
        paths[path] = {"post": {"summary": what, "requestBody": body, "responses": {"200": answer} | errors}}
    for path, (what, response) in _GETS.items():
        answer = {"description": what} if response is None else _content(what, schema_of[str(response)])
        paths[path] = {"get": {"summary": what, "responses": {"200": answer} | errors}}
    paths["/v1/models/{model}"]["get"]["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    response_id = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    for path, method, what in (
        ("/v1/responses/{id}", "get", "A response that is kept."),
        ("/v1/responses/{id}", "delete", "Forget a response."),
        ("/v1/responses/{id}/cancel", "post", "Cancel a response that runs in the background."),
    ):
        answers = {"200": _content(what, {"type": "object"})} | errors
        paths.setdefault(path, {})[method] = {"summary": what, "parameters": response_id, "responses": answers}
    paths["/reset_prefix_cache"] = {
        "post": {
            "summary": "Forget cached prefixes; 409 while requests run.",
            "responses": {"200": _content("Done.", {"type": "object"})} | errors,
        }
    }
    paths["/sleep"] = {
        "post": {
            "summary": "Give the KV cache's memory back (level 1), and the weights' (2); 409 while requests run.",
            "parameters": [{"name": "level", "in": "query", "schema": {"type": "integer", "enum": [1, 2]}}],
            "responses": {"200": _content("Done.", {"type": "object"})} | errors,
        }
    }
    paths["/wake_up"] = {
        "post": {
            "summary": "Take the memory again.",
            "responses": {"200": _content("Done.", {"type": "object"})} | errors,
        }
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "jpaged", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _content(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
