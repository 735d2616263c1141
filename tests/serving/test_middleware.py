"""What requests pass before their routes, in front of handlers that do not end."""

import asyncio
import json

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from jpaged.serving.app import _error_body
from jpaged.serving.middleware import LastWords, RequestIds, RootPath


async def never(request: Request) -> Response:
    request.scope["begun"].set()
    await asyncio.Event().wait()
    raise AssertionError


async def never_ends(request: Request) -> Response:
    async def body():
        yield b"begun"
        request.scope["begun"].set()
        await asyncio.Event().wait()

    return StreamingResponse(body())


@pytest.mark.parametrize(("path", "status"), [("/never", 503), ("/v1/messages", 503), ("/never-ends", 200)])
def test_a_request_that_the_end_of_the_server_cuts_off_is_told_if_its_answer_has_not_begun(path, status):
    routes = [Route("/never", never), Route("/v1/messages", never), Route("/never-ends", never_ends)]
    app = Starlette(routes=routes, middleware=[Middleware(RequestIds), Middleware(LastWords, error_body=_error_body)])
    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b""}
    sent = []

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    async def run():
        scope["begun"] = asyncio.Event()
        task = asyncio.ensure_future(app(scope, receive, send))
        await scope["begun"].wait()
        task.cancel()
        await task  # uvicorn logs what comes out of it as an error

    asyncio.run(asyncio.wait_for(run(), 60))
    assert sent[0]["status"] == status
    assert b"x-request-id" in dict(sent[0]["headers"])
    if status == 503:
        told = json.loads(sent[1]["body"])
        assert told["error"]["message"] == "The server is about to end."
        if path == "/v1/messages":  # as Anthropic's clients expect it
            assert (told["type"], told["error"]["type"]) == ("error", "overloaded_error")
        else:
            assert told.keys() == {"error"}
    else:
        assert [message.get("body") for message in sent[1:]] == [b"begun"]


@pytest.mark.parametrize("path", ["/v1/models", "/llm/v1/models"])
@pytest.mark.parametrize("root", ["", "/llm"])
def test_a_proxy_may_leave_its_path_on_requests_or_take_it_off(path, root):
    async def models(request: Request) -> Response:
        return Response("models")

    app = Starlette(routes=[Route("/v1/models", models)], middleware=[Middleware(RootPath)])
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "headers": [], "query_string": b"", "root_path": root}
    asyncio.run(app({**scope, "path": root + path}, None, send))  # as uvicorn puts it
    assert sent[0]["status"] == (200 if root or path == "/v1/models" else 404)
