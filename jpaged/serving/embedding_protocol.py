"""The fields of requests for embeddings, scores and rankings, and of their answers.

Embeddings are OpenAI's, scores vLLM's, rankings Jina's and Cohere's. As in `protocol.py`, unknown fields are ignored
and those typed `Unsupported` are refused by name.
"""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from jpaged.serving.protocol import Integer, Message, Prompt, TokenizeRequest, Unsupported, Usage

Text = Annotated[str, Meta(min_length=1)]


class PoolingRequest(Struct, kw_only=True):
    """What all of them have in common."""

    model: str | None = None
    user: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Integer | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None

    mm_processor_kwargs: Unsupported = None
    activation: Unsupported = None
    softmax: Unsupported = None


class EmbeddingRequest(PoolingRequest, kw_only=True):
    """POST /v1/embeddings: prompts, or a conversation, which is embedded as the chat template writes it.

    use_activation: vLLM's other name of `normalize`.
    """

    input: Prompt | None = None
    messages: list[Message] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Integer | None = None
    normalize: bool | None = None
    use_activation: bool | None = None

    @property
    def conversation(self) -> TokenizeRequest | None:
        """Its messages, and how they are rendered: without the beginning of an answer unless that is asked for."""
        if self.messages is None:
            return None
        return TokenizeRequest(
            messages=self.messages,
            add_special_tokens=self.add_special_tokens,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt is True,
            continue_final_message=self.continue_final_message,
        )

    embed_dtype: Unsupported = None
    endianness: Unsupported = None
    input_type: Unsupported = None


class ScoreRequest(PoolingRequest, kw_only=True):
    """POST /v1/score: one text for all of the others, or as many; under either pair of names.

    instruction: for rerankers: what makes a document relevant.
    """

    instruction: str | None = None
    text_1: Text | list[Text] | None = None
    text_2: Text | list[Text] | None = None
    queries: Text | list[Text] | None = None
    documents: Text | list[Text] | None = None


class Document(Struct):
    """A document to rank."""

    text: Text


class RerankRequest(PoolingRequest, kw_only=True):
    """POST /v1/rerank. instruction: as of `ScoreRequest`."""

    instruction: str | None = None
    query: Text
    documents: Annotated[list[Text | Document], Meta(min_length=1)]
    top_n: Integer | None = None
    return_documents: bool | None = None

    instruct: Unsupported = None
    rank_fields: Unsupported = None
    max_chunks_per_doc: Unsupported = None
    max_tokens_per_doc: Unsupported = None


class Embedding(Struct):
    """embedding: the numbers as JSON, or the base64 of little-endian float32."""

    index: int
    embedding: Raw | str
    object: Literal["embedding"] = "embedding"


class EmbeddingResponse(Struct):
    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: Usage
    object: Literal["list"] = "list"


class Score(Struct):
    """score: the cosine of the two texts' embeddings, or a reranker's probability of "yes"."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreResponse(Struct):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: Usage
    object: Literal["list"] = "list"


class RerankResult(Struct):
    """index: of the document in the request."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class RerankResponse(Struct):
    """results: best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: Usage


def pairs_of(body: ScoreRequest) -> tuple[list[str], list[str]] | None:
    """First and second texts, as many of each, or one first text; None unless one pair of names has both."""
    named: list[tuple[Any, Any]] = [(body.text_1, body.text_2), (body.queries, body.documents)]
    given = [pair for pair in named if pair != (None, None)]
    if len(given) != 1 or None in given[0]:
        return None
    first, second = ([one] if isinstance(one, str) else list(one) for one in given[0])
    return first, second
