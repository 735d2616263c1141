"""The options that commands share, and the engine options and sampling parameters made from them."""

import argparse
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from jpaged.api.config import (
    CompilePrograms,
    DType,
    EngineArgs,
    KVCacheDType,
    KVCacheLayout,
    LoadFormat,
    LogprobsMode,
    PreemptionMode,
    Quantization,
    RerankerName,
    VirtualPageLayout,
)
from jpaged.api.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jpaged.llm import LLM

_SAMPLING_OPTIONS = (
    ("--max-tokens", int, "N", "most tokens to generate"),
    ("--min-tokens", int, "N", "do not stop before this many tokens"),
    ("--temperature", float, "X", "randomness; 0 always takes the most likely token"),
    ("--top-p", float, "X", "sample from the most likely tokens that together reach this probability"),
    ("--top-k", int, "N", "sample from this many most likely tokens; 0 from all"),
    ("--min-p", float, "X", "leave out tokens less likely than this fraction of the likeliest"),
    ("--repetition-penalty", float, "X", "above 1, tokens that occurred become less likely"),
    ("--presence-penalty", float, "X", "the same, subtracted once (-2 to 2)"),
    ("--frequency-penalty", float, "X", "the same, subtracted for each time (-2 to 2)"),
)


def bucket_sizes(text: str) -> tuple[int, ...]:
    """The sizes in "8,64,256". `EngineArgs` says whether they may be buckets.

    Raises:
        argparse.ArgumentTypeError: something else than whole numbers between commas.
    """
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of sizes, such as 8,64,256") from None


_ENGINE_OPTIONS = (
    ("--tokenizer", str, "DIR_OR_ID", "a tokenizer other than the model's own"),
    ("--revision", str, "NAME", "branch, tag or commit on the hub"),
    ("--max-model-len", int, "N", "longest sequence, prompt and answer, in tokens (default: what fits)"),
    ("--block-size", int, "N", "tokens in a block of the KV cache"),
    ("--gpu-memory-utilization", float, "X", "fraction of the device's memory to use"),
    ("--num-gpu-blocks-override", int, "N", "blocks in the KV cache, instead of what memory allows"),
    ("--max-num-seqs", int, "N", "most sequences that run at once (default: by device)"),
    ("--max-num-batched-tokens", int, "N", "most tokens computed in a step (default: by device)"),
    (
        "--decode-buckets",
        bucket_sizes,
        "N,N,...",
        "sequences in a step that programs are compiled for, ascending to --max-num-seqs; fewer start faster and pad"
        " more (default: by device)",
    ),
    (
        "--token-buckets",
        bucket_sizes,
        "N,N,...",
        "likewise tokens, ascending to --max-num-batched-tokens (default: by device)",
    ),
    (
        "--num-state-snapshots",
        int,
        "N",
        "of models with recurrent layers, states kept for the prefix cache; 0 for none (default: an eighth of the"
        " memory that weights leave)",
    ),
    (
        "--state-snapshot-tokens",
        int,
        "N",
        "of these models, new tokens of a sequence after which a state is kept",
    ),
    ("--swap-space", float, "GIB", "host memory for the blocks of preempted sequences"),
    ("--tensor-parallel-size", int, "N", "devices to split the model over"),
    (
        "--one-shot-rows",
        int,
        "N",
        "largest step whose sums over devices take the one-shot kernel; 0 for none (default: by device)",
    ),
    ("--data-parallel-size", int, "N", "replicas, each on devices of its own"),
    ("--coordinator-address", str, "HOST:PORT", "of process 0, for a model over several hosts"),
    ("--num-processes", int, "N", "processes of such a model; the others are `jpaged worker`"),
    ("--process-id", int, "N", "which of them this is"),
)


def add_debug_option(parser: argparse._ActionsContainer, default: Any = argparse.SUPPRESS) -> None:
    """--debug may stand before the command and after it; only the first gives it a default."""
    parser.add_argument("--debug", action="store_true", default=default, help="show tracebacks and library messages")


