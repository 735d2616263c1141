"""The options of an `LLM` that the offline benchmarks share."""

import argparse
from typing import Any, get_args

from jpaged.api.config import DType, EngineArgs, KVCacheDType, KVCacheLayout, Quantization, VirtualPageLayout
from jpaged.api.errors import InvalidParameterError
from jpaged.assets import demo_model_path
from jpaged.bench.arguments import add_kernel_backend_option, check_expert_skew
from jpaged.bench.models import CONFIGS, model_directory, skewed_model_directory
from jpaged.llm import LLM
from jpaged.processes.replicas import ReplicatedEngine

DTYPE = "type of weights and KV cache"
KV_CACHE_DTYPE = '"fp8": keys and values in 8 bits; "auto": in the type of --dtype'
BLOCK_SIZE = "tokens in a block of the KV cache"
MAX_NUM_SEQS = "most sequences that run at once (default: by device)"
MAX_NUM_BATCHED_TOKENS = "most tokens computed in a step (default: by device)"
GPU_MEMORY_UTILIZATION = "fraction of the device's memory to use"
BATCH_INVARIANT = "compute the same bits whatever the batch"
PIPELINE_DEPTH = "steps dispatched before the first one's tokens are read"
TENSOR_PARALLEL_SIZE = "devices to split the model over"
"""Help texts that several benchmarks share."""


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(CONFIGS)
    parser.add_argument("--model", help=f"a directory, a hub id, or one of {names} (default: the embedded model)")
    add_load_format(parser)
    parser.add_argument("--dtype", choices=get_args(DType), default="auto", help=DTYPE)
    parser.add_argument("--max-model-len", type=int, help="tokens of the longest sequence (default: what fits)")
    parser.add_argument("--block-size", type=int, default=16, help=BLOCK_SIZE)
    add_step_sizes(parser)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, help=GPU_MEMORY_UTILIZATION)
    parser.add_argument("--pipeline-depth", type=int, default=2, help=PIPELINE_DEPTH)
    parser.add_argument("--shared-prefix-attention", action="store_true", help="read shared prefixes once a step")
    parser.add_argument("--batch-invariant", action="store_true", help=BATCH_INVARIANT)
    add_bits_options(parser)
    add_kernel_backend_option(parser)
    add_layout_options(parser)
    add_sharding_options(parser)
    add_expert_skew(parser)
    parser.add_argument("--data-parallel-size", type=int, default=1, help="replicas, each on devices of its own")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, sampling and random weights")


def add_model_options(
    parser: argparse.ArgumentParser, instead: "argparse._MutuallyExclusiveGroup | None" = None
) -> None:
    """Which model, of a benchmark that has no default for it. instead: options of which one may be given for it."""
    what = f"a directory, a hub id, or one of {', '.join(CONFIGS)}"
    if instead is None:
        parser.add_argument("--model", required=True, help=what)
    else:
        instead.add_argument("--model", help=what)
    add_load_format(parser)


def add_load_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--load-format", default="auto", choices=("auto", "safetensors", "dummy"), help='"dummy" makes random weights'
    )


def add_step_sizes(parser: argparse.ArgumentParser) -> None:
    """The sizes of steps, and those that programs are compiled for."""
    parser.add_argument("--max-num-seqs", type=int, help=MAX_NUM_SEQS)
    parser.add_argument("--max-num-batched-tokens", type=int, help=MAX_NUM_BATCHED_TOKENS)
    for name, what in (("--decode-buckets", "sequences"), ("--token-buckets", "tokens")):
        parser.add_argument(
            name,
            type=sizes,
            metavar="N,N,...",
            help=f"{what} in a step that programs are compiled for, ascending; the last is the limit above (default: by"
            " device)",
        )


def add_bits_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quantization", choices=get_args(Quantization), help='"fp8", "int8": weights in 8 bits')
    parser.add_argument("--kv-cache-dtype", choices=get_args(KVCacheDType), default="auto", help=KV_CACHE_DTYPE)


def add_expert_skew(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--expert-skew",
        type=float,
        metavar="Z",
        help="have routers of random weights pick experts as often as their rank to the power of -Z (Zipf), instead of"
        " all alike",
    )


def add_layout_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kv-cache-layout", choices=get_args(KVCacheLayout), default="paged", help="of keys and values"
    )
    parser.add_argument(
        "--virtual-page-layout",
        choices=get_args(VirtualPageLayout),
        default="sliced",
        help="what a page of the virtual layout holds: all layers, or one",
    )


def add_sharding_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help=TENSOR_PARALLEL_SIZE)
    parser.add_argument(
        "--enable-expert-parallel", action="store_true", help="split experts over the devices, not each of them"
    )
    parser.add_argument(
        "--one-shot-rows", type=int, help="steps up to this size sum by the one-shot kernel (default: by device)"
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--temperature", type=float, default=0.0, help="of sampling; 0 is greedy")
    parser.add_argument("--top-p", type=float, default=1.0, help="of sampling, with a temperature; 1 keeps every token")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those of the options that are fields of `EngineArgs`, for an engine without a tokenizer that has compiled all its
    programs when it has started.

    Raises:
        InvalidParameterError: a skew for a model without experts, or with a checkpoint.
    """
    names = EngineArgs.__dataclass_fields__.keys() & vars(args).keys()
    options = {name: getattr(args, name) for name in names}
    return options | {"model": _directory(args), "skip_tokenizer_init": True, "compile_programs": "at_start"}


def _directory(args: argparse.Namespace) -> str | None:
    skew: float | None = getattr(args, "expert_skew", None)
    if skew is None:
        return model_directory(args.model) if args.model else None
    check_expert_skew(skew)
    if args.load_format != "dummy":
        raise InvalidParameterError("--expert-skew is of random routers; add --load-format dummy.")
    return skewed_model_directory(args.model or str(demo_model_path()), skew)


def make_llm(args: argparse.Namespace) -> LLM:
    """An `LLM` without a tokenizer: prompts are token ids."""
    return LLM(**engine_options(args))


def end_replicas(llm: LLM) -> None:
    """Ends an `LLM`'s replicas, which hold the devices: a report opens these to name them. Does nothing to an engine
    that runs in this process."""
    if isinstance(llm.engine, ReplicatedEngine):
        llm.engine.close()


def sizes(text: str) -> tuple[int, ...]:
    """The type of an option that takes numbers with commas between them."""
    return tuple(int(size) for size in text.split(","))
