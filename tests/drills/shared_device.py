"""A trainer and an engine that share a device by turns, in one process whose JAX takes memory bit by bit.

    python -m tests.drills.shared_device --model llama-3.1-8b --trainer-gib 16 --gpu-memory-utilization 0.9

With XLA_PYTHON_CLIENT_PREALLOCATE=false the trainer's arrays come first. Then the engine starts beside them, takes what
it may have, and runs its largest steps; it sleeps, the trainer fills most of what that gave back, and it wakes up. Its
greedy tokens must be the same each time. Nothing may run out of memory. The exit status says whether it went so.
"""

import os

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jpaged import LLM, SamplingParams
from jpaged.bench.models import model_directory
from jpaged.bench.workloads import make_requests


def in_use() -> dict[str, float]:
    """GiB of the device, as JAX has them; nothing on a CPU."""
    stats = jax.devices()[0].memory_stats() if jax.default_backend() == "gpu" else None
    names = ("bytes_in_use", "peak_bytes_in_use", "pool_bytes", "bytes_limit")
    return {name: round(stats[name] / 2**30, 2) for name in names if name in stats} if stats else {}


def tokens_of(llm: LLM, num_prompts: int, length: int) -> list[list[int]]:
    """Greedy tokens of prompts that fill the largest steps. Some ask for their prompt's log-probabilities, which are
    large programs' results."""
    llm.reset_prefix_cache()
    requests = make_requests("random", num_prompts, llm.engine.vocab_size, input_len=length, output_len=8)
    params = [
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5, prompt_logprobs=None if i % 4 else 1)
        for i in range(num_prompts)
    ]
    outputs = llm.generate([request.prompt_token_ids for request in requests], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@partial(jax.jit, donate_argnums=0)
def trained(parameter: jax.Array, gradient: jax.Array) -> jax.Array:
    return parameter - 0.01 * gradient


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a directory, or a name that benchmarks know (default: the embedded model)")
    parser.add_argument("--load-format", default="dummy", choices=("auto", "dummy"))
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--trainer-gib", type=float, default=0.01, help="of the trainer's parameters")
    parser.add_argument("--max-num-batched-tokens", type=int, default=256)
    parser.add_argument("--num-prompts", type=int, default=16, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write what was found there")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    size = int(args.trainer_gib * 2**30 / 4 / 16)
    parameters = jax.block_until_ready([jnp.full((size,), i, jnp.float32) for i in range(16)])
    found: dict[str, Any] = {"trainer": in_use()}
    begun = time.perf_counter()
    llm = LLM(
        model_directory(args.model) if args.model else None,
        load_format=args.load_format if args.model else "auto",
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_num_seqs=64,
        max_num_batched_tokens=args.max_num_batched_tokens,
        decode_buckets=(8, 64),
        token_buckets=(64, args.max_num_batched_tokens),
        max_model_len=1024,
        skip_tokenizer_init=True,
    )
    found |= {"start_s": time.perf_counter() - begun, "started": in_use(), "blocks": llm.engine.startup.num_blocks}
    length = min(1000, args.max_num_batched_tokens)
    expected = tokens_of(llm, args.num_prompts, length)
    found["stepped"] = in_use()
    pool = llm.engine.startup.memory.pool
    same, rounds = True, []
    for _ in range(args.rounds):
        begun = time.perf_counter()
        if not llm.sleep():
            raise RuntimeError("the engine did not sleep")
        slept = time.perf_counter()
        of_sleep = in_use()
        # As large together as most of the pool, but of other sizes.
        gradients = [jnp.ones((size,), jnp.float32)]
        activations = [jnp.ones((int(pool * 0.8) // 7,), jnp.uint8) for _ in range(7)]
        parameters = [trained(parameter, gradients[0]) for parameter in parameters]
        jax.block_until_ready((parameters, activations))
        of_training = in_use()
        for array in (*gradients, *activations):
            array.delete()
        training = time.perf_counter()
        llm.wake_up()
        woken = time.perf_counter()
        same &= tokens_of(llm, args.num_prompts, length) == expected
        rounds.append(
            {
                "sleep_s": slept - begun,
                "wake_up_s": woken - training,
                "asleep": of_sleep,
                "training": of_training,
                "awake": in_use(),
            }
        )
    found |= {"rounds": rounds, "tokens_are_the_same": same}
    llm.close()
    print(json.dumps(found))
    if args.json:
        from jpaged.bench.report import write_report

        write_report(args.json, "shared device", vars(args), [found])
    print("as it should be" if same else "other tokens after a sleep")
    return not same


if __name__ == "__main__":
    sys.exit(main())
