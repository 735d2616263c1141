"""Every model family on this machine's device: the same greedy tokens in every cache layout.

    python -m tests.drills.families --processes 2              # on a CPU: some 15 seconds of a core a model
    python -m tests.drills.families --processes 16             # on a GPU beside 16 cores: 70 seconds of a core a model

Tiny random models in float32, prompts of 1 to 60 tokens, and samples that share their prompt's blocks: in the paged
layout, then in both page layouts of the virtual one, with a pool that holds all requests, and with one so small that
requests are preempted. The tokens must be equal. `--with-xla` compares them with those of XLA's kernels, too;
`--tensor-parallel N` splits the virtual layout's engines over N devices.

Models that a layout refuses are listed. Each architecture's first model comes before any architecture's second, so a
run that is cut short has seen most; what was found is written then, too. A model whose process dies, or that leaves the
device in doubt, costs that process alone.
"""

import argparse
import multiprocessing
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import wait
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
BLOCK = 16
"""Tokens of a block, the fewest that the kernels of GPUs take."""

POOL = 48
"""Blocks or pages of each cache group that hold all requests at once; a page holds a block or more."""

SHARE = 0.8
"""Of the device's memory, for all processes' arrays; the rest is for pages, and for what CUDA needs beside."""


@dataclass
class Found:
    """What one model did: the ways whose tokens were the reference's, those that were refused and why, the others, and
    how often requests were preempted in each way."""

    model: str
    equal: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, Any] = field(default_factory=dict)
    preemptions: dict[str, int] = field(default_factory=dict)
    seconds: float = 0

    def __str__(self) -> str:
        said = f"not the same: {', '.join(self.wrong)}" if self.wrong else f"the same in {len(self.equal)} ways"
        refused = f"; refused: {', '.join(self.refused)}" if self.refused else ""
        reasons = [f"\n    {way}: {what[:500]}" for way, what in self.wrong.items() if isinstance(what, str)]
        preempted = sum(self.preemptions.values())
        return f"{self.model}: {said}{refused}; {preempted} preemptions, {self.seconds} s{''.join(reasons)}"


def try_model(name: str, with_xla: bool = False, degree: int = 1) -> Found:
    """Whatever happens to one model, the others are still tried."""
    begun, found = time.monotonic(), Found(name)
    try:
        _try_model(found, with_xla, degree)
    except Exception as error:
        found.wrong["the run"] = f"{type(error).__name__}: {error}"
    found.seconds = round(time.monotonic() - begun, 1)
    return found


def _try_model(found: Found, with_xla: bool, degree: int) -> None:
    from jpaged import LLMEngine
    from jpaged.api.errors import InvalidParameterError
    from tests.parallel.family_runs import greedy_tokens

    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(tiny_model(found.model), directory, use_torch=False)
        args = replace(ARGS, model=directory, block_size=BLOCK, num_gpu_blocks_override=4 * POOL)
        split = {way: options | {"tensor_parallel_size": degree} if options else {} for way, options in WAYS.items()}
        ways = ({"paged, XLA": {"kernel_backend": "xla"}} if with_xla else {}) | split
        expected = None
        for way, options in ways.items():
            try:
                engine = LLMEngine(replace(args, **options))
            except InvalidParameterError as error:
                if "kv_cache_layout" not in options:
                    raise
                found.refused[way] = str(error)
                continue
            groups = len(engine.startup.cache_groups)
            args = replace(args, num_gpu_blocks_override=groups * POOL + 1)
            tokens = {way: greedy_tokens(engine) + paired_tokens(engine)}
            if options:
                tokens[f"{way}, few pages"], found.preemptions[way] = _with_few_pages(engine, args, options)
            expected = expected or tokens[way]
            for label, ours in tokens.items():
                if ours == expected:
                    found.equal.append(label)
                else:
                    found.wrong[label] = [list(both) for both in zip(ours, expected, strict=True)]


