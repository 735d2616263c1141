"""Answers to requests for embeddings, scores and rankings, made of the outputs of their prompts."""

import base64
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from jpaged.api.errors import InvalidParameterError
from jpaged.api.outputs import RequestOutput
from jpaged.api.pooling_params import PoolingParams
from jpaged.frontend.embedding_config import EmbeddingConfig
from jpaged.frontend.inputs import Prompt, as_prompt_list
from jpaged.frontend.reranking import Reranker
from jpaged.serving.embedding_protocol import (
    Document,
    Embedding,
    EmbeddingRequest,
    EmbeddingResponse,
    RerankRequest,
    RerankResponse,
    RerankResult,
    Score,
    ScoreRequest,
    ScoreResponse,
    pairs_of,
)
from jpaged.serving.errors import ApiError
from jpaged.serving.protocol import PromptTokensDetails, TokenizeRequest, Usage

PoolingBody = EmbeddingRequest | ScoreRequest | RerankRequest
PoolingResponse = EmbeddingResponse | ScoreResponse | RerankResponse

PATHS: dict[type[PoolingBody], tuple[str, ...]] = {
    EmbeddingRequest: ("/v1/embeddings",),
    ScoreRequest: ("/v1/score", "/score"),
    RerankRequest: ("/v1/rerank", "/v2/rerank", "/rerank"),
}

ID_PREFIXES: dict[type[PoolingBody], str] = {EmbeddingRequest: "embd", ScoreRequest: "score", RerankRequest: "rerank"}
"""How answers' ids begin."""

PROMPT_FIELDS: dict[type, str] = {EmbeddingRequest: "input", ScoreRequest: "text_2", RerankRequest: "documents"}
"""The field of each kind of request that holds its prompts."""


def prompts_of(body: PoolingBody) -> list[Prompt]:
    """The prompts to embed, in the order in which `answer` takes their outputs. Not of a conversation.

    Raises:
        ApiError, InvalidPromptError: there are none, or another number than the request needs.
    """
    if isinstance(body, EmbeddingRequest):
        if body.input is None:
            raise ApiError(400, "input is missing; give prompts, or messages.", param="input")
        prompts = as_prompt_list(body.input)
        if not prompts:
            raise ApiError(400, "input is an empty list; give at least one.", param="input")
        return prompts
    if isinstance(body, RerankRequest):
        if body.top_n is not None and body.top_n < 1:
            raise InvalidParameterError(f"top_n must be at least 1, got {body.top_n}.")
        return [body.query, *_texts(body)]
    pairs = pairs_of(body)
    if pairs is None:
        raise ApiError(400, "text_1 and text_2 are needed, or queries and documents, and not both.", param="text_1")
    first, second = pairs
    if not second or len(first) not in (1, len(second)):
        raise ApiError(
            400, f"text_1 has {len(first)} texts for {len(second)} of text_2; give one or as many.", param="text_1"
        )
    return [*first, *second]


def conversation_of(body: PoolingBody) -> TokenizeRequest | None:
    """The conversation to embed; None for other prompts.

    Raises:
        ApiError: there are prompts as well.
    """
    conversation = body.conversation if isinstance(body, EmbeddingRequest) else None
    if conversation is not None and isinstance(body, EmbeddingRequest) and body.input is not None:
        raise ApiError(400, "messages and input are both given; leave one of them out.", param="messages")
    return conversation


def params_of(body: PoolingBody, config: EmbeddingConfig) -> PoolingParams:
    """How to pool. Raises ApiError, InvalidParameterError: fields contradict each other, or the model cannot so."""
    if isinstance(body, EmbeddingRequest):
        normalize = body.use_activation if body.normalize is None else body.normalize
        if body.use_activation not in (None, normalize):
            raise ApiError(400, "use_activation contradicts normalize; leave it out.", param="use_activation")
        return config.params(dimensions=body.dimensions, normalize=normalize)
    if body.instruction is not None:
        raise InvalidParameterError("instruction is for rerankers; start with --reranker.")
    return config.params(normalize=True)


def text_pairs(body: ScoreRequest | RerankRequest) -> list[tuple[str, str]]:
    """Queries and documents. Of a request that `prompts_of` takes."""
    if isinstance(body, RerankRequest):
        return [(body.query, text) for text in _texts(body)]
    first, second = pairs_of(body) or ([], [])
    return list(zip(first * (len(second) // len(first)), second, strict=True))


def judgements(body: ScoreRequest | RerankRequest, reranker: Reranker) -> list[Prompt]:
    """The prompts that ask a reranker.

    Raises:
        ApiError: as `prompts_of`; or a field is not for rerankers.
    """
    for name in ("truncate_prompt_tokens", "add_special_tokens"):
        if getattr(body, name) is not None:
            raise ApiError(400, f"{name} is not supported with a reranker; leave it out.", param=name)
    prompts_of(body)
    return [reranker.prompt(query, document, body.instruction) for query, document in text_pairs(body)]


def answer(
    body: PoolingBody,
    request_id: str,
    model: str,
    outputs: Sequence[RequestOutput],
    scores: Sequence[float] | None = None,
) -> PoolingResponse:
    """The answer. outputs: of the prompts, which have their embeddings. scores: of the pairs, where a reranker has made
    them; None: the cosines of the embeddings.
    """
    vectors = [output.embedding for output in outputs if output.embedding is not None]
    created, usage = int(time.time()), _usage(outputs)  # noqa: TID251  # a date
    if isinstance(body, EmbeddingRequest):
        data = [Embedding(i, _written(vector, body.encoding_format)) for i, vector in enumerate(vectors)]
        return EmbeddingResponse(request_id, created, model, data, usage)
    scores = _cosines(body, vectors) if scores is None else scores
    if isinstance(body, RerankRequest):
        return RerankResponse(request_id, model, _ranked(body, scores), usage)
    return ScoreResponse(request_id, created, model, [Score(i, score) for i, score in enumerate(scores)], usage)


def _cosines(body: ScoreRequest | RerankRequest, vectors: Sequence[np.ndarray]) -> list[float]:
    """Of the pairs. vectors: of first texts, of length 1, and then of second ones."""
    num_pairs = len(text_pairs(body))
    num_firsts = len(vectors) - num_pairs
    firsts = [vectors[i % num_firsts] for i in range(num_pairs)]
    return [float(a @ b) for a, b in zip(firsts, vectors[num_firsts:], strict=True)]


def _ranked(body: RerankRequest, scores: Sequence[float]) -> list[RerankResult]:
    """Documents best first; of equals the first first."""
    texts = _texts(body)
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
    results = [RerankResult(i, scores[i]) for i in order]
    if body.return_documents is not False:
        for result in results:
            result.document = Document(texts[result.index])
    return results


def _texts(body: RerankRequest) -> list[str]:
    return [one if isinstance(one, str) else one.text for one in body.documents]


def _written(vector: np.ndarray, encoding: str | None) -> msgspec.Raw | str:
    """One by one: others get their turn in between."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return msgspec.Raw(msgspec.json.encode(vector.tolist()))


def _usage(outputs: Sequence[RequestOutput]) -> Usage:
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return Usage(tokens, 0, tokens, PromptTokensDetails(sum(output.num_cached_tokens for output in outputs)))
