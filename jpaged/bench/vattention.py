"""`jpaged bench vattention`: what pages mapped below contiguous addresses cost, and what they bring.

Parts, all of them by default (`--part` names some):

    mapping     pages mapped and unmapped a second, by how many at a time, and the growth of 1,000 sequences at once
    attention   attention over one layer's keys and values: cuDNN over contiguous addresses (decode, and a chunk of a
                quarter of the context at its end), our kernels over the same by a table that counts up, and over
                shuffled blocks (`--rows` sequences of `--context` tokens each)
    calls       the driver's calls for 1,000 tokens of a ShareGPT-like load, by the scheduler and no device
    waste       the share of pages' memory that holds no token, by page layout and length, beside blocks of 16 tokens
    steps       decode steps of an engine in each layout: mean, median and 99th percentile, with pages mapped in the
                step, ahead of it by the thread, and before all steps; whether greedy tokens are the first layout's;
                what sleeping and waking takes
    prompts     time to the first token of prompts of some lengths, in each layout, with pages mapped in the step,
                beside it, left mapped by the request before, and mapped while the prompt waits
    agreement   greedy tokens and the prompts' log-probabilities in each layout, beside the first layout's
    throughput  tokens a second of decode steps, by rows and context, and of prompts that arrive together, by length, in
                each layout, and over the first layout's (`layout_throughput.py`)
    turns       two engines on one device, each with most of its memory: one sleeps while the other serves
    sharing     two engines on one device, of which each uses what the other does not need, over time (`sharing.py`)

Each engine runs in a process of its own: one gives memory back to the device only when it ends. `steps`, `prompts`,
`agreement` and `throughput` share each layout's. With `--json` the file is written anew after each figure, and after
each of these engines, so what was measured by then is kept if the time ends. A part that fails says so and leaves the
others to run; the exit status is then 1.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.api.errors import InvalidParameterError
from jpaged.assets import demo_model_path
from jpaged.bench import layout_engines, layout_throughput, sharing
from jpaged.bench.arguments import bench_parser, check_least
from jpaged.bench.engine_options import add_engine_options, engine_options, sizes
from jpaged.bench.engine_processes import EngineProcess, engine_argv, obey
from jpaged.bench.kernel_cases import card
from jpaged.bench.kernels import measure
from jpaged.bench.mapping_calls import count_calls
from jpaged.bench.report import write_report
from jpaged.bench.workloads import WORKLOADS, make_requests
from jpaged.engine.config import SchedulerConfig
from jpaged.executor.cache.virtual.arrays import CpuRanges, GpuRanges
from jpaged.executor.cache.virtual.geometry import Geometry
from jpaged.executor.cache.virtual.pages import PageManager
from jpaged.executor.start.memory import reserve_device_memory
from jpaged.models import ModelConfig
from jpaged.pallas_kernels import Addresses, contiguous_attention, decode_attention, ragged_attention

PARTS = ("mapping", "calls", "attention", "waste", *layout_engines.PARTS, "turns", "sharing")
PAGE_BYTES = 2 * 2**20
_ROUNDS = 5


def parser() -> argparse.ArgumentParser:
    result = bench_parser("vattention", __doc__, "--model llama-3.1-8b --load-format dummy --max-model-len 4096")
    add_engine_options(result)
    result.add_argument("--part", action="append", choices=PARTS, help="may be repeated (default: all)")
    result.add_argument(
        "--layout",
        action="append",
        choices=layout_engines.LAYOUTS,
        help='of `steps`, `prompts`, `agreement` and `throughput`; "cudnn": per-layer pages and cuDNN\'s attention; may'
        " be repeated (default: all but cudnn)",
    )
    result.add_argument("--rows", type=int, default=64, help="sequences of `attention`, `steps` and `agreement`")
    result.add_argument("--context", type=int, default=1024, help="tokens of each")
    result.add_argument(
        "--steps",
        type=int,
        default=256,
        help="decode steps that are timed, mapping each way, or with each number of rows; tokens of `agreement`",
    )
    result.add_argument(
        "--prompt-lengths",
        type=sizes,
        metavar="N,N,...",
        help="tokens of `prompts` and `throughput`, ascending; longer ones than the engine takes are left out (default:"
        f" {_listed(layout_engines.PROMPT_LENGTHS)})",
    )
    for name, what, default in (
        ("batches", "sequences that decode at once, of `throughput`", layout_throughput.BATCHES),
        ("contexts", "tokens of each", layout_throughput.CONTEXTS),
    ):
        result.add_argument(
            f"--{name}",
            type=sizes,
            metavar="N,N,...",
            help=f"{what}, as far as they fit the engine (default: {_listed(default)})",
        )
    result.add_argument(
        "--most-tokens", type=int, metavar="N", help="of all sequences of `throughput` together (default: what fits)"
    )
    result.add_argument(
        "--cudnn-slots",
        type=int,
        metavar="N",
        help='--max-num-seqs of the layout "cudnn", whose 32-bit offsets have room for fewer long sequences; larger'
        " decode buckets are left out there",
    )
    result.add_argument("--skip-sleep", action="store_true", help="`steps` without sleeping and waking")
    result.add_argument("--kv-idle-release-s", type=float, metavar="S", help="of the engines (default: 1 in `sharing`)")
    result.add_argument("--of-one-layout", help=argparse.SUPPRESS)  # a process of `layout_engines`
    result.add_argument("--obeys", action="store_true", help=argparse.SUPPRESS)  # a process of `turns` and `sharing`
    return result


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    check_least(args, rows=1, context=1, steps=16, prompt_lengths=1)
    check_least(args, batches=1, contexts=1, most_tokens=1, cudnn_slots=1)
    if args.of_one_layout:
        for found in layout_engines.measure_engine(args):
            args.json.write_text(json.dumps(found))
        return 0
    if args.obeys:
        obey(args)
        return 0
    if (args.kv_cache_layout, args.virtual_page_layout) != ("paged", "sliced"):
        raise InvalidParameterError("Choose layouts by --layout, not by --kv-cache-layout or --virtual-page-layout.")
    reserve_device_memory(args.gpu_memory_utilization, at_once=False)
    of_part: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {
        "mapping": measure_mapping,
        "attention": partial(measure_attention, args.rows, args.context),
        "calls": partial(measure_calls, args),
        "waste": partial(waste, args),
        "turns": partial(measure_turns, args),
        "sharing": partial(sharing.measure, parser(), args),
    }
    asked = list(dict.fromkeys(args.part or PARTS))
    of_engines = [part for part in asked if part in layout_engines.PARTS]
    for part in of_engines[:1]:  # one engine measures all of them
        of_part[part] = partial(layout_engines.measure, parser(), args, of_engines)
    figures: list[dict[str, Any]] = []
    for part in (part for part in asked if part not in of_engines[1:]):
        try:
            for figure in of_part[part]():
                shown = (f"{key} {_shown(value)}" for key, value in figure.items() if key != "part")
                print(f"{figure.get('part', part)}: " + ", ".join(shown), flush=True)
                figures.append({"part": part} | figure)
                if args.json:
                    write_report(args.json, "vattention", vars(args), figures, says_so=False)
        except Exception as error:  # the other parts may run
            print(f"{part}: failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            figures.append({"part": part, "failed": f"{type(error).__name__}: {error}"})
    if args.json:
        write_report(args.json, "vattention", vars(args), figures)
    return int(any("failed" in figure for figure in figures))


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def _shown(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def measure_mapping() -> list[dict[str, Any]]:
    """Pages of 2 MiB below places that lie apart, as those of sequences that grow do, and side by side."""
    most = 1024 if jax.default_backend() == "gpu" else 64
    device = jax.devices()[0]
    ranges = GpuRanges(device) if device.platform == "gpu" else CpuRanges(device, most * PAGE_BYTES)
    base = ranges.driver.reserve((1 + 2) * most * PAGE_BYTES)
    manager = PageManager([(ranges.driver, base)], PAGE_BYTES, most, 2 * most)
    pages = np.arange(most)
    begun = time.perf_counter()
    manager.back(pages)
    back_us = 1e6 * (time.perf_counter() - begun) / most
    figures = [{"what": "create, map at home, clear", "pages": most, "us_a_page": back_us}]
    for count in (1, 16, 256, most):
        if count > most:
            continue
        for stride, how in ((1, "side by side"), (2, "apart")):
            places, writable = stride * np.arange(count), np.zeros((count,), np.bool_)
            mapped, unmapped = [], []
            for _ in range(_ROUNDS):
                begun = time.perf_counter()
                manager.put(places, pages[:count], writable)
                middle = time.perf_counter()
                manager.clear(places)
                mapped.append(middle - begun)
                unmapped.append(time.perf_counter() - middle)
            figures.append(
                {
                    "what": how,
                    "pages": count,
                    "map_us_a_page": 1e6 * float(np.median(mapped)) / count,
                    "unmap_us_a_page": 1e6 * float(np.median(unmapped)) / count,
                    "map_gb_per_s": count * PAGE_BYTES / float(np.median(mapped)) / 1e9,
                }
            )
    manager.close()
    return figures


def measure_attention(rows: int, context: int) -> list[dict[str, Any]]:
    """32 query heads, 8 of keys and values, of 128, in 16 bits: a layer of an 8B model. Microseconds a call; on a GPU
    beside what the card reads and multiplies at most.
    """
    heads, kv_heads, head_dim, block_size, calls = 32, 8, 128, 16, 16
    on_gpu = jax.default_backend() == "gpu"
    dtype = jnp.bfloat16 if on_gpu else jnp.float32
    tokens, length = rows * context, -(-context // block_size) * block_size
    kv_bytes = 2 * tokens * kv_heads * head_dim * jnp.dtype(dtype).itemsize
    lens = jnp.full((rows,), context, jnp.int32)
    q = jax.random.normal(jax.random.key(0), (rows, heads, head_dim), dtype)

    def timed(call: Callable[..., jax.Array], *arrays: jax.Array, q: jax.Array = q) -> float:
        @jax.jit
        def program(q: jax.Array, *arrays: jax.Array) -> jax.Array:
            for _ in range(calls):
                q = call(q, *arrays).astype(q.dtype)
            return q

        seconds, _ = measure(lambda: (program, (q, *arrays), calls, 0.0), _ROUNDS)
        return float(np.median(seconds))

    def contiguous(q: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        implementation: Literal["cudnn", "xla"] = "cudnn" if on_gpu else "xla"
        return jax.nn.dot_product_attention(
            q[:, None], keys, values, key_value_seq_lengths=lens, implementation=implementation
        )[:, 0]

    width = length // block_size
    num_blocks = rows * width
    ours = partial(_by_table, kv_lens=lens)
    key = jax.random.key(1)
    figures: list[dict[str, Any]] = []
    for case in card.cases() if on_gpu else ():
        if case.unit != "us":
            seconds, work = measure(case.build, _ROUNDS)
            rate = work / float(np.median(seconds))
            figures.append({"what": case.name, "gb_per_s" if case.unit == "GB/s" else "gflop_per_s": rate / 1e9})

    def figure(what: str, seconds: float) -> None:
        figures.append({"what": what, "rows": rows, "context": context, "us": 1e6 * seconds} | _rate(kv_bytes, seconds))

    name, backend = ("cuDNN", "cudnn") if on_gpu else ("XLA", "xla")
    whole = [jax.random.normal(jax.random.key(i), (rows, length, kv_heads, head_dim), dtype) for i in range(2)]
    figure(f"{name}, contiguous", timed(contiguous, *whole))
    stretches = jnp.asarray(np.random.default_rng(0).permutation(rows).astype(np.int32))
    flat = [x.reshape(rows * length, kv_heads, head_dim) for x in whole]
    op = partial(
        contiguous_attention,
        stretches=stretches,
        kv_lens=lens,
        addresses=Addresses(rows, 1, length, length),
        backend=backend,
    )
    figure(f"{name}, contiguous, slots in any order (the engine's call)", timed(op, *flat))
    del whole
    chunk = max(1, context // 4)
    starts, queries = jnp.array([0, chunk], jnp.int32), jax.random.normal(jax.random.key(2), (chunk, heads, head_dim))
    last = {"query_starts": starts, "kv_lens": lens[:1]}
    flops = 4 * heads * head_dim * chunk * (context - (chunk - 1) / 2)
    of_chunk = partial(op, stretches=stretches[:1], **last, num_decodes=jnp.int32(0))

    def chunk_figure(what: str, seconds: float) -> None:
        sizes = {"what": what, "rows": 1, "context": context, "chunk": chunk, "us": 1e6 * seconds}
        figures.append(sizes | {"tflop_per_s": flops / seconds / 1e12})

    chunk_figure(f"{name}, contiguous, a chunk", timed(of_chunk, *flat, q=queries.astype(dtype)))
    del flat
    pool = jax.random.normal(key, (num_blocks, 2, kv_heads, block_size, head_dim), dtype)
    counting = jnp.arange(num_blocks, dtype=jnp.int32).reshape(rows, width)
    figure("our kernel, a table that counts up", timed(ours, pool, counting))
    by_table = partial(_chunk_by_table, **last)
    chunk_figure(
        "our kernel, a chunk, a table that counts up", timed(by_table, pool, counting[:1], q=queries.astype(dtype))
    )
    for size in (64, 128):  # the same addresses, cut into larger blocks
        if length % size == 0:
            larger = pool.reshape(rows * length // size, 2, kv_heads, size, head_dim)
            table = jnp.arange(len(larger), dtype=jnp.int32).reshape(rows, -1)
            figure(f"our kernel, a table that counts up, blocks of {size}", timed(ours, larger, table))
    shuffled = jnp.asarray(np.random.default_rng(0).permutation(num_blocks).astype(np.int32).reshape(rows, width))
    figure("our kernel, shuffled blocks", timed(ours, pool, shuffled))
    layers = 32
    if num_blocks * layers * 2 * kv_heads * block_size * head_dim * 2 < 40e9 and on_gpu:
        del pool
        slices = jnp.zeros((num_blocks * layers, 2, kv_heads, block_size, head_dim), dtype)
        figure("our kernel, one layer of sliced pages", timed(ours, slices, counting * layers + 5))
    return figures


def _by_table(q: jax.Array, pool: jax.Array, table: jax.Array, kv_lens: jax.Array) -> jax.Array:
    out = decode_attention(q, pool, table, kv_lens)
    assert isinstance(out, jax.Array)
    return out


def _chunk_by_table(
    q: jax.Array, pool: jax.Array, table: jax.Array, kv_lens: jax.Array, query_starts: jax.Array
) -> jax.Array:
    out = ragged_attention(q, pool, table, kv_lens, query_starts)
    assert isinstance(out, jax.Array)
    return out


def _rate(num_bytes: int, seconds: float) -> dict[str, float]:
    return {"gb_per_s": num_bytes / seconds / 1e9}


_CALL_ROUNDS = 3


def measure_calls(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rounds of the `sharegpt` workload, at most 128 or all requests at once, with a prefix cache and without one."""
    model = ModelConfig.from_directory(Path(engine_options(args)["model"] or demo_model_path()))
    block_bytes = 2 * model.num_kv_heads * args.block_size * model.head_dim * 2
    page_tokens = Geometry.fit("sliced", model.num_layers, args.block_size, block_bytes, PAGE_BYTES).page_tokens
    load = WORKLOADS["sharegpt"]
    rounds = [make_requests(load.dataset, load.num_prompts, 32_000, seed=seed) for seed in range(_CALL_ROUNDS)]
    figures = []
    for slots in (128, 1024):
        for cached in (True, False):
            config = SchedulerConfig(
                block_size=page_tokens,
                num_blocks=1 + 720_000 // page_tokens,  # of an 8B model 94 GB
                max_num_seqs=slots,
                max_num_batched_tokens=8192,
                max_model_len=2560,
                enable_prefix_caching=cached,
                plans_ahead=True,
            )
            for figure in count_calls(config, rounds):
                figures.append({"page_tokens": page_tokens, "slots": slots, "prefix_cache": cached} | figure)
    return figures