def _with_few_pages(engine: Any, args: Any, options: dict[str, Any]) -> tuple[list[list[int]], int]:
    """Tokens where the pool is so small that requests are preempted, if any is, and how often they are."""
    from jpaged import LLMEngine
    from jpaged.api.errors import OutOfMemoryError
    from tests.parallel.family_runs import greedy_tokens

    groups, page = len(engine.startup.cache_groups), engine.startup.config.block_size
    tokens, preemptions = list[list[int]](), 0
    for pages in range(max(3, -(-112 // page)), 0, -1):
        small = replace(args, **options, num_gpu_blocks_override=groups * pages + 1)
        try:
            few = LLMEngine(small, engine.startup)
            tokens = greedy_tokens(few) + paired_tokens(few)
        except OutOfMemoryError:  # a request alone needs more
            break
        if preemptions := few.get_metrics().num_preemptions:
            break
    return tokens, preemptions


def paired_tokens(engine: Any) -> list[list[int]]:
    """Two samples each of two prompts at once: each pair shares its prompt's blocks, and parts by copying the last."""
    from jpaged import RequestOutputKind, SamplingParams
    from tests.parallel.family_runs import prompts

    for i, prompt in enumerate(prompts()[3:5]):
        sampling = SamplingParams(
            n=2, temperature=0, max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
        )
        engine.add_request(f"pair {i}", prompt, sampling)
    outputs: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    return [list(sample.token_ids) for i in range(2) for sample in outputs[f"pair {i}"].outputs]


def by_worth(names: Sequence[str]) -> list[str]:
    """Each architecture's first model, then each one's second, and so on; those that keep latents, which the virtual
    layout refuses, last."""
    seen: Counter[str] = Counter()
    turns = {}
    for name in names:
        config = tiny_model(name).config
        (architecture,) = config["architectures"]
        turns[name] = "kv_lora_rank" in config, seen[architecture]
        seen[architecture] += 1
    return sorted(names, key=turns.__getitem__)


def _work(connection: Any, with_xla: bool, degree: int) -> None:
    """A process of the drill: tries the models that it is sent, until one leaves its device in doubt."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while name := connection.recv():
        found = try_model(name, with_xla, degree)
        connection.send(found)
        if "the run" in found.wrong:
            return


def try_models(names: Sequence[str], processes: int, with_xla: bool, degree: int, until: float) -> Iterator[Found]:
    """What each model did, in the order in which they are done; those that are not by `until` are left out."""
    context = multiprocessing.get_context("spawn")
    waiting, busy = list(names), dict[Any, tuple[Any, str]]()

    def begin(process: Any, connection: Any) -> None:
        busy[connection] = process, waiting.pop(0)
        connection.send(busy[connection][1])

    def begin_process() -> None:
        ours, its = context.Pipe()
        process = context.Process(target=_work, args=(its, with_xla, degree), daemon=True)
        process.start()
        its.close()
        begin(process, ours)

    try:
        for _ in range(min(processes, len(waiting))):
            begin_process()
        while busy and (left := until - time.monotonic()) > 0:
            ready: list[Any] = wait(list(busy), left)
            for connection in ready:
                process, name = busy.pop(connection)
                try:
                    found = connection.recv()
                except EOFError:
                    process.join()
                    found = Found(name, wrong={"the run": f"its process ended with {process.exitcode}"})
                yield found
                if "the run" in found.wrong:  # its process has ended
                    if waiting:
                        begin_process()
                elif waiting:
                    begin(process, connection)
                else:
                    connection.send(None)
    finally:
        for process, _ in busy.values():
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = [case.name for case in tiny_models() + models_of_blocks()]
    parser.add_argument("--models", nargs="+", choices=cases, default=cases, metavar="NAME", help="default: all")
    parser.add_argument("--processes", type=int, default=1, help="models at once (default: %(default)s)")
    parser.add_argument("--with-xla", action="store_true", help="compare with XLA's kernels, too")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="devices of the virtual layout")
    parser.add_argument("--limit-s", type=float, default=3600, help="seconds after which it stops (default: an hour)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found to FILE")
    options = parser.parse_args()

    if options.tensor_parallel > 1:  # has no effect where there are GPUs
        count = f"--xla_force_host_platform_device_count={options.tensor_parallel}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {count}".strip()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA's allocator tells each of its attempts
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share the device
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{min(0.05, SHARE / options.processes):.3f}")
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    begun, results = time.monotonic(), list[Found]()
    directory = tempfile.TemporaryDirectory()  # of all processes, of which some may be killed
    os.environ["TMPDIR"] = directory.name
    try:
        until = begun + options.limit_s
        names = by_worth(options.models)
        for found in try_models(names, options.processes, options.with_xla, options.tensor_parallel, until):
            results.append(found)
            print(found, flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    finally:
        directory.cleanup()
        if options.json:
            write_report(options.json, "families", vars(options), [asdict(found) for found in results])
    wrong = [found.model for found in results if found.wrong]
    untried = set(options.models) - {found.model for found in results}
    print(f"{len(results) - len(wrong)} of {len(results)} models the same, {time.monotonic() - begun:.0f} s")
    if not any(any(found.preemptions.values()) for found in results):
        raise SystemExit("no request was preempted: the pools were too large to show anything")
    if wrong or untried:
        untried_words = f"not tried: {', '.join(sorted(untried))}" if untried else ""
        raise SystemExit(f"not the same: {', '.join(sorted(wrong)) or 'none'}. {untried_words}")


if __name__ == "__main__":
    main()
