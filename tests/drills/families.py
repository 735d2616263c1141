"""Every model family on this machine's device: the same greedy tokens in every cache layout.

    python -m tests.drills.families --processes 2              # on a CPU: 10 to 30 seconds of a core a model
    python -m tests.drills.families --processes 16 --json families.json        # on a GPU beside 16 cores

Tiny random models in float32, prompts of 1 to 60 tokens, and samples that share their prompt's blocks: in the paged
layout, then in both page layouts of the virtual one, with a pool that holds all requests, and with one so small that
requests are preempted. The tokens must be equal. `--with-xla` compares them with those of XLA's kernels, too;
`--tensor-parallel N` splits the virtual layout's engines over N devices.

Engines compile what these requests run, a quarter of their programs, and XLA tries no algorithms out; `--all-programs`
has them start as a GPU's engines do. Each architecture's first model comes before any architecture's second, so a run
that is cut short has seen most. A model whose process dies, or that leaves the device in doubt, costs that process
alone. The last lines say how many models did what in each way; `--json` has a table of models by ways, written anew
after each model:

    same                    the reference's tokens, which are those of the first way
    same, none preempted    in a way with few pages, which were enough
    refused                 by an error that says why
    differs; failed         other tokens; an exception, or the process ended
    not done                when the time was over
"""

import argparse
import multiprocessing
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

from jpaged.bench.report import write_report
from jpaged.executor.start import startup
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

XLA_WAY = "paged, XLA"
FEW = ", few pages"

NO_TRIALS = ("--xla_gpu_autotune_level=0", "--xla_gpu_enable_triton_gemm=false")
"""XLA's options by which it takes products' algorithms by rule."""

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


@contextmanager
def few_programs() -> Iterator[None]:
    """Engines compile a program when a step first needs it, as on a CPU. On a GPU they refuse to, since their pools may
    fill the device. Those of the drill leave room.
    """
    with (
        mock.patch.object(startup, "free_device_memory", return_value=None),
        mock.patch.object(startup, "compiles_on_first_use", return_value=True),
    ):
        yield


@dataclass(frozen=True)
class Task:
    """How models are tried. degree: devices of the virtual layout. all_programs: compile all of an engine's."""

    with_xla: bool = False
    degree: int = 1
    all_programs: bool = False

    @property
    def ways(self) -> dict[str, dict[str, Any]]:
        """The options of each engine."""
        split = {
            way: options | {"tensor_parallel_size": self.degree} if options else {} for way, options in WAYS.items()
        }
        return ({XLA_WAY: {"kernel_backend": "xla"}} if self.with_xla else {}) | split

    @property
    def columns(self) -> list[str]:
        """Of the table of models by ways."""
        return [column for way in self.ways for column in ([way, way + FEW] if way.startswith("virtual") else [way])]


def try_model(name: str, task: Task) -> Found:
    """Whatever happens to one model, the others are still tried."""
    begun, found = time.monotonic(), Found(name)
    try:
        with nullcontext() if task.all_programs else few_programs():
            _try_model(found, task.ways)
    except Exception as error:
        found.wrong["the run"] = f"{type(error).__name__}: {error}"
    found.seconds = round(time.monotonic() - begun, 1)
    return found


def _try_model(found: Found, ways: dict[str, dict[str, Any]]) -> None:
    from jpaged import LLMEngine
    from jpaged.api.errors import InvalidParameterError
    from tests.parallel.family_runs import greedy_tokens

    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(tiny_model(found.model), directory, use_torch=False)
        args = replace(ARGS, model=directory, block_size=BLOCK, num_gpu_blocks_override=4 * POOL)
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
                tokens[way + FEW], found.preemptions[way] = _with_few_pages(engine, args, options)
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


def cells(found: Found | None, columns: Sequence[str]) -> dict[str, str]:
    """A model's row of the table; None: it was not done."""

    def cell(column: str) -> str:
        if found is None:
            return "not done"
        way = column.removesuffix(FEW)
        if way in found.refused:
            return "refused"
        if column in found.wrong:
            return "differs"
        if column not in found.equal:
            return "failed"
        return "same, none preempted" if column.endswith(FEW) and not found.preemptions[way] else "same"

    return {column: cell(column) for column in columns}


