"""Whole runs on an H200, simulated: what the order and the limits of scheduling do to them.

    python benchmarks/simulate_workload.py --model llama-3.1-8b --workload alpaca
    python benchmarks/simulate_workload.py --model llama-3.1-8b --workload alpaca --max-num-seqs 2048 --exact-buckets

The engine's own loop and scheduler plan every step of a workload of `jpaged bench throughput`. A step's time comes from
its rows, their context and its bucket, by a line fitted to what `jpaged bench steps` and long prefills measured:

    max(weights_ms + row_ms * rows, start_ms + token_ms * rows)    products and all else that goes with rows
    + 0.2 + context_ms * tokens of context                         attention of decode rows
    + pairs of a query and a key * layer operations                attention of prompts, at 550 TFLOP/s

It underestimates runs of mixed lengths by several percent, and leaves out the host, for which short runs of a small
model wait. So compare its results with each other, not with measurements.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jpaged.api.sampling_params import RequestOutputKind, SamplingParams
from jpaged.bench.answered_step import AnsweredStep
from jpaged.bench.workloads import WORKLOADS, BenchRequest, make_requests
from jpaged.engine.config import SchedulerConfig
from jpaged.engine.interface import NO_TOKEN, FinishCode, StepPlan, StepResult
from jpaged.engine.loop import EngineCore
from jpaged.engine.scheduler.scheduler import Scheduler
from jpaged.engine.sequences.request import Request
from jpaged.executor.buckets import bucket_for, fine_buckets

_ATTENTION_OPERATIONS_PER_MS = 550e9


@dataclass(frozen=True)
class StepTime:
    """Times in ms on one H200; pair_operations: of attention, for each pair of a query and a key, in all layers."""

    weights_ms: float
    row_ms: float
    start_ms: float
    token_ms: float
    context_ms: float
    pair_operations: int

    def __call__(self, step: "Step", rows: int) -> float:
        ms = max(self.weights_ms + self.row_ms * rows, self.start_ms + self.token_ms * rows)
        ms += self.pair_operations * step.pairs / _ATTENTION_OPERATIONS_PER_MS
        return ms + 0.2 + self.context_ms * step.context


MODELS = {
    "llama-3.1-8b": StepTime(4.06, 0.002, 0.8, 0.0231, 3.42e-5, 4 * 32 * 32 * 128),
    "qwen3-0.6b": StepTime(0.85, 0.0009, 0.2, 0.0028, 2.85e-5, 4 * 28 * 16 * 128),
}


@dataclass(frozen=True, slots=True)
class Step:
    """rows: tokens computed. bucket: rows with the padding. context: tokens read by decode rows and chunks."""

    rows: int
    bucket: int
    context: int
    pairs: int


class RecordingExecutor:
    """Samples made-up tokens and notes what each step had to do."""

    def __init__(self, max_num_seqs: int, budget: int) -> None:
        self.steps: list[Step] = []
        self._buckets = fine_buckets(8, max_num_seqs), fine_buckets(64, budget)
        slots = max_num_seqs + 1
        self._lengths, self._ends = np.zeros(slots, np.int64), np.zeros(slots, np.int64)

    def execute(self, plan: StepPlan) -> AnsweredStep:
        for start in plan.starts:
            self._lengths[start.slot], self._ends[start.slot] = start.num_computed_tokens, start.max_len
        decodes = plan.decode_slots
        chunk_slots = np.array([chunk.slot for chunk in plan.chunks], int)
        sizes = np.array([len(chunk.token_ids) for chunk in plan.chunks], int)
        samples = np.array([True] * len(decodes) + [chunk.samples for chunk in plan.chunks], bool)
        slots = np.concatenate([decodes, chunk_slots]).astype(int)
        computed = np.concatenate([np.ones(len(decodes), int), sizes])
        pairs = int((sizes * (self._lengths[chunk_slots] + sizes / 2)).sum())
        running = samples & (self._lengths[slots] + 1 < self._ends[slots])  # not one that stopped, unknown to the host
        self._lengths[slots] += computed
        rows = int(computed.sum())
        if rows:
            bucket = bucket_for(rows, self._buckets[bool(plan.chunks)])
            self.steps.append(Step(rows, bucket, int(self._lengths[slots].sum()), pairs))
        ended = running & (self._lengths[slots] + 1 >= self._ends[slots])
        codes = np.where(ended, FinishCode.LENGTH, FinishCode.RUNNING).astype(np.uint8)
        return AnsweredStep(StepResult(np.where(running, 7, NO_TOKEN).astype(np.int32)[:, None], codes))


def simulate(
    requests: Sequence[BenchRequest], *, max_num_seqs: int = 1024, budget: int = 8192, num_blocks: int = 55_109
) -> list[Step]:
    """The steps that the scheduler makes of requests that all come at once."""
    config = SchedulerConfig(
        block_size=16,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=17_000,
    )
    executor = RecordingExecutor(max_num_seqs, budget)
    core = EngineCore(Scheduler(config, 0), executor)
    for i, request in enumerate(requests):
        params = SamplingParams(
            max_tokens=request.output_len, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
        )
        core.add_request(Request(str(i), request.prompt_token_ids, params))
    while core.has_unfinished():
        core.step()
    return executor.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--workload", choices=WORKLOADS, default="alpaca")
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--longest-first", action="store_true", help="as if output lengths were known")
    parser.add_argument("--exact-buckets", action="store_true", help="as if there were a program for every size")
    args = parser.parse_args()
    workload = WORKLOADS[args.workload]
    requests = make_requests(
        workload.dataset,
        workload.num_prompts,
        1000,
        input_len=workload.input_len,
        output_len=workload.output_len,
        prefix_len=workload.prefix_len,
    )
    if args.longest_first:
        requests.sort(key=lambda request: -request.output_len)
    steps = simulate(requests, max_num_seqs=args.max_num_seqs, budget=args.max_num_batched_tokens)
    time = MODELS[args.model]
    ms = np.array([time(step, step.rows if args.exact_buckets else step.bucket) for step in steps])
    rows = np.array([step.rows for step in steps])
    padding = 1 - rows.sum() / sum(step.bucket for step in steps)
    tokens = sum(request.output_len for request in requests)
    few = rows <= 128
    print(f"{len(steps)} steps, {ms.sum() / 1000:.2f} s, {1000 * tokens / ms.sum():,.0f} output tokens/s")
    print(f"{padding:.1%} of the rows are padding; {few.sum()} steps of at most 128 rows: {ms[few].sum() / 1000:.2f} s")


if __name__ == "__main__":
    main()
