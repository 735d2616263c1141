"""One engine in each layout, for `jpaged bench vattention`: steps, prompts, what the layouts agree on, tokens a second.

    parent   --of-one-layout PARTS-->   an engine in a process of its own, layout after layout
             <--a file of JSON-------   figures, tokens and log-probabilities, written anew after each figure

An engine gives its memory back to the device only when its process ends. What one layout has measured is compared with
the first layout's in the parent.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jpaged.api.config import EngineArgs
from jpaged.api.sampling_params import SamplingParams
from jpaged.bench.engine_options import engine_options
from jpaged.bench.engine_processes import decode, engine_argv, free_gb
from jpaged.bench.layout_throughput import BATCHES, beside, measure_throughput
from jpaged.executor.cache.virtual.mapper import PlanMapper
from jpaged.frontend.llm_engine import LLMEngine

PARTS = ("steps", "prompts", "agreement", "throughput")
"""That engines measure, of the parts of `jpaged bench vattention`."""

LAYOUTS = ("paged", "sliced", "per-layer", "cudnn")
"""cudnn: per-layer pages, read by cuDNN's attention, which knows no block tables."""

PROMPT_LENGTHS = (1024, 4096, 16384)

_WARM_TOKENS = 128
"""More than the sequences have that run before an engine's steps are timed: the first steps of a process are slow."""

_PROMPT_ROUNDS = 3
_STEPS_BEFORE = 4
"""That another prompt takes, if the engine takes one so long. The first few are dispatched at once; what comes behind
them waits for their results."""

_Found = dict[str, Any]


def measure(parser: argparse.ArgumentParser, args: argparse.Namespace, parts: Sequence[str]) -> Iterator[_Found]:
    """These parts of each layout's engine. One that fails leaves what it had measured, and the others.

    parser: of `jpaged bench vattention`. args: what it made of the command line.
    """
    first: _Found = {}
    for layout in args.layout or LAYOUTS[:3]:
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "figures.json"
            argv = [*engine_argv(parser, args, layout), "--of-one-layout", ",".join(parts), "--json", str(file)]
            status = subprocess.run(argv, check=False).returncode
            found = json.loads(file.read_text()) if file.exists() else {"figures": []}
        yield from ({"layout": layout} | figure | beside(figure, first) for figure in found["figures"])
        if status:
            yield {"layout": layout, "failed": f"the engine ended with exit code {status}; what it said is above"}
            continue
        first = first or found | {"layout": layout}
        if "steps" in parts:
            same = sum(a == b for a, b in zip(found["tokens"], first["tokens"], strict=True))
            row = {"layout": layout, "sequences_as_first": f"{same} of {len(first['tokens'])}"}
            yield {"part": "steps"} | row | found["memory"]
        if "agreement" in parts and layout != first["layout"]:
            both = {"layout": layout, "beside": first["layout"]}
            yield {"part": "agreement"} | both | compare(first["answers"], found["answers"])


def measure_engine(args: argparse.Namespace) -> Iterator[_Found]:
    """What an engine measures of the parts in `args.of_one_layout`: all that is known, whenever there is more."""
    parts = args.of_one_layout.split(",")
    begun = time.perf_counter()
    engine = LLMEngine(EngineArgs(**engine_options(args)))
    found: _Found = {"figures": [], "memory": {"startup_s": time.perf_counter() - begun}}
    memory = engine.startup.runner.memory
    mapper = None if memory is None else memory.mapper
    if "steps" in parts:
        for figure, found["tokens"] in _steps(engine, mapper, args):
            found["figures"].append({"part": "steps"} | figure)
            yield found
    if "prompts" in parts:
        for figure in _prompts(engine, mapper, args):
            found["figures"].append({"part": "prompts"} | figure)
            yield found
    if "agreement" in parts:
        found["answers"] = answers(engine, args.rows, args.context, args.steps, args.seed)
        yield found
    if "throughput" in parts:
        if "steps" not in parts:  # which has warmed up
            decode(engine, min(max(args.batches or BATCHES), engine.request_limits().max_num_seqs), 1, 16)
        for figure in measure_throughput(engine, args, args.prompt_lengths or PROMPT_LENGTHS):
            found["figures"].append({"part": "throughput"} | figure)
            yield found
    found["memory"] |= {"pool_gb": engine.startup.memory.pool / 1e9, "free_gb": free_gb()}
    yield found
    if "steps" in parts and not args.skip_sleep:
        found["memory"] |= _sleep(engine, args, found["tokens"])
        yield found


