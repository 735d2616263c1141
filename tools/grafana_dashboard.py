"""Writes docs/grafana-dashboard.json, from the list of panels below.

    python tools/grafana_dashboard.py [--check]

--check writes nothing and exits with 1 if the file is not what this would write.
"""

import argparse
import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent.parent / "docs" / "grafana-dashboard.json"
SELECTOR = '{model_name=~"$model_name", engine=~"$engine"}'
QUANTILES = (0.5, 0.9, 0.99)

Targets = list[tuple[str, str]]
"""(expression, legend); a metric's name begins with ${prefix}, and SELECTOR or `rate` says of whom."""


def gauge(name: str, legend: str, how: str = "sum") -> tuple[str, str]:
    return f"{how}(${{prefix}}:{name}{SELECTOR})", legend


def rate(name: str, by: str = "") -> str:
    return f"sum{by}(rate(${{prefix}}:{name}{SELECTOR}[$__rate_interval]))"


def quantiles(name: str) -> Targets:
    buckets = rate(f"{name}_bucket", " by (le) ")
    return [(f"histogram_quantile({q}, {buckets})", f"p{100 * q:g}") for q in QUANTILES]


def mean(name: str) -> tuple[str, str]:
    return f"{rate(f'{name}_sum')} / {rate(f'{name}_count')}", "mean"


