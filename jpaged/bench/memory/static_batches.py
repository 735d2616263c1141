"""FasterTransformer's way to serve, which the PagedAttention paper compares with in Figure 12: whole batches.

    waiting    a b c d e f            as many as memory reserved for the longest sequences holds, the earliest first
    batch      [ a b c ]              prompts in one step, then a token each a step until the longest output is done
               a a a a . .            a sequence that ends earlier leaves its row idle, and is answered with the others
               b b b b b b
    next       [ d e f ]              begins when the batch has ended

FasterTransformer has no scheduler; the paper gives it one with the largest batch that fits (section 6.1).
"""

from collections.abc import Sequence

import numpy as np

from jpaged.bench.memory.setups import Setup, StepTime
from jpaged.bench.memory.traces import TraceRequest


def largest_batch(setup: Setup) -> int:
    """Sequences that fit the memory if each has room for the longest that the model allows."""
    return setup.kv_slots // setup.max_model_len


def batch_seconds(requests: Sequence[TraceRequest], step_time: StepTime) -> float:
    """From the first step of a batch to its last. The prompts' step brings each its first token; outputs all take as
    many steps as the longest.
    """
    prompts, steps = sum(one.prompt_len for one in requests), max(one.output_len for one in requests) - 1
    first = step_time(len(requests), 0, prompts)
    # Step i of the others reads prompts and i tokens of each; step times are linear, so their mean stands for all.
    return (
        first
        + steps * step_time(len(requests), 0, 0)
        + step_time.per_context_token_s * (steps * prompts + len(requests) * steps * (steps + 1) / 2)
    )


def serve_batches(trace: Sequence[TraceRequest], setup: Setup, step_time: StepTime) -> float:
    """Serves a trace to its end.

    trace: by arrival, one sample a request.
    Returns: the normalized latency: the mean of (finish - arrival) / output length, in seconds.
    """
    most, clock_s, next_one = largest_batch(setup), 0.0, 0
    arrivals = np.array([one.arrival_s for one in trace])
    latencies = []
    while next_one < len(trace):
        clock_s = max(clock_s, float(arrivals[next_one]))
        arrived = int(np.searchsorted(arrivals, clock_s, side="right"))
        batch = trace[next_one : min(arrived, next_one + most)]
        clock_s += batch_seconds(batch, step_time)
        latencies += [(clock_s - one.arrival_s) / one.output_len for one in batch]
        next_one += len(batch)
    return float(np.mean(latencies))
