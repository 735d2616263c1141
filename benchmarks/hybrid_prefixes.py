"""Time to the first token where prompts begin alike, for a model with recurrent layers: with snapshots of its states
and without a prefix cache, on the programs of one engine; and what a copy of states takes.

    python benchmarks/hybrid_prefixes.py --model qwen3.5-9b --load-format dummy --max-model-len 32768

Measured are a prompt that is sent twice, and a conversation of `--turns` turns, each of which sends all before it and
`--turn-len` new tokens. Tokens are greedy and random, without a tokenizer.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np

from jpaged import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from jpaged.bench.models import CONFIGS, model_directory
from jpaged.executor.step.copy_states import CopyStates


class Answer(dict[str, Any]):
    """ttft_ms, cached_tokens and prefilled_tokens of a prompt of prompt_tokens."""

    token_ids: list[int]


def ask(engine: LLMEngine, prompt: list[int], max_tokens: int) -> Answer:
    before, begun = engine.get_metrics().prefilled_tokens, time.perf_counter()
    engine.add_request("one", prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
    first, outputs = 0.0, list[RequestOutput]()
    while engine.has_unfinished_requests():
        outputs = engine.step() or outputs
        if outputs and not first:
            first = time.perf_counter()
    output = outputs[-1]
    answer = Answer(
        prompt_tokens=len(prompt),
        cached_tokens=output.num_cached_tokens,
        prefilled_tokens=engine.get_metrics().prefilled_tokens - before,
        ttft_ms=1e3 * (first - begun),
    )
    answer.token_ids = list(output.outputs[0].token_ids)
    return answer


def measure_twice(engine: LLMEngine, prompt: list[int], runs: int) -> dict[str, Any]:
    first, again = [], []
    for _ in range(runs):
        engine.reset_prefix_cache()
        first.append(ask(engine, prompt, 8))
        again.append(ask(engine, prompt, 8))
    return {"first": min(first, key=lambda one: one["ttft_ms"]), "again": min(again, key=lambda one: one["ttft_ms"])}


def measure_conversation(engine: LLMEngine, prompt: list[int], args: argparse.Namespace) -> list[Answer]:
    engine.reset_prefix_cache()
    rng, turns, conversation = np.random.default_rng(args.seed + 1), list[Answer](), prompt
    for _ in range(args.turns):
        conversation = [*conversation, *rng.integers(3, engine.vocab_size, args.turn_len).tolist()]
        turns.append(ask(engine, conversation, args.answer_len))
        conversation = [*conversation, *turns[-1].token_ids]
    return turns


def measure_copies(engine: LLMEngine, runs: int) -> list[dict[str, Any]]:
    """Of each size of the program: slots copied onto snapshots, the host's part included."""
    startup, found = engine.startup, []
    slots, count = startup.config.max_num_seqs, startup.config.num_state_snapshots
    for program in CopyStates.programs(startup.setup):
        pairs = np.array([[i, slots + i] for i in range(min(program.pairs, slots, count))], np.int32)
        times = []
        for _ in range(runs):
            begun = time.perf_counter()
            startup.runner._changes.copy_states(pairs)
            jax.block_until_ready(startup.runner._held["recurrent"])
            times.append(1e3 * (time.perf_counter() - begun))
        moved = 2 * len(pairs) * startup.setup.states.slot_bytes
        found.append({"states": len(pairs), "bytes": moved, "ms": median(times), "GB/s": moved / median(times) / 1e6})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True, help=f"a directory, or one of {', '.join(CONFIGS)}")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--num-gpu-blocks-override", type=int)
    parser.add_argument("--num-state-snapshots", type=int)
    parser.add_argument("--state-snapshot-tokens", type=int, default=256)
    parser.add_argument("--prompt-len", type=int, default=16000)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--turn-len", type=int, default=200, help="new tokens of each turn (default: 200)")
    parser.add_argument("--answer-len", type=int, default=300, help="tokens of each answer (default: 300)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    own = ("prompt_len", "turns", "turn_len", "answer_len", "runs", "json")
    options = {name: value for name, value in vars(args).items() if name not in own and value is not None}
    options["model"] = model_directory(args.model)
    cached = LLMEngine(EngineArgs(**options, skip_tokenizer_init=True, verbose=True))
    plain = LLMEngine(replace(cached.args, enable_prefix_caching=False, verbose=False), cached.startup)
    prompt = np.random.default_rng(args.seed).integers(3, cached.vocab_size, args.prompt_len).tolist()
    found: dict[str, Any] = {
        "model": args.model,
        "device": cached.startup.device,
        "state_bytes": cached.startup.setup.states.slot_bytes,
        "num_state_snapshots": cached.startup.config.num_state_snapshots,
        "copies": measure_copies(cached, 5 * args.runs),
    }
    for name, engine in (("with snapshots", cached), ("without", plain)):
        ask(engine, prompt, 8)  # what a first run still has to load
        twice, turns = measure_twice(engine, prompt, args.runs), measure_conversation(engine, prompt, args)
        found[name] = {"twice": twice, "conversation": turns}
        shown = ", ".join(f"{turn['ttft_ms']:.1f}" for turn in turns)
        print(
            f"{name}: first {twice['first']['ttft_ms']:.1f} ms, again {twice['again']['ttft_ms']:.1f} ms; turns {shown}"
        )
    for copy in found["copies"]:
        print(f"{copy['states']} states copied: {copy['ms']:.3f} ms, {copy['GB/s']:.0f} GB/s")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
