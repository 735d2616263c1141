"""`jpaged bench throughput`: output tokens a second of a whole offline run, prefill included.

A warm-up run of the same requests comes first. It also measures how much of the KV memory in use held tokens: tokens
held over token slots of referenced blocks, added up over the steps. The prefix cache is emptied before each run. The
figures are the median of the timed runs, their least and their most. A workload is named (`--workload`, as in the
README's table), read from a file of conversations (`--dataset-path`), or put together from the other options.

`--structured` measures each workload a second time with a JSON schema: objects with bounded strings and arrays. An
answer then ends where the schema is fulfilled, at the latest with the workload's length, and what it has is counted.

`--profile` adds a run under JAX's profiler. Its *.trace.json.gz opens in https://ui.perfetto.dev. The report then has
the share of the time in which no kernel ran. This is an upper bound: under the profiler XLA launches kernel by kernel
instead of CUDA graphs.
"""

import argparse
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path

import jax

from jpaged.api.errors import InvalidParameterError
from jpaged.api.sampling_params import RequestOutputKind, SamplingParams
from jpaged.assets import demo_model_path
from jpaged.bench.arguments import bench_parser, check_least
from jpaged.bench.device_trace import idle_share, read_trace
from jpaged.bench.engine_options import add_engine_options, add_sampling_options, end_replicas, make_llm
from jpaged.bench.models import CONFIGS
from jpaged.bench.report import write_report
from jpaged.bench.sharegpt import read_turns, sharegpt_requests
from jpaged.bench.structured import make_structured_llm, measure_structured, measure_unseen, structured_row, unseen_row
from jpaged.bench.workloads import DATASETS, WORKLOADS, BenchRequest, Workload, make_requests
from jpaged.frontend.llm_engine import LLMEngine
from jpaged.llm import LLM
from jpaged.text.tokenizer import Tokenizer

_OF_DATASETS: tuple[str, ...] = ("dataset", "input_len", "output_len", "prefix_len")
_OF_REQUESTS: tuple[str, ...] = (*_OF_DATASETS, "dataset_path", "num_prompts", "temperature", "top_p")
"""Options that say what requests are like: those that a file of conversations leaves nothing to, and all of them."""


