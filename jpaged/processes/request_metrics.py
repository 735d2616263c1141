"""Counts and times of the requests that pass through `AsyncLLMEngine`.

The API processes of a server share the array that the numbers lie in (`board.py`): each adds to its own row, and the
totals are over all. Inter-token latencies are counted a step at a time, in one numpy call: one by one they would cost
about 1 us a token.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from jpaged.engine.sequences.request import Request

_TIME_TO_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_INTER_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
    40, 80,
)  # fmt: skip
_REQUEST_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))

HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("Time from a request's arrival to its first token.", _TIME_TO_FIRST_TOKEN_S),
    "inter_token_latency_seconds": ("Time between two tokens of a request.", _INTER_TOKEN_S),
    "request_time_per_output_token_seconds": ("Mean time between the tokens of a request.", _INTER_TOKEN_S),
    "e2e_request_latency_seconds": ("Time from a request's arrival to its end.", _REQUEST_S),
    "request_queue_time_seconds": ("Time that a request waited to run.", _REQUEST_S),
    "request_inference_time_seconds": ("Time from when a request first ran to its end.", _REQUEST_S),
    "request_prefill_time_seconds": ("Time from when a request first ran to its first token.", _REQUEST_S),
    "request_decode_time_seconds": ("Time from a request's first token to its last.", _REQUEST_S),
    "request_prompt_tokens": ("Tokens of a request's prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens that a request generated.", _TOKENS),
    "request_num_preemptions": ("Times that a request was preempted.", (0, 1, 2, 5, 10, 20)),
    "request_params_n": ("The n of a request.", (1, 2, 5, 10, 20)),
    "request_params_max_tokens": ("The max_tokens of a request.", _TOKENS),
}
"""What each measures, and the upper bounds of its buckets."""
FINISH_REASONS = ("stop", "length", "abort", "error")
COUNTERS = {
    "engine_restarts": "Times that the engine process was started again.",
    "requests_resumed": "Requests that went on in another engine process after theirs had ended.",
    "requests_suspected": "Requests refused because they ran each time the engine process ended.",
}
"""What each counts."""


class Histogram:
    """Counts of values by upper bound; the last bucket is unbounded.

    cells: float64 [workers, replicas, len(bounds) + 2]: counts, then the sum of all values.
    worker: whose row to add to.
    """

    def __init__(self, bounds: Sequence[float], cells: np.ndarray, worker: int) -> None:
        self._bounds = list(map(float, bounds))
        self._cells = cells
        self._own = cells[worker]

    def observe(self, replica: int, value: float, times: int = 1) -> None:
        own = self._own[replica]
        own[bisect_left(self._bounds, value)] += times
        own[-1] += times * value

    def observe_all(self, replica: int, values: Sequence[float]) -> None:
        if values:
            array = np.asarray(values, np.float64)
            own = self._own[replica]
            own[:-1] += np.bincount(np.searchsorted(self._bounds, array), minlength=len(own) - 1)
            own[-1] += array.sum()

    def totals(self, replica: int) -> tuple[list[float], float]:
        """The counts, and the sum of all values, over all workers."""
        *counts, total = self._cells[:, replica].sum(axis=0).tolist()
        return counts, total


NUM_COLUMNS = len(FINISH_REASONS) + len(COUNTERS) + sum(len(bounds) + 2 for _, bounds in HISTOGRAMS.values())
"""Numbers that `RequestMetrics` keeps for each worker and replica."""


class RequestMetrics:
    """Counters and histograms of the requests of a server.

    cells: float64 [workers, replicas, NUM_COLUMNS], zeros at first. worker: whose row this process adds to.

    Attributes:
        histograms: by name, as in `HISTOGRAMS`.
    """

    def __init__(self, cells: np.ndarray, worker: int) -> None:
        self._finished = cells[:, :, : len(FINISH_REASONS)]
        self._own_finished = self._finished[worker]
        start = len(FINISH_REASONS) + len(COUNTERS)
        self._counters = cells[:, :, len(FINISH_REASONS) : start]
        self._own_counters = self._counters[worker]
        self.histograms: dict[str, Histogram] = {}
        for name, (_, bounds) in HISTOGRAMS.items():
            end = start + len(bounds) + 2
            self.histograms[name] = Histogram(bounds, cells[:, :, start:end], worker)
            start = end

    def count_intervals(self, replica: int, intervals_s: Sequence[float]) -> None:
        """Counts tokens by the time since the previous token of their request."""
        self.histograms["inter_token_latency_seconds"].observe_all(replica, intervals_s)

    def count_finished(self, replica: int, request: Request) -> None:
        """Counts a request that has ended, for whatever reason."""
        stats = request.stats

        def observe(name: str, value: float, times: int = 1) -> None:
            self.histograms[name].observe(replica, value, times)

        lengths = [len(member.output_token_ids) for member in request.group.members]
        num_tokens = sum(lengths)
        self._own_finished[replica, FINISH_REASONS.index(request.finish_reason or "abort")] += 1
        observe("request_prompt_tokens", request.prompt_len)
        observe("request_generation_tokens", num_tokens)
        observe("request_num_preemptions", stats.num_preemptions)
        observe("request_params_n", request.sampling.n)
        if request.sampling.max_tokens is not None:
            observe("request_params_max_tokens", request.sampling.max_tokens)
        end = stats.finished_time
        if end is None:
            return
        observe("e2e_request_latency_seconds", end - stats.arrival_time)
        if stats.first_scheduled_time is None:
            return
        observe("request_queue_time_seconds", stats.first_scheduled_time - stats.arrival_time)
        observe("request_inference_time_seconds", end - stats.first_scheduled_time)
        if stats.first_token_time is None:
            return
        decode = (stats.last_token_time or end) - stats.first_token_time
        observe("time_to_first_token_seconds", stats.first_token_time - stats.arrival_time)
        observe("request_prefill_time_seconds", stats.first_token_time - stats.first_scheduled_time)
        observe("request_decode_time_seconds", decode)
        if num_tokens > 1:
            observe("request_time_per_output_token_seconds", decode / (num_tokens - 1))
        num_intervals = num_tokens - len(lengths)
        if num_intervals > 0 and not request.reports_each_token:  # when each token came is not known: their mean
            observe("inter_token_latency_seconds", decode / (max(lengths) - 1), num_intervals)

    def count(self, counter: str, replica: int, amount: int = 1) -> None:
        """Adds to one of `COUNTERS`."""
        self._own_counters[replica, list(COUNTERS).index(counter)] += amount

    def counted(self, counter: str, replica: int) -> float:
        """One of `COUNTERS`, over all workers."""
        return float(self._counters[:, replica, list(COUNTERS).index(counter)].sum())

    @property
    def num_replicas(self) -> int:
        return self._finished.shape[1]

    def finished(self, replica: int) -> dict[str, float]:
        """Requests of all workers that ended, by finish_reason."""
        return dict(zip(FINISH_REASONS, self._finished[:, replica].sum(axis=0).tolist(), strict=True))