def _steps(
    engine: LLMEngine, mapper: PlanMapper | None, args: argparse.Namespace
) -> Iterator[tuple[_Found, list[list[int]]]]:
    """Decode steps of `rows` sequences, by the clock, and their tokens."""
    if args.context >= _WARM_TOKENS:  # below which the timed steps need no page
        decode(engine, args.rows, 1, 16)
    for mapping in ("never",) if mapper is None else ("ahead", "done before", "in the step"):
        if mapper is not None:
            mapper.maps_ahead = mapping != "in the step"
            if mapping != "done before":  # pages stay where sequences had them
                _unmap(engine, mapper)
        before = _counts(mapper)
        times, tokens = decode(engine, args.rows, args.context, args.steps)
        figure: _Found = {
            "mapping": mapping,
            "mean_ms": 1e3 * float(np.mean(times)),
            "median_ms": 1e3 * float(np.median(times)),
            "p99_ms": 1e3 * float(np.quantile(times, 0.99)),
        }
        yield figure | _since(mapper, before), tokens


def _sleep(engine: LLMEngine, args: argparse.Namespace, tokens: list[list[int]]) -> _Found:
    """What sleeping and waking takes."""
    begun = time.perf_counter()
    engine.sleep()
    slept = time.perf_counter()
    asleep_gb = free_gb()
    waking = time.perf_counter()
    engine.wake_up()
    woken = time.perf_counter()
    _, again = decode(engine, args.rows, args.context, 16)
    return {
        "sleep_s": slept - begun,
        "free_gb_asleep": asleep_gb,
        "wake_s": woken - waking,
        "same_after_wake": again == [of_row[: len(again[0])] for of_row in tokens],
    }


