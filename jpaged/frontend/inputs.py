"""Prompts and the checks of a request's input. A request that passes them cannot fail for its input later."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeGuard, cast

import numpy as np

from jpaged.api.beam_search_params import BeamSearchParams
from jpaged.api.checks import is_integer, is_number
from jpaged.api.errors import InvalidParameterError, InvalidPromptError, UnsupportedParameterError, shown
from jpaged.api.pooling_params import PoolingParams
from jpaged.api.prompts import TextPrompt, TokensPrompt
from jpaged.api.sampling_params import RequestOutputKind, SamplingParams, check_token_ids
from jpaged.engine.limits import RequestLimits
from jpaged.engine.sequences.request import Request, checked_salt
from jpaged.frontend.embedding_config import EmbeddingConfig
from jpaged.text.grammars import GrammarCheck, GrammarTokenizer
from jpaged.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
"""One prompt: text, token ids, or either in a dict."""

Params = SamplingParams | BeamSearchParams | PoolingParams
"""What a request asks for: to sample, to search, or to pool hidden states."""

_SCORING = SamplingParams(temperature=0.0, max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY)
"""Parameters of score requests, which sample nothing."""

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")

Messages = Sequence[Mapping[str, Any]]
"""A conversation: {"role": ..., "content": ...} each."""


@dataclass(frozen=True, slots=True)
class ProcessedInput:
    """A request's input, checked. prompt: its text, None when it came as token ids. cache_salt: the prompt's own."""

    prompt: str | None
    prompt_token_ids: list[int]
    bad_words_token_ids: tuple[tuple[int, ...], ...]
    cache_salt: str | None = None

    def salt(self, beside: str | None) -> str | None:
        """The cache salt, which the prompt has or was given `beside` it.

        Raises:
            InvalidParameterError: it is no salt, or there are two.
        """
        beside = checked_salt(beside)
        if self.cache_salt is None or beside in (None, self.cache_salt):
            return self.cache_salt or beside
        raise InvalidParameterError(
            f"cache_salt={shown(beside)} is not the {shown(self.cache_salt)} that the prompt has; give one of them."
        )


class InputProcessor:
    """Turns prompts into token ids and refuses what the model or the engine can never serve.

    tokenizer: None when the engine was started without one; then only token ids are taken.
    vocab_size: of the model's embedding.
    limits: of the engine that the requests will run on; of several, the least.
    eos_token_ids: the model's end-of-sequence tokens, for `request`.
    embeddings: how the model embeds.

    Attributes:
        limits: as given; may be set anew, when prefixes were pinned say.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        limits: RequestLimits,
        eos_token_ids: Sequence[int] = (),
        embeddings: EmbeddingConfig | None = None,
    ) -> None:
        self.limits = limits
        self.embeddings = embeddings or EmbeddingConfig()
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = ends = tuple(eos_token_ids)
        self._grammars: GrammarCheck | None = None
        if tokenizer is not None:
            self._grammars = GrammarCheck(lambda: GrammarTokenizer.of(tokenizer, vocab_size, ends), vocab_size)

    def prepare_structured_outputs(self) -> None:
        """Starts what the first constrained request would wait for, in the background."""
        if self._grammars is not None:
            self._grammars.prepare()

    def takes_long(self, params: Params) -> bool:
        """Whether checking these parameters may take longer than tokenizing a prompt: their constraint is new."""
        constraint = params.structured_outputs if isinstance(params, SamplingParams) else None
        return constraint is not None and self._grammars is not None and not self._grammars.knows(constraint)

    def request(
        self,
        request_id: str,
        prompt: Prompt | ProcessedInput,
        params: Params,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
    ) -> tuple[Request, ProcessedInput]:
        """Checks all arguments of `LLMEngine.add_request`.

        prompt: also what `process` made of it, with these parameters.

        Returns: the request as a scheduler takes it, and its prompt.

        Raises:
            InvalidPromptError, InvalidParameterError, OutOfMemoryError: what is wrong is named.
        """
        request_id = _checked_id(request_id)
        if arrival_time is not None:
            if not is_number(arrival_time) or not abs(arrival_time) <= sys.float_info.max:
                raise InvalidParameterError(
                    f"arrival_time must be a finite number of seconds, got {shown(arrival_time)}."
                )
            arrival_time = float(arrival_time)
        _check_kind(params)
        checked = prompt if isinstance(prompt, ProcessedInput) else self.process(prompt, params)
        request = Request(
            request_id,
            checked.prompt_token_ids,
            copy(params) if isinstance(params, SamplingParams) else params.sampling_params(),
            eos_token_ids=self._eos_token_ids,
            bad_words_token_ids=checked.bad_words_token_ids,
            priority=priority,
            cache_salt=checked.salt(cache_salt),
            arrival_time=arrival_time,
            beam=params if isinstance(params, BeamSearchParams) else None,
            pooling=params if isinstance(params, PoolingParams) else None,
        )
        return request, checked

    def score_request(
        self,
        request_id: str,
        token_ids: Sequence[int] | np.ndarray,
        first_scored: int,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Request:
        """Checks all arguments of `LLMEngine.add_score_request`. Returns the request as a scheduler takes it."""
        request_id = _checked_id(request_id)
        tokens = self.check_scored(token_ids, first_scored)
        self.limits.max_len(len(tokens) - 1, _SCORING)
        return Request(
            request_id,
            tokens[:-1],
            _SCORING,
            priority=priority,
            cache_salt=cache_salt,
            score_targets=tokens[first_scored:],
        )

    def process(self, prompt: Prompt, params: Params) -> ProcessedInput:
        """Tokenizes and checks one prompt and its parameters.

        Raises:
            InvalidPromptError: of the wrong type, empty, too long, or with token ids outside the vocabulary.
            InvalidParameterError: parameters that name unknown tokens, need a tokenizer that is not there, have a
                constraint that cannot be used, or ask for more sequences than can run; or the prompt's cache_salt.
            OutOfMemoryError: the pool can never hold the prompt, or the beams.
        """
        _check_kind(params)
        if isinstance(params, BeamSearchParams) and params.beam_width > self._vocab_size:
            raise InvalidParameterError(
                f"beam_width={params.beam_width} exceeds the vocabulary of {self._vocab_size} tokens; lower it."
            )
        if isinstance(params, PoolingParams):
            self.embeddings.check(params)
        given = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
        if not isinstance(given, str) and _is_sequence(given) and len(given) >= self.limits.max_model_len:
            self.limits.max_len(len(given), params)  # refuses it before anything looks at each token
        text, token_ids = self._tokens_of(prompt)
        self._check_tokens(token_ids)
        self.limits.max_len(len(token_ids), params)
        sampling = params if isinstance(params, SamplingParams) else params.sampling_params()
        salt = checked_salt(prompt.get("cache_salt")) if isinstance(prompt, Mapping) else None
        return ProcessedInput(text, token_ids, self._check_parameters(sampling), salt)

    def check_scored(self, token_ids: Sequence[int] | np.ndarray, first_scored: int) -> np.ndarray:
        """Checks tokens to score, from index `first_scored` on; returns them as int32 [n].

        Raises:
            InvalidPromptError: too few or too many tokens, or some outside the vocabulary.
            InvalidParameterError: first_scored is not the index of a token that has one before it.
        """
        try:
            tokens = np.asarray(token_ids)
        except ValueError:  # a ragged list, or one nested beyond numpy's dimensions
            raise InvalidPromptError(f"token_ids must be a list of integers, got {_kind(token_ids)}.") from None
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise InvalidPromptError(f"token_ids must be a list of integers, got {_kind(token_ids)}.")
        if len(tokens) < 2:
            raise InvalidPromptError(
                f"token_ids must have at least two tokens, one to score and one before it; got {len(tokens)}."
            )
        if len(tokens) > self.limits.max_model_len:
            raise InvalidPromptError(
                f"token_ids has {len(tokens)} tokens; with max_model_len={self.limits.max_model_len} at most as many"
                f" can be scored at once. Use windows (jpaged.scoring) or raise max_model_len."
            )
        wrong = np.flatnonzero((tokens < 0) | (tokens >= self._vocab_size))
        if len(wrong):
            raise InvalidPromptError(
                f"token_ids[{wrong[0]}] is {tokens[wrong[0]]}, outside the vocabulary of {self._vocab_size} tokens "
                f"(0 to {self._vocab_size - 1})."
            )
        if not is_integer(first_scored):
            raise InvalidParameterError(f"first_scored must be an integer, got {shown(first_scored)}.")
        if not 1 <= first_scored < len(tokens):
            raise InvalidParameterError(f"first_scored must be from 1 to {len(tokens) - 1}, got {shown(first_scored)}.")
        return tokens.astype(np.int32)

    def _tokens_of(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self._tokenize(prompt)
        if isinstance(prompt, Mapping):
            return self._tokens_of_dict(prompt)
        if _is_sequence(prompt) or hasattr(prompt, "tolist"):
            return None, _integers(prompt)
        raise InvalidPromptError(f"A prompt must be a string, a list of token ids or a dict, got {_kind(prompt)}.")

    def _tokens_of_dict(self, prompt: Mapping[str, Any]) -> tuple[str | None, list[int]]:
        unknown = [key for key, value in prompt.items() if key not in _PROMPT_KEYS and value is not None]
        if unknown:
            raise InvalidPromptError(
                f"A prompt dict has {shown(unknown[0])}, which is not supported; it may have "
                f'"prompt", "prompt_token_ids" and "cache_salt".'
            )
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if text is not None and not isinstance(text, str):
            raise InvalidPromptError(f'"prompt" must be a string, got {_kind(text)}.')
        if token_ids is not None:
            return text, _integers(token_ids)  # the text is kept for the output; the token ids are what counts
        if text is None:
            raise InvalidPromptError(f'A prompt dict needs "prompt" or "prompt_token_ids", got keys {list(prompt)}.')
        return text, self._tokenize(text)

    def _tokenize(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise InvalidPromptError(
                "The prompt is text, but the engine was started with skip_tokenizer_init=True; pass "
                '{"prompt_token_ids": [...]} or start it with a tokenizer.'
            )
        if not text:
            raise InvalidPromptError("The prompt is empty; give at least one character.")
        return self._tokenizer.encode(text)

    def _check_tokens(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise InvalidPromptError("The prompt has no tokens; give at least one.")
        if not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            i = next(i for i, token in enumerate(token_ids) if not 0 <= token < self._vocab_size)
            raise InvalidPromptError(
                f"prompt_token_ids[{i}] is {shown(token_ids[i])}, outside the vocabulary of {self._vocab_size} tokens "
                f"(0 to {self._vocab_size - 1})."
            )

    def _check_parameters(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Checks what depends on the model; returns bad_words as token sequences."""
        for token in params.stop_token_ids or ():
            if token >= self._vocab_size:
                raise InvalidParameterError(
                    f"stop_token_ids names token {token}, but the vocabulary has {self._vocab_size} tokens."
                )
        if self._tokenizer is None:
            for name in ("stop", "bad_words", "structured_outputs"):
                if getattr(params, name):
                    raise InvalidParameterError(
                        f"{name} needs a tokenizer, but the engine was started with skip_tokenizer_init=True."
                    )
        bad_words: tuple[tuple[int, ...], ...] = ()
        if params.bad_words and self._tokenizer is not None:
            bad_words = tuple(tuple(word) for word in self._tokenizer.encode_bad_words(params.bad_words))
        check_token_ids(params, self._vocab_size, bad_words)
        if params.structured_outputs is not None and self._grammars is not None:
            self._grammars.check(params.structured_outputs)
        return bad_words


_UNSUPPORTED = {
    "lora_request": "adapters are not loaded; merge the adapter into the checkpoint",
    "tokenization_kwargs": "give token ids for other tokens than the tokenizer's own",
    "mm_processor_kwargs": "prompts are text alone",
}
"""vLLM's options of calls, and why they are refused."""


def refuse_call_options(**options: object) -> None:
    """Raises UnsupportedParameterError for the first of these options that asks for something."""
    for name, value in options.items():
        if value is not None:
            raise UnsupportedParameterError(f"{name} is not supported: {_UNSUPPORTED[name]}. Got {shown(value)}.")


def request_ids_to_abort(request_ids: str | Iterable[str]) -> list[str]:
    """One id or several, as a list. Entries that are not strings are dropped.

    Raises:
        InvalidParameterError: neither an id nor a list.
    """
    if isinstance(request_ids, str):
        return [request_ids]
    if not isinstance(request_ids, Iterable):
        raise InvalidParameterError(f"request_ids must be a request id or a list of them, got {shown(request_ids)}.")
    return [request_id for request_id in request_ids if isinstance(request_id, str)]


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or a list of them, as a list. A list of integers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if not _is_sequence(prompts):
        raise InvalidPromptError(f"prompts must be a prompt or a list of prompts, got {_kind(prompts)}.")
    if prompts and isinstance(prompts[0], Integral):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _checked_id(request_id: object) -> str:
    if not isinstance(request_id, str) or not request_id:
        raise InvalidParameterError(f"request_id must be a non-empty string, got {shown(request_id)}.")
    return str.__str__(request_id)


def _check_kind(params: object) -> None:
    if not isinstance(params, Params):
        raise InvalidParameterError(
            f"params must be SamplingParams, BeamSearchParams or PoolingParams, got {type(params).__name__}."
        )


def _integers(values: Any) -> list[int]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, str) or not _is_sequence(values):
        raise InvalidPromptError(f"prompt_token_ids must be a list of integers, got {_kind(values)}.")
    if set(map(type, values)) == {int}:  # nearly always; looking at 16,000 tokens one by one takes 5 ms
        return list(values)
    for i, value in enumerate(values):
        if not is_integer(value):
            raise InvalidPromptError(f"prompt_token_ids[{i}] must be an integer, got {shown(value)}.")
    return [int(value) for value in values]


def _is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    """Bytes are refused: they are text that was not decoded, not token ids."""
    return isinstance(value, Sequence) and not isinstance(value, bytes | bytearray)


def _kind(value: object) -> str:
    return f"{type(value).__name__} {shown(value)}"
