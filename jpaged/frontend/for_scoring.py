"""An engine's arguments for scoring given tokens rather than generating them."""

from dataclasses import replace

import jax

from jpaged.api.config import EngineArgs
from jpaged.executor.buckets import fine_buckets
from jpaged.executor.start.memory import reserve_device_memory

GPU_STEP_TOKENS = 16384
"""Token budget of a step on a GPU. Large matrix products come closest to the card's peak."""
GPU_ROWS = 1024
"""Slots on a GPU. Short choices fill a step only if there are many of them."""


def for_scoring(args: EngineArgs) -> EngineArgs:
    """The same, with shapes for scoring where none were asked for: large steps, and one batch size for the rest."""
    reserve_device_memory(args.gpu_memory_utilization)  # before JAX is asked what the device is
    if jax.default_backend() == "gpu":
        rows = args.max_num_seqs or GPU_ROWS
        budget = args.max_num_batched_tokens or GPU_STEP_TOKENS
        args = replace(args, max_num_seqs=rows, max_num_batched_tokens=budget)
        if args.token_buckets is None:  # most steps are full; the last of a shard need not be computed as if they were
            args = replace(args, token_buckets=fine_buckets(max(1, budget // 8), budget))
        if args.decode_buckets is None:
            args = replace(args, decode_buckets=(rows,))
    return args
