"""What the host does in a step, by part.

    python benchmarks/host_turn.py --model qwen3-0.6b --load-format dummy --json OUT.json
    python benchmarks/host_turn.py --log-updates        # how to see what XLA updates of its CUDA graphs

Some requests decode, and every few steps another one arrives with a prompt, as when serving. A step is "mixed" if it
computes a prompt, else "decode". Parts of a step, in the host's time:

    schedule    planning it
    change      the call of the program that starts and ends sequences, if any do
    body        the call of its body's executable, with all that JAX and XLA do in it
    sample      the same of its head, where the body's program does not sample as well
    read        waiting for an earlier step's tokens; if the device is slower, the host waits here
    update      giving them to the scheduler
    other       the rest: packing, bookkeeping, outputs

`host` is a step without `read`. The engine has room for these requests and few more, so that it starts soon.
"""

import argparse
import itertools
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from jpaged.api.config import EngineArgs
from jpaged.api.sampling_params import SamplingParams
from jpaged.bench.arguments import HelpFormatter, add_kernel_backend_option, check_least
from jpaged.bench.engine_options import BLOCK_SIZE, PIPELINE_DEPTH, add_load_format
from jpaged.bench.models import CONFIGS, model_directory
from jpaged.bench.percentiles import summary, table
from jpaged.bench.report import write_report
from jpaged.engine.scheduler.scheduler import Scheduler
from jpaged.executor.step.handle import DispatchedStep
from jpaged.executor.step.runner import Runner
from jpaged.frontend.llm_engine import LLMEngine

BODIES = ("decode", "shared_decode", "decode_and_sample", "mixed")
PART_OF_PROGRAM = dict.fromkeys(BODIES, "body") | {"sample": "sample", "update": "change"}
PARTS = ("schedule", "change", "body", "sample", "read", "update")
PROMPT_TOKENS = 512
"""Of a step, beside its decode rows."""
LEAST_SEQS = 32
"""Slots of an engine: with fewer, one sequence would run in a smaller program than it does when serving."""
VISITORS = 8
"""Slots beyond that, for the requests that come in a turn: each stays for few steps."""
UNTIMED = 16
"""Steps of each turn before timing begins: graphs are built anew when an executable was loaded since."""

LOG_UPDATES = """\
For each execution of a CUDA graph XLA can log on standard error whether it updated it, and how much of it:

    Update command buffer ...; num_commands=N; updated_allocs=A     A buffers are not where they were the last time
    Updated N commands in T us (skipped M command updates)          N - M of the graph's commands use any of them
    Execute command buffer ...; num_executions=E                    E executions since it was last updated

The log costs time, so figures of such a run are of no use; few steps are enough:

    export TF_CPP_MIN_LOG_LEVEL=0 TF_CPP_VMODULE=command_buffer_thunk=3,command_executor=1
    {command} --batch 1 --rounds 1 --steps 64 2> updates.log
    grep -o 'updated_allocs=.*\\|Updated [0-9]* commands.*' updates.log | tail -64
"""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    names = ", ".join(CONFIGS)
    result.add_argument("--model", help=f"a directory, a hub id, or one of {names} (default: the embedded model)")
    add_load_format(result)
    result.add_argument("--batch", action="append", type=int, help="sequences; may be repeated (default: 1, 32)")
    result.add_argument("--context", type=int, default=128, help="tokens of a prompt; of those that come, on average")
    result.add_argument(
        "--every", type=int, default=8, help="steps from one prompt to the next, on average; 0: none come"
    )
    result.add_argument("--steps", type=int, default=256, help="steps timed in each turn")
    result.add_argument("--rounds", type=int, default=5, help="turns of each batch")
    result.add_argument("--block-size", type=int, default=16, help=BLOCK_SIZE)
    result.add_argument("--pipeline-depth", type=int, default=2, help=PIPELINE_DEPTH)
    add_kernel_backend_option(result)
    result.add_argument("--log-updates", action="store_true", help="say how to see XLA's updates of graphs, no more")
    result.add_argument("--json", type=Path, help="write the figures and the environment to this file")
    return result


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    check_least(args, batch=1, context=1, every=0, steps=1, rounds=1, block_size=1)
    if args.log_updates:
        model = f" --model {args.model} --load-format {args.load_format}" if args.model else ""
        print(LOG_UPDATES.replace("{command}", f"python benchmarks/host_turn.py{model}"))
        return 0
    batches = args.batch or [1, 32]
    llm_engine = engine(args, max(LEAST_SEQS, *batches))
    figures = []
    for batch in batches:
        for figure in figures_of(batch, [take_turn(llm_engine, batch, round_, args) for round_ in range(args.rounds)]):
            figures.append(figure)
            print(table_of(figure), flush=True)
    if args.json:
        write_report(args.json, "host_turn", vars(args), figures)
    return 0


