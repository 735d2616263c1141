"""How much larger a KV pool is where weights, or keys and values, have fewer bits.

    python benchmarks/pool_memory.py --model llama-3.1-8b --load-format dummy --quantized-model DIR --json FILE

An engine each, one after the other, each in a process of its own: the model as it is, rounded to FP8 while it is read,
the same with keys and values in FP8, and each quantized checkpoint or configuration. Of each: what the plan gives to
weights and to the pool, how many tokens that holds, and how much of the card all processes use, by `nvidia-smi`, while
the engine runs. The engine takes its share of the card at once, so that this stays the same, and the pool grows.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from jpaged import LLM, SamplingParams
from jpaged.assets import demo_model_path
from jpaged.bench.models import CONFIGS, model_directory
from jpaged.bench.report import write_report
from jpaged.bench.sharing import CardMemory

_LOOKS_S = 1.0
"""Seconds within which `nvidia-smi` has looked once more."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=f"a directory, or one of {', '.join(CONFIGS)} (default: the embedded model)")
    parser.add_argument("--quantized-model", action="append", default=[], help="a directory; may be repeated")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--max-model-len", type=int, default=1024, help="tokens (default: 1,024)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write JSON")
    parser.add_argument("--engine", type=json.loads, help=argparse.SUPPRESS)  # what one process measures
    args = parser.parse_args()
    if args.engine is not None:
        print(json.dumps(of_engine(args.engine)))
        return
    plain: dict[str, Any] = {"model": str(model_directory(args.model) if args.model else demo_model_path())}
    engines = {"as it is": plain, "FP8": plain | {"quantization": "fp8"}}
    engines["FP8, keys and values too"] = engines["FP8"] | {"kv_cache_dtype": "fp8"}
    engines |= {Path(one).name: {"model": one} for one in args.quantized_model}
    results: list[dict[str, Any]] = []
    for name, options in engines.items():
        options |= {"load_format": args.load_format, "max_model_len": args.max_model_len}
        command = [sys.executable, __file__, "--engine", json.dumps(options)]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results.append({"name": name, **json.loads(run.stdout.splitlines()[-1])})
        print(json.dumps(results[-1]), flush=True)
    if args.json:
        write_report(args.json, "pool_memory", vars(args), results)


def of_engine(options: dict[str, Any]) -> dict[str, Any]:
    """What one engine has, after a request."""
    card = CardMemory()
    few: dict[str, Any] = {"max_num_seqs": 8, "decode_buckets": (8,), "token_buckets": (64,), "verbose": False}
    llm = LLM(**options, **few, max_num_batched_tokens=64, skip_tokenizer_init=True)
    llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=8, detokenize=False), use_tqdm=False)
    time.sleep(_LOOKS_S)
    startup, used = llm.engine.startup, card.now()
    card.end()
    return {
        "weights_bytes": startup.memory.weights,
        "pool_bytes": startup.memory.pool,
        "pool_tokens": startup.num_blocks * startup.config.block_size // len(startup.cache_groups),
        "nvidia_smi_gb": used,
    }


if __name__ == "__main__":
    main()