def summary(names: Sequence[str], results: Sequence[Found], columns: Sequence[str]) -> dict[str, Any]:
    """Of the report: the table of models by ways, how many models did what in each way, and all that was found."""
    found = {one.model: one for one in results}
    table = {name: cells(found.get(name), columns) for name in names}
    ways = {column: dict(Counter(row[column] for row in table.values()).most_common()) for column in columns}
    return {"table": table, "ways": ways, "models": [asdict(one) for one in results]}


def _work(connection: Any, task: Task) -> None:
    """A process of the drill: tries the models that it is sent, until one leaves its device in doubt."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while name := connection.recv():
        found = try_model(name, task)
        connection.send(found)
        if "the run" in found.wrong:
            return


def try_models(names: Sequence[str], processes: int, task: Task, until: float) -> Iterator[Found]:
    """What each model did, in the order in which they are done; those that are not by `until` (of the monotonic clock)
    are left out. No process is left behind.
    """
    context = multiprocessing.get_context("spawn")
    waiting, busy = list(names), dict[Any, tuple[Any, str]]()

    def begin(process: Any, connection: Any) -> None:
        busy[connection] = process, waiting.pop(0)
        connection.send(busy[connection][1])

    def begin_process() -> None:
        ours, its = context.Pipe()
        process = context.Process(target=_work, args=(its, task), daemon=True)
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
        for process, _ in busy.values():
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = [case.name for case in tiny_models() + models_of_blocks()]
    parser.add_argument("--models", nargs="+", choices=cases, default=cases, metavar="NAME", help="default: all")
    parser.add_argument("--processes", type=int, default=1, help="models at once (default: %(default)s)")
    parser.add_argument("--with-xla", action="store_true", help="compare with XLA's kernels, too")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="devices of the virtual layout")
    parser.add_argument("--all-programs", action="store_true", help="compile all of an engine's programs at its start")
    parser.add_argument("--limit-s", type=float, default=3600, help="seconds after which it stops (default: an hour)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found to FILE")
    options = parser.parse_args()

    flags = [os.environ.get("XLA_FLAGS", "")]
    if options.tensor_parallel > 1:  # has no effect where there are GPUs
        flags.append(f"--xla_force_host_platform_device_count={options.tensor_parallel}")
    if not options.all_programs:
        flags += NO_TRIALS
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA's allocator tells each of its attempts
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share the device
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{min(0.05, SHARE / options.processes):.3f}")
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    begun, results = time.monotonic(), list[Found]()
    task = Task(options.with_xla, options.tensor_parallel, options.all_programs)
    names = by_worth(options.models)

    def report(says_so: bool) -> None:
        if options.json:
            found = summary(names, results, task.columns)
            write_report(options.json, "families", vars(options), found, says_so=says_so)

    # Of all processes, of which some may be killed.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        os.environ["TMPDIR"] = directory
        try:
            for found in try_models(names, options.processes, task, begun + options.limit_s):
                results.append(found)
                print(found, flush=True)
                report(says_so=False)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        report(says_so=True)
    for way, counts in summary(names, results, task.columns)["ways"].items():
        print(f"{way}: " + ", ".join(f"{count} {what}" for what, count in counts.items()))
    wrong = sorted(found.model for found in results if found.wrong)
    untried = sorted(set(names) - {found.model for found in results})
    print(
        f"{len(results) - len(wrong)} of {len(names)} models the same, {len(wrong)} not, {len(untried)} not done;"
        f" {time.monotonic() - begun:.0f} s"
    )
    if wrong or untried:
        what = {"not the same": wrong, "not done": untried}
        raise SystemExit(". ".join(f"{words}: {', '.join(models)}" for words, models in what.items() if models))
    if not any(any(found.preemptions.values()) for found in results):
        raise SystemExit("no request was preempted: the pools were too large to show anything")


if __name__ == "__main__":
    main()
