"""The part of `jpaged bench throughput` that has a constraint: requests of which all or some carry a JSON schema."""

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np

from jpaged.api.errors import InvalidParameterError
from jpaged.api.outputs import RequestOutput
from jpaged.api.sampling_params import SamplingParams
from jpaged.api.structured_outputs import StructuredOutputsParams
from jpaged.bench.engine_options import engine_options
from jpaged.bench.models import CONFIGS
from jpaged.bench.percentiles import summary, table
from jpaged.bench.workloads import BenchRequest, Workload
from jpaged.llm import LLM

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "summary": {"type": "string", "maxLength": 120},
        "score": {"type": "integer", "minimum": 0, "maximum": 100},
        "category": {"enum": ["question", "request", "complaint", "praise"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 16}, "minItems": 1, "maxItems": 5},
    },
    "required": ["name", "summary", "score", "category", "tags"],
    "additionalProperties": False,
}
"""Bounded strings and arrays, as of an application that files what its users write."""

_COUNTED = ("num_steps", "num_requests_by_table", "num_guesses", "num_kept_guesses")
_LONGEST_WAIT_S = 30.0


def make_structured_llm(args: argparse.Namespace) -> LLM:
    """An `LLM` with a tokenizer.

    Raises:
        InvalidParameterError: the model is a configuration without a tokenizer, and none is named.
    """
    if args.tokenizer is None and args.model in CONFIGS:
        raise InvalidParameterError(
            f"--structured needs --tokenizer: --model {args.model} is a configuration without one."
        )
    return LLM(**engine_options(args) | {"skip_tokenizer_init": False})


def measure_structured(llm: LLM, requests: list[BenchRequest], workload: Workload, runs: int, share: float) -> dict:
    """Runs the requests `runs` times after a warm-up, this share of them with the schema, evenly spread; then once with
    as many tokens of each, none with the schema; and then once those without it alone. Timed runs begin when the
    schema's table is there, as for all but its first requests.
    """
    is_constrained = [int((i + 1) * share) > int(i * share) for i in range(len(requests))]
    params = [_params(*one, workload) for one in zip(requests, is_constrained, strict=True)]
    prompts = [request.prompt_token_ids for request in requests]
    begun = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    first_s = time.perf_counter() - begun
    constrained = [one for one, yes in zip(params, is_constrained, strict=True) if yes]  # of one request's half: none
    table_s = _wait_for_table(llm, prompts[0], constrained[0]) if constrained else None
    timed: list[dict[str, Any]] = []
    rates = []
    for _ in range(runs):
        llm.reset_prefix_cache()
        before = llm.get_metrics()
        begun, begun_clock = time.perf_counter(), time.monotonic()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begun
        after = llm.get_metrics()
        rates.append(_tokens(outputs) / seconds)
        with_schema = [output for output, yes in zip(outputs, is_constrained, strict=True) if yes]
        without = [output for output, yes in zip(outputs, is_constrained, strict=True) if not yes]
        timed.append(
            {
                "seconds": seconds,
                "output_tokens": _tokens(outputs),
                "constrained": _until_the_last(with_schema, begun_clock),
                "free": _until_the_last(without, begun_clock),
                **{name: getattr(after, name) - getattr(before, name) for name in _COUNTED},
                "num_fulfilled": sum(one.outputs[0].finish_reason == "stop" for one in with_schema),
            }
        )
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    same_lengths = _run_plain(llm, requests, lengths, is_constrained, workload)
    alone = None
    if share < 1:
        llm.reset_prefix_cache()
        pairs = [(p, one) for p, one, yes in zip(prompts, params, is_constrained, strict=True) if not yes]
        begun_clock = time.monotonic()
        outputs = llm.generate([prompt for prompt, _ in pairs], [one for _, one in pairs], use_tqdm=False)
        alone = _until_the_last(outputs, begun_clock)
    return {
        "num_prompts": len(requests),
        "num_constrained": sum(is_constrained),
        "first_run_s": first_s,
        "table_s": table_s,
        "runs": timed,
        "same_lengths": same_lengths,
        "free_alone": alone,
        "output_tokens_per_s": statistics.median(rates),
    }


