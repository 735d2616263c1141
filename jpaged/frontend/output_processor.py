"""Turns the engine core's updates into outputs: text, stop strings, log-probabilities, finish reasons."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from jpaged.api.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from jpaged.api.sampling_params import RequestOutputKind
from jpaged.engine.scheduler.scheduler import RequestUpdate
from jpaged.engine.sequences.request import Request
from jpaged.text.detokenizer import Detokenizer
from jpaged.text.token_decoders import TokenTexts
from jpaged.text.tokenizer import Tokenizer


class EndsSequences(Protocol):
    """The part of the engine core that an `OutputProcessor` calls. A client of an engine process has its own."""

    def finish(self, request_id: str, stop_reason: int | str | None, index: int = 0) -> Request | None: ...


@dataclass(slots=True)
class _OpenSequence:
    """One sequence of a request that has not finished.

    num_sent: tokens that DELTA outputs have returned. texts: of the tokens in its log-probabilities; None without.
    """

    request: Request
    detokenizer: Detokenizer | None
    num_sent: int = 0
    texts: TokenTexts | None = None
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens that belong to the output; those sampled after a stop string do not."""
        if self.detokenizer is not None and self.detokenizer.stop_string is not None:
            return self.detokenizer.num_output_tokens
        return len(self.request.output_token_ids)


