"""Lines of OpenAI batch files: requests in, responses out, with the server's own schemas and answers.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 50}}
    {"id": ..., "custom_id": "a", "response": {"status_code": 200, "request_id": ..., "body": {...}}, "error": null}

A request that cannot be served is answered like any other, with the status code and error object that the server would
send; one whose line is no request at all has "response": null and says in "error" why.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from jpaged.api.errors import InvalidPromptError, JPagedError, UnsupportedParameterError, shown
from jpaged.api.outputs import RequestOutput
from jpaged.api.pooling_params import PoolingParams
from jpaged.api.sampling_params import SamplingParams
from jpaged.frontend.embedding_config import EmbeddingConfig
from jpaged.frontend.inputs import Params, ProcessedInput, Prompt, as_prompt_list
from jpaged.frontend.reranking import Reranker
from jpaged.serving import embeddings
from jpaged.serving.answers import AnswerContext, answer_to
from jpaged.serving.chat_template import template_arguments
from jpaged.serving.constraints import Constraint
from jpaged.serving.embedding_protocol import EmbeddingRequest
from jpaged.serving.embeddings import PoolingBody
from jpaged.serving.errors import ApiError, api_error, decoding_error
from jpaged.serving.protocol import ChatCompletionRequest, CompletionRequest, refuse_unsupported
from jpaged.serving.sampling import InWordsOf, sampling_of
from jpaged.serving.turns import Reading, Turn, reading_of, turn_of
from jpaged.text.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

Body = CompletionRequest | ChatCompletionRequest | PoolingBody

_KINDS: dict[str, type[Body]] = {
    COMPLETIONS: CompletionRequest,
    CHAT: ChatCompletionRequest,
    **{path: kind for kind, paths in embeddings.PATHS.items() for path in paths},
}

_SERVER_ONLY = ("stream", "stream_options", "request_id", "priority", "truncate_prompt_tokens", "truncation_side")
"""Fields that the server takes and a batch refuses: nobody waits for a batch, and custom_id names the answer."""
_IDLE = {"stream": False, "priority": 0}
"""Values of these fields that ask for nothing, and are taken."""


@dataclass(frozen=True)
class BatchRequest:
    """A line's request: one prompt, or several for completions, embeddings and scores. params are the same for all.

    reading, constraint: of a chat that has tools or reasoning. reranker: what judges the prompts, which are pairs.
    """

    custom_id: str
    body: Body
    prompts: list[Prompt]
    params: Params
    reading: Reading | None = None
    constraint: Constraint | None = None
    reranker: Reranker | None = None


class BadLine(Exception):
    """The line is not a request. The message says why."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


class BadRequest(Exception):
    """A request that cannot be served; `response` is the line that says so."""

    def __init__(self, custom_id: str, error: Exception, kind: type[Body]) -> None:
        super().__init__(str(error))
        prompt_field = "messages" if kind is ChatCompletionRequest else embeddings.PROMPT_FIELDS.get(kind, "prompt")
        answer = api_error(error, kind.__struct_fields__, prompt_field)
        self.response = _line(custom_id, answer.status, answer.body())


