"""`jpaged bench steps`: what a decode step costs at several batch sizes, and which kernels it goes to.

Each batch size gets as many requests of one context length. Once all of them decode, steps are timed through the whole
engine (scheduler, dispatch, reading tokens), and then recorded by JAX's profiler. The floor is what a step must do, at
the card's rates: read its weights, of experts those that its tokens touch, or multiply with them, whichever takes
longer, and move keys and values or latents within the window of each layer, and states of recurrent layers.

    wall     time of a step, by the clock, steps following one another as they do when serving
    busy     time in which the device ran a kernel, of a step recorded by the profiler
    kernels  the busy time by kernel, largest first

With `--tensor-parallel-size`, floor, busy and kernels are those of one device, the mean over all.

`--replay FILE` measures nothing. It prints what an engine process's flight recorder held when it ended: the cause, and
for its last steps when they ran, how long they took and what was in them. With `--run` it then starts the same engine
and runs steps of the same lengths again, with made-up tokens, one by one; the one that fails is the last it prints.

While it records, the profiler makes XLA launch kernel by kernel instead of as CUDA graphs, so `wall` comes from
steps that it does not see.
"""

import argparse
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jpaged.api.config import EngineArgs
from jpaged.api.errors import InvalidParameterError
from jpaged.api.sampling_params import SamplingParams
from jpaged.bench import recorded_steps
from jpaged.bench.arguments import add_kernel_backend_option, bench_parser, check_least
from jpaged.bench.device_trace import kernel_times, read_trace
from jpaged.bench.engine_options import (
    BATCH_INVARIANT,
    BLOCK_SIZE,
    PIPELINE_DEPTH,
    add_bits_options,
    add_expert_skew,
    add_layout_options,
    add_model_options,
    add_sampling_options,
    add_sharding_options,
    add_step_sizes,
    engine_options,
)
from jpaged.bench.replayed_steps import run_again
from jpaged.bench.report import write_report
from jpaged.bench.routing import experts_touched
from jpaged.executor.cache.spec import StateCache, cache_spec, kernel_block_bytes
from jpaged.frontend.llm_engine import LLMEngine
from jpaged.models import SparseConfig

STEPS_A_GROUP = 8
_STEPS_EACH = 2
"""Steps of a batch, for each that is timed: half as many before, and half as many recorded."""
_SLACK = 24
"""Steps in flight, and what the estimate of the steps that prompts take may miss."""


def parser() -> argparse.ArgumentParser:
    result = bench_parser("steps", __doc__, "--model qwen3-0.6b --load-format dummy --batch 1 --batch 256")
    either = result.add_mutually_exclusive_group(required=True)
    either.add_argument("--replay", type=Path, metavar="FILE", help="print the recorded steps of an engine that ended")
    result.add_argument("--run", action="store_true", help="with --replay: run steps of the recorded lengths again")
    add_model_options(result, either)
    result.add_argument(
        "--batch",
        action="append",
        type=int,
        help="sequences; may be repeated (default: 1, 32, 256 and 1000, as far as they decode at once)",
    )
    result.add_argument("--context", type=int, default=512, help="tokens of each prompt")
    result.add_argument("--steps", type=int, default=64, help="steps timed, and half as many recorded")
    add_sampling_options(result)
    result.add_argument("--block-size", type=int, default=16, help=BLOCK_SIZE)
    result.add_argument(
        "--max-model-len", type=int, help="tokens of the longest sequence (default: what model and memory allow)"
    )
    add_step_sizes(result)
    result.add_argument("--pipeline-depth", type=int, default=2, help=PIPELINE_DEPTH)
    result.add_argument("--batch-invariant", action="store_true", help=BATCH_INVARIANT)
    add_bits_options(result)
    add_kernel_backend_option(result)
    add_layout_options(result)
    add_sharding_options(result)
    add_expert_skew(result)
    result.add_argument(
        "--read-gb-per-s", type=float, default=4424.0, help="the card's read bandwidth in GB/s, for the floor"
    )
    result.add_argument("--tflops", type=float, default=790.0, help="its TFLOP/s in 16 bits, likewise")
    result.add_argument("--top", type=int, default=12, help="kernels to print")
    result.add_argument("--trace", type=Path, help="keep the profiler's trace here (it opens in Perfetto)")
    return result


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    check_least(args, batch=1, context=1, steps=STEPS_A_GROUP, top=0)
    if args.run and args.replay is None:
        raise InvalidParameterError("--run is for recorded steps; name their file by --replay.")
    if args.replay is not None:
        recorded = recorded_steps.load(args.replay)
        print("\n".join(recorded_steps.report(recorded)))
        if args.run:
            for text in run_again(recorded):
                print(text, end="", flush=True)
        if args.json:
            write_report(args.json, "steps", vars(args), recorded["steps"])
        return 0
    engine = LLMEngine(EngineArgs(**engine_options(args)))
    figures = []
    for batch in sizes_that_last(engine, batch_sizes(engine, args.batch), args):
        figure = measure(engine, batch, args)
        figures.append(figure)
        print(
            f"batch {batch}, context {args.context}: {figure['wall_ms']:.3f} ms a step "
            f"({figure['wall_least_ms']:.3f} to {figure['wall_most_ms']:.3f}), floor {figure['floor_ms']:.3f}; "
            + (
                f"busy {figure['busy_ms']:.3f} in {figure['launches']:.0f} kernels"
                if figure["kernels"]
                else "the profiler saw no kernels, as on a CPU"
            )
        )
        for kernel in figure["kernels"][: args.top]:
            print(f"    {kernel['ms']:8.4f} ms {kernel['count']:7.1f} x  {kernel['name'][:100]}", flush=True)
    if args.json:
        write_report(args.json, "steps", vars(args), figures)
    return 0


