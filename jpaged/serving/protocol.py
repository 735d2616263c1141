"""The fields of OpenAI-compatible requests and answers. Names and meanings are OpenAI's; extensions are vLLM's.

A field that is not here is ignored, as clients expect. One that is typed `Unsupported` is known and refused by name,
unless its value asks for nothing (`_ASKS_FOR_NOTHING`). None, JSON's null, means "not given".

Requests are msgspec structs: decoding and checking a chat request takes about 3 us, a chunk of a stream is encoded in
about 1 us.
"""

from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from jpaged.serving.errors import ApiError

_T = TypeVar("_T")

Unsupported = Any
"""The type of fields that are refused."""

Integer = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
"""The type of counts. Its bounds are far above anything that can be served."""

Message = Annotated[
    dict[str, Any],
    Meta(
        description="One message of a conversation, as the model's chat template takes it.",
        extra_json_schema={
            "properties": {
                "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]},
                "content": {"type": "string"},
                "tool_calls": {"type": "array", "items": {"type": "object"}},
                "tool_call_id": {"type": "string"},
                "reasoning_content": {"type": "string"},
            },
            "required": ["role", "content"],
        },
    ),
]

Prompt = Annotated[
    str | list[Any],
    Meta(
        description="A text, a list of texts, token ids, or a list of lists of token ids.",
        extra_json_schema={
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
                {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
                },
            ]
        },
    ),
]


LogitBias = Annotated[dict[str, Any], Meta(extra_json_schema={"additionalProperties": {"type": "number"}})]
"""Token ids and what is added to their logits. Any: numbers of a declared type go around the hook of `json_decoder`."""


def json_decoder(kind: type[_T]) -> msgspec.json.Decoder[_T]:
    """A decoder of requests. A number with a decimal exponent takes msgspec up to 9 us, in which nobody else runs; this
    one calls Python for each that may stand for anything, and Python lets others in.
    """
    return msgspec.json.Decoder(kind, float_hook=_number)


def _number(text: str) -> float:
    return float(text)


class StreamOptions(Struct):
    """include_usage: a last chunk with the usage. continuous_usage_stats: the usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Struct, kw_only=True):
    """What completions and chats have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    n: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Integer] | None = None
    ignore_eos: bool | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: list[Integer] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Integer | None = None

    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Integer | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None

    best_of: Integer | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    # SGLang's
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | None = None
    stop_regex: Unsupported = None
    no_stop_trim: Unsupported = None
    lora_path: Unsupported = None
    custom_logit_processor: Unsupported = None
    custom_params: Unsupported = None
    return_hidden_states: Unsupported = None
    return_prompt_token_ids: Unsupported = None

    logprob_token_ids: Unsupported = None
    logits_processors: Unsupported = None
    spaces_between_special_tokens: Unsupported = None
    kv_transfer_params: Unsupported = None
    vllm_xargs: Unsupported = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Integer | None = None

    suffix: Unsupported = None
    prompt_embeds: Unsupported = None
    thinking_token_budget: Unsupported = None


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    thinking_token_budget: Integer | None = None
    service_tier: str | None = None
    documents: list[dict[str, Any]] | None = None
    echo: bool | None = None

    functions: Unsupported = None
    function_call: Unsupported = None
    modalities: Unsupported = None
    audio: Unsupported = None
    prediction: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None
    store: Unsupported = None
    mm_processor_kwargs: Unsupported = None
    stream_reasoning: Unsupported = None


class TokenizeRequest(Struct, kw_only=True):
    """POST /tokenize: a prompt, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None

    truncate_prompt_tokens: Unsupported = None
    truncation_side: Unsupported = None
    mm_processor_kwargs: Unsupported = None


class DetokenizeRequest(Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Integer]


_ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "store": (False,),
    "verbosity": ("medium",),
    "stream_reasoning": (True,),
    "thinking_token_budget": (-1,),
    **dict.fromkeys(("no_stop_trim", "return_hidden_states", "return_prompt_token_ids"), (False,)),
}

_INSTEAD = {
    "instruct": "instruction",
    "no_stop_trim": "include_stop_str_in_output",
    "return_prompt_token_ids": "return_token_ids",
    "stop_regex": "stop, or a constraint on the text",
}
"""What does the same as a field that is not supported."""


def refuse_unsupported(request: Struct) -> None:
    """Raises ApiError for the first field that is known, not supported, and asks for something."""
    for name in _unsupported_fields(type(request)):
        value = getattr(request, name)
        if value is None or value == [] or value == {} or value in _ASKS_FOR_NOTHING.get(name, ()):
            continue
        instead = f"use {_INSTEAD[name]}" if name in _INSTEAD else "leave it out"
        raise ApiError(400, f"{name} is not supported; {instead}.", param=name, code="unsupported_parameter")


@cache
def _unsupported_fields(kind: type[Struct]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(kind) if field.type is Any)


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    """Of the tokens that were generated, those of the reasoning, without its marks."""

    reasoning_tokens: int


class Usage(Struct):
    """Tokens of a request, of all its prompts and choices together.

    completion_tokens_details: of chats with a model whose reasoning the server knows.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class CompletionLogprobs(Struct):
    """For each token: its text, its log-probability, the most likely tokens by text, and the offset of its text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(Struct):
    """The answer to a completion, and each chunk of a stream of it."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatLogprob]
    refusal: None = None


class CalledFunction(Struct):
    """name: with the first news of a call. arguments: JSON, or more of it."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCall(Struct):
    """A call, or news of it: then with its index, and id and type with the first."""

    function: CalledFunction
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    index: int | UnsetType = UNSET


class ChatMessage(Struct):
    """content: null where there are only calls. reasoning: the same as reasoning_content."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatResponse(Struct):
    """The answer to a chat. service_tier: if the request names one; there is only "default"."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    service_tier: str | UnsetType = UNSET
    object: Literal["chat.completion"] = "chat.completion"


class ChatDelta(Struct):
    """What is new in a message. Without new reasoning, reasoning_content is null, since clients of SGLang read it from
    every delta; reasoning is left out, since clients of vLLM join it wherever it is.
    """

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | None = None
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatChunk(Struct):
    """A chunk of a chat's stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | None = None
    service_tier: str | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class ModelCard(Struct):
    id: str
    created: int
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "jpaged"


class ModelList(Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenizeResponse(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(Struct):
    prompt: str


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Struct):
    """The body of every answer with a status of 400 or more, and the last event of a stream that failed."""

    error: ErrorDetail
