"""`jpaged bench scheduler`: what the control plane costs on the host in each step, with no model behind it.

A fake executor answers every plan at once, so `EngineCore.step` only plans a step and takes in an earlier one's
results. In every line of the table the given number of sequences decode. What changes in each step:

    nothing        no sequence starts, ends or needs a block
    blocks         one sequence in 16 needs a new block
    blocks, cache  the same, from a pool full of old prefixes, so that each new block's name is forgotten
    finishes       besides, `--finishing` sequences end and as many start
    streaming      one sequence in 16 needs a new block, and every sequence reports its token

The last lines time one fork in the block manager, of a sequence of 10, 100 and 1,000 blocks: the child's block table
and tokens, and one more reference to each block.
"""

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np

from jpaged.api.sampling_params import RequestOutputKind, SamplingParams
from jpaged.bench.answered_step import AnsweredStep, DeviceSequences
from jpaged.bench.arguments import HelpFormatter
from jpaged.engine.config import SchedulerConfig
from jpaged.engine.interface import StepPlan
from jpaged.engine.kv.block_manager import BlockManager
from jpaged.engine.kv.block_pool import BlockPool
from jpaged.engine.loop import EngineCore
from jpaged.engine.scheduler.scheduler import Scheduler
from jpaged.engine.sequences.request import Request
from jpaged.engine.sequences.slots import Slots

_BLOCK_SIZE = 16
_PROMPT_LEN = 64
_FORKED_BLOCKS = (10, 100, 1000)


