"""Figures 18 and 19 on a device: what a block size costs the kernels, and swapping against computing again.

    18   the whole engine at each block size: requests of a trace arrive at a rate, normalized latency; tokens/s
    19   the keys and values of one sequence, in blocks of each size scattered over the pool: gathered, copied to pinned
         host memory, copied back and scattered (all blocks of all layers in one batch), against computing them again

The paper copied block by block, so that small blocks left the link idle; gathered first, they should not.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jpaged.api.config import EngineArgs
from jpaged.api.sampling_params import RequestOutputKind, SamplingParams
from jpaged.bench.memory.figures import Row
from jpaged.bench.memory.traces import TraceRequest, draw_trace
from jpaged.bench.models import model_directory
from jpaged.frontend.llm_engine import LLMEngine

_BLOCK_SIZES = (16, 32, 64, 128)
_SWAP_BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_DEFAULT_RATES = {"sharegpt": 10.0, "alpaca": 40.0}
_REPEATS = 7
_FEW_PROGRAMS: dict[str, Any] = {
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "decode_buckets": (32, 256),
    "token_buckets": (512, 2048),
}


def measure(figure: str, args: argparse.Namespace) -> Iterator[dict[str, list[Row]]]:
    """Runs a figure's measurement with the command line's model: all rows so far, whenever there are more."""
    if figure == "18":
        rows: list[Row] = []
        for row in block_sizes(args):
            rows.append(row)
            yield {"18, device": rows}
    else:
        yield {"19": swap_against_recompute(args)}


def block_sizes(args: argparse.Namespace) -> Iterator[Row]:
    """Normalized latency and tokens/s of the engine at each block size, for both data sets."""
    for block_size in args.block_size or _BLOCK_SIZES:
        engine = _engine(args, block_size)
        for dataset, usual in _DEFAULT_RATES.items():
            for rate in args.rate or [usual]:
                seconds = args.num_prompts / rate
                trace = draw_trace(dataset, rate, seconds, args.seed, args.lengths, engine.max_model_len)
                _serve(engine, trace[: min(64, len(trace))])  # the first steps of a process are slow
                latency_s, seconds = _serve(engine, trace)
                yield {
                    "dataset": dataset,
                    "block_size": block_size,
                    "rate": rate,
                    "latency_s_per_token": latency_s,
                    "output_tokens_per_s": sum(r.output_len for r in trace) / seconds,
                    "preemptions": engine.get_metrics().num_preemptions,
                    "programs": "few" if args.few_programs else "all",
                }
        engine.close()  # or the next one finds the device full
        del engine
        gc.collect()


def _engine(args: argparse.Namespace, block_size: int) -> LLMEngine:
    blocks = args.num_gpu_blocks
    return LLMEngine(
        EngineArgs(
            model=model_directory(args.model),
            load_format=args.load_format,
            block_size=block_size,
            max_model_len=args.max_model_len,
            num_gpu_blocks_override=max(2, blocks * 16 // block_size) if blocks else None,
            skip_tokenizer_init=True,
            seed=args.seed,
            compile_programs="at_start",
            **(_FEW_PROGRAMS if args.few_programs else {}),
        )
    )


def _serve(engine: LLMEngine, trace: list[TraceRequest]) -> tuple[float, float]:
    """Serves requests as they arrive; returns the normalized latency and the seconds from first arrival to last end."""
    engine.reset_prefix_cache()
    rng = np.random.default_rng(len(trace))
    vocab_size = engine.startup.model.config.vocab_size
    prompts = [rng.integers(0, vocab_size, request.prompt_len).tolist() for request in trace]
    latencies: list[float] = []
    num_sent = 0
    begun = time.perf_counter()
    while num_sent < len(trace) or engine.has_unfinished_requests():
        now = time.perf_counter() - begun
        while num_sent < len(trace) and trace[num_sent].arrival_s <= now:
            params = SamplingParams(
                max_tokens=trace[num_sent].output_len,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(num_sent), {"prompt_token_ids": prompts[num_sent]}, params)
            num_sent += 1
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, trace[num_sent].arrival_s - (time.perf_counter() - begun)))
            continue
        for output in engine.step():
            if output.finished:
                request = trace[int(output.request_id)]
                latencies.append((time.perf_counter() - begun - request.arrival_s) / request.output_len)
    return statistics.mean(latencies), time.perf_counter() - begun


def swap_against_recompute(args: argparse.Namespace) -> list[Row]:
    """Milliseconds to swap a sequence out and in, by block size, and to compute it again."""
    engine = _engine(args, 16)
    num_tokens = min(args.tokens, engine.max_model_len - 1)
    recompute_ms = _recompute_ms(engine, num_tokens)
    model = engine.startup.model
    config, dtype = model.config, model.dtype
    del engine
    gc.collect()
    rows = []
    for block_size in _SWAP_BLOCK_SIZES:
        arrays = 2 if config.value_dim is None else 1  # keys, and values where they are kept apart
        shape = (arrays, config.num_kv_heads, block_size, config.head_dim)
        out_ms, in_ms, num_bytes = _swap_ms(config.num_layers, shape, dtype, num_tokens)
        rows.append(
            {
                "block_size": block_size,
                "tokens": num_tokens,
                "swap_out_ms": out_ms,
                "swap_in_ms": in_ms,
                "swap_gb_per_s": 2 * num_bytes / 1e6 / (out_ms + in_ms),
                "recompute_ms": recompute_ms,
                "recompute_over_swap": recompute_ms / (out_ms + in_ms),
            }
        )
    return rows


def _recompute_ms(engine: LLMEngine, num_tokens: int) -> float:
    """Median time to compute a prompt's keys and values, the first token sampled after it included."""
    rng = np.random.default_rng(0)
    vocab_size = engine.startup.model.config.vocab_size
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
    times = []
    for i in range(_REPEATS + 2):
        prompt = rng.integers(0, vocab_size, num_tokens).tolist()
        begun = time.perf_counter()
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            engine.step()
        times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times[2:])