def add_model_options(parser: argparse.ArgumentParser, *, generates: bool = True, compares: bool = False) -> None:
    """Which model to run, and how; `engine_options` reads them. generates: the command samples answers. compares: it
    scores pairs of texts."""
    parser.add_argument(
        "-m", "--model", metavar="DIR_OR_ID", help="a directory or a Hugging Face hub id (default: the embedded model)"
    )
    group = parser.add_argument_group("engine options")
    group.add_argument("--dtype", choices=get_args(DType), help="type of weights and KV cache (default: auto)")
    if generates:
        _add_generation_settings(group)
    for flag, kind, metavar, what in _ENGINE_OPTIONS:
        default = EngineArgs.__dataclass_fields__[flag[2:].replace("-", "_")].default
        shown = what if default is None else f"{what} (default: {default:g})"
        group.add_argument(flag, type=kind, metavar=metavar, help=shown)
    group.add_argument(
        "--no-enable-prefix-caching",
        dest="enable_prefix_caching",
        action="store_const",
        const=False,
        help="compute equal beginnings of prompts anew",
    )
    group.add_argument(
        "--preemption-mode",
        choices=get_args(PreemptionMode),
        help="swap preempted sequences or compute them again (default: auto)",
    )
    group.add_argument(
        "--compile-programs",
        choices=get_args(CompilePrograms),
        help="all at start, or each when a step first needs it, which CPUs alone can do; auto: the latter on a CPU"
        " unless --kernel-backend forces kernels (default: auto)",
    )
    group.add_argument(
        "--batch-invariant",
        action="store_const",
        const=True,
        help="give a token's log-probabilities the same bits whatever shares its steps",
    )
    group.add_argument(
        "--kv-cache-dtype",
        choices=get_args(KVCacheDType),
        help='"fp8" keeps keys and values in 8 bits, "auto" in the type of the model (default: auto)',
    )
    group.add_argument(
        "--calculate-kv-scales",
        action="store_const",
        const=True,
        help="with --kv-cache-dtype fp8: find the scales of keys and values at start-up",
    )
    group.add_argument(
        "--kv-cache-layout",
        choices=get_args(KVCacheLayout),
        help="blocks behind block tables, or contiguous addresses with pages mapped below (default: paged)",
    )
    group.add_argument(
        "--virtual-page-layout",
        choices=get_args(VirtualPageLayout),
        help="pages of all layers, or of one layer, in the virtual layout (default: sliced)",
    )
    group.add_argument(
        "--kv-idle-release-s",
        type=float,
        metavar="S",
        help="give pages of the virtual layout back to the device that were idle for so long (default: never)",
    )
    group.add_argument(
        "--host-prefix-cache",
        action="store_const",
        const=True,
        help="let prefixes that the KV cache has no room for go to the swap space",
    )
    group.add_argument(
        "--shared-prefix-attention",
        action="store_const",
        const=True,
        help="read what many prompts begin with once a step for all of them",
    )
    group.add_argument(
        "--enable-expert-parallel",
        action="store_const",
        const=True,
        help="split a mixture of experts by experts over the devices of --tensor-parallel-size",
    )
    group.add_argument(
        "--kernel-backend",
        metavar="NAME",
        help='attention, cache and MLP kernels: "hopper" (or "mosaic"), "triton" or "xla" (default: by device)',
    )
    group.add_argument(
        "--load-format", choices=get_args(LoadFormat), help='"dummy" makes random weights (default: auto)'
    )
    group.add_argument(
        "--quantization",
        choices=get_args(Quantization),
        help='"fp8" and "int8" round weights to 8 bits while they are read; "none" reads experts in MXFP4 as bfloat16;'
        " the others are what quantized checkpoints say of themselves (default: as the checkpoint is)",
    )
    if compares:
        group.add_argument(
            "--reranker",
            choices=get_args(RerankerName),
            help='the model judges documents by "yes" or "no", as Qwen3-Reranker does (default: scores compare'
            " embeddings)",
        )
    group.add_argument("-q", "--quiet", action="store_true", help="no start-up table, progress or timing")
    add_debug_option(group)


