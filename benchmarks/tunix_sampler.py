"""Rollouts of the same model by Tunix' own sampler ("vanilla") and by jpaged, on one card, in one run.

    python benchmarks/tunix_sampler.py --json FILE       # Qwen3-0.6B, 256 prompts of 512 tokens, 256 new tokens each

Both sample at temperature 1 from random weights of the same shapes, in bfloat16, with no end-of-sequence token, so that
all answers have the same length. Both have been called once before they are timed. Needs google-tunix 0.1.7; of what it
needs only what its sampler and its Qwen3 import.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged import LLM, SamplingParams
from jpaged.bench.models import CONFIGS
from jpaged.bench.report import write_report

TINY = {"num_hidden_layers": 2, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128}

UNUSED = {"sentencepiece": "SentencePieceProcessor", "PIL": "Image"}
"""Packages that Tunix' sampler imports, for tokenizers and images, and what it names of them. They may be missing."""


class Numbers:
    """A tokenizer whose texts are the numbers of prompts, all of which begin with token 1."""

    def __init__(self, prompts: Sequence[list[int]]) -> None:
        self._prompts = prompts

    def encode(self, text: str, **_: Any) -> list[int]:
        return self._prompts[int(text)][1:]  # the first is put before it

    def decode(self, ids: list[int], **_: Any) -> str:
        return ""

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return -1

    def pad_id(self) -> int:
        return 0


@cache
def tunix_parts() -> tuple[Any, Any]:
    """The modules tunix.generate.sampler and tunix.models.qwen3.model, without tunix/__init__.py: that imports all
    trainers and what they need."""
    found = importlib.util.find_spec("tunix")
    if found is None:
        sys.exit("tunix is not installed: pip install google-tunix==0.1.7")
    package = types.ModuleType("tunix")
    package.__path__ = list(found.submodule_search_locations or ())
    sys.modules["tunix"] = package
    for name, attribute in UNUSED.items():
        if importlib.util.find_spec(name) is None:
            stand_in = types.ModuleType(name)
            setattr(stand_in, attribute, type(attribute, (), {}))
            sys.modules[name] = stand_in
    return importlib.import_module("tunix.generate.sampler"), importlib.import_module("tunix.models.qwen3.model")


def tunix_figures(config: dict[str, Any], prompts: list[list[int]], new_tokens: int, runs: int) -> dict[str, Any]:
    """Of Tunix' sampler, with as many prompts at once as it has memory for: it makes the logits of all their tokens."""
    sampling, qwen3 = tunix_parts()
    model_config = qwen3.ModelConfig(
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        embed_dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
        num_kv_heads=config["num_key_value_heads"],
        norm_eps=config["rms_norm_eps"],
        rope_theta=int(config["rope_theta"]),
        use_tied_embedding=config["tie_word_embeddings"],
        dtype=jnp.bfloat16,
        param_dtype=jnp.bfloat16,
    )
    model = qwen3.Qwen3(model_config, rngs=nnx.Rngs(0))
    length = len(prompts[0])
    cache = sampling.CacheConfig(
        cache_size=length + new_tokens,
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
    )
    sampler = sampling.Sampler(model, Numbers(prompts), cache)

    at_once = len(prompts)

    def run(seed: int) -> int:
        found = 0
        for first in range(0, len(prompts), at_once):
            output = sampler(
                [str(number) for number in range(first, min(first + at_once, len(prompts)))],
                max_generation_steps=new_tokens,
                max_prompt_length=length,
                temperature=1.0,
                top_p=1.0,
                seed=seed,
                eos_tokens=[config["vocab_size"] + 1],
            )
            found += sum(map(len, output.tokens))
        return found

    while True:
        try:
            return timed(run, runs, len(prompts) * new_tokens) | {"prompts_at_once": at_once}
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or at_once == 1:
                raise
        at_once //= 2


def jpaged_engine(config: dict[str, Any], prompts: list[list[int]], new_tokens: int) -> LLM:
    """For all prompts at once, on a device that nobody else uses yet."""
    return LLM(
        config,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=len(prompts[0]) + new_tokens,
        gpu_memory_utilization=0.6,
        max_num_seqs=len(prompts),
        decode_buckets=(len(prompts),),
        max_num_batched_tokens=2048,
        token_buckets=(512, 2048),
        verbose=False,
    )


def jpaged_figures(llm: LLM, prompts: list[list[int]], new_tokens: int, runs: int) -> dict[str, Any]:
    """Of jpaged, which frees all memory at the end."""
    params = SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)

    def run(seed: int) -> int:
        llm.reset_prefix_cache()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    with llm:
        return timed(run, runs, len(prompts) * new_tokens)


def drawn_prompts(config: dict[str, Any], number: int, length: int) -> list[list[int]]:
    drawn = np.random.default_rng(0).integers(3, config["vocab_size"], (number, length))
    drawn[:, 0] = 1
    return drawn.tolist()


def timed(run: Callable[[int], int], runs: int, expected: int) -> dict[str, Any]:
    begun = time.perf_counter()
    run(0)
    first_s = time.perf_counter() - begun
    seconds = []
    for seed in range(1, runs + 1):
        begun = time.perf_counter()
        found = run(seed)
        seconds.append(time.perf_counter() - begun)
        if found != expected:
            raise RuntimeError(f"asked for {expected} tokens, got {found}.")
    return {
        "first_run_s": first_s,
        "seconds": seconds,
        "output_tokens_per_s": expected / statistics.median(seconds),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=256, help="of each run (default: %(default)s)")
    parser.add_argument("--input-len", type=int, default=512, help="tokens of each (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=256, help="new tokens of each (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=2, help="timed, after one that is not (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers, for a look on a CPU")
    parser.add_argument("--json", type=Path, help="write the figures and the environment to this file")
    args = parser.parse_args(argv)
    config = dict(CONFIGS["qwen3-0.6b"]) | (TINY if args.tiny else {})
    prompts = drawn_prompts(config, args.prompts, args.input_len)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")  # else JAX would have what the engine asks for
    figures: dict[str, dict[str, Any]] = {}
    tunix_parts()  # what is missing is missed before anything has started
    for name in ("jpaged", "tunix"):
        if name == "jpaged":
            llm = jpaged_engine(config, prompts, args.output_len)
            figures[name] = jpaged_figures(llm, prompts, args.output_len, args.runs)
        else:
            figures[name] = tunix_figures(config, prompts, args.output_len, args.runs)
        print(f"{name}: {figures[name]['output_tokens_per_s']:,.0f} output tokens/s", flush=True)
    ratio = figures["jpaged"]["output_tokens_per_s"] / figures["tunix"]["output_tokens_per_s"]
    print(f"jpaged beside Tunix' sampler: {ratio:.1f} times")
    if args.json:
        versions = {"google-tunix": importlib.metadata.version("google-tunix")}
        write_report(args.json, "tunix sampler", vars(args) | versions, [figures | {"ratio": ratio}])
    return 0


if __name__ == "__main__":
    sys.exit(main())
