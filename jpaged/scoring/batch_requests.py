"""Lines of OpenAI batch files: requests in, responses out.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 50}}
    {"id": ..., "custom_id": "a", "response": {"status_code": 200, "request_id": ..., "body": {...}}, "error": null}

A request that cannot be served is answered like any other, with the status code and error object that a server would
send; one whose line is no request at all has "response": null and says in "error" why.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jpaged.engine.tokenizer import Tokenizer
from jpaged.errors import InvalidParameterError, InvalidPromptError, JPagedError, UnsupportedParameterError
from jpaged.inputs import Prompt, as_prompt_list
from jpaged.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from jpaged.sampling_params import RequestOutputKind, SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

_SAMPLING = (
    *("n", "best_of", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words"),
    *("stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output"),
)
"""Fields that mean what `SamplingParams` says."""

_REFUSED = (
    *("echo", "prompt_logprobs", "stream", "suffix", "use_beam_search"),
    *("audio", "function_call", "functions", "modalities", "prediction", "response_format", "tool_choice", "tools"),
    *("guided_choice", "guided_grammar", "guided_json", "guided_regex", "structured_outputs"),
)
"""Known fields that would change the answer and are not supported: refused unless they are null, false or harmless."""

_HARMLESS: dict[str, Any] = {"response_format": {"type": "text"}, "tool_choice": "none", "suffix": ""}


@dataclass(frozen=True)
class BatchRequest:
    """A line's request: one prompt, or several for completions. params are the same for all."""

    custom_id: str
    url: str
    model: str | None
    prompts: list[Prompt]
    params: SamplingParams


class BadLine(Exception):
    """The line is no request. Its text says why."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


class BadRequest(Exception):
    """A request that cannot be served; `response` is the answer."""

    def __init__(self, custom_id: str, error: Exception, param: str | None = None) -> None:
        super().__init__(str(error))
        self.custom_id = custom_id
        self.param = param

    @property
    def response(self) -> dict[str, Any]:
        error = {"message": str(self), "type": "invalid_request_error", "param": self.param, "code": None}
        return _line(self.custom_id, 400, {"error": error})


def parse_request(line: Any, tokenizer: Tokenizer, defaults: SamplingParams) -> BatchRequest:
    """Takes a line apart. defaults: for sampling fields that the body leaves out.

    Raises:
        BadLine: it is no request. BadRequest: its body asks for what cannot be done.
    """
    if not isinstance(line, Mapping):
        raise BadLine("the line must be an object with custom_id, method, url and body.")
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise BadLine(f"custom_id must be a non-empty string, got {custom_id!r:.80}.")
    if line.get("method", "POST") != "POST":
        raise BadLine(f'method must be "POST", got {line["method"]!r:.80}.', custom_id)
    url, body = line.get("url"), line.get("body")
    if url not in (COMPLETIONS, CHAT):
        raise BadLine(f"url must be {COMPLETIONS} or {CHAT}, got {url!r:.80}.", custom_id)
    if not isinstance(body, Mapping):
        raise BadLine(f"body must be an object, got {type(body).__name__}.", custom_id)
    try:
        return _parse_body(custom_id, url, body, tokenizer, defaults)
    except JPagedError as error:
        raise BadRequest(custom_id, error) from error


def _parse_body(
    custom_id: str, url: str, body: Mapping[str, Any], tokenizer: Tokenizer, defaults: SamplingParams
) -> BatchRequest:
    for name in _REFUSED:
        value = body.get(name)
        if value not in (None, False, [], _HARMLESS.get(name)):
            raise UnsupportedParameterError(f"{name}={value!r:.80} is not supported; leave it out.")
    fields = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidParameterError(f"model must be a string, got {model!r:.80}.")
    prompts: list[Prompt]
    if url == CHAT:
        if body.get("max_completion_tokens") is not None:
            fields["max_tokens"] = body["max_completion_tokens"]
        fields.setdefault("max_tokens", None)
        fields["logprobs"] = _chat_logprobs(body)
        if "messages" not in body:
            raise InvalidParameterError("messages is missing; a chat needs a list of them.")
        options = {name: body[name] for name in ("add_generation_prompt", "continue_final_message") if name in body}
        template = body.get("chat_template_kwargs") or {}
        prompts = [{"prompt_token_ids": tokenizer.apply_chat_template(body["messages"], **options, **template)}]
    else:
        fields.setdefault("max_tokens", 16)
        fields["logprobs"] = body.get("logprobs")
        if body.get("prompt") is None:
            raise InvalidParameterError("prompt is missing; give a text, token ids, or a list of either.")
        prompts = as_prompt_list(body["prompt"])
        if not prompts:
            raise InvalidPromptError("prompt is an empty list; give at least one prompt.")
    params = replace(defaults, **fields, output_kind=RequestOutputKind.FINAL_ONLY)
    return BatchRequest(custom_id, url, model, prompts, params)


def _chat_logprobs(body: Mapping[str, Any]) -> int | None:
    wanted, top = body.get("logprobs"), body.get("top_logprobs")
    if not isinstance(wanted, bool | None):
        raise InvalidParameterError(f"logprobs must be true or false in a chat, got {wanted!r:.80}.")
    if top and not wanted:
        raise InvalidParameterError("top_logprobs needs logprobs: true.")
    return (top or 0) if wanted else None


def response_line(request: BatchRequest, model: str, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The line of a request whose prompts have all been answered."""
    is_chat = request.url == CHAT
    choices: list[dict[str, Any]] = []
    for output in outputs:
        for completion in output.outputs:
            choice: dict[str, Any] = {"index": len(choices)}
            if is_chat:
                choice |= {"message": {"role": "assistant", "content": completion.text}}
            else:
                choice |= {"text": completion.text}
            top = request.params.logprobs or 0
            logprobs = _chat_logprobs_of(completion, top) if is_chat else _completion_logprobs_of(completion)
            reasons = {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
            choices.append(choice | {"logprobs": logprobs} | reasons)
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    completion_tokens = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": request.model or model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
        },
    }
    return _line(request.custom_id, 200, body)


def bad_line(error: BadLine) -> dict[str, Any]:
    """The answer to a line that is no request."""
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": error.custom_id,
        "response": None,
        "error": {"code": "invalid_request", "message": str(error)},
    }


def _line(custom_id: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    name = uuid.uuid4().hex
    response = {"status_code": status, "request_id": name, "body": body}
    return {"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": None}


def _text_of(position: PositionLogprobs, token: int) -> str:
    return position[token].decoded_token or ""


def _completion_logprobs_of(completion: CompletionOutput) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None
    tokens = [_text_of(p, t) for p, t in zip(completion.logprobs, completion.token_ids, strict=True)]
    offsets = [0]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    return {
        "tokens": tokens,
        "token_logprobs": [p[t].logprob for p, t in zip(completion.logprobs, completion.token_ids, strict=True)],
        "top_logprobs": [{_text_of(p, t): p[t].logprob for t in p} for p in completion.logprobs],
        "text_offset": offsets[:-1],
    }


def _chat_logprobs_of(completion: CompletionOutput, top: int) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None

    def entry(position: PositionLogprobs, token: int) -> dict[str, Any]:
        text = _text_of(position, token)
        return {"token": text, "logprob": position[token].logprob, "bytes": list(text.encode())}

    content = []
    for position, token in zip(completion.logprobs, completion.token_ids, strict=True):
        ranked = sorted((logprob.rank or 0, other) for other, logprob in position.items())
        alternatives = [entry(position, other) for rank, other in ranked if rank <= top]
        content.append(entry(position, token) | {"top_logprobs": alternatives})
    return {"content": content}