def waste(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The mean share of a sequence's pages that holds no token, over lengths up to each bound."""
    model = ModelConfig.from_directory(Path(engine_options(args)["model"] or demo_model_path()))
    block_bytes = 2 * model.num_kv_heads * args.block_size * model.head_dim * 2
    pages = {"blocks of 16": 16}
    for layout in ("sliced", "per-layer"):
        geometry = Geometry.fit(layout, model.num_layers, args.block_size, block_bytes, PAGE_BYTES)
        pages[layout] = geometry.page_tokens
    figures = []
    for longest in (256, 1024, 4096, 16384):
        lengths = np.arange(1, longest + 1)
        for layout, tokens in pages.items():
            held = -(-lengths // tokens) * tokens
            figures.append(
                {
                    "layout": layout,
                    "page_tokens": tokens,
                    "lengths_up_to": longest,
                    "share": float(1 - lengths.sum() / held.sum()),
                }
            )
    return figures


def measure_turns(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Two engines: the first serves and sleeps, the second starts, serves and sleeps, the first wakes up and serves."""
    argv = [*engine_argv(parser(), args, "sliced"), "--obeys"]
    with EngineProcess("A", argv) as first, EngineProcess("B", argv) as second:
        for turn, engine in enumerate((first, second, first, second)):
            woken = engine.ask("wake") if turn > 1 else {}
            served = engine.ask("serve")
            asleep = engine.ask("sleep")
            yield {
                "turn": turn,
                "engine": engine.name,
                "start_or_wake_s": woken.get("s", served.get("start_s")),
                "sleep_s": asleep["s"],
                "tokens_sha256": served["tokens_sha256"],
                "kv_gb_awake": served["kv_gb"],
                "free_gb_awake": served["free_gb"],
                "free_gb_asleep": asleep["free_gb"],
            }
