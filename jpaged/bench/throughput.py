"""`jpaged bench throughput`: output tokens a second of a whole offline run, prefill included.

A warm-up run of the same requests comes first; it also finds the share of the KV memory in use that held tokens (tokens
held over token slots of referenced blocks, added up over the steps). The prefix cache is emptied before each run.
Reported is the median of the timed runs, and their least and most. Workloads come by name (`--workload`, those of the
README's table) or are put together from the other options.
"""

import argparse
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import jax

from jpaged.bench.models import CONFIGS, model_directory
from jpaged.bench.report import write_report
from jpaged.bench.workloads import DATASETS, WORKLOADS, BenchRequest, Workload, make_requests
from jpaged.errors import InvalidParameterError
from jpaged.llm import LLM
from jpaged.replicas import ReplicatedEngine
from jpaged.sampling_params import RequestOutputKind, SamplingParams


def parser() -> argparse.ArgumentParser:
    names = ", ".join(CONFIGS)
    result = argparse.ArgumentParser(
        prog="jpaged bench throughput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: jpaged bench throughput --model qwen3-0.6b --load-format dummy --workload sharegpt",
    )
    result.add_argument("--model", required=True, help=f"a directory, a hub id, or one of {names}")
    result.add_argument("--load-format", default="auto", choices=("auto", "safetensors", "dummy"))
    result.add_argument("--dtype", default="auto")
    result.add_argument(
        "--workload", action="append", choices=(*WORKLOADS, "all"), help="may be repeated; sets all that follows"
    )
    result.add_argument("--dataset", action="append", choices=DATASETS, help="may be repeated; random by default")
    result.add_argument("--num-prompts", type=int, default=256)
    result.add_argument("--input-len", type=int, default=512, help="tokens, for random and shared-prefix")
    result.add_argument("--output-len", type=int, default=256, help="tokens, for random and shared-prefix")
    result.add_argument("--prefix-len", type=int, default=2048, help="tokens, for shared-prefix")
    result.add_argument("--temperature", type=float, default=0.0)
    result.add_argument("--top-p", type=float, default=1.0)
    result.add_argument("--max-model-len", type=int, default=None)
    result.add_argument("--block-size", type=int, default=16)
    result.add_argument("--max-num-seqs", type=int, default=None)
    result.add_argument("--max-num-batched-tokens", type=int, default=None)
    result.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    result.add_argument("--pipeline-depth", type=int, default=2)
    result.add_argument("--shared-prefix-attention", action="store_true", help="read shared prefixes once a step")
    result.add_argument("--kernel-backend", default=None, choices=("mosaic", "xla"), help="by device if not given")
    result.add_argument("--tensor-parallel-size", type=int, default=1)
    result.add_argument("--data-parallel-size", type=int, default=1)
    result.add_argument("--runs", type=int, default=3, help="timed runs, after one that is not")
    result.add_argument("--profile", type=Path, help="also run each workload once under JAX's profiler, written here")
    result.add_argument("--seed", type=int, default=0)
    result.add_argument("--json", type=Path, help="write the figures and the environment to this file")
    return result


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.runs < 1:
        raise InvalidParameterError(f"--runs must be at least 1, got {args.runs}.")
    if args.profile and args.data_parallel_size > 1:
        raise InvalidParameterError("--profile sees this process only; use --data-parallel-size 1.")
    begun = time.perf_counter()
    llm = LLM(
        model_directory(args.model),
        load_format=args.load_format,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        gpu_memory_utilization=args.gpu_memory_utilization,
        pipeline_depth=args.pipeline_depth,
        kernel_backend=args.kernel_backend,
        shared_prefix_attention=args.shared_prefix_attention,
        skip_tokenizer_init=True,
        tensor_parallel_size=args.tensor_parallel_size,
        data_parallel_size=args.data_parallel_size,
        seed=args.seed,
    )
    startup_s = time.perf_counter() - begun
    vocab_size = llm.engine.vocab_size
    figures = []
    for name, workload in _workloads(args).items():
        requests = make_requests(
            workload.dataset,
            workload.num_prompts,
            vocab_size,
            input_len=workload.input_len,
            output_len=workload.output_len,
            prefix_len=workload.prefix_len,
            seed=args.seed,
        )
        figures.append({"name": name, "workload": asdict(workload), **measure(llm, requests, workload, args.runs)})
        print(_row(figures[-1]), flush=True)
        if args.profile:
            with jax.profiler.trace(str(args.profile / name)):
                measure(llm, requests, workload, runs=0)
    if isinstance(llm.engine, ReplicatedEngine):
        llm.engine.close()  # until then the devices are theirs
    if args.json:
        write_report(args.json, "throughput", vars(args) | {"startup_s": startup_s}, figures)
    return 0


def _workloads(args: argparse.Namespace) -> dict[str, Workload]:
    """By name: those asked for, or one a dataset from the options."""
    if args.workload:
        return {name: WORKLOADS[name] for name in (WORKLOADS if "all" in args.workload else args.workload)}
    return {
        dataset: Workload(
            dataset,
            args.num_prompts,
            args.input_len,
            args.output_len,
            args.prefix_len,
            args.temperature,
            args.top_p,
        )
        for dataset in args.dataset or ["random"]
    }


def measure(llm: LLM, requests: list[BenchRequest], workload: Workload, runs: int) -> dict:
    """Runs the requests `runs` times after a warm-up; checks that every one got its exact length."""
    params = [
        SamplingParams(
            temperature=workload.temperature,
            top_p=workload.top_p,
            max_tokens=request.output_len,
            ignore_eos=True,
            detokenize=False,
        )
        for request in requests
    ]
    prompts = [request.prompt_token_ids for request in requests]
    seconds = []
    utilization = kv_utilization(llm, prompts, params)
    for _ in range(runs):
        llm.reset_prefix_cache()
        begun = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - begun)
        for request, output in zip(requests, outputs, strict=True):
            if len(output.outputs[0].token_ids) != request.output_len:
                raise RuntimeError(f"asked for {request.output_len} tokens, got {len(output.outputs[0].token_ids)}.")
    generated = sum(request.output_len for request in requests)
    return {
        "num_prompts": len(requests),
        "input_tokens": sum(map(len, prompts)),
        "output_tokens": generated,
        "seconds": seconds,
        "kv_utilization": utilization,
        "output_tokens_per_s": generated / statistics.median(seconds) if seconds else None,
        "metrics": asdict(llm.get_metrics()),
    }


def kv_utilization(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> float:
    """Runs the requests, untimed, and returns tokens held / token slots allocated, added up over the steps."""
    llm.reset_prefix_cache()
    engine = llm.engine
    for i, (prompt, of_prompt) in enumerate(zip(prompts, params, strict=True)):
        final = of_prompt.reporting(RequestOutputKind.FINAL_ONLY)
        engine.add_request(f"warm-up {i}", {"prompt_token_ids": prompt}, final)
    held = slots = 0
    while engine.has_unfinished_requests():
        engine.step()
        stats = engine.get_metrics()
        held, slots = held + stats.tokens_held, slots + stats.token_slots
    return held / slots if slots else 0.0


def _row(figure: dict) -> str:
    least, most = min(figure["seconds"]), max(figure["seconds"])
    return (
        f"{figure['name']}: {figure['num_prompts']} requests, {figure['input_tokens']:,} tokens in, "
        f"{figure['output_tokens']:,} out: {figure['output_tokens_per_s']:,.0f} output tokens/s "
        f"({least:.3f} to {most:.3f} s a run); {figure['kv_utilization']:.1%} of the KV memory in use held tokens"
    )
