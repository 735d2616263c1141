"""How far log-probabilities in bfloat16 are from float32: of jpaged, and of transformers, on the same checkpoints.

    python benchmarks/against_transformers.py --together 5 --json FILE           five families at once; needs torch
    python benchmarks/against_transformers.py --size tiny --model gpt-oss-20b    in a minute on a CPU

Of each family a random checkpoint in bfloat16 is written: a published configuration with fewer layers and smaller
widths. jpaged serves prompts of 1 to 6,000 random tokens at once, in chunks beside others' decode steps, and goes on
greedily. transformers then reads what jpaged read and wrote, in float32 and in bfloat16. Every token's log-probability
is compared with float32's:

    positions    tokens compared
    jpaged       |difference| from transformers' float32: mean, 99th percentile, maximum
    bfloat16     the same of transformers' bfloat16
    floor        the same of float32 log-probabilities with each position's logits rounded to bfloat16 once

Weights have variance 1 / inputs, so that every layer changes what comes after it, and heads make distributions about as
sharp as a trained model's. Of each model torch writes, JAX serves and torch compares, in processes of their own.
FILE has the models that are done; the last line says which failed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# JAX takes memory as it needs it: other processes, and other users, find the rest free.
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

LENGTHS = (1, 2, 7, 16, 65, 130, 500, 1024, 1900, 3000, 6000)
TINY_LENGTHS = (1, 2, 7, 16, 65, 130)
NEW_TOKENS = 16

_ALL = {"num_hidden_layers": 4, "hidden_size": 1024, "vocab_size": 32_000, "bos_token_id": 1, "eos_token_id": 2}
_TINY = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 500, "num_attention_heads": 4}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3-30b-a3b": (
        {"num_attention_heads": 16, "num_experts": 64, "moe_intermediate_size": 384},
        {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 16, "moe_intermediate_size": 32},
    ),
    "gpt-oss-20b": (
        {"num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 1024}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64, "num_local_experts": 8}
        | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32},
    ),
    "gemma-3-12b": (
        {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 4096},
        {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "sliding_window": 32}
        | {"sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    ),
    "deepseek-v2-lite": (
        {"n_routed_experts": 32, "intermediate_size": 2816, "moe_intermediate_size": 352},
        {"num_key_value_heads": 4, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}
        | {"v_head_dim": 32, "n_routed_experts": 8, "intermediate_size": 96, "moe_intermediate_size": 32}
        | {"num_experts_per_tok": 4},
    ),
    "qwen3-next-80b-a3b": (
        {"num_attention_heads": 8, "linear_num_key_heads": 8, "linear_num_value_heads": 16}
        | {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 256}
        | {"shared_expert_intermediate_size": 256},
        {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 16}
        | {"num_experts_per_tok": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    ),
}
"""What changes in `jpaged.bench.models.CONFIGS`: for the usual size, and for the tiny one."""


def config_of(name: str, size: str) -> dict[str, Any]:
    from jpaged.bench.models import CONFIGS

    modest, tiny = MODELS[name]
    return {**CONFIGS[name], **_ALL, **modest, **({} if size == "modest" else {**_TINY, **tiny}), "pad_token_id": 0}


# ---------------------------------------------------------------------------------------------- torch: the checkpoints


def write_checkpoint(args: argparse.Namespace) -> None:
    import torch
    import transformers

    name = args.model[0]
    config = config_of(name, args.size)
    torch.manual_seed(zlib.crc32(name.encode()))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.no_grad():
        described = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
        model = transformers.AutoModelForCausalLM.from_config(described, dtype=torch.float32)
        for parameter, weight in model.named_parameters():
            _draw(config, parameter, weight)
    model.to(torch.bfloat16).save_pretrained(args.directory / name)
    (args.directory / name / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))


def _draw(config: dict[str, Any], name: str, weight: Any) -> None:
    """Random weights in place. Norms, decays and the like vary a little around what transformers starts with."""
    hidden, tied = config["hidden_size"], config["tie_word_embeddings"]
    if name.endswith(("A_log", "dt_bias")):
        return
    if weight.ndim == 1 or name.endswith("bias"):
        weight.add_(weight.clone().normal_(), alpha=0.1)
    elif "embed_tokens" in name:
        weight.normal_(std=2 * hidden**-0.5 if tied else 1.0)
    elif "lm_head" in name:
        weight.normal_(std=2 * hidden**-0.5)
    else:
        by_columns = config["model_type"] == "gpt_oss" and ".experts." in name  # [experts, inputs, outputs]
        weight.normal_(std=weight.shape[1 if by_columns else -1] ** -0.5)


# ------------------------------------------------------------------------------------------------- JAX: what is served


def serve(args: argparse.Namespace) -> None:
    from jpaged import LLM, SamplingParams, TokensPrompt

    (name,) = args.model
    begun, longest = time.perf_counter(), max(args.lengths) + NEW_TOKENS
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    config = config_of(name, args.size)
    vocab, blocks = config["vocab_size"], sum(args.lengths) // 16 + 16 * len(args.lengths)
    prompts = [rng.integers(3, vocab, length).tolist() for length in args.lengths]
    llm = LLM(
        str(args.directory / name),
        dtype="bfloat16",
        max_model_len=-(-longest // 64) * 64,
        block_size=16,
        num_gpu_blocks_override=blocks * config["num_hidden_layers"],  # layers form that many groups at most
        max_num_seqs=16,
        max_num_batched_tokens=args.batched_tokens,
        decode_buckets=(16,),
        token_buckets=(args.batched_tokens,),
        skip_tokenizer_init=True,
        verbose=False,
    )
    started = time.perf_counter()
    sampling = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0, detokenize=False
    )
    asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    outputs = llm.generate(asked, sampling, use_tqdm=False)
    found: dict[str, Any] = {}
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        tokens = list(output.outputs[0].token_ids)
        positions: list[Any] = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
        read = [*prompt, *tokens]
        found[f"tokens_{i}"] = np.array(read)
        found[f"logprobs_{i}"] = np.array([at[t].logprob for at, t in zip(positions, read[1:], strict=True)])
    np.savez(args.directory / f"{name}.npz", **found)
    ended = time.perf_counter()
    print(f"{name}: started in {started - begun:.1f} s, served in {ended - started:.1f} s", flush=True)


# --------------------------------------------------------------------------------------------- torch: what is compared


def compare(args: argparse.Namespace) -> None:
    import torch
    import transformers

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    (name,) = args.model
    with np.load(args.directory / f"{name}.npz") as found:
        rows = [found[f"tokens_{i}"] for i in range(len(args.lengths))]
        ours = [found[f"logprobs_{i}"] for i in range(len(args.lengths))]
    eager = {"attn_implementation": "eager"} if name.startswith("gpt-oss") else {}  # others leave sinks out
    read: dict[Any, list[np.ndarray]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = transformers.AutoModelForCausalLM.from_pretrained(args.directory / name, dtype=dtype, **eager)
        model = model.eval().to(device)
        with torch.no_grad():
            both = [_log_probabilities(model, torch.tensor(row, device=device)) for row in rows]
        read[dtype] = [plain for plain, _ in both]
        if dtype == torch.float32:
            read["rounded"] = [rounded for _, rounded in both]
        del model
        if device == "cuda":
            torch.cuda.empty_cache()
    exact = read[torch.float32]
    figures = {"model": name, "positions": int(sum(map(len, exact)))}
    for label, of_rows in (("jpaged", ours), ("bfloat16", read[torch.bfloat16]), ("floor", read["rounded"])):
        figures[label] = _distances(of_rows, exact)
    figures["mean_by_prompt"] = {
        str(length): {"jpaged": float(np.abs(a - e).mean()), "bfloat16": float(np.abs(b - e).mean())}
        for length, a, b, e in zip(args.lengths, ours, read[torch.bfloat16], exact, strict=True)
    }
    print(_line(figures), flush=True)
    (args.directory / f"{name}.json").write_text(json.dumps(figures))


def _log_probabilities(model: Any, row: Any) -> tuple[np.ndarray, np.ndarray]:
    """Of each token but the first of row, int [T], and the same of logits that are rounded to bfloat16."""
    import torch

    logits = model(row[None], use_cache=False).logits[0, :-1]
    given = row[1:, None]

    def of(logits: Any) -> np.ndarray:
        # A part at a time: of 6,000 tokens all log-probabilities are a gigabyte.
        parts = [torch.log_softmax(part.float(), -1) for part in logits.split(1024)]
        return torch.cat([p.gather(1, g)[:, 0] for p, g in zip(parts, given.split(1024), strict=True)]).cpu().numpy()

    return of(logits), of(logits.bfloat16())


def _distances(found: list[np.ndarray], exact: list[np.ndarray]) -> dict[str, float]:
    distances = np.abs(np.concatenate(found) - np.concatenate(exact))
    # JSON has no NaN, and a maximum that is none would hide in a comparison.
    if not np.isfinite(distances).all():
        raise SystemExit("a log-probability is not finite")
    return {"mean": float(distances.mean()), "p99": float(np.quantile(distances, 0.99)), "max": float(distances.max())}


def _line(figures: dict[str, Any]) -> str:
    parts = [f"{figures['model']:20s} {figures['positions']:7,d}"]
    for label in ("jpaged", "bfloat16", "floor"):
        parts.append(f"{label} " + " ".join(f"{name} {value:.4f}" for name, value in figures[label].items()))
    return "   ".join(parts)


# ------------------------------------------------------------------------------------------------------------ the whole

PARTS = {"write": write_checkpoint, "serve": serve, "compare": compare}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="may be repeated (default: all)")
    parser.add_argument("--size", choices=("modest", "tiny"), default="modest", help="of the models and prompts")
    parser.add_argument("--together", type=int, default=1, metavar="N", help="models at a time (default: 1)")
    parser.add_argument("--directory", type=Path, help="where checkpoints are kept (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write JSON")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.model = args.model or list(MODELS)
    args.lengths = LENGTHS if args.size == "modest" else TINY_LENGTHS
    args.batched_tokens = 2048 if args.size == "modest" else 64
    if args.part:
        PARTS[args.part](args)
        return 0
    results: dict[str, Any] = {}
    lock = threading.Lock()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.together) as pool:
        directory = args.directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)

        def finish(name: str) -> None:
            if not all(_run(part, name, args.size, directory) for part in PARTS):
                return
            with lock:
                results[name] = json.loads((directory / f"{name}.json").read_text())
                if args.json:
                    _report(args, [results[name] for name in args.model if name in results])

        list(pool.map(finish, args.model))
    failed = [name for name in args.model if name not in results]
    print(f"failed: {', '.join(failed)}" if failed else "all compared", flush=True)
    return 1 if failed else 0


def _report(args: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    from jpaged.bench.report import write_report

    settings = {"size": args.size, "lengths": args.lengths, "new_tokens": NEW_TOKENS, "models": args.model}
    write_report(args.json, "against transformers", settings, results, says_so=False)


def _run(part: str, name: str, size: str, directory: Path) -> bool:
    """Runs a part in a process of its own. Returns whether it succeeded; if not, the end of what it said is shown."""
    begun = time.perf_counter()
    options = ["--part", part, "--model", name, "--size", size, "--directory", str(directory)]
    command = [sys.executable, __file__, *options]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    said = ran.stdout.strip() if ran.returncode == 0 else f"failed\n{(ran.stdout + ran.stderr)[-3000:]}"
    print(f"{time.perf_counter() - begun:5.1f} s  {part:7s} {name}  {said}", flush=True)
    return ran.returncode == 0


if __name__ == "__main__":
    raise SystemExit(main())
