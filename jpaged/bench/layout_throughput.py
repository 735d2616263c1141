"""Tokens a second of one engine, for the part `throughput` of `jpaged bench vattention`: decode steps by rows and
context, and prompts by length.

A context costs its most rows' prompts once. They decode, some of them are aborted, and the rest decodes on:

    compute 64 prompts | 64 rows: warm up, time | abort 32 | 32 rows: warm up, time | abort 24 | 8 rows: ...

So the fewer the rows, the longer the sequences, by a few hundred tokens at most; each figure says their mean length.
It is the same in every layout.
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jpaged.api.sampling_params import SamplingParams
from jpaged.engine.limits import RequestLimits
from jpaged.frontend.llm_engine import LLMEngine

BATCHES = (1, 8, 32, 64, 128)
CONTEXTS = (1024, 4096, 16384)

_WARM_STEPS = 8
"""Before those that are timed: the pipeline is full again, and rows have the pages that they were promised."""

_PROMPT_ROUNDS = 3

_Found = dict[str, Any]


def measure_throughput(engine: LLMEngine, args: argparse.Namespace, lengths: Sequence[int]) -> Iterator[_Found]:
    """Prompts, then decode steps.

    lengths: of prompts.
    args: `batches` and `contexts` of decode steps, `steps` that are timed, `most_tokens` of all rows, `seed`.
    """
    yield from _prompts(engine, lengths, args.seed)
    for context in args.contexts or CONTEXTS:
        yield from _decode(engine, args, context)


def beside(figure: Mapping[str, Any], others: Mapping[str, Any]) -> _Found:
    """A figure's tokens a second over those of the same case in what another layout found; nothing if it has none.

    others: what `layout_engines.measure_engine` yields, and the "layout".
    """

    def case(one: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(one.get(key) for key in ("part", "what", "rows", "context"))

    if "tokens_per_s" not in figure:
        return {}
    for other in others.get("figures", ()):
        if case(other) == case(figure) and "tokens_per_s" in other:
            return {"beside": others["layout"], "ratio": figure["tokens_per_s"] / other["tokens_per_s"]}
    return {}


def _prompts(engine: LLMEngine, lengths: Sequence[int], seed: int) -> Iterator[_Found]:
    """Prompts of one length that arrive together, as many as make up the longest, until the last one's first token.

    The median of three rounds, after a first one whose pages the others find mapped, as on a busy server.
    """
    limits, rng = engine.request_limits(), np.random.default_rng(seed)
    fit = [length for length in lengths if length < min(limits.max_model_len, limits.pool_tokens)]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    for length in lengths:
        case = {"what": "prompts", "context": length}
        if length not in fit:
            yield case | {"left_out": _too_long(limits)}
            continue
        rows = max(fit) // length
        seconds = []
        for _ in range(1 + _PROMPT_ROUNDS):
            _add_requests(engine, rng, rows, length, params)
            begun = time.perf_counter()
            while engine.has_unfinished_requests():
                engine.step()
            seconds.append(time.perf_counter() - begun)
        median = float(np.median(seconds[1:]))
        yield case | {"rows": rows, "ms": 1e3 * median, "tokens_per_s": rows * length / median}


def _decode(engine: LLMEngine, args: argparse.Namespace, context: int) -> Iterator[_Found]:
    """Decode steps of so many tokens each, from the most rows to the fewest."""
    limits = engine.request_limits()
    batches = sorted(set(args.batches or BATCHES), reverse=True)
    while batches and (why := _left_out(limits, args, batches, context)):
        yield {"what": "decode", "rows": batches.pop(0), "context": context, "left_out": why}
    if not batches:
        return
    grown = _grown(limits, args, batches, context)
    params = SamplingParams(temperature=0, max_tokens=grown, ignore_eos=True, detokenize=False)
    names = _add_requests(engine, np.random.default_rng(args.seed), batches[0], context, params)
    lengths: dict[str, int] = {}

    def step() -> None:
        for output in engine.step():
            lengths[output.request_id] = context + len(output.outputs[0].token_ids)

    while len(lengths) < len(names):
        step()
    for rows in batches:
        engine.abort_request(names[rows:])
        names = names[:rows]
        for _ in range(_WARM_STEPS):
            step()
        before = sum(lengths[name] for name in names)
        preempted = engine.get_metrics().num_preemptions
        begun = time.perf_counter()
        for _ in range(args.steps):
            step()
        seconds = time.perf_counter() - begun
        after = sum(lengths[name] for name in names)
        yield {
            "what": "decode",
            "rows": rows,
            "context": context,
            "mean_length": (before + after) / 2 / rows,
            "step_ms": 1e3 * seconds / args.steps,
            "tokens_per_s": (after - before) / seconds,
            "preemptions": engine.get_metrics().num_preemptions - preempted,
        }
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()


def _add_requests(
    engine: LLMEngine, rng: np.random.Generator, rows: int, length: int, params: SamplingParams
) -> list[str]:
    """Random prompts, of which no token is cached; their names."""
    engine.reset_prefix_cache()
    size, names = engine.startup.model.config.vocab_size, [str(row) for row in range(rows)]
    for name in names:
        engine.add_request(name, {"prompt_token_ids": rng.integers(0, size, length).tolist()}, params)
    return names


def _grown(limits: RequestLimits, args: argparse.Namespace, batches: Sequence[int], context: int) -> int:
    """More tokens than any row decodes: while other prompts are computed, and in the steps of all batches."""
    rows = batches[0]
    of_a_prompt = -(-context // max(1, limits.max_num_batched_tokens - rows))
    return 2 * rows * of_a_prompt + len(batches) * (_WARM_STEPS + args.steps)


def _left_out(limits: RequestLimits, args: argparse.Namespace, batches: Sequence[int], context: int) -> str | None:
    """Why the largest of these batches is not measured, if it is not."""
    rows, length = batches[0], context + _grown(limits, args, batches, context)
    if rows > limits.max_num_seqs:
        return f"max_num_seqs is {limits.max_num_seqs}"
    if args.most_tokens is not None and rows * context > args.most_tokens:
        return f"more than {args.most_tokens} tokens"
    if length > limits.max_model_len:
        return _too_long(limits)
    if rows * limits.footprint.alone(context, length) > limits.num_blocks:
        return f"the pool has {limits.num_blocks} blocks of {limits.block_size}"
    return None


def _too_long(limits: RequestLimits) -> str:
    return f"max_model_len is {limits.max_model_len}, and the pool holds {limits.pool_tokens} tokens of a sequence"
