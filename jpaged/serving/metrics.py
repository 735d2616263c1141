"""What the server measures, in Prometheus' form under vLLM's names.

Counters and histograms of requests are `AsyncLLMEngine.metrics`; what is true of an engine, such as its steps, is in
its `EngineStats`. The label `engine` is the replica's number.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from jpaged.engine.expert_load import ExpertLoad
from jpaged.engine.stats import STEP_TOKENS_BOUNDS, EngineStats
from jpaged.processes.request_metrics import COUNTERS, HISTOGRAMS, RequestMetrics

_ENGINE_METRICS = {  # by field of EngineStats
    "num_running": ("num_requests_running", "gauge", "Requests that run."),
    "num_waiting": ("num_requests_waiting", "gauge", "Requests that wait to run."),
    "kv_cache_usage": ("kv_cache_usage_perc", "gauge", "Fraction of the KV pool's blocks in use."),
    "num_not_finite": ("requests_not_finite", "counter", "Requests that ended because their logits were not finite."),
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
    "prefix_cache_state_misses": (
        "prefix_cache_state_misses",
        "counter",
        "Prompt tokens that were there, but had no snapshot of states behind them.",
    ),
    "num_steps": ("engine_steps", "counter", "Steps of the engine."),
    "num_guesses": (
        "constrained_guesses",
        "counter",
        "Tokens of constrained requests that were sampled before their masks were made.",
    ),
    "num_kept_guesses": (
        "constrained_guesses_kept",
        "counter",
        "Those of them that the constraint allowed.",
    ),
    "num_requests_by_table": (
        "constrained_requests_by_table",
        "counter",
        "Constrained requests whose constraint the device follows by itself.",
    ),
    "num_shared_prefix_steps": (
        "shared_prefix_steps",
        "counter",
        "Steps that read a prefix once for all who share it.",
    ),
}

_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""By the level of `EngineStats.asleep`, in vLLM's words."""

_EXPERT_METRICS: tuple[tuple[str, str, str, Callable[[ExpertLoad], Sequence[float]]], ...] = (
    ("expert_tokens", "counter", "Tokens, each once for each of its experts.", lambda load: [*map(sum, load.tokens)]),
    (
        "expert_load_imbalance",
        "gauge",
        "Tokens of the busiest expert over those of the mean one, lately.",
        lambda load: load.imbalance,
    ),
    ("experts_unused", "gauge", "Experts that no token has gone to.", lambda load: load.num_unused),
)
"""By layer, with `expert_load`: of a layer three series, however many experts it has."""


def exposition(
    metrics: RequestMetrics,
    prefix: str,
    model: str,
    stats: Mapping[int, EngineStats],
    cache_config: Mapping[str, Any] | None = None,
) -> str:
    """All metrics in Prometheus' text format.

    prefix: of every name, without its colon. model: the label model_name. stats: of the replicas that serve.
    cache_config: labels of `cache_config_info`, which has none of them otherwise.
    """
    replicas = range(metrics.num_replicas)
    labels = [f'model_name="{_escape(model)}",engine="{replica}"' for replica in replicas]
    lines: list[str] = []

    def add(name: str, kind: str, what: str, samples: Sequence[tuple[str, float]]) -> None:
        full = f"{prefix}:{name}_total" if kind == "counter" else f"{prefix}:{name}"
        lines.append(f"# HELP {full} {what}")
        lines.append(f"# TYPE {full} {kind}")
        lines.extend(f"{full}{{{of}}} {_number(value)}" for of, value in samples)

    for field, (name, kind, what) in _ENGINE_METRICS.items():
        add(name, kind, what, [(labels[replica], getattr(one, field)) for replica, one in stats.items()])
    states = [
        (f'{labels[replica]},sleep_state="{state}"', int(one.asleep == level))
        for replica, one in stats.items()
        for level, state in enumerate(_SLEEP_STATES)
    ]
    add("engine_sleep_state", "gauge", "1 for what the engine is: awake, or asleep at level 1 or 2.", states)
    reasons = [
        (f'{labels[replica]},finished_reason="{reason}"', count)
        for replica in replicas
        for reason, count in sorted(metrics.finished(replica).items())
    ]
    add("request_success", "counter", "Requests that ended, by reason.", reasons)
    for name, what in COUNTERS.items():
        add(name, "counter", what, [(labels[replica], metrics.counted(name, replica)) for replica in replicas])
    for name, (what, bounds) in HISTOGRAMS.items():
        add(name, "histogram", what, [])
        for replica in replicas:
            counts, total = metrics.histograms[name].totals(replica)
            lines += _histogram_lines(f"{prefix}:{name}", labels[replica], bounds, counts, total)
    name = "iteration_tokens_total"
    add(name, "histogram", "Tokens that a step computed of prompts, and returned.", [])
    for replica, one in stats.items():
        of_steps, tokens = one.step_tokens, one.prefilled_tokens + one.generated_tokens
        lines += _histogram_lines(f"{prefix}:{name}", labels[replica], STEP_TOKENS_BOUNDS, of_steps, tokens)
    loads = {replica: one.expert_load for replica, one in stats.items() if one.expert_load is not None}
    for name, kind, what, values in _EXPERT_METRICS if loads else ():
        add(
            name,
            kind,
            what,
            [
                (f'{labels[replica]},layer="{layer}"', value)
                for replica, load in loads.items()
                for layer, value in zip(load.layers, values(load), strict=True)
            ],
        )
    infos = []
    for replica, one in stats.items():
        config = {**(cache_config or {}), "num_gpu_blocks": one.num_blocks}
        if cache_config is not None:
            size = one.num_blocks * cache_config["block_size"]
            config |= {"kv_cache_size_tokens": size, "kv_cache_max_concurrency": size / cache_config["max_model_len"]}
        said = ",".join(f'{name}="{_escape(str(value))}"' for name, value in config.items())
        infos.append((f"{labels[replica]},{said}", 1))
    add("cache_config_info", "gauge", "The KV cache's configuration, in labels.", infos)
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
