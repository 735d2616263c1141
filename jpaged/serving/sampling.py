"""Turns a request's fields into `SamplingParams` or `BeamSearchParams`."""

import re
from typing import Any

from jpaged.api.beam_search_params import BeamSearchParams
from jpaged.api.errors import InvalidParameterError, OutOfMemoryError, Reworded
from jpaged.api.sampling_params import RequestOutputKind, SamplingParams
from jpaged.serving.constraints import Constraint, constraint_of
from jpaged.serving.errors import ApiError
from jpaged.serving.protocol import ChatCompletionRequest, CompletionRequest

_FIELDS = (
    *("n", "best_of", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids", "bad_words"),
    *("stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "prompt_logprobs"),
)
"""Fields with the same name and meaning in `SamplingParams`."""
_BEAM_FIELDS = {"n", "best_of", "max_tokens", "stop_token_ids", "ignore_eos", "skip_special_tokens"}

COMPLETION_MAX_TOKENS = 16
"""The `max_tokens` of a completion that gives none, as OpenAI's. A chat may use the whole context."""
_TOKEN_ID_DIGITS = 10
_MOST_NAMED = 8
"""Of the keys of a field that are wrong, how many an error names."""


def sampling_of(
    request: CompletionRequest | ChatCompletionRequest, defaults: SamplingParams
) -> SamplingParams | BeamSearchParams:
    """The parameters of a request. defaults: the model's, for fields that the request leaves out.

    max_tokens=0 becomes 1 where `echo` allows it: the answer leaves that token out.
    Raises:
        InvalidParameterError: a value out of range. ApiError: fields that contradict each other.
    """
    with InWordsOf(request):
        return _sampling_of(request, defaults)


class InWordsOf(Reworded):
    """A context in which errors name parameters as a request does: its fields have other names than our parameters.

    constraint: where it is made of more than the request's own.
    """

    kinds = (InvalidParameterError, OutOfMemoryError)

    def __init__(
        self, request: CompletionRequest | ChatCompletionRequest, constraint: Constraint | None = None
    ) -> None:
        self._request = request
        self._constraint = constraint

    def reword(self, said: str) -> str:
        request, names = self._request, dict[str, str]()
        if isinstance(request, ChatCompletionRequest):
            names["logprobs"] = "top_logprobs"
            if request.max_completion_tokens is not None:
                names["max_tokens"] = "max_completion_tokens"
        if request.use_beam_search:
            names["beam_width"] = "n" if request.best_of is None else "best_of"
        constraint = self._constraint or constraint_of(request)
        if constraint is not None:
            said = re.sub(r"^structured_outputs(\.\w+)?", constraint.field, said)
        return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), said)


def _sampling_of(
    request: CompletionRequest | ChatCompletionRequest, defaults: SamplingParams
) -> SamplingParams | BeamSearchParams:
    fields: dict[str, Any] = {name: value for name in _FIELDS if (value := getattr(request, name)) is not None}
    if isinstance(request, ChatCompletionRequest):
        fields.setdefault("max_tokens", None)
        if request.max_completion_tokens is not None:
            fields["max_tokens"] = request.max_completion_tokens
        if request.top_logprobs is not None and not request.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true.", param="top_logprobs")
        fields["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    else:
        fields.setdefault("max_tokens", COMPLETION_MAX_TOKENS)
        fields["logprobs"] = request.logprobs
        if request.echo:
            if request.logprobs is not None:
                fields["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
            if fields["max_tokens"] == 0:
                fields["max_tokens"] = 1
    if request.logit_bias is not None:
        fields["logit_bias"] = _logit_bias(request.logit_bias)
    constraint = constraint_of(request)
    if constraint is not None:
        if request.use_beam_search:
            name = constraint.field.partition(".")[0]
            raise ApiError(400, f"{name} is not supported in a beam search; leave one of them out.", param=name)
        fields["structured_outputs"] = constraint.params
    if request.use_beam_search:
        return _beam_search(request, fields)
    if request.length_penalty not in (None, 1.0):
        raise ApiError(400, "length_penalty needs use_beam_search: true.", param="length_penalty")
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    fields["output_kind"] = kind
    return defaults.changed(fields)


def _beam_search(request: CompletionRequest | ChatCompletionRequest, fields: dict[str, Any]) -> BeamSearchParams:
    for name, value in fields.items():
        if value is not None and name not in _BEAM_FIELDS and not (name == "temperature" and value == 0):
            raise ApiError(400, f"{name} has no meaning in a beam search; leave it out.", param=name)
    if fields["max_tokens"] is None:
        raise ApiError(400, "max_tokens is needed for a beam search; give it.", param="max_tokens")
    n = 1 if request.n is None else request.n
    beam_width = n if request.best_of is None else request.best_of
    given = {name: fields[name] for name in _BEAM_FIELDS - {"n", "best_of"} if name in fields}
    penalty = 1.0 if request.length_penalty is None else request.length_penalty
    return BeamSearchParams(beam_width=beam_width, n=n, length_penalty=penalty, **given)


def _logit_bias(bias: dict[str, Any]) -> dict[int, Any]:
    wrong = [key for key in bias if not (key.isascii() and key.isdecimal() and len(key) <= _TOKEN_ID_DIGITS)]
    if wrong:
        said = ", ".join(repr(key[:40]) for key in wrong[:_MOST_NAMED]) + (", ..." if wrong[_MOST_NAMED:] else "")
        what = "is no token id" if len(wrong) == 1 else "are no token ids"
        raise ApiError(400, f"logit_bias: {said} {what}.", param="logit_bias")
    return {int(key): value for key, value in bias.items()}