def _swap_ms(num_layers: int, shape: tuple[int, ...], dtype: Any, num_tokens: int) -> tuple[float, float, int]:
    """Median times to move a sequence's blocks out and in, and its bytes; the pool is four times as large."""
    num_moved = -(-num_tokens // shape[2])
    num_blocks = 4 * num_moved
    device = jax.devices()[0]
    on_host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    on_device = jax.sharding.SingleDeviceSharding(device)
    ids = jax.numpy.asarray(np.random.default_rng(0).permutation(num_blocks)[:num_moved])
    pools = [jax.numpy.ones((num_blocks, *shape), dtype) for _ in range(num_layers)]
    gather = jax.jit(lambda pools, ids: jax.numpy.stack([pool[ids] for pool in pools]))
    scatter = jax.jit(
        lambda pools, ids, moved: [pool.at[ids].set(moved[i]) for i, pool in enumerate(pools)], donate_argnums=0
    )

    def swap_out(pools: list[jax.Array]) -> jax.Array:
        return jax.device_put(gather(pools, ids), on_host)

    def swap_in(pools: list[jax.Array], held: jax.Array) -> list[jax.Array]:
        return scatter(pools, ids, jax.device_put(held, on_device))

    out_times, in_times = [], []
    for _ in range(_REPEATS + 2):
        elapsed, held = _timed(swap_out, pools)
        out_times.append(elapsed)
        elapsed, pools = _timed(swap_in, pools, held)
        in_times.append(elapsed)
    return statistics.median(out_times[2:]), statistics.median(in_times[2:]), held.nbytes


def _timed(work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Milliseconds, and the result."""
    begun = time.perf_counter()
    result = jax.block_until_ready(work(*arguments))
    return 1e3 * (time.perf_counter() - begun), result
