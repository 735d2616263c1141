"""Whether batch_invariant=True keeps its promise on this device: equal bits in the engine and in training.

    python -m tests.drills.batch_invariance                    # a GPU: four models, some two minutes
    python -m tests.drills.batch_invariance --model tiny       # a CPU: one of them, small

Each model, with random weights, samples some requests one by one. Then all of them run together, in random batches,
chunks, preemptions and prefix hits, and must find the same log-probabilities to the bit, of prompts and tokens; and so
must `token_logprobs(..., batch_invariant=True)`, in batches of other lengths. The exit status says whether all did.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jpaged import EngineArgs, LLMEngine
from jpaged.bench.models import CONFIGS
from tests.support.invariance import Sizes, alone, compare, trained

_SMALL_LLAMA = CONFIGS["llama-3.1-8b"] | {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2816,
}
_SMALL_MIXTURE = CONFIGS["qwen3-30b-a3b"] | {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
}
_TINY = _SMALL_LLAMA | {"vocab_size": 160, "hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512}

MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3-0.6b": (CONFIGS["qwen3-0.6b"], "bfloat16"),
    "llama": (_SMALL_LLAMA, "bfloat16"),
    "llama-float32": (_SMALL_LLAMA, "float32"),
    "mixture": (_SMALL_MIXTURE, "bfloat16"),
    "tiny": (_TINY, "float32"),
}
"""By name: the contents of config.json, and the type of weights."""


def sizes_of(config: dict[str, Any]) -> Sizes:
    lengths = (1, 2, 15, 16, 17, 63, 129, 257, 300)
    if config is _TINY:
        lengths = lengths[:7]
    return Sizes(
        lengths=lengths,
        vocab_size=config["vocab_size"],
        new_tokens=12,
        chunks=(7, 100, 512),
        rows=(3, 16, 64),
        blocks=(22, 60, 400),
        max_model_len=320,
    )


def start(directory: Path, dtype: str, batch_invariant: bool) -> LLMEngine:
    return LLMEngine(
        EngineArgs(
            model=str(directory),
            load_format="dummy",
            dtype=dtype,
            max_model_len=320,
            num_gpu_blocks_override=400,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            decode_buckets=(8, 64),
            token_buckets=(64, 512),
            batch_invariant=batch_invariant,
            skip_tokenizer_init=True,
            verbose=False,
        )
    )


def check(name: str, directory: Path, rounds: int, batch_invariant: bool) -> dict[str, Any]:
    """What differed, of one model, whose configuration is written to the directory."""
    config, dtype = MODELS[name]
    sizes, begun = sizes_of(config), time.perf_counter()
    (directory / "config.json").write_text(json.dumps(config))
    engine = start(directory, dtype, batch_invariant)
    started_s = time.perf_counter() - begun
    prompts = sizes.prompts()
    expected = alone(engine, sizes, prompts)
    differing = [compare(engine, sizes, prompts, expected, seed) for seed in range(rounds)]
    found: dict[str, Any] = {
        "model": name,
        "dtype": dtype,
        "requests": len(prompts),
        "rounds": rounds,
        "requests_that_differ": differing,
        "start_s": started_s,
    }
    if batch_invariant:
        in_training, distance = trained(engine, prompts, expected, range(len(prompts)), 320)
        some, _ = trained(engine, prompts, expected, (3, 5), 130)
        found |= {"differ_in_training": in_training + some, "distance_from_the_plain_form": distance}
    found["seconds"] = time.perf_counter() - begun
    engine.close()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="may be repeated (default: all but tiny)")
    parser.add_argument("--rounds", type=int, default=8, help="random batches of each model (default: %(default)s)")
    parser.add_argument("--plain", action="store_true", help="see how often bits differ without the option")
    parser.add_argument("--json", type=Path, help="write what was found there")
    args = parser.parse_args(argv)
    results = []
    for name in args.model or [name for name in MODELS if name != "tiny"]:
        try:
            with tempfile.TemporaryDirectory() as directory:
                found = check(name, Path(directory), args.rounds, not args.plain)
        except Exception as error:  # the other models are still worth a look
            found = {"model": name, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), flush=True)
        results.append(found)
        if args.json:
            from jpaged.bench.report import write_report

            write_report(args.json, "batch invariance", vars(args), results, says_so=False)
    wrong = [
        one["model"]
        for one in results
        if "error" in one or any(one["requests_that_differ"]) or one.get("differ_in_training")
    ]
    print(f"bits differ, or it failed: {', '.join(wrong)}" if wrong else "equal bits everywhere")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
