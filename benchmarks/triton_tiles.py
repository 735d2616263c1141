"""Measures configurations of Triton kernels on this GPU: tiles of attention, for the tables in
`jpaged/pallas_kernels/{decode,ragged}_attention/triton.py`, and how sampling cuts a row.

    python benchmarks/triton_tiles.py decode --head-dim 128 --json tiles.json
    python benchmarks/triton_tiles.py decode --pool fp8 --json tiles.json
    python benchmarks/triton_tiles.py launches --json launches.json --other CHECKOUT

Each configuration of attention is measured on the first case; the best of them on the others. One JSON line a figure.

`launches` measures draws by Triton's kernels beside Hopper's and, with --other, beside Triton's of another checkout:
microseconds of a whole draw, then, from a profile, of each kernel in it. The rest of a draw is gaps between kernels.
"""

import argparse
import importlib
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.bench import kernels
from jpaged.bench.device_trace import kernel_times, read_trace
from jpaged.bench.kernel_cases.attention import DEEPSEEK_V2_LITE, Setting, attention_case
from jpaged.bench.kernel_cases.case import Built
from jpaged.bench.kernel_cases.sampling import sample_case
from jpaged.bench.kernels import measure
from jpaged.pallas_kernels.common.attention_arguments import Features, Operands
from jpaged.pallas_kernels.decode_attention import triton as decode
from jpaged.pallas_kernels.ragged_attention import triton as ragged
from jpaged.pallas_kernels.sample_tokens import hopper as hopper_sampling
from jpaged.pallas_kernels.sample_tokens import triton as sampling
from jpaged.pallas_kernels.sample_tokens.operands import Operands as Draws

DECODE_CASES = ((64, 4096), (256, 1024), (16, 4096), (8, 16384), (32, 1024))
LATENT_CASES = ((256, 512), (32, 512), (32, 2048), (8, 16384))
RAGGED_CASES = ((16, 1024), (4, 4096), (1, 16384))
SAMPLING_CASES = ((256, 0.95), (1, 0.95), (256, 1.0))  # rows, top_p
SAMPLING_CUTS = ((512, 2048), (256, 2048), (256, 4096), (512, 4096), (1024, 4096))
"""Tokens that a warp handles at once, and of a program."""

DRAWS = {
    "temperature": (0, 1.0),
    "top_k 50": (50, 1.0),
    "top_p 0.95": (0, 0.95),
    "top_k 20, top_p 0.95": (20, 0.95),
    "top_p 0.1": (0, 0.1),
}
"""top_k (0: all) and top_p of each."""

DRAWN_FROM = {"flat": 2.0, "peaked": 6.0}
"""Deviations of normal logits. At 6 a few tokens have most of the mass, as in a model's."""

Config = decode.Config | ragged.Config