def _add_generation_settings(group: "argparse._ArgumentGroup") -> None:
    """Options of commands that sample. Others leave them out, as nothing would read them."""
    group.add_argument(
        "--generation-config",
        metavar="auto|vllm|DIR",
        help="whose generation_config.json says how to sample where a request does not: the model's (auto),"
        " none's (vllm) or that of a directory (default: auto)",
    )
    group.add_argument(
        "--logprobs-mode",
        choices=get_args(LogprobsMode),
        help="log-probabilities of the model's own distribution, or of the one sampled from (default: raw_logprobs)",
    )
    group.add_argument(
        "--expert-load",
        action="store_const",
        const=True,
        help="count the tokens of each expert of a mixture, for /metrics and get_metrics",
    )


def add_parser_options(parser: argparse._ActionsContainer) -> None:
    """How the model writes what is not text."""
    parser.add_argument(
        "--tool-parser", metavar="NAME", help="how the model writes tool calls (default: found from its chat template)"
    )
    parser.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help='how the model writes reasoning; "none" leaves it in the text (default: found from its chat template)',
    )


def engine_options(args: argparse.Namespace, *, verbose: bool) -> dict[str, Any]:
    """Keyword arguments for `LLM` or `EngineArgs`: what was given on the command line, and nothing else.

    verbose: print the start-up table.
    Raises:
        InvalidParameterError: a value out of range; so before anything is loaded.
    """
    names = EngineArgs.__dataclass_fields__
    options = {name: value for name, value in vars(args).items() if name in names and value is not None}
    options["verbose"] = verbose
    EngineArgs(**options)
    return options


def add_generation_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """How to sample, and with which model; `generation_options` and `sampling_params` read them.

    max_tokens: the default.
    """
    group = parser.add_argument_group("sampling options", "What is not given is as the model's makers set it.")
    for flag, kind, metavar, what in _SAMPLING_OPTIONS:
        if flag == "--max-tokens":
            group.add_argument(
                flag, type=kind, metavar=metavar, default=max_tokens, help=f"{what} (default: {max_tokens})"
            )
        else:
            group.add_argument(flag, type=kind, metavar=metavar, help=what)
    group.add_argument(
        "--stop",
        action="append",
        type=_unescape,
        metavar="TEXT",
        help="end before this text; may be repeated; \\n, \\t",
    )
    group.add_argument("--ignore-eos", action="store_const", const=True, help="go on after the model ends its text")
    group.add_argument("--seed", type=int, metavar="N", help="the same N gives the same text (default: a new one)")
    add_model_options(parser)


def generation_options(args: argparse.Namespace, *, verbose: bool) -> dict[str, Any]:
    """`engine_options`, with the sampling options checked as well."""
    options = engine_options(args, verbose=verbose)
    _given_sampling(args)
    return options


def _given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The `SamplingParams` fields given on the command line, less the seed.

    Raises:
        InvalidParameterError: a value out of range; so before anything is loaded.
    """
    names = set(SamplingParams.__dataclass_fields__) - {"seed"}
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    SamplingParams(**given)
    return given


def sampling_params(
    llm: "LLM", args: argparse.Namespace, output_kind: RequestOutputKind, request_index: int = 0
) -> SamplingParams:
    """The model's defaults with what was given on the command line.

    request_index: requests of one run get seeds that follow each other, so that equal prompts differ.
    """
    seed = secrets.randbits(48) if args.seed is None else args.seed + request_index
    return replace(llm.get_default_sampling_params(), **_given_sampling(args), seed=seed, output_kind=output_kind)


def _unescape(text: str) -> str:
    return text.replace("\\n", "\n").replace("\\t", "\t")
