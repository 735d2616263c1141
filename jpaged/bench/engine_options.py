"""The options of an `LLM` that the offline benchmarks share."""

import argparse

from jpaged.bench.models import CONFIGS, model_directory
from jpaged.llm import LLM
from jpaged.replicas import ReplicatedEngine


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(CONFIGS)
    parser.add_argument("--model", help=f"a directory, a hub id, or one of {names}; the embedded model by default")
    parser.add_argument("--load-format", default="auto", choices=("auto", "safetensors", "dummy"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-num-seqs", type=int, default=None)
    parser.add_argument("--max-num-batched-tokens", type=int, default=None)
    for name in ("--decode-buckets", "--token-buckets"):
        parser.add_argument(name, type=_sizes, help="ascending, as 8,64,1024; the last one is the limit above")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--pipeline-depth", type=int, default=2)
    parser.add_argument("--shared-prefix-attention", action="store_true", help="read shared prefixes once a step")
    parser.add_argument("--kernel-backend", default=None, choices=("mosaic", "xla"), help="by device if not given")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--one-shot-rows", type=int, help="steps up to this size sum by the one-shot kernel")
    parser.add_argument("--data-parallel-size", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)


def make_llm(args: argparse.Namespace) -> LLM:
    """An `LLM` without a tokenizer: prompts are token ids."""
    return LLM(
        args.model and model_directory(args.model),
        load_format=args.load_format,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        decode_buckets=args.decode_buckets,
        token_buckets=args.token_buckets,
        gpu_memory_utilization=args.gpu_memory_utilization,
        pipeline_depth=args.pipeline_depth,
        shared_prefix_attention=args.shared_prefix_attention,
        kernel_backend=args.kernel_backend,
        skip_tokenizer_init=True,
        tensor_parallel_size=args.tensor_parallel_size,
        one_shot_rows=args.one_shot_rows,
        data_parallel_size=args.data_parallel_size,
        seed=args.seed,
    )


def end_replicas(llm: LLM) -> None:
    """Ends an `LLM` that has replicas, whose devices are theirs until then: what names the device in a report opens it.
    Does nothing to one that runs here."""
    if isinstance(llm.engine, ReplicatedEngine):
        llm.engine.close()


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))
