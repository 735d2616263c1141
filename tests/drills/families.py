"""Every model family on this machine's device: the same greedy tokens in every cache layout and by any kernels.

    python -m tests.drills.families --processes 2          # on a CPU, some 20 seconds of a core for each model
    python -m tests.drills.families --processes 12         # on a GPU beside 16 cores

Tiny random models in float32, prompts of 1 to 60 tokens: first in the paged layout by XLA's kernels, with a pool that
holds all requests. Then by the kernels that the device takes, in the paged layout and in both page layouts of the
virtual one; and in those of the virtual one with a pool so small that requests are preempted. The tokens must be equal.
Models that a layout refuses are listed.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jpaged.bench.report import write_report
from tests.parallel.family_runs import ARGS
from tests.tiny_models import models_of_blocks, tiny_model, tiny_models, write_tiny_model

WAYS: dict[str, dict[str, Any]] = {
    "paged": {},
    "virtual, sliced": {"kv_cache_layout": "virtual"},
    "virtual, per-layer": {"kv_cache_layout": "virtual", "virtual_page_layout": "per-layer"},
}


@dataclass
class Found:
    """What one model did: the ways whose tokens were the reference's, those that were refused and why, the others."""

    model: str
    equal: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, Any] = field(default_factory=dict)
    preemptions: int = 0
    seconds: float = 0


def try_model(name: str) -> Found:
    """In a process of its own, so that several start at once. Whatever happens to one, the others are still tried."""
    begun, found = time.monotonic(), Found(name)
    try:
        _try_model(found)
    except Exception as error:
        found.wrong["the run"] = f"{type(error).__name__}: {error}"
    found.seconds = round(time.monotonic() - begun, 1)
    return found


def _try_model(found: Found) -> None:
    from jpaged import LLMEngine
    from jpaged.api.errors import InvalidParameterError
    from tests.parallel.family_runs import greedy_tokens

    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(tiny_model(found.model), directory, use_torch=False)
        args = replace(ARGS, model=directory)
        expected = greedy_tokens(LLMEngine(replace(args, kernel_backend="xla")))
        for way, options in WAYS.items():
            try:
                engine = LLMEngine(replace(args, **options))
            except InvalidParameterError as error:
                if not options:
                    raise
                found.refused[way] = str(error)
                continue
            runs = {way: engine}
            if options:
                page, groups = engine.startup.config.block_size, len(engine.startup.cache_groups)
                few = replace(args, **options, num_gpu_blocks_override=groups * -(-112 // page) + 1)
                runs[f"{way}, few pages"] = LLMEngine(few, engine.startup)
            for label, llm in runs.items():
                tokens = greedy_tokens(llm)
                if tokens == expected:
                    found.equal.append(label)
                else:
                    found.wrong[label] = [[ours, theirs] for ours, theirs in zip(tokens, expected, strict=True)]
                found.preemptions += llm.get_metrics().num_preemptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = [case.name for case in tiny_models() + models_of_blocks()]
    parser.add_argument("--models", nargs="+", choices=cases, default=cases, metavar="NAME", help="default: all")
    parser.add_argument("--processes", type=int, default=1, help="models at once (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found to FILE")
    options = parser.parse_args()

    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share the device
    begun, results = time.monotonic(), []
    pool = multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=4)
    with pool:
        for found in pool.imap_unordered(try_model, options.models):
            results.append(found)
            said = f"not the same: {', '.join(found.wrong)}" if found.wrong else f"the same in {len(found.equal)} ways"
            refused = f"; refused: {', '.join(found.refused)}" if found.refused else ""
            print(f"{found.model}: {said}{refused}; {found.preemptions} preemptions, {found.seconds} s", flush=True)
            for way, what in found.wrong.items():
                if isinstance(what, str):
                    print(f"    {way}: {what[:500]}", flush=True)
        pool.close()
        pool.join()
    if options.json:
        write_report(options.json, "families", vars(options), [asdict(found) for found in results])
    wrong = [found.model for found in results if found.wrong]
    if not any(found.preemptions for found in results):
        raise SystemExit("no request was preempted: the pools were too large to show anything")
    print(f"{len(results) - len(wrong)} of {len(results)} models, {time.monotonic() - begun:.0f} s")
    if wrong:
        raise SystemExit(f"not the same: {', '.join(sorted(wrong))}")


if __name__ == "__main__":
    main()