class InstantExecutor:
    """Samples token 1 for every active row, and stops sequences at their greatest length, as the device would."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._sequences = DeviceSequences(config.max_num_seqs)

    def execute(self, plan: StepPlan) -> AnsweredStep:
        rows, samples = self._sequences.begin(plan)
        samples &= self._sequences.lengths[rows] < self._sequences.limits[rows]
        return self._sequences.answer(rows, samples, 1)


@dataclass(frozen=True)
class Case:
    """A steady state to measure.

    block_size: in tokens; large enough for a whole sequence where no block is to be needed.
    fill_with_prefixes: every block of the pool has held a prefix before.
    streaming: every request reports each token.
    finishing: sequences that end in each step.
    """

    name: str
    block_size: int = _BLOCK_SIZE
    fill_with_prefixes: bool = False
    streaming: bool = False
    finishing: int = 0


@dataclass(frozen=True)
class Measurement:
    """Microseconds of host time a step, or a fork."""

    case: str
    running: int
    steps: int
    median_us: float
    p99_us: float
    mean_us: float


def measure(case: Case, running: int, steps: int) -> Measurement:
    """Times `steps` turns of the engine loop with `running` sequences decoding."""
    core, num_started = _steady_engine(case, running, steps)
    times_ns = np.zeros((steps,), np.int64)
    gc.collect()
    gc.freeze()
    try:
        for step in range(steps):
            for _ in range(case.finishing):
                num_started += 1
                core.add_request(_request(num_started, case, _lifetime(case, running, steps)))
            begin = time.perf_counter_ns()
            core.step()
            times_ns[step] = time.perf_counter_ns() - begin
    finally:
        gc.unfreeze()
    if not case.finishing and core.stats().num_running != running:
        raise RuntimeError(f"{core.stats().num_running} sequences ran, not {running}.")
    return _measurement(case.name, running, times_ns)


def _lifetime(case: Case, running: int, steps: int) -> int:
    """Tokens that a sequence generates: for ever, or so many that `finishing` of them end in each step."""
    return running // case.finishing if case.finishing else steps + 2 * _BLOCK_SIZE + 64


def measure_fork(num_blocks: int, forks: int) -> Measurement:
    """Times forks of a sequence of so many blocks, the last of them partly filled, into a slot that is freed again."""
    length = num_blocks * _BLOCK_SIZE - 1
    config = SchedulerConfig(
        block_size=_BLOCK_SIZE,
        num_blocks=2 * num_blocks,
        max_num_seqs=2,
        max_num_batched_tokens=length,
        max_model_len=length + 1,
    )
    pool, slots = BlockPool(config.num_blocks, _BLOCK_SIZE, enable_prefix_caching=False), Slots(config)
    manager = BlockManager(pool, slots)
    # Scattered, as in a pool that has served for a while.
    block_ids = np.random.default_rng(0).permutation(pool.allocate(pool.capacity))
    pool.free(block_ids[num_blocks:])
    tokens = np.ones((length,), np.int32)
    nothing = tokens[:0]
    params = SamplingParams(max_tokens=1)
    parent = slots.acquire(Request("parent", tokens, params), 0, tokens, block_ids[:num_blocks], length)
    child = slots.acquire(Request("child", tokens, params), 0, nothing, nothing, 0)
    times_ns = np.zeros((forks,), np.int64)
    for i in range(forks):
        begin = time.perf_counter_ns()
        manager.fork(parent, [child])
        times_ns[i] = time.perf_counter_ns() - begin
        manager.free(child)
    return _measurement(f"fork, {num_blocks}", 1, times_ns)


def _measurement(case: str, running: int, times_ns: np.ndarray) -> Measurement:
    us = times_ns / 1e3
    return Measurement(case, running, len(us), float(np.median(us)), float(np.percentile(us, 99)), float(us.mean()))


def _steady_engine(case: Case, running: int, steps: int) -> tuple[EngineCore, int]:
    """An engine whose `running` sequences decode, the phases of their blocks and their ends evenly spread."""
    lifetime = _lifetime(case, running, steps)
    block_size = case.block_size
    max_model_len = _PROMPT_LEN + lifetime + _BLOCK_SIZE
    num_blocks = 2 + (running + case.finishing) * (-(-max_model_len // block_size) + 1)
    config = SchedulerConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=running + case.finishing,
        max_num_batched_tokens=running * (_PROMPT_LEN + _BLOCK_SIZE),
        max_model_len=max_model_len,
        watermark=0.0,
    )
    core = EngineCore(Scheduler(config), InstantExecutor(config))
    if case.fill_with_prefixes:
        _fill_with_prefixes(core, config)
    for i in range(running):
        # One in `lifetime` ends in each step if the first ones have ever less left to generate.
        left = 1 + i * lifetime // running if case.finishing else lifetime
        core.add_request(_request(i, case, max(left, 4)))
    for _ in range(4):
        core.step()
    return core, running


def _fill_with_prefixes(core: EngineCore, config: SchedulerConfig) -> None:
    """Leaves old prefixes in all blocks of the pool."""
    length = config.max_model_len - 1
    for i in range(-(-(config.num_blocks - 1) * config.block_size // length) + 1):
        prompt = np.full((length,), 5)
        prompt[0] = i + 10
        core.add_request(Request(f"old-{i}", prompt, SamplingParams(max_tokens=1, temperature=0.0)))
        while core.has_unfinished():
            core.step()


def _request(i: int, case: Case, max_tokens: int) -> Request:
    prompt = np.full((_PROMPT_LEN + i % _BLOCK_SIZE,), 7)
    prompt[0] = i + 10
    kind = RequestOutputKind.DELTA if case.streaming else RequestOutputKind.FINAL_ONLY
    return Request(str(i), prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, output_kind=kind))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="jpaged bench scheduler",
        description="Host time of a step, in microseconds.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--running",
        type=int,
        nargs="+",
        default=[100, 1000, 4000],
        help="running sequences, a line each (default: 100 1000 4000)",
    )
    parser.add_argument("--steps", type=int, default=1000, help="steps measured for each line")
    parser.add_argument(
        "--finishing", type=int, default=4, help="sequences that end in a step, in the line of those that end"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    args = parser.parse_args(argv)
    if min(args.running) < 1 or args.steps < 1 or args.finishing < 1:
        parser.error("--running, --steps and --finishing must be at least 1")
    cases = [
        Case("nothing", block_size=1 << 16),
        Case("blocks"),
        Case("blocks, cache", fill_with_prefixes=True),
        Case("finishes", finishing=args.finishing),
        Case("streaming", streaming=True),
    ]
    print(f"{'what changes':<16}{'running':>8}{'median us':>11}{'p99 us':>9}{'mean us':>9}")
    measurements = (
        measure(replace(case, finishing=min(case.finishing, running // 8)), running, args.steps)
        for case in cases
        for running in args.running
    )
    forks = (measure_fork(num_blocks, args.steps) for num_blocks in _FORKED_BLOCKS)
    results = []
    for result in chain(measurements, forks):
        results.append(asdict(result))
        print(
            f"{result.case:<16}{result.running:>8}{result.median_us:>11.1f}{result.p99_us:>9.1f}{result.mean_us:>9.1f}",
            flush=True,
        )
    if args.json:
        from jpaged.bench.report import write_report  # imports jax, which nothing measured here does

        write_report(args.json, "scheduler", {"steps": args.steps, "finishing": args.finishing}, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
