"""A step that was dispatched (`StepHandle`), and what it brings to the host."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jpaged.engine.interface import NO_TOKEN, FinishCode, Logprobs, StepResult, TargetScores
from jpaged.executor.jax_settings import default_jax_settings
from jpaged.executor.sampling.logprobs import DeviceScores, TokenLogprobs
from jpaged.executor.step.heads import SampleResult


class DispatchedStep:
    """A dispatched step (`StepHandle`). Its arrays started on their way to the host when it was dispatched.

    prompt_scores: scores of the step's tokens, and where in them the chunks that asked stand: (row, start, end) each.
    target_scores: scores of the chunks' targets, one behind the other, and whose they are: (row, count) each.
    pooled: sums of hidden states by row, and the rows that have one.
    places: where the step's rows stand among those sampled; the first ones if not given.
    when_read: called with the sampled tokens and codes on the device, once the host has them.

    Attributes:
        when_run: called once the host has read what the step brings, if anything, so that all of it has run.
    """

    when_run: Callable[[], None] | None = None

    def __init__(
        self,
        num_rows: int,
        sampled: SampleResult | None,
        prompt_scores: tuple[TokenLogprobs, list[tuple[int, int, int]]] | None = None,
        target_scores: tuple[list[DeviceScores], list[tuple[int, int]]] | None = None,
        pooled: tuple[jax.Array, list[int]] | None = None,
        read_shared_prefix: bool = False,
        places: np.ndarray | None = None,
        when_read: Callable[[jax.Array], None] = lambda _: None,
    ) -> None:
        self._num_rows = num_rows
        self._places = slice(num_rows) if places is None else places
        self._read_shared_prefix = read_shared_prefix
        self._sampled = sampled
        self._when_read = when_read
        self._tokens_and_codes: np.ndarray | None = None
        self._prompt_scores = prompt_scores
        self._target_scores = target_scores
        self._pooled = pooled
        logprobs = None if sampled is None else sampled.logprobs
        brings_more = logprobs is not None or bool(prompt_scores or target_scores or pooled)
        self._brings_arrays = sampled is not None or brings_more
        if sampled is not None:
            sampled.tokens_and_codes.copy_to_host_async()
        if brings_more:  # few steps; to walk a tree takes as long as to start a copy
            scores = prompt_scores and prompt_scores[0], target_scores and target_scores[0], pooled and pooled[0]
            for array in jax.tree.leaves((logprobs, scores)):
                array.copy_to_host_async()

    def is_ready(self) -> bool:
        if self._tokens_and_codes is not None:
            return True
        last = self._sampled.tokens_and_codes if self._sampled is not None else self._pooled and self._pooled[0]
        return last is None or last.is_ready()  # type: ignore[attr-defined]  # JAX's stubs leave it out

    def result(self) -> StepResult:
        """Each row brings one token at most: the arrays by row and token have a second axis of size 1."""
        with default_jax_settings():
            return self._result()

    def _result(self) -> StepResult:
        logprobs = ranked = None
        if self._sampled is None:
            tokens = np.full((self._num_rows,), NO_TOKEN, np.int32)
            codes = np.full((self._num_rows,), FinishCode.RUNNING, np.int32)
        else:
            read = self._read(self._sampled.tokens_and_codes)[:, self._places]
            tokens, codes = read[:2]
            if len(read) > 2:
                ranked = np.concatenate([read[:1], read[2:]]).T
            if self._sampled.logprobs is not None:
                logprobs = _host_logprobs(self._sampled.logprobs, (self._places, None))
        prompt_logprobs = {}
        if self._prompt_scores is not None:
            scores, scored_rows = self._prompt_scores
            prompt_logprobs = {row: _host_logprobs(scores, np.s_[start:end]) for row, start, end in scored_rows}
        result = StepResult(
            tokens[:, None],
            codes.astype(np.uint8),
            logprobs,
            prompt_logprobs,
            self._host_scores(),
            self._read_shared_prefix,
            self._host_pooled(),
            ranked,
        )
        if self._brings_arrays and self.when_run is not None:
            self.when_run()
        return result

    def _read(self, tokens_and_codes: jax.Array) -> np.ndarray:
        """A copy of them, which stands when a later step's are written over those on the device."""
        if self._tokens_and_codes is None:
            self._tokens_and_codes = np.array(tokens_and_codes)
            self._when_read(tokens_and_codes)
        return self._tokens_and_codes

    def _host_pooled(self) -> dict[int, np.ndarray]:
        if self._pooled is None:
            return {}
        sums, rows = np.asarray(self._pooled[0]), self._pooled[1]
        return {row: sums[row] for row in rows}

    def _host_scores(self) -> dict[int, TargetScores]:
        if self._target_scores is None:
            return {}
        calls, rows = self._target_scores
        logprobs = np.concatenate([np.asarray(call.logprobs) for call in calls])
        greedy = np.concatenate([np.asarray(call.greedy) for call in calls])
        scores, start = {}, 0
        for row, count in rows:
            scores[row] = TargetScores(logprobs[start : start + count], greedy[start : start + count])
            start += count
        return scores


def _host_logprobs(arrays: TokenLogprobs, places: Any) -> Logprobs:
    """places: an index of their rows."""
    return Logprobs(*(np.asarray(array)[places] for array in arrays))
