"""The HTTP application: its routes, and the middleware in front of them.

    client -- RequestIds -- RootPath -- LastWords -- Hosts -- Origins -- CORS -- ApiKeys --+-- page.py
                                                                                           +-- openai_routes.py
                                                                                           +-- dialects/routes.py
                                                                                           +-- embedding_routes.py
                                                                                           +-- operational_routes.py

Hosts, CORS and ApiKeys are there when hosts and origins are listed and keys are given.
"""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from jpaged.api.errors import InvalidParameterError
from jpaged.processes.async_llm_engine import AsyncLLMEngine
from jpaged.processes.request_log import RequestLog
from jpaged.processes.traces import Traces
from jpaged.serving.admission import Admission, ClientCounts
from jpaged.serving.browsers import Hosts, Origins
from jpaged.serving.dialects import messages
from jpaged.serving.dialects.background import BackgroundResponses
from jpaged.serving.dialects.response_store import ResponseStore
from jpaged.serving.dialects.routes import dialect_routes
from jpaged.serving.embedding_routes import embedding_routes
from jpaged.serving.errors import ApiError
from jpaged.serving.http import error_response
from jpaged.serving.live import LiveView
from jpaged.serving.middleware import ApiKeys, LastWords, RequestIds, RootPath, is_anthropic
from jpaged.serving.openai_routes import openai_routes
from jpaged.serving.operational_routes import operational_routes
from jpaged.serving.options import AppOptions
from jpaged.serving.page import page_routes


def build_app(engine: AsyncLLMEngine, options: AppOptions, clients: ClientCounts | None = None) -> Starlette:
    """The ASGI application that serves an engine, which gets the observers and the chat template that the options ask
    for. `app.state.live.close()` ends the streams that never end, and `await app.state.background.close()` the
    responses that run in the background.

    clients: counts that several applications share.

    Raises:
        InvalidParameterError: there is a chat template, and no tokenizer for what it renders.
    """
    if options.chat_template is not None:
        if engine.tokenizer is None:
            raise InvalidParameterError("chat_template needs a tokenizer, but the engine was started without one.")
        engine.tokenizer.use_chat_template(options.chat_template)
    if options.otlp_traces_endpoint is not None:  # before the log, which names a request's trace
        engine.observers.append(Traces(options.otlp_traces_endpoint, options.served_model_names[0]))
    if options.log_requests:
        engine.observers.append(RequestLog(options.log_prompts, engine.tokenizer))
    admission = Admission(engine, options.limits, clients)
    live = LiveView(engine, options.limits.max_watchers)
    background = BackgroundResponses(engine, ResponseStore(options.limits.max_response_bytes))
    routes = [*openai_routes(engine, options, admission), *dialect_routes(engine, options, admission, background)]
    routes += embedding_routes(engine, options, admission)
    routes += [*operational_routes(engine, options, live), *page_routes()]
    middleware = [Middleware(RequestIds), Middleware(RootPath), Middleware(LastWords, error_body=_error_body)]
    if options.allowed_hosts is not None:
        middleware.append(Middleware(Hosts, allowed=options.allowed_hosts, error_body=_error_body))
    middleware.append(Middleware(Origins, allowed=options.allowed_origins, error_body=_error_body))
    if options.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(options.allowed_origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id"],
            )
        )
    if options.api_keys:
        middleware.append(Middleware(ApiKeys, keys=options.api_keys, error_body=_error_body))
    app = Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _http_error})
    app.state.live = live
    app.state.background = background
    return app


def _error_body(scope: Scope, error: ApiError) -> bytes:
    return messages.error_body(error) if is_anthropic(scope) else error.body()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}."
    answer = ApiError(error.status_code, message, headers=error.headers)
    return error_response(answer, _error_body(request.scope, answer))
