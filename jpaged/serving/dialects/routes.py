"""The routes of Anthropic's Messages API and of OpenAI's Responses API."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jpaged.api.errors import InvalidPromptError, JPagedError
from jpaged.processes.async_llm_engine import AsyncLLMEngine
from jpaged.serving.admission import Admission, client_of
from jpaged.serving.dialects import messages, responses
from jpaged.serving.dialects.background import BackgroundResponses, RecordedStream
from jpaged.serving.dialects.messages import MessagesAnswer, MessagesRequest
from jpaged.serving.dialects.responses import ResponsesRequest
from jpaged.serving.dialects.responses_answer import ResponsesAnswer
from jpaged.serving.errors import ApiError, api_error
from jpaged.serving.http import guarded, json_response, unless_disconnected
from jpaged.serving.jobs import JobMaker, MakeAnswer
from jpaged.serving.middleware import trace_headers
from jpaged.serving.openai_routes import decode_body
from jpaged.serving.options import AppOptions
from jpaged.serving.protocol import ChatCompletionRequest, json_decoder
from jpaged.serving.streams import JobStream, all_outputs

_T = TypeVar("_T", bound=msgspec.Struct)

_DIGITS = 12
"""The most that an event's number may have; no answer has so many events."""


def dialect_routes(
    engine: AsyncLLMEngine, options: AppOptions, admission: Admission, background: BackgroundResponses
) -> list[Route]:
    """/v1/messages, /v1/messages/count_tokens, /v1/responses, and what is done with a response that runs or is kept."""
    server = _Handlers(engine, options, admission, background)
    return [
        Route("/v1/messages", guarded(server.messages, messages.error_body), methods=["POST"]),
        Route("/v1/messages/count_tokens", guarded(server.count_tokens, messages.error_body), methods=["POST"]),
        Route("/v1/responses", guarded(server.responses, responses.error_body), methods=["POST"]),
        Route("/v1/responses/input_tokens", guarded(server.count_input_tokens, responses.error_body), methods=["POST"]),
        Route("/v1/responses/{id}", guarded(server.kept_response), methods=["GET"]),
        Route("/v1/responses/{id}", guarded(server.delete_response), methods=["DELETE"]),
        Route("/v1/responses/{id}/cancel", guarded(server.cancel_response), methods=["POST"]),
    ]


