"""`jpaged bench scoring`: scored tokens a second, and how near that comes to the card's matrix rate.

Rows are random token ids; every token but the first is scored. The figure is the median of the runs after a warm-up.
The roofline is that of prefill: the operations that the model needs for a token, over the rate of a large matrix
product measured on the same device in the same run.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpaged.api.config import DType
from jpaged.bench.arguments import add_kernel_backend_option, bench_parser, check_least
from jpaged.bench.engine_options import (
    BLOCK_SIZE,
    DTYPE,
    GPU_MEMORY_UTILIZATION,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    PIPELINE_DEPTH,
    TENSOR_PARALLEL_SIZE,
    add_model_options,
)
from jpaged.bench.models import model_directory
from jpaged.bench.report import write_report
from jpaged.executor.start.memory import reserve_device_memory
from jpaged.models import Model, ModelConfig, build, resolve
from jpaged.scoring import Scorer
from jpaged.scoring.files import SHARD_SIZE, ScoreShards, size_of
from jpaged.scoring.inputs import Record
from jpaged.scoring.jobs import shards_of
from jpaged.scoring.shards import Entry
from jpaged.scoring.workers import Work, WorkerPool


def parser() -> argparse.ArgumentParser:
    result = bench_parser("scoring", __doc__, "--model llama-3.1-8b --load-format dummy --num-rows 2000")
    add_model_options(result)
    result.add_argument("--dtype", choices=get_args(DType), default="auto", help=DTYPE)
    result.add_argument("--num-rows", type=int, default=512, help="rows to score")
    result.add_argument("--row-len", type=int, default=1024, help="tokens of a row")
    result.add_argument(
        "--choices", type=int, default=0, help="score so many choices a row instead of the whole row; 0 for none"
    )
    result.add_argument("--choice-len", type=int, default=16, help="tokens of a choice, after the row's tokens")
    result.add_argument("--max-model-len", type=int, help="tokens of the longest row (default: row and choice)")
    result.add_argument("--block-size", type=int, default=16, help=BLOCK_SIZE)
    result.add_argument("--max-num-seqs", type=int, help=MAX_NUM_SEQS)
    result.add_argument("--max-num-batched-tokens", type=int, help=MAX_NUM_BATCHED_TOKENS)
    result.add_argument("--tensor-parallel-size", type=int, default=1, help=TENSOR_PARALLEL_SIZE)
    result.add_argument("--data-parallel-size", type=int, default=1, help="worker processes, through shard files")
    result.add_argument("--gpu-memory-utilization", type=float, default=0.9, help=GPU_MEMORY_UTILIZATION)
    result.add_argument(
        "--no-enable-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="compute equal beginnings of rows anew",
    )
    result.add_argument("--pipeline-depth", type=int, default=2, help=PIPELINE_DEPTH)
    add_kernel_backend_option(result)
    result.add_argument("--runs", type=int, default=3, help="timed runs, after one that is not")
    result.add_argument("--seed", type=int, default=0, help="of rows and random weights")
    return result


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    check_least(
        args, runs=1, num_rows=1, row_len=1 if args.choices else 2, choices=0, choice_len=1, data_parallel_size=1
    )
    options = {
        "model": model_directory(args.model),
        "load_format": args.load_format,
        "dtype": args.dtype,
        "max_model_len": args.max_model_len or args.row_len + (args.choice_len if args.choices else 0),
        "block_size": args.block_size,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "tensor_parallel_size": args.tensor_parallel_size,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "enable_prefix_caching": args.enable_prefix_caching,
        "pipeline_depth": args.pipeline_depth,
        "kernel_backend": args.kernel_backend,
        "skip_tokenizer_init": True,
        "seed": args.seed,
    }
    config = ModelConfig.from_directory(Path(resolve(options["model"], None, args.load_format)))
    rows = draw_rows(args, config.vocab_size)
    if args.data_parallel_size == 1:
        reserve_device_memory(args.gpu_memory_utilization)
        rate = matrix_rate()
        figures = measure(Scorer(**options), rows, args.runs)
    else:  # the workers have the GPUs: until they are done, this process must not touch JAX's devices
        program = "from jpaged.bench.scoring import matrix_rate; print(matrix_rate())"
        rate = float(subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE).stdout)
        figures = measure_workers(options, rows, args)
    num_sequences = args.num_rows * max(1, args.choices)
    tokens = args.num_rows * (args.row_len + args.choices * args.choice_len)
    scored = num_sequences * args.choice_len if args.choices else tokens - args.num_rows
    # A sequence's last token is scored and never computed.
    work = operations(build(config), tokens - num_sequences, scored, args.row_len)
    median = statistics.median(figures["seconds"])
    devices = args.data_parallel_size * args.tensor_parallel_size
    figures |= {
        "num_rows": args.num_rows,
        "tokens": tokens,
        "tokens_per_s": tokens / median,
        "operations": work,
        "devices": devices,
        "matrix_rate_tflops": rate / 1e12,
        "share_of_roofline": work / median / (rate * devices),
    }
    print(
        f"{args.num_rows:,} rows, {tokens:,} tokens in {median:.2f} s ({min(figures['seconds']):.2f} to "
        f"{max(figures['seconds']):.2f}) on {devices} device(s): {figures['tokens_per_s']:,.0f} tokens/s, "
        f"{figures['share_of_roofline']:.1%} of the roofline ({work / tokens / 1e9:.2f} G operations a token, matrix "
        f"rate {rate / 1e12:,.1f} TFLOP/s)",
        flush=True,
    )
    if args.json:
        write_report(args.json, "scoring", vars(args), figures)
    return 0


def draw_rows(args: argparse.Namespace, vocab_size: int) -> list[dict]:
    """Texts, or prompts with choices, of random token ids."""
    rng = np.random.default_rng(args.seed)

    def draw(length: int) -> list[int]:
        return rng.integers(0, vocab_size, length).tolist()

    if not args.choices:
        return [{"text": draw(args.row_len)} for _ in range(args.num_rows)]
    return [
        {"prompt": draw(args.row_len), "choices": [draw(args.choice_len) for _ in range(args.choices)]}
        for _ in range(args.num_rows)
    ]


def measure(scorer: Scorer, rows: list[dict], runs: int) -> dict:
    """Scores the rows `runs` times after a warm-up; checks that every run finds the same."""
    seconds, sums = [], set()
    for run in range(runs + 1):
        begun = time.perf_counter()
        scores = scorer.score(rows, use_tqdm=False)
        if run:
            seconds.append(time.perf_counter() - begun)
        sums.add(sum(sequence.logprob for score in scores for sequence in score.sequences))
    if len(sums) != 1:
        raise RuntimeError(f"runs of the same rows differ: log-likelihoods sum to {sorted(sums)}.")
    return {"seconds": seconds, "sum_logprob": sums.pop()}


def measure_workers(options: dict[str, Any], rows: list[dict], args: argparse.Namespace) -> dict:
    """The same by worker processes, shard files and all; their start is part of the warm-up."""
    with tempfile.TemporaryDirectory() as directory:
        settings = {"window": None, "stride": None, "add_special_tokens": True, "logprobs": False, "suffix": ".jsonl"}
        work = Work(ScoreShards, settings | {"engine": options}, Path(directory))
        records = [Record(i, "rows", i + 1, row) for i, row in enumerate(rows)]
        seconds = []
        with WorkerPool(work, args.data_parallel_size, args.tensor_parallel_size) as pool:
            for run in range(args.runs + 1):
                entries: list[Entry] = []
                begun = time.perf_counter()
                pool.run(shards_of(records, SHARD_SIZE, size_of), entries.append, lambda rows, tokens: None)
                if run:
                    seconds.append(time.perf_counter() - begun)
                if sum(entry["rows"] - entry["failed"] for entry in entries) != len(rows):
                    raise RuntimeError(f"{len(rows)} rows were to be scored; the shards say {entries}.")
    return {"seconds": seconds}


def operations(model: Model, computed: int, scored: int, length: int) -> float:
    """Multiplications and additions that scoring needs: for each computed token two for each weight of the layers, and
    attention over half of the row's length on average; for each scored token two for each weight of the LM head.
    """
    config = model.config
    head = config.vocab_size * config.hidden_size
    layers = model.num_parameters - head * (1 if config.tie_word_embeddings else 2)
    of_layers = map(config.of_layer, range(config.num_layers))
    columns = sum(layer.head_dim + (layer.value_dim or layer.head_dim) for layer in of_layers)  # of keys and of values
    attention = 2 * config.num_heads * columns * (length + 1) / 2
    return computed * (2.0 * layers + attention) + scored * 2.0 * head


def matrix_rate() -> float:
    """Operations a second of a large square product, bfloat16 on a GPU and float32 on a CPU; the median of seven."""
    on_gpu = jax.default_backend() == "gpu"
    n, dtype, times = (8192, jnp.bfloat16, 8) if on_gpu else (512, jnp.float32, 2)
    x, y = (jax.random.normal(jax.random.key(i), (n, n), dtype) * n**-0.5 for i in range(2))
    program = jax.jit(lambda x, y: lax.fori_loop(0, times, lambda _, x: x @ y, x))
    jax.block_until_ready(program(x, y))
    rates = []
    for _ in range(7):
        begun = time.perf_counter()
        jax.block_until_ready(program(x, y))
        rates.append(times * 2.0 * n**3 / (time.perf_counter() - begun))
    return statistics.median(rates)