def parser() -> argparse.ArgumentParser:
    result = bench_parser("throughput", __doc__, "--model qwen3-0.6b --load-format dummy --workload sharegpt")
    add_engine_options(result)
    result.add_argument(
        "--expert-load", action="store_true", help="count the tokens of each expert of a mixture, and report how even"
    )
    result.add_argument(
        "--workload",
        action="append",
        choices=(*WORKLOADS, "all"),
        help="by name; may be repeated; not with --dataset, --num-prompts, lengths, --temperature or --top-p",
    )
    result.add_argument(
        "--dataset",
        action="append",
        choices=DATASETS,
        help="what lengths requests have; may be repeated (default: random)",
    )
    result.add_argument(
        "--dataset-path", type=Path, help="a ShareGPT JSON file to draw conversations from, instead of --dataset"
    )
    result.add_argument(
        "--tokenizer", help="for --dataset-path and --structured, a directory or hub id (default: the model's)"
    )
    result.add_argument("--num-prompts", type=int, default=256, help="requests")
    result.add_argument("--input-len", type=int, default=512, help="tokens of a prompt, for random and shared-prefix")
    result.add_argument("--output-len", type=int, default=256, help="tokens of an answer, for random and shared-prefix")
    result.add_argument("--prefix-len", type=int, default=2048, help="tokens that all prompts share, for shared-prefix")
    add_sampling_options(result)
    result.add_argument(
        "--structured",
        choices=("all", "half"),
        help="measure each workload without a constraint, and then with a JSON schema for all requests or every second"
        " one; needs --tokenizer where the model has none",
    )
    result.add_argument(
        "--unseen-schemas",
        type=int,
        default=0,
        help="with --structured: also send so many requests one by one, each with a JSON schema of its own, and as many"
        " without one, and measure the time to the first token",
    )
    result.add_argument("--runs", type=int, default=3, help="timed runs, after one that is not")
    result.add_argument(
        "--profile",
        type=Path,
        help="also run each workload once under JAX's profiler; the trace goes to this directory",
    )
    return result


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    _refuse_ignored(argv)
    check_least(args, runs=1, num_prompts=1, input_len=1, output_len=1, prefix_len=1)
    if args.unseen_schemas and args.structured is None:
        raise InvalidParameterError("--unseen-schemas needs --structured.")
    if args.profile and args.data_parallel_size > 1:
        raise InvalidParameterError("--profile sees this process only; use --data-parallel-size 1.")
    conversations = None if args.dataset_path is None else _Conversations(args)
    begun = time.perf_counter()
    llm = make_llm(args) if args.structured is None else make_structured_llm(args)
    startup_s = time.perf_counter() - begun
    figures = []
    workloads = _workloads(args)
    if conversations is None:
        drawn = {name: _requests(args, workload, llm, name) for name, workload in workloads.items()}
    else:
        drawn = {name: conversations.draw(llm) for name in workloads}
    for name, workload in workloads.items():
        requests = drawn[name]
        figure = {"name": name, "workload": asdict(workload), **measure(llm, requests, workload, args.runs)}
        if args.profile:
            figure["device_idle"] = profile(llm, requests, workload, args.profile / name)
        print(_row(figure), flush=True)
        figures.append(figure)
        if args.structured is not None:
            share = 1.0 if args.structured == "all" else 0.5
            constrained = {
                "name": f"{name} structured",
                **measure_structured(llm, requests, workload, args.runs, share),
            }
            print(structured_row(constrained, figure["output_tokens_per_s"]), flush=True)
            figures.append(constrained)
    if args.unseen_schemas:
        unseen = measure_unseen(llm, args.unseen_schemas, args.seed)
        print(unseen_row(unseen), flush=True)
        figures.append(unseen)
    end_replicas(llm)
    if args.json:
        write_report(args.json, "throughput", vars(args) | {"startup_s": startup_s}, figures)
    return 0


def _refuse_ignored(argv: list[str] | None) -> None:
    """Raises InvalidParameterError: an option says what requests are, and another one says so already."""
    told, unsaid = parser(), object()
    told.set_defaults(**{name: unsaid for name in _OF_REQUESTS if told.get_default(name) is not None})
    args = told.parse_args(argv)
    if args.workload:
        source, refused = f"--workload {args.workload[0]}", _OF_REQUESTS
    elif args.dataset_path is not None:
        source, refused = "--dataset-path", _OF_DATASETS
    else:
        return
    for name in refused:
        if getattr(args, name) not in (unsaid, None):
            raise InvalidParameterError(
                f"--{name.replace('_', '-')} does not go with {source}, which says it already; leave one of them out."
            )


def _workloads(args: argparse.Namespace) -> dict[str, Workload]:
    """By name: those asked for, or one a dataset from the options."""
    if args.dataset_path is not None:
        of_file = Workload("sharegpt file", args.num_prompts, temperature=args.temperature, top_p=args.top_p)
        return {args.dataset_path.stem: of_file}
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


class _Conversations:
    """The file of `--dataset-path` and the tokenizer for it, both read before a model is loaded for them."""

    def __init__(self, args: argparse.Namespace) -> None:
        if args.tokenizer is None and args.model in CONFIGS:
            raise InvalidParameterError(
                f"--dataset-path needs --tokenizer: --model {args.model} is a configuration without one."
            )
        self._args = args
        self._turns = read_turns(args.dataset_path)
        self._tokenizer = Tokenizer.load(args.tokenizer or args.model or demo_model_path())

    def draw(self, llm: LLM) -> list[BenchRequest]:
        args, most = self._args, llm.engine.max_model_len
        return sharegpt_requests(self._turns, self._tokenizer, args.num_prompts, seed=args.seed, max_model_len=most)