def _run_plain(
    llm: LLM, requests: list[BenchRequest], lengths: list[int], is_constrained: list[bool], workload: Workload
) -> dict[str, Any]:
    """A run without the schema, whose requests have so many tokens each. free: of those that never had it."""
    llm.reset_prefix_cache()
    params = [_params(replace(one, output_len=n), False, workload) for one, n in zip(requests, lengths, strict=True)]
    begun, begun_clock = time.perf_counter(), time.monotonic()
    outputs = llm.generate([request.prompt_token_ids for request in requests], params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    without = [output for output, yes in zip(outputs, is_constrained, strict=True) if not yes]
    return {"seconds": seconds, "output_tokens": _tokens(outputs), "free": _until_the_last(without, begun_clock)}


def _wait_for_table(llm: LLM, prompt: list[int], params: SamplingParams) -> float | None:
    """Seconds until a request goes by the schema's table, from the end of the first run; None if none does so soon."""
    begun = time.perf_counter()
    before = llm.get_metrics().num_requests_by_table
    while time.perf_counter() - begun < _LONGEST_WAIT_S:
        llm.generate([prompt], [params], use_tqdm=False)
        if llm.get_metrics().num_requests_by_table > before:
            return time.perf_counter() - begun
    return None


def _params(request: BenchRequest, is_constrained: bool, workload: Workload) -> SamplingParams:
    return SamplingParams(
        temperature=workload.temperature,
        top_p=workload.top_p,
        max_tokens=request.output_len,
        ignore_eos=not is_constrained,
        detokenize=False,
        structured_outputs=StructuredOutputsParams(json=SCHEMA) if is_constrained else None,
    )


def _tokens(outputs: list[RequestOutput]) -> int:
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def _until_the_last(outputs: list[RequestOutput], begun: float) -> dict[str, float]:
    """Tokens of these requests, and seconds until the last of them had finished."""
    ends = [output.metrics.finished_time or begun for output in outputs]
    return {"output_tokens": _tokens(outputs), "seconds": max(ends, default=begun) - begun}


def structured_row(figure: dict, free_rate: float) -> str:
    """What is printed of `measure_structured`. free_rate: output tokens a second of the workload without a schema."""
    rate, last = figure["output_tokens_per_s"], figure["runs"][-1]
    ended = f"{last['num_fulfilled']} ended by the schema, {last['num_requests_by_table']} went by its table"
    text = (
        f"{figure['name']}: {figure['num_constrained']} of {figure['num_prompts']} requests with a schema: {rate:,.0f} "
        f"output tokens/s, {rate / free_rate:.2f} of the rate without; {ended}"
    )
    plain = figure["same_lengths"]
    plain_rate = plain["output_tokens"] / plain["seconds"]
    text += f"; {rate / plain_rate:.2f} of {plain_rate:,.0f}, the rate of answers as long without a schema"
    if figure["free_alone"] is not None:
        parts = last["free"], plain["free"], figure["free_alone"]
        beside, plain_beside, alone = (one["output_tokens"] / one["seconds"] for one in parts)
        text += f"; those without had {beside:,.0f} tokens/s until the last of them ended, {plain_beside:,.0f} where"
        text += f" none had a schema, and {alone:,.0f} alone"
    return text


def unseen_schema(rng: np.random.Generator, depth: int = 0) -> dict[str, Any]:
    """An object's schema with names that nothing else has, of some ten to fifty fields: about as large as the schemas
    of jsonschemabench's medium sets.
    """
    properties: dict[str, Any] = {}
    for _ in range(int(rng.integers(4, 10)) if depth < 2 else 3):
        name = "field_" + "".join(rng.choice(list("abcdefghijklmnop"), 8))
        kind = rng.integers(7 if depth < 2 else 5)
        properties[name] = [
            lambda: {"type": "string", "maxLength": int(rng.integers(5, 200))},
            lambda: {"type": "integer", "minimum": 0, "maximum": int(rng.integers(1, 10_000))},
            lambda: {"enum": ["".join(rng.choice(list("qrstuvwxyz"), 6)) for _ in range(5)]},
            lambda: {"type": ["number", "null"]},
            lambda: {"type": "array", "items": {"type": "string"}, "maxItems": int(rng.integers(1, 9))},
            lambda: unseen_schema(rng, depth + 1),
            lambda: {"type": "array", "items": unseen_schema(rng, depth + 1), "minItems": 1},
        ][kind]()
    names = list(properties)
    required = names[: int(rng.integers(1, len(names) + 1))]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def measure_unseen(llm: LLM, count: int, seed: int) -> dict[str, Any]:
    """Times to the first token, in ms, of requests that come one by one: every second one has a schema that the engine
    has never seen.
    """
    rng = np.random.default_rng(seed)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for i in range(2 * (count + 1)):
        schema = StructuredOutputsParams(json=unseen_schema(rng)) if i % 2 else None
        params = SamplingParams(temperature=1.0, max_tokens=1, detokenize=False, structured_outputs=schema)
        prompt: list[int] = rng.integers(0, llm.engine.vocab_size, 32).tolist()
        begun = time.perf_counter()
        llm.generate([prompt], [params], use_tqdm=False)
        if i > 1:  # the first ones may start what later ones find
            seconds[schema is not None].append(time.perf_counter() - begun)
    with_schema, without = (summary(np.array(seconds[which])) for which in (True, False))
    return {"name": "unseen schemas", "count": count, "first_token_ms": with_schema, "first_token_free_ms": without}


def unseen_row(figure: dict[str, Any]) -> str:
    """What is printed of `measure_unseen`."""
    labels = {"with unseen schema": figure["first_token_ms"], "without": figure["first_token_free_ms"]}
    return "time to the first token, one request at a time\n" + table(labels)
