"""Turns what the engine core reports into what users see: text, stop strings, log-probabilities, finish reasons."""

from dataclasses import dataclass, field

from jpaged.engine.detokenizer import Detokenizer, decode_token
from jpaged.engine.loop import EngineCore
from jpaged.engine.request import Request
from jpaged.engine.scheduler import RequestUpdate
from jpaged.engine.tokenizer import Tokenizer
from jpaged.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from jpaged.sampling_params import RequestOutputKind


@dataclass(slots=True)
class _Open:
    """A request that has not finished. num_sent: tokens that DELTA outputs have returned."""

    request: Request
    prompt: str | None
    prompt_token_ids: list[int]
    detokenizer: Detokenizer | None
    num_sent: int = 0
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0


class OutputProcessor:
    """Keeps, for each unfinished request, what is needed to report on it.

    tokenizer: None when the engine was started without one; outputs then have token ids only.
    """

    def __init__(self, core: EngineCore, tokenizer: Tokenizer | None) -> None:
        self._core = core
        self._tokenizer = tokenizer
        self._open: dict[str, _Open] = {}

    def add(self, request: Request, prompt: str | None, prompt_token_ids: list[int]) -> None:
        """A request was queued."""
        detokenizer = None
        if self._tokenizer is not None and request.sampling.detokenize:
            detokenizer = Detokenizer(self._tokenizer, prompt_token_ids, request.sampling)
        self._open[request.request_id] = _Open(request, prompt, prompt_token_ids, detokenizer)

    def forget(self, request_id: str) -> None:
        """A request was aborted."""
        self._open.pop(request_id, None)

    def process(self, updates: list[RequestUpdate]) -> list[RequestOutput]:
        """Outputs for the updates of one step. Ends requests whose text reached a stop string."""
        outputs = []
        for update in updates:
            state = self._open[update.request.request_id]
            self._take_tokens(state, update)
            finished = state.request.finished
            if finished or state.request.sampling.output_kind != RequestOutputKind.FINAL_ONLY:
                outputs.append(self._output(state))
            if finished:
                del self._open[update.request.request_id]
        return outputs

    def _take_tokens(self, state: _Open, update: RequestUpdate) -> None:
        request, detokenizer = state.request, state.detokenizer
        if detokenizer is not None:
            stopped_by_token = request.finish_reason == "stop"
            found = detokenizer.append(update.new_token_ids, stop_token=stopped_by_token)
            if found is not None:
                self._core.finish(request.request_id, found)  # nothing to do if this very token ended it
                request.finish_reason, request.stop_reason = "stop", found
        if request.logprobs is not None:
            for position in request.logprobs[len(state.logprobs) : self._num_tokens(state)]:
                token = next(iter(position))  # the sampled one comes first
                state.cumulative_logprob += position[token].logprob
                state.logprobs.append(self._with_text(position))

    def _num_tokens(self, state: _Open) -> int:
        """Tokens that belong to the output; those sampled after a stop string do not."""
        if state.detokenizer is not None and state.detokenizer.stop_string is not None:
            return state.detokenizer.num_output_tokens
        return len(state.request.output_token_ids)

    def _output(self, state: _Open) -> RequestOutput:
        request, finished = state.request, state.request.finished
        is_delta = request.sampling.output_kind == RequestOutputKind.DELTA
        text = ""
        if state.detokenizer is not None:
            delta = state.detokenizer.next_delta(finished)
            text = delta if is_delta else state.detokenizer.text
        first, end = (state.num_sent if is_delta else 0), self._num_tokens(state)
        state.num_sent = end
        logprobs = request.logprobs is not None
        completion = CompletionOutput(
            index=0,
            text=text,
            token_ids=request.output_token_ids[first:end],
            cumulative_logprob=state.cumulative_logprob if logprobs else None,
            logprobs=state.logprobs[first:end] if logprobs else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )
        prompt_logprobs = request.prompt_logprobs
        if prompt_logprobs is not None:
            prompt_logprobs = [position and self._with_text(position) for position in prompt_logprobs]
        return RequestOutput(
            request_id=request.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.prompt_token_ids,
            outputs=[completion],
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=request.num_cached_tokens,
            metrics=request.stats,
        )

    def _with_text(self, position: PositionLogprobs) -> PositionLogprobs:
        if self._tokenizer is not None:
            for token, logprob in position.items():
                logprob.decoded_token = decode_token(self._tokenizer, token)
        return position