def parse_request(
    line: Any,
    tokenizer: Tokenizer,
    defaults: SamplingParams,
    embedding: EmbeddingConfig | None = None,
    reranker: Reranker | None = None,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> BatchRequest:
    """Parses a line. defaults: for sampling fields that the body leaves out. embedding: how the model embeds. reranker:
    what judges pairs of texts, instead of their embeddings. tool_parser, reasoning_parser: as of `AppOptions`.

    Raises:
        BadLine: it is no request. BadRequest: its body asks for what cannot be done.
    """
    if not isinstance(line, Mapping):
        raise BadLine("the line must be an object with custom_id, method, url and body.")
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise BadLine(f"custom_id must be a non-empty string, got {shown(custom_id)}.")
    if line.get("method", "POST") != "POST":
        raise BadLine(f'method must be "POST", got {shown(line["method"])}.', custom_id)
    url, given = line.get("url"), line.get("body")
    kind = _KINDS.get(url) if isinstance(url, str) else None
    if kind is None:
        raise BadLine(f"url must be one of {', '.join(_KINDS)}, got {shown(url)}.", custom_id)
    if not isinstance(given, Mapping):
        raise BadLine(f"body must be an object, got {type(given).__name__}.", custom_id)
    try:
        try:
            msgspec.json.encode(given)  # a lone surrogate, which JSON can spell, could not be told of in an answer
            body = msgspec.convert(given, kind)
        except UnicodeEncodeError as error:
            raise ApiError(400, "The body holds a lone surrogate, which is no text; remove it.") from error
        except msgspec.ValidationError as error:
            raise decoding_error(error) from error
        _check(body)
        if isinstance(body, PoolingBody):
            return _to_embed(custom_id, body, tokenizer, embedding or EmbeddingConfig(), reranker)
        if isinstance(body, ChatCompletionRequest):
            return _to_chat(
                custom_id, body, tokenizer, defaults, turn_of(body, tokenizer, tool_parser, reasoning_parser)
            )
        return _to_complete(custom_id, body, tokenizer, defaults)
    except (ApiError, JPagedError) as error:
        raise BadRequest(custom_id, error, kind) from error


def _check(body: Body) -> None:
    refuse_unsupported(body)
    for name in _SERVER_ONLY:
        value = getattr(body, name, None)
        if value is not None and (name not in _IDLE or value != _IDLE[name]):
            raise UnsupportedParameterError(f"{name} is not supported in a batch; leave it out.")


def _to_embed(
    custom_id: str, body: PoolingBody, tokenizer: Tokenizer, config: EmbeddingConfig, reranker: Reranker | None
) -> BatchRequest:
    prompts: list[Prompt]
    if reranker is not None and not isinstance(body, EmbeddingRequest):
        prompts = embeddings.judgements(body, reranker)
        return BatchRequest(custom_id, body, prompts, reranker.params(), reranker=reranker)
    conversation = embeddings.conversation_of(body)
    if conversation is None:
        prompts = _with_special(body, embeddings.prompts_of(body), tokenizer)
    else:
        turn = turn_of(conversation, tokenizer)
        prompt = tokenizer.chat_prompt(turn.messages, **template_arguments(conversation, turn, tokenizer))
        prompts = [tokenizer.encode_prompt(prompt)]
    return BatchRequest(custom_id, body, prompts, embeddings.params_of(body, config))


def _with_special(body: CompletionRequest | PoolingBody, prompts: list[Prompt], tokenizer: Tokenizer) -> list[Prompt]:
    """Texts as tokens where the request wants no special ones."""
    if body.add_special_tokens is not False:
        return prompts
    return [tokenizer.encode(one, add_special_tokens=False) if isinstance(one, str) else one for one in prompts]


def _to_chat(
    custom_id: str, body: ChatCompletionRequest, tokenizer: Tokenizer, defaults: SamplingParams, turn: Turn
) -> BatchRequest:
    params = sampling_of(body, defaults)
    prompt = tokenizer.chat_prompt(turn.messages, **template_arguments(body, turn, tokenizer))
    prompts: list[Prompt] = [tokenizer.encode_prompt(prompt)]
    if turn.is_plain:
        return BatchRequest(custom_id, body, prompts, params)
    reading = reading_of(turn, body, prompt.text)
    constraint = turn.constraint(body, reading.reasons, tokenizer)
    with InWordsOf(body, constraint):
        params = turn.applied(params, constraint, tokenizer)
    return BatchRequest(custom_id, body, prompts, params, reading, constraint)


def _to_complete(
    custom_id: str, body: CompletionRequest, tokenizer: Tokenizer, defaults: SamplingParams
) -> BatchRequest:
    params = sampling_of(body, defaults)
    prompts = as_prompt_list(body.prompt)
    if not prompts:
        raise InvalidPromptError("prompt is an empty list; give at least one prompt.")
    return BatchRequest(custom_id, body, _with_special(body, prompts, tokenizer), params)


def response_line(
    request: BatchRequest,
    model: str,
    outputs: Sequence[RequestOutput],
    tokenizer: Tokenizer,
    scores: Sequence[float] | None = None,
) -> dict[str, Any]:
    """The line of a request whose prompts have all been answered. scores: a reranker's."""
    body, name = request.body, uuid.uuid4().hex
    if isinstance(body, PoolingBody):
        own_id = f"{embeddings.ID_PREFIXES[type(body)]}-{name}"
        found = embeddings.answer(body, own_id, body.model or model, outputs, scores)
        return _line(request.custom_id, 200, msgspec.json.encode(found))
    prompts = [ProcessedInput(output.prompt, output.prompt_token_ids, ()) for output in outputs]
    kind = "chatcmpl" if isinstance(body, ChatCompletionRequest) else "cmpl"
    assert not isinstance(request.params, PoolingParams)  # which are of embeddings
    context = AnswerContext(
        f"{kind}-{name}",
        body.model or model,
        prompts,
        tokenizer,
        request.reading,
        skips_special_tokens=request.params.skip_special_tokens,
    )
    answer = answer_to(body, context)
    return _line(request.custom_id, 200, answer.whole(outputs))


def bad_line(error: BadLine) -> dict[str, Any]:
    """The answer to a line that is not a request."""
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": error.custom_id,
        "response": None,
        "error": {"code": "invalid_request", "message": str(error)},
    }


def _line(custom_id: str, status: int, body: bytes) -> dict[str, Any]:
    name = uuid.uuid4().hex
    response = {"status_code": status, "request_id": name, "body": json.loads(body)}
    return {"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": None}