def _prompts(engine: LLMEngine, mapper: PlanMapper | None, args: argparse.Namespace) -> Iterator[_Found]:
    """Milliseconds from a prompt's arrival to its first token, by when its pages are mapped.

    in the step          each chunk's before its step
    beside the chunks    the first chunk's before its step, the others' by the thread meanwhile
    left                 before: those of the slot's last request (the paper's deferred reclamation)

    and, where it waits for a prompt that fills four steps, from that one's first token on:

    in the step, behind another
    ahead, behind another           by the thread, while the other's steps run (the paper's eager allocation)
    """
    rng = np.random.default_rng(args.seed)
    limits = engine.request_limits()
    steps_before = max(1, min(_STEPS_BEFORE, (limits.max_model_len - 1) // limits.max_num_batched_tokens))
    step_tokens = min(limits.max_num_batched_tokens, limits.max_model_len - 1)
    modes = ["in the step", "beside the chunks", "left", "in the step, behind another", "ahead, behind another"]
    for length in args.prompt_lengths or PROMPT_LENGTHS:
        if length >= limits.max_model_len:
            print(f"prompts of {length} tokens are left out: max_model_len is {limits.max_model_len}", file=sys.stderr)
            continue
        for mode in ["never", "never, behind another"] if mapper is None else modes:
            before = [step_tokens] * (steps_before if mode.endswith("behind another") else 0)
            times, counts = list[float](), _Found()
            for _ in range(1 + _PROMPT_ROUNDS):  # the first one warms up, and leaves its pages
                if mapper is not None:
                    mapper.maps_ahead = not mode.startswith("in the step")
                    if mode != "left":
                        _unmap(engine, mapper)
                seconds, counts = _first_token(engine, mapper, rng, length, before)
                times.append(seconds)
            yield {"tokens": length, "mapping": mode, "ms": 1e3 * float(np.median(times[1:]))} | counts
        if mapper is not None:
            mapper.maps_ahead = True


def _first_token(
    engine: LLMEngine, mapper: PlanMapper | None, rng: np.random.Generator, length: int, before: Sequence[int]
) -> tuple[float, _Found]:
    """Seconds until a prompt's first token, and what was mapped for it.

    before: tokens of a prompt that is computed before it, step by step; none where that is empty.
    """
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    engine.reset_prefix_cache()
    size = engine.startup.model.config.vocab_size
    for name, count in (("before", sum(before)), ("prompt", length)):
        if count:
            engine.add_request(name, {"prompt_token_ids": rng.integers(0, size, count).tolist()}, params)
    counts = _counts(mapper)
    begun = ended = time.perf_counter()
    for _ in before:
        engine.step()  # dispatches one of the other's steps
        counts = _counts(mapper)  # what is mapped from here on is for the prompt
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id == "before":
                begun = time.perf_counter()
            else:
                ended = time.perf_counter()
    return ended - begun, _since(mapper, counts)


def _unmap(engine: LLMEngine, mapper: PlanMapper) -> None:
    """Takes the pages from all places, which the scheduler no longer counts on. No request is unfinished."""
    jax.block_until_ready(engine.startup.runner.pools)
    mapper.empty_places()
    engine.core.scheduler.slots.forget_former_tenants()


def _counts(mapper: PlanMapper | None) -> tuple[int, float, int, float]:
    if mapper is None:
        return 0, 0.0, 0, 0.0
    return mapper.counts.num_mapped, mapper.counts.seconds, mapper.num_in_steps, mapper.waited_s


def _since(mapper: PlanMapper | None, before: tuple[int, float, int, float]) -> _Found:
    """What was mapped since `_counts` was `before`; nothing without a mapper."""
    if mapper is None:
        return {}
    now = _counts(mapper)
    names = ("pages", "mapping_s", "pages_in_steps", "waited_s")
    return {name: a - b for name, a, b in zip(names, now, before, strict=True)}


def answers(engine: LLMEngine, rows: int, context: int, steps: int, seed: int) -> _Found:
    """Greedy answers to `rows` random prompts of `context` tokens, the two likeliest tokens of each step, and the
    log-probabilities of the prompts' own tokens.
    """
    rng, size = np.random.default_rng(seed), engine.startup.model.config.vocab_size
    params = SamplingParams(
        temperature=0, max_tokens=steps, ignore_eos=True, detokenize=False, logprobs=2, prompt_logprobs=0
    )
    engine.reset_prefix_cache()
    prompts = [rng.integers(0, size, context).tolist() for _ in range(rows)]
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    found: _Found = {"tokens": [[]] * rows, "likeliest": [[]] * rows, "prompts": [[]] * rows}
    while engine.has_unfinished_requests():
        for output in engine.step():
            number, choice = int(output.request_id), output.outputs[0]
            if not output.finished:
                continue
            found["tokens"][number] = list(choice.token_ids)
            found["likeliest"][number] = [
                sorted(((int(token), entry.logprob) for token, entry in of_step.items()), key=lambda pair: -pair[1])[:2]
                for of_step in choice.logprobs or ()
            ]
            given = zip(prompts[number], output.prompt_logprobs or (), strict=True)
            found["prompts"][number] = [entry[token].logprob for token, entry in given if entry is not None]
    return found


def compare(first: Mapping[str, Any], other: Mapping[str, Any]) -> _Found:
    """Two engines' `answers` to the same prompts.

    The margin of a step is by how much the first engine's token was likelier than its second choice, in natural
    logarithms; where two engines' sums round differently, greedy tokens may part where it is small. Reported are the
    margins where the answers part, beside those of all steps; `not_second`: answers whose other token was not even the
    first engine's second choice.
    """
    margins, not_second, parts_at, equal = [], 0, [], 0
    for mine, theirs, likeliest in zip(first["tokens"], other["tokens"], first["likeliest"], strict=True):
        at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
        if at is None:
            equal += 1
            continue
        parts_at.append(at)
        (_, best), (second, next_best) = likeliest[at]
        margins.append(best - next_best)
        not_second += theirs[at] != second
    of_all = [pair[0][1] - pair[1][1] for of_row in first["likeliest"] for pair in of_row]
    of_tokens = np.abs(np.concatenate(first["prompts"]) - np.concatenate(other["prompts"]))
    found: _Found = {"sequences_equal": f"{equal} of {len(first['tokens'])}"}
    if margins:
        found |= {
            "tokens_before_they_part_median": float(np.median(parts_at)),
            "margin_where_they_part_median": float(np.median(margins)),
            "margin_where_they_part_max": float(np.max(margins)),
            "not_second": int(not_second),
        }
    return found | {
        "margin_of_all_steps_median": float(np.median(of_all)),
        "prompt_logprobs": len(of_tokens),
        "difference_mean": float(np.mean(of_tokens)),
        "difference_p99": float(np.quantile(of_tokens, 0.99)),
        "difference_max": float(np.max(of_tokens)),
    }
