"""What the server measures, in Prometheus' form under vLLM's names.

Counters and histograms of requests are kept here, from what passes through `AsyncLLMEngine`; gauges of the engine are
read from its `EngineStats` when someone asks. Inter-token latencies are counted a step at a time, in one numpy call:
one by one they would cost about 1 us a token.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from jpaged.engine.request import Request
from jpaged.engine.stats import EngineStats

_TIME_TO_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_INTER_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
    40, 80,
)  # fmt: skip
_REQUEST_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

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
    "iteration_tokens_total": ("Tokens that a step returned.", _STEP_TOKENS),
}
FINISH_REASONS = ("stop", "length", "abort")


class Histogram:
    """Counts of values by upper bound; the last bucket is unbounded."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = np.array(bounds, np.float64)
        self._counts = np.zeros((len(bounds) + 1,), np.int64)
        self._sum = 0.0

    def observe(self, *values: float) -> None:
        self.observe_all(values)

    def observe_all(self, values: Sequence[float]) -> None:
        if values:
            array = np.asarray(values, np.float64)
            self._counts += np.bincount(np.searchsorted(self._bounds, array), minlength=len(self._counts))
            self._sum += float(array.sum())

    @property
    def count(self) -> int:
        return int(self._counts.sum())

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """In Prometheus' text format: cumulative buckets, sum and count."""
        cumulative = np.cumsum(self._counts).tolist()
        for bound, total in zip([*map(_number, self._bounds.tolist()), "+Inf"], cumulative, strict=True):
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {_number(self._sum)}"
        yield f"{name}_count{{{labels}}} {cumulative[-1]}"


class ServingMetrics:
    """Counters and histograms of the requests of one `AsyncLLMEngine`."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self.finished: Counter[str] = Counter(dict.fromkeys(FINISH_REASONS, 0))

    def count_step(self, num_tokens: int, intervals_s: Sequence[float]) -> None:
        """A step came: so many tokens, so long after the previous ones of their requests."""
        self.histograms["iteration_tokens_total"].observe(num_tokens)
        self.histograms["inter_token_latency_seconds"].observe_all(intervals_s)

    def count_finished(self, request: Request) -> None:
        """A request ended, in whatever way."""
        stats, histograms = request.stats, self.histograms
        num_tokens = sum(len(member.output_token_ids) for member in request.group.members)
        self.finished[request.finish_reason or "abort"] += 1
        histograms["request_prompt_tokens"].observe(request.prompt_len)
        histograms["request_generation_tokens"].observe(num_tokens)
        histograms["request_params_n"].observe(request.sampling.n)
        if request.sampling.max_tokens is not None:
            histograms["request_params_max_tokens"].observe(request.sampling.max_tokens)
        end = stats.finished_time
        if end is None:
            return
        histograms["e2e_request_latency_seconds"].observe(end - stats.arrival_time)
        if stats.first_scheduled_time is None:
            return
        histograms["request_queue_time_seconds"].observe(stats.first_scheduled_time - stats.arrival_time)
        histograms["request_inference_time_seconds"].observe(end - stats.first_scheduled_time)
        if stats.first_token_time is None:
            return
        decode = (stats.last_token_time or end) - stats.first_token_time
        histograms["time_to_first_token_seconds"].observe(stats.first_token_time - stats.arrival_time)
        histograms["request_prefill_time_seconds"].observe(stats.first_token_time - stats.first_scheduled_time)
        histograms["request_decode_time_seconds"].observe(decode)
        if num_tokens > 1:
            histograms["request_time_per_output_token_seconds"].observe(decode / (num_tokens - 1))

    def exposition(self, prefix: str, model: str, stats: EngineStats) -> str:
        """All metrics in Prometheus' text format.

        prefix: of every name, without its colon. model: the label model_name.
        """
        labels = f'model_name="{_escape(model)}",engine="0"'
        lines: list[str] = []

        def add(name: str, kind: str, what: str, samples: Sequence[tuple[str, float]]) -> None:
            full = f"{prefix}:{name}"
            suffix = "_total" if kind == "counter" else ""
            lines.append(f"# HELP {full}{suffix} {what}")
            lines.append(f"# TYPE {full}{suffix} {kind}")
            lines.extend(f"{full}{suffix}{{{labels}{extra}}} {_number(value)}" for extra, value in samples)

        def one(value: float) -> list[tuple[str, float]]:
            return [("", value)]

        add("num_requests_running", "gauge", "Requests that run.", one(stats.num_running))
        add("num_requests_waiting", "gauge", "Requests that wait to run.", one(stats.num_waiting))
        add("kv_cache_usage_perc", "gauge", "Fraction of the KV pool's blocks in use.", one(stats.kv_cache_usage))
        add("num_preemptions", "counter", "Requests preempted.", one(stats.num_preemptions))
        add("prompt_tokens", "counter", "Tokens of admitted prompts.", one(stats.prompt_tokens))
        add("generation_tokens", "counter", "Tokens generated.", one(stats.generated_tokens))
        queries, hits = stats.prefix_cache_queries, stats.prefix_cache_hits
        add("prefix_cache_queries", "counter", "Prompt tokens looked up in the prefix cache.", one(queries))
        add("prefix_cache_hits", "counter", "Prompt tokens found in the prefix cache.", one(hits))
        add("engine_steps", "counter", "Steps of the engine.", one(stats.num_steps))
        shared = stats.num_shared_prefix_steps
        add("shared_prefix_steps", "counter", "Steps that read a prefix once for all who share it.", one(shared))
        reasons = [(f',finished_reason="{reason}"', float(n)) for reason, n in sorted(self.finished.items())]
        add("request_success", "counter", "Requests that ended, by reason.", reasons)
        for name, (what, _) in _HISTOGRAMS.items():
            full = f"{prefix}:{name}"
            lines += [f"# HELP {full} {what}", f"# TYPE {full} histogram"]
            lines += self.histograms[name].lines(full, labels)
        return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