def _requests(args: argparse.Namespace, workload: Workload, llm: LLM, name: str) -> list[BenchRequest]:
    """Raises InvalidParameterError: the longest has more tokens than the engine takes."""
    requests = make_requests(
        workload.dataset,
        workload.num_prompts,
        llm.engine.vocab_size,
        input_len=workload.input_len,
        output_len=workload.output_len,
        prefix_len=workload.prefix_len,
        seed=args.seed,
    )
    longest = max(len(request.prompt_token_ids) + request.output_len for request in requests)
    if longest > llm.engine.max_model_len:
        raise InvalidParameterError(
            f"the longest request of '{name}' has {longest} tokens, and this engine takes {llm.engine.max_model_len}:"
            f" use --max-model-len {longest} or more."
        )
    return requests


def measure(llm: LLM, requests: list[BenchRequest], workload: Workload, runs: int) -> dict:
    """Runs the requests `runs` times after a warm-up; checks that every one got its exact length."""
    params = _params(requests, workload)
    prompts = [request.prompt_token_ids for request in requests]
    seconds = []
    utilization = kv_utilization(llm, prompts, params)
    before = mapping_so_far(llm)
    for _ in range(runs):
        llm.reset_prefix_cache()
        begun = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - begun)
        for request, output in zip(requests, outputs, strict=True):
            if len(output.outputs[0].token_ids) != request.output_len:
                raise RuntimeError(f"asked for {request.output_len} tokens, got {len(output.outputs[0].token_ids)}.")
    generated = sum(request.output_len for request in requests)
    stats = llm.get_metrics()
    load = stats.expert_load
    return {
        "num_prompts": len(requests),
        "input_tokens": sum(map(len, prompts)),
        "output_tokens": generated,
        "seconds": seconds,
        "kv_utilization": utilization,
        "output_tokens_per_s": generated / statistics.median(seconds) if seconds else None,
        "metrics": asdict(replace(stats, expert_load=None)),
        "expert_load": load and {"imbalance": load.imbalance, "num_unused": load.num_unused},
        "mapping": {name: value - before[name] for name, value in mapping_so_far(llm).items()},
    }


def mapping_so_far(llm: LLM) -> dict[str, float]:
    """What the virtual layout's page manager has done, and seconds that steps waited for it; empty where there is none
    in this process.
    """
    engine = llm.engine
    memory = engine.startup.runner.memory if isinstance(engine, LLMEngine) else None
    if memory is None:
        return {}
    mapper = memory.mapper
    return asdict(mapper.counts) | {"num_in_steps": mapper.num_in_steps, "waited_s": mapper.waited_s}


def _params(requests: list[BenchRequest], workload: Workload) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=workload.temperature,
            top_p=workload.top_p,
            max_tokens=request.output_len,
            ignore_eos=True,
            detokenize=False,
        )
        for request in requests
    ]


def profile(llm: LLM, requests: list[BenchRequest], workload: Workload, directory: Path) -> float | None:
    """Runs the requests once under the profiler, and returns the share of the time that the device was idle.

    None where there is no GPU.
    """
    llm.reset_prefix_cache()
    with jax.profiler.trace(str(directory)):
        llm.generate([request.prompt_token_ids for request in requests], _params(requests, workload), use_tqdm=False)
    return idle_share(read_trace(directory))


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
    idle = figure.get("device_idle")
    return (
        f"{figure['name']}: {figure['num_prompts']} requests, {figure['input_tokens']:,} tokens in, "
        f"{figure['output_tokens']:,} out: {figure['output_tokens_per_s']:,.0f} output tokens/s "
        f"({least:.3f} to {most:.3f} s a run); {figure['kv_utilization']:.1%} of the KV memory in use held tokens"
        + (
            f"; of {mapping['num_mapped']:,} pages mapped {mapping['num_in_steps']:,} were in the way of a step, steps "
            f"waited {mapping['waited_s']:.2f} s for pages"
            if (mapping := figure.get("mapping"))
            else ""
        )
        + (
            f"; by layer the busiest expert had {min(load['imbalance']):.2f} to {max(load['imbalance']):.2f} times the"
            " tokens of the mean one"
            if (load := figure.get("expert_load"))
            else ""
        )
        + (f"; profiled, the device was idle for {idle:.1%} of the time" if idle is not None else "")
    )