PANELS: list[tuple[str, list[tuple[str, str, str, Targets]]]] = [  # rows of (title, unit, description, targets)
    (
        "Load",
        [
            (
                "Requests",
                "short",
                "Sequences that run, and requests that wait for a slot or for blocks.",
                [gauge("num_requests_running", "running"), gauge("num_requests_waiting", "waiting")],
            ),
            (
                "Requests ended",
                "reqps",
                "By reason: stop and length are answers, abort is a client that went away.",
                [(rate("request_success_total", " by (finished_reason) "), "{{finished_reason}}")],
            ),
            (
                "Tokens",
                "short",
                "Tokens a second.",
                [(rate("generation_tokens_total"), "generated"), (rate("prompt_tokens_total"), "of prompts")],
            ),
        ],
    ),
    (
        "Latency",
        [
            ("Time to first token", "s", "From a request's arrival.", quantiles("time_to_first_token_seconds")),
            ("Inter-token latency", "s", "Between tokens of a request.", quantiles("inter_token_latency_seconds")),
            ("End to end", "s", "From a request's arrival to its end.", quantiles("e2e_request_latency_seconds")),
            (
                "Time per output token",
                "s",
                "Mean of a request.",
                quantiles("request_time_per_output_token_seconds"),
            ),
            ("Time in the queue", "s", "Before a request first ran.", quantiles("request_queue_time_seconds")),
            (
                "Prefill and decode",
                "s",
                "Median time of a request from first running to its first token, and from there to its last.",
                [
                    (quantiles("request_prefill_time_seconds")[0][0], "prefill"),
                    (quantiles("request_decode_time_seconds")[0][0], "decode"),
                    (quantiles("request_inference_time_seconds")[0][0], "both"),
                ],
            ),
        ],
    ),
    (
        "Memory",
        [
            (
                "KV pool in use",
                "percentunit",
                "Blocks in use, of all; where it stays near 100 % requests wait or are preempted.",
                [(f"${{prefix}}:kv_cache_usage_perc{SELECTOR}", "engine {{engine}}")],
            ),
            (
                "KV pool",
                "short",
                "Its configuration, in the legend.",
                [
                    (
                        f"${{prefix}}:cache_config_info{SELECTOR}",
                        "engine {{engine}}: {{num_gpu_blocks}} blocks of {{block_size}} tokens, {{cache_dtype}}",
                    )
                ],
            ),
            (
                "Engines awake and asleep",
                "short",
                "Engines that are awake, and that sleep: at level 1, or at level 2.",
                [(f"sum by (sleep_state) (${{prefix}}:engine_sleep_state{SELECTOR})", "{{sleep_state}}")],
            ),
            (
                "Prefix cache hit rate",
                "percentunit",
                "Prompt tokens found in the prefix cache, of those looked up; those of them that host memory held; and"
                " those that were there, without a state behind them.",
                [
                    (f"{rate('prefix_cache_hits_total')} / {rate('prefix_cache_queries_total')}", "hits"),
                    (
                        f"{rate('prefix_cache_state_misses_total')} / {rate('prefix_cache_queries_total')}",
                        "without a state",
                    ),
                    (
                        f"{rate('prefix_cache_host_hits_total')} / {rate('prefix_cache_queries_total')}",
                        "of host memory",
                    ),
                ],
            ),
            (
                "Preemptions",
                "short",
                "How often requests gave up their blocks to others: a second, and on average in the life of one.",
                [
                    (rate("num_preemptions_total"), "a second"),
                    (mean("request_num_preemptions")[0], "of a request"),
                ],
            ),
        ],
    ),
    (
        "Requests and steps",
        [
            ("Prompt length", "short", "Tokens.", [*quantiles("request_prompt_tokens"), mean("request_prompt_tokens")]),
            (
                "Answer length",
                "short",
                "Tokens, of all choices of a request.",
                [*quantiles("request_generation_tokens"), mean("request_generation_tokens")],
            ),
            (
                "Asked for",
                "short",
                "Mean max_tokens and n of requests.",
                [
                    (mean("request_params_max_tokens")[0], "max_tokens"),
                    (mean("request_params_n")[0], "n"),
                ],
            ),
            (
                "Steps",
                "ops",
                "Steps of the engine a second, and those that read a prefix once for all sequences that share it.",
                [(rate("engine_steps_total"), "steps"), (rate("shared_prefix_steps_total"), "with a shared prefix")],
            ),
            ("Tokens a step", "short", "Of prompts computed, and new ones.", [mean("iteration_tokens_total")]),
            (
                "Constrained requests",
                "ops",
                "Tokens sampled before their masks were made, a second, those of them that the constraint allowed, and "
                "requests whose constraint the device follows by itself.",
                [
                    (rate("constrained_guesses_total"), "guesses"),
                    (rate("constrained_guesses_kept_total"), "allowed"),
                    (rate("constrained_requests_by_table_total"), "requests by table"),
                ],
            ),
        ],
    ),
    (
        "Experts, with --expert-load",
        [
            (
                "Tokens of experts",
                "short",
                "Tokens a second that went to experts, each once for each of its experts, in all layers.",
                [(rate("expert_tokens_total"), "tokens")],
            ),
            (
                "Imbalance",
                "short",
                "Tokens of a layer's busiest expert over those of its mean one, in the last minutes.",
                [gauge("expert_load_imbalance", "worst layer", "max"), gauge("expert_load_imbalance", "mean", "avg")],
            ),
            (
                "Experts without tokens",
                "short",
                "Experts that no token has gone to since the engine's start, in all layers.",
                [gauge("experts_unused", "experts")],
            ),
        ],
    ),
    (
        "Failures",
        [
            (
                "Engine restarts",
                "short",
                "Engine processes started again after they ended or hung, a second, and requests that went on then.",
                [(rate("engine_restarts_total"), "restarts"), (rate("requests_resumed_total"), "requests resumed")],
            ),
            (
                "Requests refused",
                "short",
                "Requests a second whose logits were not finite, and those that ended engine processes.",
                [
                    (rate("requests_not_finite_total"), "logits not finite"),
                    (rate("requests_suspected_total"), "ended the engine"),
                ],
            ),
        ],
    ),
]


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for row, members in PANELS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row,
                "collapsed": False,
                "panels": [],
                "gridPos": {"h": 1, "w": 24, "x": 0, "y": y},
            }
        )
        y += 1
        for i, (title, unit, description, targets) in enumerate(members):
            place = {"h": 8, "w": 8, "x": 8 * (i % 3), "y": y + 8 * (i // 3)}
            panels.append(_panel(len(panels) + 1, title, unit, description, targets, place))
        y += 8 * -(-len(members) // 3)
    return {
        "uid": "jpaged",
        "title": "jpaged",
        "description": "Requests, latency and memory of jpaged servers.",
        "tags": ["jpaged", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    source = {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus"}
    prefix = {
        "type": "textbox",
        "name": "prefix",
        "label": "Prefix",
        "description": "As --metrics-prefix of the server.",
        "query": "jpaged",
        "current": {"text": "jpaged", "value": "jpaged"},
    }
    labels = [
        {
            "type": "query",
            "name": name,
            "label": label,
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "query": {"query": f"label_values(${{prefix}}:num_requests_running, {name})", "refId": name},
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": ["All"], "value": ["$__all"]},
        }
        for name, label in (("model_name", "Model"), ("engine", "Replica"))
    ]
    return [source, prefix, *labels]


def _panel(
    panel_id: int, title: str, unit: str, description: str, targets: Targets, place: dict[str, int]
) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    custom = {"lineWidth": 2, "fillOpacity": 8, "showPoints": "never", "spanNulls": False}
    limits = {"min": 0, "max": 1} if unit == "percentunit" else {"min": 0}
    return {
        "id": panel_id,
        "type": "timeseries",
        "title": title,
        "description": description,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, "custom": custom, **limits}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": source, "expr": expression, "legendFormat": legend}
            for i, (expression, legend) in enumerate(targets)
        ],
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        if PATH.read_text() != text():
            raise SystemExit(f"{PATH} is not what this script writes; run it without --check.")
        return
    PATH.write_text(text())


if __name__ == "__main__":
    main()
