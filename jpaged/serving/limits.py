"""Limits on what clients may send, checked before anything is allocated for a request."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from jpaged.api.errors import InvalidParameterError
from jpaged.api.sampling_params import SamplingParams
from jpaged.serving.errors import ApiError, OverloadedError
from jpaged.serving.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest

RETRY_AFTER_S = 1


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Limits, all of which can be set on the command line.

    Args:
        max_body_bytes: of a request's body; also of what is read before it is refused.
        max_header_bytes: of a request's line and headers together.
        max_prompts: prompts in one completion request, or texts to embed, score or rank.
        max_prompt_tokens: of one prompt; None: what the model can take.
        max_n: choices for one prompt.
        max_stop_strings: stop strings of a request. max_stop_characters: of all of them together.
        max_logprobs: alternatives to each token, in `logprobs`, `top_logprobs` and `prompt_logprobs`.
        max_logprob_values: log-probabilities in one answer: tokens of its prompts and, where it is not streamed and
            gives max_tokens, of its choices, times the alternatives asked for and one. Each is some 200 bytes.
        max_logit_bias: entries of `logit_bias`.
        max_stop_token_ids, max_allowed_token_ids: entries of these lists.
        max_detokenize_tokens: of one `/detokenize`, where the model itself takes no longer sequence.
        max_bad_words: entries of `bad_words`.
        max_tools: entries of `tools`.
        max_queued_requests: prompts that wait to run, all clients' together; above it requests get a 503.
        max_queued_tokens: tokens of those.
        max_requests_per_client: prompts of one client that wait or run: of one key, or of one address where there are
            no keys; above it the client gets a 429. None: no limit.
        max_watchers: of the live view, in each API process; above it they get a 503.
        max_unsent_bytes: of a stream's log-probabilities that wait for a client that takes them more slowly than they
            come; above it the stream ends with an error.
        max_response_bytes: of `/v1/responses` that are kept or run in the background, with conversations and events,
            all together. The oldest that have ended give way; where those that run fill it, a new one gets a 503.
        header_timeout_s: from the first byte of a request to the end of its headers; also for a TLS handshake.
        body_timeout_s: from there to the end of its body.
        send_timeout_s: for a client to take some of its answer; one that takes none is cut off, and its requests are
            aborted.
        keep_alive_timeout_s: a connection may wait for its next request. It should be longer than clients and proxies
            keep theirs, or a request may meet the closing of its connection: whoever sends it sees a reset.
        template_timeout_s: for a chat template to make a prompt.

    Raises:
        InvalidParameterError: a limit that is not positive and finite.
    """

    max_body_bytes: int = 16 << 20
    max_header_bytes: int = 64 << 10
    max_prompts: int = 1024
    max_prompt_tokens: int | None = None
    max_n: int = 64
    max_stop_strings: int = 16
    max_stop_characters: int = 4096
    max_logprobs: int = 20
    max_logprob_values: int = 1 << 18
    max_logit_bias: int = 300
    max_stop_token_ids: int = 64
    max_allowed_token_ids: int = 1 << 16
    max_detokenize_tokens: int = 1 << 16
    max_tools: int = 512
    max_bad_words: int = 128
    max_queued_requests: int = 8192
    max_queued_tokens: int = 16 << 20
    max_requests_per_client: int | None = None
    max_watchers: int = 32
    max_unsent_bytes: int = 16 << 20
    max_response_bytes: int = 256 << 20
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    send_timeout_s: float = 60.0
    keep_alive_timeout_s: float = 75.0
    template_timeout_s: float = 2.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 < value < math.inf:
                raise InvalidParameterError(f"{field.name} must be positive and finite, got {value}.")

    def check(self, request: GenerationRequest) -> None:
        """Checks the sizes of a request's fields. Raises ApiError, which names the field."""
        _at_most("n", request.n, self.max_n)
        _at_most("best_of", request.best_of, self.max_n)
        _at_most("bad_words", len(request.bad_words or ()), self.max_bad_words, " entries")
        _at_most("stop_token_ids", len(request.stop_token_ids or ()), self.max_stop_token_ids, " entries")
        _at_most("allowed_token_ids", len(request.allowed_token_ids or ()), self.max_allowed_token_ids, " entries")
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
        _at_most("stop", len(stop), self.max_stop_strings, " strings")
        _at_most("stop", sum(map(len, stop)), self.max_stop_characters, " characters")
        _at_most("logit_bias", len(request.logit_bias or ()), self.max_logit_bias, " entries")
        _at_most("prompt_logprobs", request.prompt_logprobs, self.max_logprobs)
        if isinstance(request, ChatCompletionRequest):
            _at_most("tools", len(request.tools or ()), self.max_tools, " tools")
        if isinstance(request, CompletionRequest):
            _at_most("logprobs", request.logprobs, self.max_logprobs)
        elif isinstance(request, ChatCompletionRequest):
            _at_most("top_logprobs", request.top_logprobs, self.max_logprobs)

    def check_prompts(self, num_prompts: int, prompt_field: str = "prompt") -> None:
        """Checks the number of prompts in one request."""
        _at_most(prompt_field, num_prompts, self.max_prompts, " prompts")

    def check_detokenized(self, num_tokens: int, max_model_len: int) -> None:
        """Checks the number of tokens to turn into text."""
        _at_most("tokens", num_tokens, max(self.max_detokenize_tokens, max_model_len), " tokens")

    def check_prompt_tokens(self, token_ids: Sequence[int], prompt_field: str) -> None:
        """Checks the length of one prompt."""
        if self.max_prompt_tokens is not None and len(token_ids) > self.max_prompt_tokens:
            raise ApiError(
                400,
                f"{prompt_field} has {len(token_ids)} tokens; this server takes at most {self.max_prompt_tokens}.",
                param=prompt_field,
                code="context_length_exceeded",
            )

    def check_logprobs(
        self, prompt_lens: Sequence[int], params: SamplingParams, max_model_len: int, *, streams: bool
    ) -> int:
        """Checks the number of log-probabilities that an answer may have, and returns it.

        prompt_lens: tokens of each prompt. streams: choices are sent as they grow, and not counted.
        """
        num_values = 0
        if params.prompt_logprobs is not None:
            num_values += sum(prompt_lens) * (params.prompt_logprobs + 1)
        if params.logprobs is not None and params.max_tokens is not None and not streams:
            new_tokens = sum(min(params.max_tokens, max(0, max_model_len - prompt_len)) for prompt_len in prompt_lens)
            num_values += new_tokens * params.num_sequences * (params.logprobs + 1)
        _at_most("logprobs", num_values, self.max_logprob_values, " values (tokens x alternatives)")
        return num_values

    def check_queue(self, num_queued: int, num_more: int) -> None:
        """Raises OverloadedError if the queue has no room for `num_more` prompts."""
        if num_queued + num_more > self.max_queued_requests:
            raise OverloadedError(
                f"{num_queued} requests wait already, of at most {self.max_queued_requests}; try again later.",
                RETRY_AFTER_S,
            )

    def check_queued_tokens(self, num_queued: int, num_more: int) -> None:
        """Raises OverloadedError if the queue has no room for `num_more` tokens. An empty queue takes any number."""
        if num_queued and num_queued + num_more > self.max_queued_tokens:
            raise OverloadedError(
                f"{num_queued} tokens wait already, of at most {self.max_queued_tokens}; try again later.",
                RETRY_AFTER_S,
            )


def _at_most(field: str, value: int | None, most: int, unit: str = "") -> None:
    if value is not None and value > most:
        raise ApiError(
            400, f"{field}: {value}{unit} given, this server takes at most {most}{unit}.", param=field, code="too_large"
        )