class _Handlers:
    def __init__(
        self, engine: AsyncLLMEngine, options: AppOptions, admission: Admission, background: BackgroundResponses
    ) -> None:
        self._background = background
        self._engine = engine
        self._options = options
        self._jobs = JobMaker(engine, options, admission)
        self._messages = json_decoder(MessagesRequest)
        self._responses = json_decoder(ResponsesRequest)
        self._store = background.store

    async def messages(self, request: Request) -> Response:
        body = await self._decode(request, self._messages)
        chat = await self._engine.in_thread(lambda: messages.chat_of(body))
        return await self._answer(request, body, chat, "messages", MessagesAnswer)

    async def count_tokens(self, request: Request) -> Response:
        body = await self._decode(request, self._messages)
        self._jobs.check_model(body.model)
        try:
            chat = await self._engine.in_thread(lambda: messages.chat_of(body, counts=True))
            _, tokens, _ = await self._jobs.chat_prompt(chat)
        except InvalidPromptError as error:
            raise api_error(error, (), "messages") from error
        return json_response({"input_tokens": len(tokens)})

    async def count_input_tokens(self, request: Request) -> Response:
        body = await self._decode(request, self._responses)
        self._jobs.check_model(body.model)
        self._check_references(body)
        try:
            chat = await self._engine.in_thread(lambda: responses.chat_of(body, self._store))
            _, tokens, _ = await self._jobs.chat_prompt(chat)
        except InvalidPromptError as error:
            raise api_error(error, (), "input") from error
        return json_response({"object": "response.input_tokens", "input_tokens": len(tokens)})

    async def responses(self, request: Request) -> Response:
        body = await self._decode(request, self._responses)
        self._check_references(body)
        if body.background:
            self._check_store("background", "background")

        def make_answer(chat: ChatCompletionRequest, context: Any) -> ResponsesAnswer:
            return ResponsesAnswer(chat, context, body, self._store)

        chat = await self._engine.in_thread(lambda: responses.chat_of(body, self._store))
        return await self._answer(request, body, chat, "input", make_answer)

    def _check_references(self, body: ResponsesRequest) -> None:
        """Raises ApiError if what a request refers to may be unknown here, or has not ended."""
        items = [] if isinstance(body.input, str) else body.input
        name = "input" if any(map(responses.refers, items)) else "previous_response_id"
        if name == "input" or body.previous_response_id is not None:
            said = "input: an item_reference" if name == "input" else name
            self._check_store(said, name, " Send the whole conversation as input.")
        if body.previous_response_id is not None and self._background.get(body.previous_response_id) is not None:
            raise ApiError(
                400,
                f"previous_response_id: {body.previous_response_id!r} has not ended; wait until it has.",
                param="previous_response_id",
            )

    async def kept_response(self, request: Request) -> Response:
        self._check_store("response_id", "response_id")
        response_id = request.path_params["id"]
        run = self._background.get(response_id)
        after = request.query_params.get("starting_after")
        if request.query_params.get("stream", "false").lower() != "true":
            if after is not None:
                raise ApiError(400, "starting_after needs stream=true.", param="starting_after")
            return json_response(self._store.response(response_id) if run is None else run.answer.message())
        record = self._store.record(response_id) if run is None else run.record
        if record is None:
            raise ApiError(
                400,
                "stream needs a response whose request had background: true and stream: true; leave it out.",
                param="stream",
            )
        if after is not None and not (after.isascii() and after.isdecimal() and len(after) <= _DIGITS):
            raise ApiError(400, "starting_after must be the sequence_number of an event.", param="starting_after")
        return RecordedStream(record, 0 if after is None else int(after) + 1)

    async def delete_response(self, request: Request) -> Response:
        self._check_store("response_id", "response_id")
        response_id = request.path_params["id"]
        run = self._background.get(response_id)
        if run is not None:
            await run.cancel()
        self._store.remove(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel_response(self, request: Request) -> Response:
        self._check_store("response_id", "response_id")
        response_id = request.path_params["id"]
        run = self._background.get(response_id)
        if run is not None:
            await run.cancel()
            return json_response(run.answer.message())  # the store may have had to give it up already
        response = self._store.response(response_id)
        if not response["background"]:
            raise ApiError(
                400,
                "Cannot cancel a synchronous response; close the connection of its request instead, while it runs.",
                param="response_id",
            )
        return json_response(response)

    def _check_store(self, said: str, param: str, instead: str = "") -> None:
        """Raises ApiError if another API process may have the response."""
        if self._engine.num_clients > 1:
            raise ApiError(
                400,
                f"{said} needs a server with one API process (--api-workers 1): others do not know the response."
                f"{instead}",
                param=param,
            )

    async def _decode(self, request: Request, decoder: msgspec.json.Decoder[_T]) -> _T:
        return await decode_body(self._engine, self._options, request, decoder)

    async def _answer(
        self,
        request: Request,
        body: msgspec.Struct,
        chat: ChatCompletionRequest,
        prompt_field: str,
        make_answer: MakeAnswer | Callable[..., Any],
    ) -> Response:
        try:
            client = client_of(request, self._options.api_keys)
            job = await self._jobs.chat(chat, client, make_answer, ends_whole=True)
            if self._engine.observers:
                job = replace(job, trace_headers=trace_headers(request))
            if isinstance(body, ResponsesRequest) and body.background:
                run = self._background.start(job, records=bool(body.stream))
                return json_response(run.answer.message()) if run.record is None else RecordedStream(run.record)
            if job.streams:
                return JobStream(self._engine, job)
            with contextlib.closing(job.ticket):
                outputs = await unless_disconnected(request.receive, all_outputs(self._engine, job))
        except JPagedError as error:
            raise api_error(error, body.__struct_fields__, prompt_field) from error
        if job.is_large:
            answer = await self._engine.in_thread(lambda: job.answer.whole(outputs))
        else:
            answer = job.answer.whole(outputs)
        return Response(answer, media_type="application/json")
