"""`jpaged bench latency`: how long a batch of fixed size and lengths takes that has the engine to itself.

The requests of a batch arrive at once. The next batch, of other random tokens, arrives when the last request is done.

  TTFT      time from the batch's arrival to a request's first token; percentiles over all requests
  TPOT      time per output token after the first, a request: (last token - first token) / (output length - 1)
  latency   time from the batch's arrival to its last token; percentiles over batches

Times are those at which the host has read the tokens.
"""

import argparse
import time
from typing import Any

import numpy as np

from jpaged.api.sampling_params import SamplingParams
from jpaged.bench.arguments import bench_parser, check_least
from jpaged.bench.engine_options import add_engine_options, add_sampling_options, end_replicas, make_llm
from jpaged.bench.percentiles import summary, table
from jpaged.bench.report import write_report
from jpaged.bench.workloads import make_requests
from jpaged.llm import LLM


def parser() -> argparse.ArgumentParser:
    result = bench_parser("latency", __doc__, "--model qwen3-0.6b --load-format dummy --batch-size 8")
    add_engine_options(result)
    result.add_argument("--batch-size", type=int, default=8, help="requests of a batch")
    result.add_argument("--input-len", type=int, default=32, help="tokens of a prompt")
    result.add_argument("--output-len", type=int, default=128, help="tokens of an answer")
    add_sampling_options(result)
    result.add_argument("--warm-up", type=int, default=3, help="batches that are not timed")
    result.add_argument("--runs", type=int, default=30, help="batches that are timed")
    return result


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    check_least(args, batch_size=1, input_len=1, output_len=1, warm_up=0, runs=1)
    begun = time.perf_counter()
    llm = make_llm(args)
    startup_s = time.perf_counter() - begun
    figures = measure(llm, args)
    end_replicas(llm)
    print(
        f"{args.batch_size} x ({args.input_len} in, {args.output_len} out), {args.runs} batches: "
        f"{figures['output_tokens_per_s']:,.0f} output tokens/s"
    )
    print(table({"TTFT": figures["ttft_ms"], "TPOT": figures["tpot_ms"], "latency": figures["latency_ms"]}), flush=True)
    if args.json:
        write_report(args.json, "latency", vars(args) | {"startup_s": startup_s}, [figures])
    return 0


def measure(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of `args.runs` batches after `args.warm_up` others."""
    params = SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        max_tokens=args.output_len,
        ignore_eos=True,
        detokenize=False,
    )
    first_s, per_token_s, batch_s = [], [], []
    for run in range(-args.warm_up, args.runs):
        requests = make_requests(
            "random",
            args.batch_size,
            llm.engine.vocab_size,
            input_len=args.input_len,
            output_len=args.output_len,
            seed=args.seed + run + args.warm_up,
        )
        llm.reset_prefix_cache()
        begun = time.monotonic()
        outputs = llm.generate([request.prompt_token_ids for request in requests], params, use_tqdm=False)
        ended = time.monotonic()
        if run < 0:
            continue
        batch_s.append(ended - begun)
        for output in outputs:
            stats, length = output.metrics, len(output.outputs[0].token_ids)
            if length != args.output_len or stats.first_token_time is None or stats.last_token_time is None:
                raise RuntimeError(f"asked for {args.output_len} tokens, got {length}.")
            first_s.append(stats.first_token_time - begun)
            if length > 1:
                per_token_s.append((stats.last_token_time - stats.first_token_time) / (length - 1))
    return {
        "batch_size": args.batch_size,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "output_tokens_per_s": args.batch_size * args.output_len * args.runs / sum(batch_s),
        "ttft_ms": summary(np.array(first_s)),
        "tpot_ms": summary(np.array(per_token_s)),
        "latency_ms": summary(np.array(batch_s)),
    }