def batch_sizes(engine: LLMEngine, asked: list[int] | None) -> list[int]:
    """The sizes asked for, or the usual ones that fit. Raises InvalidParameterError: one asked for does not."""
    most = engine.startup.config.decode_buckets[-1]
    if asked is None:
        return [batch for batch in (1, 32, 256, 1000) if batch <= most]
    if max(asked) > most:
        raise InvalidParameterError(
            f"--batch {max(asked)} is more than the {most} sequences that decode at once here; use at most {most}."
        )
    return asked


def sizes_that_last(engine: LLMEngine, sizes: list[int], args: argparse.Namespace) -> list[int]:
    """The batch sizes whose sequences stay within max_model_len until all steps are measured.

    Raises:
        InvalidParameterError: one that was asked for is not among them, or none is.
    """
    most = engine.max_model_len
    longest = {batch: args.context + output_len(engine, batch, args) for batch in sizes}
    too_long = [batch for batch in sizes if longest[batch] > most]
    if too_long and (args.batch is not None or too_long == sizes):
        raise InvalidParameterError(
            f"Batch {too_long[0]}: sequences grow to {longest[too_long[0]]} tokens until all are measured, and"
            f" max_model_len is {most}; raise --max-model-len or --max-num-batched-tokens, or lower --context, --steps"
            " or --batch."
        )
    return [batch for batch in sizes if batch not in too_long]


def output_len(engine: LLMEngine, batch: int, args: argparse.Namespace) -> int:
    """Tokens that each of so many sequences makes at most until all steps are measured: the first ones decode while the
    prompts of others are computed."""
    budget = engine.startup.config.token_buckets[-1]
    prompts_steps = sum(args.context / max(1, budget - done) for done in range(batch))
    return math.ceil(prompts_steps) + _STEPS_EACH * args.steps + _SLACK


