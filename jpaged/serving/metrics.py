"""What the server measures, in Prometheus' form under vLLM's names.

Counters and histograms of requests are kept here, from what passes through `AsyncLLMEngine`; what is true of an engine,
such as its steps, is read from its `EngineStats` when someone asks. Inter-token latencies are counted a step at a time,
in one numpy call: one by one they would cost about 1 us a token.

Their numbers lie in an array that the API processes of a server share (`board.py`): each adds to its own row, and all
report the sum. The label `engine` is the replica's number.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np

from jpaged.engine.sequences.request import Request
from jpaged.engine.stats import STEP_TOKENS_BOUNDS, EngineStats

_TIME_TO_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_INTER_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
    40, 80,
)  # fmt: skip
_REQUEST_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))

_HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
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
    "request_params_n": ("The n of a request.", (1, 2, 5, 10, 20)),
    "request_params_max_tokens": ("The max_tokens of a request.", _TOKENS),
}
_ENGINE_METRICS = {  # by field of EngineStats
    "num_running": ("num_requests_running", "gauge", "Requests that run."),
    "num_waiting": ("num_requests_waiting", "gauge", "Requests that wait to run."),
    "kv_cache_usage": ("kv_cache_usage_perc", "gauge", "Fraction of the KV pool's blocks in use."),
    "num_preemptions": ("num_preemptions", "counter", "Requests preempted."),
    "prompt_tokens": ("prompt_tokens", "counter", "Tokens of admitted prompts."),
    "generated_tokens": ("generation_tokens", "counter", "Tokens generated."),
    "prefix_cache_queries": ("prefix_cache_queries", "counter", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "counter", "Prompt tokens found in the prefix cache."),
    "prefix_cache_host_hits": (
        "prefix_cache_host_hits",
        "counter",
        "Prompt tokens found there that were in host memory.",
    ),
    "num_steps": ("engine_steps", "counter", "Steps of the engine."),
    "num_shared_prefix_steps": (
        "shared_prefix_steps",
        "counter",
        "Steps that read a prefix once for all who share it.",
    ),
}
FINISH_REASONS = ("stop", "length", "abort")


class Histogram:
    """Counts of values by upper bound; the last bucket is unbounded.

    cells: float64 [workers, replicas, len(bounds) + 2]: counts, then the sum of all values.
    worker: whose row to add to.
    """

    def __init__(self, bounds: Sequence[float], cells: np.ndarray, worker: int) -> None:
        self._bounds = list(map(float, bounds))
        self._cells = cells
        self._own = cells[worker]

    def observe(self, replica: int, value: float) -> None:
        own = self._own[replica]
        own[bisect_left(self._bounds, value)] += 1
        own[-1] += value

    def observe_all(self, replica: int, values: Sequence[float]) -> None:
        if values:
            array = np.asarray(values, np.float64)
            own = self._own[replica]
            own[:-1] += np.bincount(np.searchsorted(self._bounds, array), minlength=len(own) - 1)
            own[-1] += array.sum()

    def lines(self, name: str, labels: str, replica: int) -> Iterator[str]:
        """In Prometheus' text format."""
        *counts, total = self._cells[:, replica].sum(axis=0).tolist()
        return _histogram_lines(name, labels, self._bounds, counts, total)


NUM_COLUMNS = len(FINISH_REASONS) + sum(len(bounds) + 2 for _, bounds in _HISTOGRAMS.values())
"""Of `ServingMetrics`' cells."""


class ServingMetrics:
    """Counters and histograms of the requests of a server.

    cells: float64 [workers, replicas, NUM_COLUMNS], zeros at first. worker: whose row this process adds to.
    """

    def __init__(self, cells: np.ndarray, worker: int) -> None:
        self._finished = cells[:, :, : len(FINISH_REASONS)]
        self._own_finished = self._finished[worker]
        self._histograms = {}
        start = len(FINISH_REASONS)
        for name, (_, bounds) in _HISTOGRAMS.items():
            end = start + len(bounds) + 2
            self._histograms[name] = Histogram(bounds, cells[:, :, start:end], worker)
            start = end

    def count_intervals(self, replica: int, intervals_s: Sequence[float]) -> None:
        """Tokens came, each so long after the one before it of its request."""
        self._histograms["inter_token_latency_seconds"].observe_all(replica, intervals_s)

    def count_finished(self, replica: int, request: Request) -> None:
        """A request ended, in whatever way."""
        stats = request.stats

        def observe(name: str, value: float) -> None:
            self._histograms[name].observe(replica, value)

        num_tokens = sum(len(member.output_token_ids) for member in request.group.members)
        self._own_finished[replica, FINISH_REASONS.index(request.finish_reason or "abort")] += 1
        observe("request_prompt_tokens", request.prompt_len)
        observe("request_generation_tokens", num_tokens)
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

    def exposition(self, prefix: str, model: str, stats: Mapping[int, EngineStats]) -> str:
        """All metrics in Prometheus' text format.

        prefix: of every name, without its colon. model: the label model_name. stats: of the replicas that serve.
        """
        num_replicas = self._finished.shape[1]
        labels = [f'model_name="{_escape(model)}",engine="{replica}"' for replica in range(num_replicas)]
        lines: list[str] = []

        def add(name: str, kind: str, what: str, samples: Sequence[tuple[str, float]]) -> None:
            full = f"{prefix}:{name}_total" if kind == "counter" else f"{prefix}:{name}"
            lines.append(f"# HELP {full} {what}")
            lines.append(f"# TYPE {full} {kind}")
            lines.extend(f"{full}{{{of}}} {_number(value)}" for of, value in samples)

        for field, (name, kind, what) in _ENGINE_METRICS.items():
            add(name, kind, what, [(labels[replica], getattr(one, field)) for replica, one in stats.items()])
        finished = self._finished.sum(axis=0)
        reasons = [
            (f'{labels[replica]},finished_reason="{reason}"', finished[replica, FINISH_REASONS.index(reason)])
            for replica in range(num_replicas)
            for reason in sorted(FINISH_REASONS)
        ]
        add("request_success", "counter", "Requests that ended, by reason.", reasons)
        for name, (what, _) in _HISTOGRAMS.items():
            add(name, "histogram", what, [])
            for replica in range(num_replicas):
                lines += self._histograms[name].lines(f"{prefix}:{name}", labels[replica], replica)
        name = "iteration_tokens_total"
        add(name, "histogram", "Tokens that a step returned.", [])
        for replica, one in stats.items():
            counts, total = one.step_tokens, one.generated_tokens
            lines += _histogram_lines(f"{prefix}:{name}", labels[replica], STEP_TOKENS_BOUNDS, counts, total)
        return "\n".join(lines) + "\n"


def _histogram_lines(
    name: str, labels: str, bounds: Sequence[float], counts: Sequence[float], total: float
) -> Iterator[str]:
    """Cumulative buckets, sum and count. counts: by upper bound, the last unbounded. total: the sum of all values."""
    cumulative = list(accumulate(counts))
    for bound, below in zip([*map(_number, bounds), "+Inf"], cumulative, strict=True):
        yield f'{name}_bucket{{{labels},le="{bound}"}} {_number(below)}'
    yield f"{name}_sum{{{labels}}} {_number(total)}"
    yield f"{name}_count{{{labels}}} {_number(cumulative[-1])}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