def decode_configs(head_dim: int, pool: str) -> list[Config]:
    """Candidates: of head_dim 128, or with tiles of the same size."""
    if pool == "latents":
        shapes = [(32, 8, 3, 1), (32, 8, 5, 1), (32, 8, 7, 1), (64, 8, 3, 1), (64, 8, 5, 1), (16, 8, 7, 1)]
        shapes += [(64, 8, 3, 2), (32, 8, 3, 2), (32, 8, 5, 2)]
        return [decode.Config(*one) for one in [*shapes, (32, 16, 5, 1), (64, 16, 5, 1)]]
    if pool == "fp8":
        shapes = [(64, 4, 3, 2), (64, 4, 3, 3), (64, 4, 5, 3), (64, 2, 3, 4), (64, 2, 5, 4), (128, 4, 3, 2)]
        shapes += [(128, 4, 3, 3), (128, 4, 5, 2), (128, 4, 5, 3), (32, 2, 5, 4), (64, 4, 7, 3)]
        return [decode.Config(*one) for one in shapes]
    shapes = [(64, 2, 3, 4), (64, 2, 3, 3), (64, 2, 3, 5), (64, 2, 5, 3), (64, 2, 5, 2), (32, 2, 5, 4), (32, 2, 7, 4)]
    shapes += [
        (128, 2, 3, 2),
        (128, 2, 3, 3),
        (128, 4, 3, 2),
        (128, 4, 3, 3),
        (64, 4, 3, 3),
        (64, 4, 5, 2),
        (32, 1, 5, 6),
    ]
    return [decode.Config(min(128, max(16, tile * 128 // head_dim)), *others) for tile, *others in shapes]


def ragged_configs(head_dim: int, pool: str) -> list[Config]:
    """Candidates. Of head_dim 128 two CTAs of 128 rows fit a multiprocessor of a Hopper GPU if they have four warps, or
    eight of 128 registers a thread."""
    if pool == "fp8":
        shapes: list[tuple[int, ...]] = [(128, 64, 8, 3), (128, 64, 8, 5), (128, 32, 8, 3), (128, 32, 8, 5)]
        shapes += [(128, 64, 8, 3, 128), (128, 128, 8, 3), (256, 64, 16, 3, 128), (64, 64, 4, 3)]
        return [ragged.Config(*shape) for shape in shapes]
    if head_dim == 128:
        shapes = [(128, 64, 8, 3, 128), (128, 64, 8, 2, 128), (128, 32, 8, 5, 128)]
        shapes += [(64, 32, 4, 4, 128), (64, 64, 4, 3), (128, 128, 8, 3), (256, 64, 16, 3, 128)]
        shapes += [(128, 32, 4, 4), (128, 64, 4, 3), (64, 64, 4, 3, 168)]
        return [ragged.Config(*shape) for shape in shapes]
    shapes = [(64, 64, 4, stages) for stages in (2, 3, 5)]
    shapes += [(128, 64, 8, stages) for stages in (2, 3, 5)] + [(128, 64, 8, 3, 128), (128, 32, 8, 3, 128)]
    if head_dim < 128:
        shapes += [(64, 128, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 2, 128)]
    else:
        shapes += [(64, 64, 8, 3), (64, 32, 8, 3), (128, 32, 8, 3), (64, 32, 4, 3)]
    return [ragged.Config(*shape) for shape in shapes]


def case(kind: str, batch: int, length: int, setting: Setting) -> Built:
    lens = np.full(batch, length, np.int64)
    return attention_case(lens, None if kind == "decode" else lens, setting, "triton")


def compile_all(kind: str, configs: Sequence[Config], arguments: tuple[Any, ...], value_dim: int | None) -> None:
    """Compiles the kernel in all configurations at once; jax-triton keeps them, by shapes and constants."""
    q, pool, tables, lens, *extra = arguments
    features = Features(q.shape[2] ** -0.5, value_dim=value_dim)

    def compile_one(config: Config) -> None:
        op: Callable[..., Any] = decode.decode_attention if kind == "decode" else ragged.ragged_attention
        jax.jit(lambda *a: op(Operands(*a[:4], None), *a[4:], features, config=config)).lower(
            q, pool, tables[0], lens, *extra
        )

    with ThreadPoolExecutor(12) as pool_of_threads:
        for config, done in [(config, pool_of_threads.submit(compile_one, config)) for config in configs]:
            if (error := done.exception()) is not None:
                print(
                    json.dumps({"config": str(config), "error": f"{type(error).__name__}: {error}"[:200]}), flush=True
                )


def figure(kind: str, built: Built, config: Config) -> float | None:
    """GB/s or TFLOP/s; None if it cannot run."""
    module = decode if kind == "decode" else ragged
    module.default_config = lambda *_, **__: config
    jax.clear_caches()
    try:
        seconds, work = measure(lambda: built, repeats=3)
    except Exception as error:
        print(json.dumps({"config": str(config), "error": f"{type(error).__name__}: {error}"[:300]}), flush=True)
        return None
    return work / statistics.median(seconds) / (1e9 if kind == "decode" else 1e12)


def _same(built: Built) -> Built:
    return built


def compile_cuts(logits: jax.Array, arguments: Sequence[jax.Array], positions: jax.Array) -> None:
    """Compiles sampling's kernels in all cuts at once."""
    operands = Draws(logits, *arguments, positions)

    def compile_one(cut: tuple[int, int]) -> None:
        sampling.sample_tokens.lower(operands, tile=cut[0], part=cut[1])

    with ThreadPoolExecutor(12) as pool_of_threads:
        for done in [pool_of_threads.submit(compile_one, cut) for cut in SAMPLING_CUTS]:
            done.result()


def sampling_figures() -> list[dict[str, Any]]:
    """Microseconds a draw, of each cut and case."""
    figures: list[dict[str, Any]] = [{"tile": tile, "part": part} for tile, part in SAMPLING_CUTS]
    for rows, top_p in SAMPLING_CASES:
        built = sample_case(rows, 0, top_p, "triton")
        positions, logits, arguments = built[1]
        compile_cuts(logits[0], arguments, positions)
        for of_cut in figures:
            sampling._TILE, sampling._PART = of_cut["tile"], of_cut["part"]
            jax.clear_caches()
            seconds, _ = measure(partial(_same, built), repeats=3)
            of_cut[f"{rows} rows, top_p {top_p}"] = statistics.median(seconds) * 1e6
            print(json.dumps(of_cut), flush=True)
    return figures


def kernels_of(checkout: Path) -> Any:
    """The module of Triton's draws in another checkout."""
    package = importlib.import_module(sampling.__package__)
    names = [name for name in sys.modules if name.startswith(f"{package.__name__}.")]
    ours, attributes, path = {name: sys.modules.pop(name) for name in names}, dict(vars(package)), package.__path__
    for name in names:
        delattr(package, name.rpartition(".")[2])
    package.__path__ = [str(checkout.resolve() / "jpaged/pallas_kernels/sample_tokens")]
    try:
        return importlib.import_module(sampling.__name__)
    finally:
        package.__path__ = path
        vars(package).update(attributes)
        sys.modules.update(ours)


def draw_program(draw: Callable[[Draws], jax.Array], calls: int) -> Callable[..., jax.Array]:
    """Draws one after the other, each at positions that depend on the tokens before."""

    @jax.jit
    def program(positions: jax.Array, logits: list[jax.Array], arguments: Sequence[jax.Array]) -> jax.Array:
        for i in range(calls):
            tokens = draw(Draws(logits[i % len(logits)], *arguments, positions))
            positions = positions + (tokens & 1) + 1
        return positions

    return program


def launch_figures(rows_of_cases: Sequence[int], other: Path | None, vocab_size: int, calls: int, path: Path) -> None:
    """Writes microseconds of draws and of each kernel in them to a file. Whole draws come first, so that a run that is
    cut short has them. rows_that_differ: rows whose tokens are not all Hopper's."""
    draws: dict[str, Callable[[Draws], jax.Array]] = {"triton": sampling.sample_tokens}
    if other is not None:
        draws["other"] = kernels_of(other).sample_tokens
    if jax.default_backend() == "gpu" and jax.devices()[0].compute_capability == "9.0":
        draws["hopper"] = hopper_sampling.sample_tokens
    figures, cases = [], []
    for rows in rows_of_cases:
        programs = {name: draw_program(draw, calls) for name, draw in draws.items()}
        seeds = jax.random.bits(jax.random.key(0), (rows, 2), jnp.uint32)
        copies = 8 if rows < 100 else 2
        for kind, deviation in DRAWN_FROM.items():
            keys = jax.random.split(jax.random.key(rows), copies)
            logits = [jax.random.normal(key, (rows, vocab_size)) * deviation for key in keys]
            for name, (top_k, top_p) in DRAWS.items():
                ones = jnp.ones(rows)
                arguments = (ones, jnp.full(rows, top_k, jnp.int32), ones * top_p, ones * 0, seeds)
                operands = (jnp.arange(rows, dtype=jnp.int32), logits, arguments)
                figure: dict[str, Any] = {"rows": rows, "logits": kind, "draw": name}
                for backend, program in programs.items():
                    seconds, _ = measure(partial(_same, (program, operands, calls, 0.0)), repeats=5)
                    figure[f"{backend}_us"] = round(statistics.median(seconds) * 1e6, 2)
                ends = {backend: program(*operands) for backend, program in programs.items()}
                if "hopper" in ends:
                    differ = {name: int((end != ends["hopper"]).sum()) for name, end in ends.items()}
                    figure["rows_that_differ"] = {name: differ[name] for name in differ if name != "hopper"}
                figures.append(figure)
                cases.append((programs, operands))
                print(json.dumps(figure), flush=True)
                path.write_text(json.dumps({"kind": "launches", "figures": figures}, indent=1))
    for figure, (programs, operands) in zip(figures, cases, strict=True):
        for backend, program in programs.items():
            figure[f"{backend}_kernels_us"] = kernel_figures(program, operands, calls)
        print(json.dumps(figure), flush=True)
        path.write_text(json.dumps({"kind": "launches", "figures": figures}, indent=1))


def kernel_figures(program: Callable[..., jax.Array], operands: tuple[Any, ...], calls: int) -> dict[str, float]:
    """Microseconds a draw of each kernel, by its name."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([program(*operands) for _ in range(2)])
        times = kernel_times(read_trace(Path(folder)))
    return {name: round(ms * 1e3 / (2 * calls), 2) for name, (ms, _) in sorted(times.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("decode", "ragged", "sampling", "launches"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument(
        "--pool",
        choices=("16-bit", "fp8", "latents"),
        default="16-bit",
        help="what attention reads: as its queries, in e4m3, or DeepSeek-V2-Lite's latents, of decode alone",
    )
    parser.add_argument("--best", type=int, default=4, help="configurations that are measured on all cases")
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 8, 32, 256), help="of draws")
    parser.add_argument("--vocab-size", type=int, default=151_936, help="of draws")
    parser.add_argument("--calls", type=int, default=16, help="draws of a program")
    parser.add_argument("--other", type=Path, help="a checkout whose draws are measured beside these")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    kind, head_dim = options.kind, options.head_dim
    if options.pool != "16-bit" and kind not in ("decode", "ragged"):
        parser.error("--pool is for decode and ragged")
    kernels._BATCH_S = 0.02
    if kind == "sampling":
        options.json.write_text(json.dumps({"kind": kind, "figures": sampling_figures()}, indent=1))
        return
    if kind == "launches":
        launch_figures(options.rows, options.other, options.vocab_size, options.calls, options.json)
        return
    if options.pool == "latents" and kind != "decode":
        parser.error("--pool latents is for decode")
    if options.pool == "fp8" and head_dim != 128:
        parser.error("--pool fp8 is for --head-dim 128")
    setting = Setting(head_dim=head_dim) if head_dim <= 128 else Setting(16, 4, head_dim)
    if options.pool == "latents":
        setting, head_dim = DEEPSEEK_V2_LITE, DEEPSEEK_V2_LITE.head_dim
    elif options.pool == "fp8":
        setting = replace(setting, kv_dtype=jnp.float8_e4m3fn)
    cases = LATENT_CASES if options.pool == "latents" else DECODE_CASES
    first, *others = cases if kind == "decode" else RAGGED_CASES
    configs = (decode_configs if kind == "decode" else ragged_configs)(head_dim, options.pool)
    figures: dict[Config, dict[str, float]] = {config: {} for config in configs}

    def run(chosen: Sequence[Config], batch: int, length: int) -> None:
        built = case(kind, batch, length, setting)
        compile_all(kind, chosen, built[1], setting.value_dim)
        for config in chosen:
            if (value := figure(kind, built, config)) is not None:
                figures[config][f"{batch} x {length}"] = value
                print(json.dumps({"config": str(config), "case": f"{batch} x {length}", "value": value}), flush=True)

    name = f"{first[0]} x {first[1]}"
    run(configs, *first)
    best = sorted(configs, key=lambda config: -figures[config].get(name, 0.0))[: options.best]
    for batch, length in others:
        run(best, batch, length)
    report = [{"config": str(config), **of_cases} for config, of_cases in figures.items() if of_cases]
    figure_of_all = {"kind": kind, "pool": options.pool, "head_dim": head_dim, "figures": report}
    options.json.write_text(json.dumps(figure_of_all, indent=1))


if __name__ == "__main__":
    main()