@dataclass(slots=True)
class _OpenRequest:
    """A request that has not finished. reports: it has outputs before it finishes. is_delta: these have what is new.
    named: the log-probabilities of its prompt, once its tokens there have their texts.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    request: Request
    sequences: list[_OpenSequence]
    reports: bool
    is_delta: bool
    named: list[PositionLogprobs | None] | None = None


class OutputProcessor:
    """Makes the outputs of all unfinished requests.

    tokenizer: None when the engine was started without one; outputs then have token ids only.
    """

    def __init__(self, core: EndsSequences, tokenizer: Tokenizer | None) -> None:
        self._core = core
        self._tokenizer = tokenizer
        self._open: dict[str, _OpenRequest] = {}

    def add(self, request: Request, prompt: str | None, prompt_token_ids: list[int]) -> None:
        """A request was queued."""
        sequences = []
        for member in request.group.members:
            detokenizer = None
            if self._tokenizer is not None and request.sampling.detokenize and request.samples:
                detokenizer = Detokenizer(self._tokenizer, prompt_token_ids, request.sampling)
            sequence = _OpenSequence(member, detokenizer)
            if request.logprobs is not None:
                sequence.texts = self._texts(request)
            sequences.append(sequence)
        kind, ranks = request.sampling.output_kind, request.sampling.ranks
        self._open[request.request_id] = _OpenRequest(
            prompt,
            prompt_token_ids,
            request,
            sequences,
            reports=kind != RequestOutputKind.FINAL_ONLY and not ranks,
            is_delta=kind == RequestOutputKind.DELTA and not ranks,
        )

    def forget(self, request_id: str) -> None:
        """A request was aborted."""
        self._open.pop(request_id, None)

    def process(self, updates: list[RequestUpdate]) -> list[RequestOutput]:
        """Outputs for the updates of one step, at most one a request. Ends sequences at their stop strings."""
        if len(updates) == 1:  # as for each token of a lone stream, which so skips the grouping
            update = updates[0]
            state = self._open[update.request.request_id]
            sequence = state.sequences[update.request.index]
            self._take_tokens(sequence, update)
            output = self._news(state, [sequence])
            return [] if output is None else [output]
        changed: dict[str, dict[int, _OpenSequence]] = {}
        for update in updates:
            request_id, index = update.request.request_id, update.request.index
            sequence = self._open[request_id].sequences[index]
            self._take_tokens(sequence, update)
            changed.setdefault(request_id, {})[index] = sequence  # it may have got a token and ended for another reason
        found = (self._news(self._open[request_id], list(of.values())) for request_id, of in changed.items())
        return [output for output in found if output is not None]

    def _news(self, state: _OpenRequest, changed: list[_OpenSequence]) -> RequestOutput | None:
        """The output of a request of which some sequences have news; None if it does not report yet."""
        finished = state.request.group.finished
        output = self._output(state, changed, finished) if finished or state.reports else None
        if finished:
            del self._open[state.request.request_id]
        return output

    def _take_tokens(self, state: _OpenSequence, update: RequestUpdate) -> None:
        request, detokenizer = state.request, state.detokenizer
        if detokenizer is not None:
            stopped_by_token = request.finish_reason == "stop"
            found = detokenizer.append(update.new_token_ids, stop_token=stopped_by_token)
            if found is not None:
                # Nothing to do if this very token ended it.
                self._core.finish(request.request_id, found, request.index)
                request.finish_reason, request.stop_reason = "stop", found
        if request.logprobs is not None:
            for position in request.logprobs[len(state.logprobs) : state.num_tokens]:
                token = next(iter(position))  # the sampled one comes first
                state.cumulative_logprob += position[token].logprob
                state.logprobs.append(_with_text(position, state.texts, token))

    def _output(self, state: _OpenRequest, changed: list[_OpenSequence], finished: bool) -> RequestOutput:
        request = state.request
        prompt_logprobs = self._prompt_logprobs(state, changed)
        completions: list[CompletionOutput]
        if not request.samples:
            completions = []
        elif request.beam is not None:
            completions = [self._completion(s, i, False) for i, s in enumerate(state.sequences[: request.beam.n])]
        elif request.sampling.ranks:
            ranked = sorted(state.sequences, key=lambda sequence: -sequence.cumulative_logprob)  # stable
            completions = [self._completion(s, i, False) for i, s in enumerate(ranked[: request.sampling.n])]
        else:
            shown = state.sequences
            if state.is_delta:
                shown = changed if len(changed) == 1 else sorted(changed, key=lambda s: s.request.index)
            completions = [self._completion(s, s.request.index, state.is_delta) for s in shown]
        return RequestOutput(
            request_id=request.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.prompt_token_ids,
            outputs=completions,
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=request.num_cached_tokens,
            metrics=request.stats,
            scores=request.scores,
            embedding=None if request.pooling is None else _embedding(request),
        )

    def _prompt_logprobs(
        self, state: _OpenRequest, changed: list[_OpenSequence]
    ) -> list[PositionLogprobs | None] | None:
        """Those of the prompt, where asked for. They are new where a sequence has its first tokens."""
        found = state.request.prompt_logprobs
        if found is None:
            return None
        if state.is_delta and all(sequence.num_sent for sequence in changed):
            return []
        if state.named is not found:
            texts = self._texts(state.request)
            for position, token in zip(found, state.prompt_token_ids, strict=False):
                if position is not None:
                    _with_text(position, texts, token)
            state.named = found
        return list(found)  # whoever gets it may change it

    def _completion(self, state: _OpenSequence, index: int, is_delta: bool) -> CompletionOutput:
        request = state.request
        text = ""
        if state.detokenizer is not None:
            delta = state.detokenizer.next_delta(request.finished)
            text = delta if is_delta else state.detokenizer.text
        first, end = (state.num_sent if is_delta else 0), state.num_tokens
        state.num_sent = end
        logprobs = state.logprobs[first:end] if request.sampling.logprobs is not None else None
        if is_delta and logprobs:  # nobody asks for them again, and they take far more than the tokens
            state.logprobs[first:end] = [{}] * len(logprobs)
            if request.logprobs is not None:
                request.logprobs[first:end] = [{}] * len(logprobs)
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=request.output_token_ids[first:end],
            cumulative_logprob=request.cumulative_logprob if request.logprobs is None else state.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            score=request.score,
        )

    def _texts(self, request: Request) -> TokenTexts | None:
        """The texts of tokens; None where none are asked for."""
        if self._tokenizer is None or not request.sampling.detokenize:
            return None
        return TokenTexts(self._tokenizer)


def _embedding(request: Request) -> np.ndarray | None:
    if request.pooling is None or request.pooled is None or request.finish_reason != "length":
        return None
    return request.pooling.finished(request.pooled)


def _with_text(position: PositionLogprobs, texts: TokenTexts | None, token: int) -> PositionLogprobs:
    """Names the tokens at a position. token: the one that stands there."""
    if texts is not None:
        for other, logprob in position.items():
            logprob.decoded_token = texts.text(other)
        texts.advance(token)
    return position