def measure(engine: LLMEngine, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Wall time of steps, in groups so that the pipeline's rhythm evens out, and the kernels of half as many."""
    rng = np.random.default_rng(batch)
    vocab_size = engine.startup.model.config.vocab_size
    params = SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        max_tokens=output_len(engine, batch, args),
        ignore_eos=True,
        detokenize=False,
    )
    engine.reset_prefix_cache()
    for i in range(batch):
        prompt = rng.integers(0, vocab_size, args.context).tolist()
        engine.add_request(f"{batch}-{i}", {"prompt_token_ids": prompt}, params)
    decoding: set[str] = set()
    while len(decoding) < batch:
        decoding.update(output.request_id for output in engine.step())
    for _ in range(args.steps // 2):
        engine.step()
    groups = []
    for _ in range(args.steps // STEPS_A_GROUP):
        begun = time.perf_counter()
        for _ in range(STEPS_A_GROUP):
            engine.step()
        groups.append(1e3 * (time.perf_counter() - begun) / STEPS_A_GROUP)
    trace = args.trace / f"batch-{batch}" if args.trace else Path(tempfile.mkdtemp(prefix="jpaged-trace-"))
    with jax.profiler.trace(str(trace)):
        for _ in range(args.steps // 2):
            engine.step()
    kernels = kernel_times(read_trace(trace))
    steps = args.steps // 2 * args.tensor_parallel_size  # as many on each device
    while engine.has_unfinished_requests():
        engine.step()
    bytes_per_s, flops = (args.tensor_parallel_size * rate for rate in (args.read_gb_per_s * 1e9, args.tflops * 1e12))
    table = sorted(
        ({"name": name, "ms": ms / steps, "count": count / steps} for name, (ms, count) in kernels.items()),
        key=lambda kernel: -kernel["ms"],
    )
    return {
        "batch": batch,
        "context": args.context,
        "wall_ms": statistics.median(groups),
        "wall_least_ms": min(groups),
        "wall_most_ms": max(groups),
        "floor_ms": 1e3 * step_work(engine, batch, args.context).floor_s(bytes_per_s, flops),
        "busy_ms": sum(kernel["ms"] for kernel in table),
        "launches": sum(kernel["count"] for kernel in table),
        "kernels": table,
    }


class StepWork(NamedTuple):
    """What all devices together have to do in a decode step of `batch` rows.

    dense, experts: bytes of weights that are read; of a mixture of experts those that so many tokens are expected to
        have (`experts_touched`).
    cache: bytes that are moved of what layers keep.
    dense_ops, expert_ops: operations with these weights, for which their bytes times the rows of each are taken. That
        is right in 16 bits, and in 8 where rows are in 8 bits, too, and tensor cores twice as fast. Otherwise it is
        less than what is done. Those of attention are not counted.
    """

    dense: float
    experts: float
    cache: float
    dense_ops: float
    expert_ops: float

    def floor_s(self, bytes_per_s: float, flops: float) -> float:
        """Seconds, at rates of reading memory and of operations in 16 bits."""
        weights = ((self.dense, self.dense_ops), (self.experts, self.expert_ops))
        return sum(max(read / bytes_per_s, ops / flops) for read, ops in weights) + self.cache / bytes_per_s


def step_work(engine: LLMEngine, batch: int, context: int) -> StepWork:
    """The work of a step of `batch` rows, each behind `context` tokens. It reads

    - the weights once, without an untied embedding, of which rows are looked up;
    - of each layer what it keeps of a row's tokens: keys and values, or latents, of those within its window;
    - of recurrent layers the states, which are read and written.
    """
    model = engine.startup.model
    config, itemsize = model.config, np.dtype(model.dtype).itemsize
    dense, experts, touched, expert_ops = float(model.num_bytes), 0, 0.0, 0.0
    if not config.tie_word_embeddings:
        dense -= itemsize * config.vocab_size * config.hidden_size
    if isinstance(config, SparseConfig) and config.num_experts:
        experts = sum(
            math.prod(array.shape) * array.dtype.itemsize
            for name, array in zip(model.parameter_names, model.abstract_weights, strict=True)
            if ".experts." in name
        )
        touched = experts * experts_touched(config.routing, config.num_experts, batch) / config.num_experts
        expert_ops = experts * batch * config.routing.per_token / config.num_experts
    dense -= experts
    row = 0
    for layer in cache_spec(model, engine.startup.config.kv_scales):
        if isinstance(layer, StateCache):
            row += 2 * layer.state.num_bytes(layer.dtype.itemsize)
        else:
            row += kernel_block_bytes(layer, context if layer.window is None else min(context, layer.window))
    return StepWork(dense, touched, batch * row, dense * batch, expert_ops)
