"""What a call of a Triton kernel costs at run time, launched by jaxlib (ffi) and by XLA itself (native).

    python benchmarks/triton_calls.py --json OUT.json

Each way runs in a process of its own, one after the other on the same device, as JPAGED_TRITON_CALLS is read when a
program is lowered. No programs are kept on disk, so a first run compiles them.

    chain    programs of N calls of a kernel that adds one to 1,024 numbers
    sample   programs of N draws of one row, with a temperature
    steps    greedy decode steps of an engine with Triton's kernels and random weights

For each program the report has these figures:

    us           microseconds of a run, in a batch of runs; the host waits for the last one only
    host_us      microseconds of the host's call alone
    first_s      seconds of the first run, in which the GPU's driver compiles native kernels
    device_mb    how much less device memory is free after the first run

`us_a_call` is the slope of `us` over N, by least squares, so the program's own share is left out.

Both ways compute the same bits, or the exit code is 1. On a CPU, with TRITON_INTERPRET=1, Triton's interpreter runs the
kernels whatever the way; that tries this script, and its times mean nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl

from jpaged.api.config import EngineArgs
from jpaged.api.errors import InvalidParameterError, JPagedError
from jpaged.bench.arguments import HelpFormatter, check_least
from jpaged.bench.engine_options import sizes
from jpaged.bench.engine_processes import decode, digest, free_gb
from jpaged.bench.models import model_directory
from jpaged.bench.report import write_report
from jpaged.frontend.llm_engine import LLMEngine
from jpaged.pallas_kernels import sample_tokens
from jpaged.pallas_kernels.common.native_calls import VARIABLE
from jpaged.pallas_kernels.common.triton_call import Launch, call

WAYS = ("ffi", "native")
PARTS = ("chain", "sample", "steps")
GRAPHS = {
    "default": "",
    "off": "--xla_gpu_enable_command_buffer=",
    "always-update": "--xla_gpu_command_buffer_update_mode=ALWAYS_UPDATE",
    "skip-temp": "--xla_gpu_command_buffer_update_mode=SKIP_TEMP",
    "skip-profiled": "--xla_gpu_command_buffer_update_mode=SKIP_PROFILED",
}
"""XLA's flags by the value of --graphs."""
NUMBERS = 1024
"""That a call of the chain adds one to."""

Figure = dict[str, Any]


@triton.jit
def _add_one(x, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton evaluates annotations
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at) + 1)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    result.add_argument("--part", action="append", choices=PARTS, help="may be repeated (default: all)")
    result.add_argument("--calls", type=sizes, metavar="N,N,...", default=(1, 16, 64, 128), help="in a program")
    result.add_argument("--runs", type=int, default=200, help="of each program in a batch")
    result.add_argument("--batches", type=int, default=5, help="timed; the figure is their median")
    result.add_argument("--vocab", type=int, default=151_936, help="logits of a row that is sampled")
    result.add_argument("--model", default="qwen3-0.6b", help="of the steps: a directory, or a name of `jpaged bench`")
    result.add_argument("--rows", type=sizes, metavar="N,N,...", default=(1, 32), help="of the steps")
    result.add_argument("--context", type=int, default=512, help="tokens of each row when timing begins")
    result.add_argument("--steps", type=int, default=64, help="timed for each number of rows")
    result.add_argument(
        "--token-buckets", type=sizes, metavar="N,N,...", help="tokens of the engine's steps (default: by device)"
    )
    result.add_argument(
        "--graphs",
        choices=GRAPHS,
        default="default",
        help="CUDA graphs: as XLA has them, none, or when a launch updates their buffers' addresses: always, not for"
        " temporaries, or not for those that were seen to stay",
    )
    result.add_argument("--json", type=Path, help="write the figures and the environment to this file")
    result.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # of a process that measures
    return result


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    check_least(args, calls=1, runs=1, batches=1, vocab=2, rows=1, context=1, steps=1, token_buckets=1)
    if len(set(args.calls)) < 2:
        raise InvalidParameterError(f"--calls {','.join(map(str, args.calls))}: a slope needs two different numbers.")
    if args.way:
        figures = []
        for figure in measure(args):
            figures.append(figure)
            print(text(figure), flush=True)
        write_report(args.json, f"triton_calls_{args.way}", vars(args), figures, says_so=False)
        return 0
    reports = dict(zip(WAYS, (measured(way, argv, args.graphs) for way in WAYS), strict=True))
    found = {way: report["results"] for way, report in reports.items()}
    differ = differences(found)
    for name in differ:
        print(f"{name}: the two ways' results differ", file=sys.stderr)
    for name, slopes in slopes_of(found).items():
        print(f"{name:<8} " + ", ".join(f"{way} {us:.2f} us a call" for way, us in slopes.items()))
    if args.json:
        of_device = {
            name: reports["ffi"]["environment"][name] for name in ("device", "num_devices", "platform_version")
        }
        results = [figure for figures in found.values() for figure in figures]
        results += [{"name": name, "us_a_call": slopes} for name, slopes in slopes_of(found).items()]
        write_report(args.json, "triton_calls", vars(args) | {"differ": differ}, results, devices=of_device)
    return 1 if differ else 0


def measured(way: str, argv: Sequence[str], graphs: str) -> Any:
    """The report of a process that measures one way.

    Raises:
        JPagedError: the process failed; what it said is above.
    """
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "report.json")
        flags = f"{os.environ.get('XLA_FLAGS', '')} {GRAPHS[graphs]}".strip()
        environment = os.environ | {VARIABLE: way, "JPAGED_CACHE_DIR": "", "XLA_FLAGS": flags}
        command = [sys.executable, __file__, *argv, "--way", way, "--json", str(file)]
        if code := subprocess.run(command, env=environment, check=False).returncode:
            raise JPagedError(f"The process that measures {way} ended with exit code {code}; what it said is above.")
        return json.loads(file.read_text())