def engine(args: argparse.Namespace, max_num_seqs: int) -> LLMEngine:
    """With room for one turn of so many sequences, and little more."""
    max_num_seqs += VISITORS
    length = 2 * args.context + output_len(max_num_seqs, args)
    return LLMEngine(
        EngineArgs(
            model=args.model and model_directory(args.model),
            load_format=args.load_format,
            compile_programs="at_start",
            block_size=args.block_size,
            num_gpu_blocks_override=max_num_seqs * math.ceil(length / args.block_size) + 2,
            max_model_len=length,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=PROMPT_TOKENS + max_num_seqs,
            enable_prefix_caching=False,
            pipeline_depth=args.pipeline_depth,
            kernel_backend=args.kernel_backend,
            skip_tokenizer_init=True,
            verbose=False,
        )
    )


def output_len(batch: int, args: argparse.Namespace) -> int:
    """Tokens that the first of so many requests may sample until its turn ends."""
    prompts_steps = math.ceil(batch * args.context / PROMPT_TOKENS)
    return prompts_steps + UNTIMED + args.steps + 2 * args.pipeline_depth + 2


Step = dict[str, float]
"""Seconds of a step by part, and of the whole ("wall"); whether it is "mixed"."""


def take_turn(engine: LLMEngine, batch: int, seed: int, args: argparse.Namespace) -> list[Step]:
    rng = np.random.default_rng(seed)
    ids = (f"{seed}-{i}" for i in itertools.count())
    staying = [add(engine, next(ids), rng, args.context, output_len(batch, args)) for _ in range(batch)]
    decoding: set[str] = set()
    while len(decoding) < batch:
        decoding.update(output.request_id for output in engine.step())
    steps: list[Step] = []
    to_go = args.every
    with timed_parts(engine.startup.runner) as seconds:
        for i in range(UNTIMED + args.steps):
            if args.every and (to_go := to_go - 1) <= 0:
                add(engine, next(ids), rng, int(rng.integers(1, 2 * args.context)), 4)
                to_go = int(rng.integers(1, 2 * args.every))
            seconds.clear()
            begun = time.perf_counter()
            engine.step()
            if i >= UNTIMED:
                steps.append({"wall": time.perf_counter() - begun} | dict(seconds))
                if not {"schedule", "body", "read"} <= steps[-1].keys():
                    raise RuntimeError(f"a step that did not dispatch and read one was timed: {sorted(steps[-1])}.")
    if (running := engine.get_metrics().num_running) < batch:
        raise RuntimeError(f"{running} of {batch} requests were still running when the last step had been timed.")
    engine.abort_request(staying)
    while engine.has_unfinished_requests():
        engine.step()
    return steps


def add(engine: LLMEngine, request_id: str, rng: np.random.Generator, prompt_len: int, output_len: int) -> str:
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    engine.add_request(
        request_id, {"prompt_token_ids": rng.integers(0, engine.vocab_size, prompt_len).tolist()}, params
    )
    return request_id


@contextmanager
def timed_parts(runner: Runner) -> Iterator[dict[str, float]]:
    """Yields the seconds that parts took since it was last cleared, and "mixed": 1 if a mixed body was called."""
    seconds: dict[str, float] = defaultdict(float)

    def timed(owner: Any, name: str, part_of: Callable[[tuple], str | None]) -> Any:
        function = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            result = function(*args, **options)
            if (part := part_of(args)) is not None:
                seconds[part] += time.perf_counter() - begun
            return result

        return mock.patch.object(owner, name, call)

    def of_program(args: tuple) -> str | None:
        kind = args[0].kind
        seconds["mixed"] = max(seconds["mixed"], kind == "mixed")
        return PART_OF_PROGRAM.get(kind)

    with ExitStack() as patches:
        patches.enter_context(timed(Scheduler, "schedule", lambda _: "schedule"))
        patches.enter_context(timed(Scheduler, "update", lambda _: "update"))
        patches.enter_context(timed(DispatchedStep, "result", lambda _: "read"))
        for caller in (runner, runner._changes):
            patches.enter_context(timed(caller, "_run", of_program))
        yield seconds


def figures_of(batch: int, turns: list[list[Step]]) -> Iterator[dict[str, Any]]:
    """For each kind of step milliseconds of it and of its parts. turn_ms: of all steps of each turn together."""
    turn_ms = [1e3 * sum(step["wall"] for step in turn) for turn in turns]
    for kind in ("decode", "mixed"):
        steps = [step for turn in turns for step in turn if bool(step["mixed"]) == (kind == "mixed")]
        if not steps:
            continue
        columns = {part: np.array([step.get(part, 0.0) for step in steps]) for part in ("wall", *PARTS)}
        columns["other"] = columns["wall"] - np.sum([columns[part] for part in PARTS], axis=0)
        columns["host"] = columns["wall"] - columns["read"]
        yield {
            "batch": batch,
            "kind": kind,
            "steps": len(steps),
            "turn_ms": turn_ms,
            "ms": {part: summary(columns[part]) for part in ("wall", "host", *PARTS, "other")},
        }


def table_of(figure: dict[str, Any]) -> str:
    turns = f"turns of {statistics.median(figure['turn_ms']):.0f} ms"
    title = f"batch {figure['batch']}, {figure['steps']} {figure['kind']} steps; {turns}"
    return f"\n{title}\n{table(figure['ms'])}"


if __name__ == "__main__":
    sys.exit(main())
