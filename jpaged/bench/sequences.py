"""`jpaged bench sequences`: what sharing a prompt brings, what beam search costs, and how fast blocks are swapped.

    separate   `--width` requests for each prompt, without a prefix cache          output tokens a second, of as many
    samples    one request for each prompt, with n = `--width`                     sequences of the same lengths
    greedy     like samples, with temperature 0
    beams      one beam search for each prompt, of width `--width`
    swap       blocks that go to host memory and come back, in GiB/s; and the same bytes in plain copies

Samples are compared with separate requests; beams with greedy decoding of as many sequences, which computes the prompts
as seldom; swaps with plain copies. `jpaged bench scheduler` times a fork on the host.

Every sequence generates exactly its number of tokens. The time is that of a whole run, prefill included: the median of
the runs after one that is not timed.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jpaged.api.beam_search_params import BeamSearchParams
from jpaged.api.config import EngineArgs
from jpaged.api.sampling_params import RequestOutputKind, SamplingParams
from jpaged.bench.arguments import bench_parser, check_least
from jpaged.bench.engine_options import BLOCK_SIZE, MAX_NUM_SEQS, add_model_options, engine_options
from jpaged.bench.report import write_report
from jpaged.bench.workloads import DATASETS, BenchRequest, make_requests
from jpaged.engine.interface import SWAP_CHUNK_BLOCKS, HostCopy, SamplingVariant, StepPlan
from jpaged.executor.start.started import Startup
from jpaged.frontend.llm_engine import LLMEngine

CASES = ("separate", "samples", "greedy", "beams", "swap")
_AGAINST = {"samples": "separate", "beams": "greedy"}


def parser() -> argparse.ArgumentParser:
    result = bench_parser("sequences", __doc__, "--model llama-3.1-8b --load-format dummy --num-prompts 250")
    add_model_options(result)
    result.add_argument("--case", action="append", choices=CASES, help="may be repeated (default: all)")
    result.add_argument("--dataset", default="sharegpt-like", choices=DATASETS, help="what lengths requests have")
    result.add_argument("--num-prompts", type=int, default=250, help="requests")
    result.add_argument("--input-len", type=int, default=512, help="tokens of a prompt, for random and shared-prefix")
    result.add_argument("--output-len", type=int, default=128, help="tokens of an answer, for random and shared-prefix")
    result.add_argument("--width", type=int, default=4, help="sequences for each prompt")
    result.add_argument("--swap-chunks", type=int, default=64, help="chunks of 16 blocks that go out and come back")
    result.add_argument("--max-model-len", type=int, help="tokens of the longest sequence (default: what fits)")
    result.add_argument("--max-num-seqs", type=int, help=MAX_NUM_SEQS)
    result.add_argument("--block-size", type=int, default=16, help=BLOCK_SIZE)
    result.add_argument(
        "--num-gpu-blocks-override", type=int, help="blocks in the KV cache (default: what memory allows)"
    )
    result.add_argument("--runs", type=int, default=3, help="timed runs, after one that is not")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    check_least(args, runs=1, width=1, num_prompts=1, swap_chunks=1)
    engine_args = EngineArgs(**engine_options(args), enable_prefix_caching=False)
    startup = LLMEngine(engine_args).startup
    requests = make_requests(
        args.dataset,
        args.num_prompts,
        startup.model.config.vocab_size,
        input_len=args.input_len,
        output_len=args.output_len,
    )
    results: list[dict[str, Any]] = []
    rates: dict[str, float] = {}
    for case in sorted(set(args.case or CASES), key=CASES.index):
        if case == "swap":
            swap = measure_swap(startup, args.swap_chunks, args.runs)
            results.append({"case": case, **swap, "over_plain": swap["gib_per_s"] / swap["plain_gib_per_s"]})
            print(
                f"swap: {swap['gib_per_s']:.1f} GiB/s, {results[-1]['over_plain']:.2f} times the "
                f"{swap['plain_gib_per_s']:.1f} of plain copies"
            )
            continue
        seconds = _times(partial(_run, engine_args, startup, requests, case, args.width), args.runs)
        tokens = args.width * sum(request.output_len for request in requests)
        figure = {"case": case, "output_tokens": tokens, "seconds": seconds}
        rates[case] = figure["output_tokens_per_s"] = tokens / statistics.median(seconds)
        text = f"{case}: {rates[case]:,.0f} output tokens/s"
        if (other := _AGAINST.get(case)) in rates:
            figure[f"over_{other}"] = rates[case] / rates[other]
            text += f", {rates[case] / rates[other]:.2f} times {other}"
        results.append(figure)
        print(text, flush=True)
    if args.json:
        write_report(args.json, "sequences", vars(args), results)
    return 0


def _run(args: EngineArgs, startup: Startup, requests: Sequence[BenchRequest], case: str, width: int) -> None:
    engine = LLMEngine(replace(args, verbose=False), startup)
    copies = width if case == "separate" else 1
    for i, request in enumerate(requests):
        for copy in range(copies):
            params = _params(case, request.output_len, width)
            engine.add_request(f"{i}/{copy}", request.prompt_token_ids, params)
    while engine.has_unfinished_requests():
        engine.step()


def _params(case: str, output_len: int, width: int) -> SamplingParams | BeamSearchParams:
    if case == "beams":
        return BeamSearchParams(beam_width=width, max_tokens=output_len, ignore_eos=True, detokenize=False)
    return SamplingParams(
        n=1 if case == "separate" else width,
        temperature=0.0 if case == "greedy" else 1.0,
        max_tokens=output_len,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def measure_swap(startup: Startup, num_chunks: int, runs: int) -> dict[str, Any]:
    """Bandwidth of blocks through the swap space, out and in, and of arrays of the same size that are just copied."""
    config, runner = startup.config, startup.runner
    chunks = min(num_chunks, (config.num_blocks - 1) // SWAP_CHUNK_BLOCKS)
    block_ids = np.arange(1, 1 + chunks * SWAP_CHUNK_BLOCKS, dtype=np.int32).reshape(chunks, SWAP_CHUNK_BLOCKS)
    copies = tuple(HostCopy(chunk, ids) for chunk, ids in enumerate(block_ids))
    bytes_moved = 2 * chunks * SWAP_CHUNK_BLOCKS * startup.memory.block

    def swap() -> None:
        runner.execute(StepPlan(step_id=0, variant=SamplingVariant.GREEDY, swap_outs=copies, swap_ins=copies))
        jax.block_until_ready(runner.pools)

    shape = (SWAP_CHUNK_BLOCKS * startup.memory.block,)
    arrays = [jax.block_until_ready(jax.numpy.zeros(shape, np.uint8)) for _ in range(min(chunks, 4))]
    on_cpu = next(iter(arrays[0].devices())).platform == "cpu"
    host = arrays[0].sharding if on_cpu else arrays[0].sharding.with_memory_kind("pinned_host")

    def copy() -> None:
        for _ in range(-(-chunks // len(arrays))):
            moved = jax.block_until_ready([jax.device_put(array, host) for array in arrays])
            jax.block_until_ready([jax.device_put(array, arrays[0].sharding) for array in moved])

    swap_s, copy_s = statistics.median(_times(swap, runs)), statistics.median(_times(copy, runs))
    copied = 2 * -(-chunks // len(arrays)) * len(arrays) * shape[0]
    return {
        "chunks": chunks,
        "gib_per_s": bytes_moved / swap_s / 2**30,
        "plain_gib_per_s": copied / copy_s / 2**30,
    }


def _times(function: Callable[[], None], runs: int) -> list[float]:
    """Seconds of each run but the first."""
    seconds = []
    for _ in range(runs + 1):
        begun = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begun)
    return seconds[1:]