def measure(args: argparse.Namespace) -> Iterator[Figure]:
    """The figures of this process's way."""
    for part in args.part or PARTS:
        if part == "steps":
            found = steps(args)
        else:
            build = chain if part == "chain" else partial(draws, args.vocab)
            found = programs(part, build, args)
        for figure in found:
            yield {"way": args.way, **figure}


def programs(part: str, build: Callable[[int], tuple[Any, Any]], args: argparse.Namespace) -> Iterator[Figure]:
    """A part's programs by their numbers of calls. build: gives one and its arguments."""
    for calls in args.calls:
        program, arguments = build(calls)
        compiled = jax.jit(program).lower(*arguments).compile()
        free, begun = free_gb(), time.perf_counter()
        result = np.asarray(compiled(*arguments))
        first_s, left = time.perf_counter() - begun, free_gb()
        whole, host = zip(*(batch(compiled, arguments, args.runs) for _ in range(args.batches)), strict=True)
        yield {
            "part": part,
            "calls": calls,
            "us": 1e6 * float(np.median(whole)),
            "host_us": 1e6 * float(np.median(host)),
            "first_s": first_s,
            "device_mb": None if free is None or left is None else 1e3 * (free - left),
            "result": digest([result.reshape(-1).view(np.int32).tolist()]),
        }


def batch(compiled: Any, arguments: Any, runs: int) -> tuple[float, float]:
    """Seconds of a run and of the call alone, of a batch of runs whose last one is waited for."""
    begun = time.perf_counter()
    for _ in range(runs):
        result = compiled(*arguments)
    called = time.perf_counter()
    jax.block_until_ready(result)
    return (time.perf_counter() - begun) / runs, (called - begun) / runs


def chain(calls: int) -> tuple[Any, Any]:
    def program(x: jax.Array) -> jax.Array:
        for _ in range(calls):
            (x,) = call(_add_one, Launch((1,)), x, out=[jax.ShapeDtypeStruct(x.shape, x.dtype)], SIZE=NUMBERS)
        return x

    return program, (jnp.arange(NUMBERS, dtype=jnp.float32),)


def draws(vocab: int, calls: int) -> tuple[Any, Any]:
    one = jnp.ones(1)

    def program(logits: jax.Array, seeds: jax.Array, positions: jax.Array) -> jax.Array:
        for _ in range(calls):
            tokens = sample_tokens(
                logits, one, jnp.zeros(1, jnp.int32), one, one * 0, seeds, positions, backend="triton"
            )
            positions = positions + (tokens & 1) + 1
        return positions

    logits = jax.random.normal(jax.random.key(0), (1, vocab)) * 2
    return program, (logits, jnp.array([[1, 2]], jnp.uint32), jnp.zeros(1, jnp.int32))


def steps(args: argparse.Namespace) -> Iterator[Figure]:
    """Decode steps by their rows, after a round that runs every program once."""
    most = max(args.rows)
    begun = time.perf_counter()
    engine = LLMEngine(
        EngineArgs(
            model=model_directory(args.model),
            load_format="dummy",
            skip_tokenizer_init=True,
            compile_programs="at_start",
            kernel_backend="triton",
            max_model_len=args.context + args.steps + 128,
            max_num_seqs=most,
            decode_buckets=tuple(sorted(set(args.rows))),
            token_buckets=args.token_buckets and tuple(sorted(set(args.token_buckets))),
            max_num_batched_tokens=args.token_buckets and max(args.token_buckets),
        )
    )
    start_s = time.perf_counter() - begun
    for rows in args.rows:
        free, begun = free_gb(), time.perf_counter()
        _, first = decode(engine, rows, args.context, args.steps)
        first_s, left = time.perf_counter() - begun, free_gb()
        times, tokens = decode(engine, rows, args.context, args.steps)
        yield {
            "part": "steps",
            "rows": rows,
            "us": 1e6 * float(np.mean(times)),
            "median_us": 1e6 * float(np.median(times)),
            "start_s": start_s,
            "first_s": first_s,
            "device_mb": None if free is None or left is None else 1e3 * (free - left),
            "result": digest([*first, *tokens]),
        }


def name_of(figure: Mapping[str, Any]) -> str:
    of = f"{figure['rows']} rows" if figure["part"] == "steps" else f"{figure['calls']} calls"
    return f"{figure['part']}, {of}"


def text(figure: Mapping[str, Any]) -> str:
    memory = "" if figure["device_mb"] is None else f", {figure['device_mb']:.0f} MB"
    host = f" ({figure['host_us']:.1f} the call alone)" if "host_us" in figure else ""
    return (
        f"{figure['way']:<7} {name_of(figure):<18} {figure['us']:10.1f} us{host}; first run "
        f"{figure['first_s']:.2f} s{memory}"
    )


def differences(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """The names of what the ways computed differently, or only one of them did."""
    results = [{name_of(figure): figure["result"] for figure in figures} for figures in found.values()]
    names = dict.fromkeys(name for of_way in results for name in of_way)
    return [name for name in names if len({of_way.get(name) for of_way in results}) > 1]


def slopes_of(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """Microseconds of a call more in a program, by part and way."""
    slopes: dict[str, dict[str, float]] = {}
    for way, figures in found.items():
        for part in PARTS[:2]:
            points = [(figure["calls"], figure["us"]) for figure in figures if figure["part"] == part]
            if points:
                calls, us = zip(*points, strict=True)
                slopes.setdefault(part, {})[way] = float(np.polyfit(calls, us, 1)[0])
    return slopes


if __name__ == "__main__":
    sys.exit(main())
