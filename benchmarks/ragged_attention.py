"""Times the ragged attention kernel on a Hopper GPU, beside cuDNN's dense attention, and checks it on the way.

    python benchmarks/ragged_attention.py --json OUT.json [--cases prefill_1x16384,...] [--tilings "128,2,2,1,1;..."]

Timed are jitted programs of several calls, each on its own copy of the data so that the L2 cache cannot hold them, and
queued to hide dispatch. Figures are medians. The work list is planned once a program, as in a model, and timed by
itself. FLOPs are counted causally: 4 * D * heads * visible (query, key) pairs.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.bench.report import write_report
from jpaged.pallas_kernels.common.attention_arguments import Features, Operands
from jpaged.pallas_kernels.ragged_attention import hopper as kernel
from jpaged.pallas_kernels.ragged_attention import reference
from jpaged.pallas_kernels.registry import missing, runs_here


@dataclasses.dataclass(frozen=True)
class Case:
    """`rows` of (queries, tokens in all)."""

    rows: tuple[tuple[int, int], ...]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    aim: float | None = None  # TFLOP/s

    @property
    def flops(self) -> float:
        pairs = sum(n * (kv - n) + n * (n + 1) / 2 for n, kv in self.rows)
        return 4 * self.head_dim * self.heads * pairs

    @property
    def kv_bytes(self) -> int:
        return sum(kv for _, kv in self.rows) * self.kv_heads * self.head_dim * 4

    @property
    def floor_s(self) -> float:
        return max(self.flops / 700e12, self.kv_bytes / 4.4e12)


CASES = {
    "prefill_1x16384": Case(((16384, 16384),), aim=600),
    "prefill_4x4096": Case(((4096, 4096),) * 4, aim=520),
    "prefill_16x1024": Case(((1024, 1024),) * 16, aim=390),
    "chunk_2048_on_14336": Case(((2048, 16384),), aim=600),
    "prefill_1x8192_d64": Case(((8192, 8192),), head_dim=64, aim=450),
    "prefill_1x8192_d256": Case(((8192, 8192),), heads=16, kv_heads=4, head_dim=256, aim=620),
    "prefill_1x16384_block128": Case(((16384, 16384),), block_size=128),
    "decode_128x2048": Case(((1, 2048),) * 128),
    "chunk_1x2048": Case(((2048, 2048),)),
    "mixed_128x2048_and_2048": Case(((1, 2048),) * 128 + ((2048, 2048),)),
}


def build(case: Case, copies: int, dtype: jnp.dtype = jnp.bfloat16, seed: int = 0) -> dict:
    """The case's arrays; `copies` block tables over disjoint, shuffled blocks."""
    blocks = [-(-kv // case.block_size) for _, kv in case.rows]
    rng = np.random.default_rng(seed)
    ids = 1 + rng.permutation(sum(blocks) * copies).astype(np.int32)
    tables = np.zeros((copies, len(blocks), max(blocks)), np.int32)
    used = 0
    for c in range(copies):
        for r, n in enumerate(blocks):
            tables[c, r, :n] = ids[used : used + n]
            used += n
    starts = np.concatenate([[0], np.cumsum([n for n, _ in case.rows])]).astype(np.int32)
    keys = jax.random.split(jax.random.key(seed), 2)
    pool_shape = (used + 1, 2, case.kv_heads, case.block_size, case.head_dim)
    q_shape = (int(starts[-1]), case.heads, case.head_dim)
    return {
        "q": [jax.random.normal(key, q_shape, dtype) for key in jax.random.split(keys[0], copies)],
        "pool": jax.random.normal(keys[1], pool_shape, dtype),
        "tables": jnp.asarray(tables),
        "kv_lens": jnp.asarray([kv for _, kv in case.rows], jnp.int32),
        "starts": jnp.asarray(starts),
    }


def median_s(fn, *args, calls: int, seconds_a_call: float = 1e-4, repeats: int = 7) -> float:
    """Seconds of one of the `calls` different calls that the program `fn` makes.

    Programs are queued many at a time, so that dispatch hides behind the device's work.
    """
    dispatches = max(4, round(20e-3 / (calls * seconds_a_call)))
    jax.block_until_ready(fn(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(dispatches):
            last = fn(*args)
        jax.block_until_ready(last)
        times.append((time.perf_counter() - start) / (calls * dispatches))
    return statistics.median(times)


def time_kernel(case: Case, data: dict, **options) -> float:
    features = Features(case.head_dim**-0.5)

    @jax.jit
    def run(q, pool, tables, kv_lens, starts):
        calls = (
            kernel.ragged_attention(Operands(q[c], pool, tables[c], kv_lens, None), starts, features, **options)
            for c in range(len(q))
        )
        return [out[0, 0, 0] for out, _ in calls]

    args = (data["q"], data["pool"], data["tables"], data["kv_lens"], data["starts"])
    return median_s(run, *args, calls=len(data["q"]), seconds_a_call=case.floor_s)


def time_plan(data: dict, calls: int = 20) -> float:
    @jax.jit
    def run(starts, kv_lens):
        work = []
        for _ in range(calls):
            out, count = kernel.plan_tiles(
                starts, kv_lens, tokens=data["q"][0].shape[0], window=32, block_kv=128, sliding_window=None
            )
            kv_lens = kv_lens + jnp.minimum(count, 0)  # 0, but the next plan has to wait for it
            work.append(out)
        return work

    return median_s(run, data["starts"], data["kv_lens"], calls=calls, seconds_a_call=2e-5)


def time_cudnn(case: Case, copies: int) -> float | None:
    n, kv = case.rows[0]
    if n != kv or len(set(case.rows)) > 1:
        return None
    keys = jax.random.split(jax.random.key(1), 3 * copies)
    shape = (len(case.rows), n, case.heads, case.head_dim)
    kv_shape = (len(case.rows), n, case.kv_heads, case.head_dim)
    sets = [
        tuple(jax.random.normal(keys[3 * c + i], kv_shape if i else shape, jnp.bfloat16) for i in range(3))
        for c in range(copies)
    ]

    @jax.jit
    def run(sets):
        attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
        return [attend(*qkv)[0, 0, 0, 0] for qkv in sets]

    return median_s(run, sets, calls=copies, seconds_a_call=case.floor_s)


def max_error(case: Case, data: dict, **options) -> float:
    """Relative error of the first copy, by norm, against the float32 reference."""
    features = Features(case.head_dim**-0.5)
    operands = Operands(data["q"][0], data["pool"], data["tables"][0], data["kv_lens"], None)
    wide = operands._replace(q=operands.q.astype(jnp.float32), kv_pool=operands.kv_pool.astype(jnp.float32))
    out, _ = kernel.ragged_attention(operands, data["starts"], features, **options)
    want, _ = reference.ragged_attention(wide, data["starts"], features)
    out = out.astype(jnp.float32)
    return float(jnp.linalg.norm((out - want).ravel()) / jnp.linalg.norm(want.ravel()))


def parse_tiling(text: str) -> kernel.Tiling | None:
    """Of "block_kv,stages,consumers,turns,consumer registers,producer registers,q stages"; "best": None."""
    if text == "best":
        return None
    block_kv, stages, consumers, turns, most, least, q_stages = (int(part) for part in text.split(","))
    return kernel.Tiling(block_kv, stages, consumers, bool(turns), (most, least), q_stages)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True, help="where to write the figures")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--tilings", default="best")
    parser.add_argument("--no-cudnn", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    args = parser.parse_args()
    if missing("hopper") or not runs_here("hopper"):
        parser.error(
            f"needs a Hopper GPU and JAX 0.11 or newer; this is JAX {jax.__version__} on {jax.default_backend()}"
        )
    results = []
    for name in args.cases.split(","):
        case = CASES[name]
        copies = max(2, min(8, -(-(256 << 20) // case.kv_bytes)))
        data = build(case, copies)
        cudnn = None if args.no_cudnn else time_cudnn(case, copies)
        for text in args.tilings.split(";"):
            result = {"case": name, "tiling": text, "aim": case.aim}
            try:
                tiling = parse_tiling(text)
                if not args.no_check and case.flops < 1e12:
                    result["error"] = max_error(case, data, tiling=tiling)
                seconds = time_kernel(case, data, tiling=tiling)
                result |= {
                    "us": seconds * 1e6,
                    "tflops": case.flops / seconds / 1e12,
                    "gbs": case.kv_bytes / seconds / 1e9,
                }
            except Exception as error:
                result["failed"] = str(error)[:200]
            if cudnn is not None:
                result["cudnn_tflops"] = case.flops / cudnn / 1e12
            if text == args.tilings.split(";")[0]:
                result["plan_us"] = time_plan(data) * 1e6
            results.append(result)
            print(
                {k: round(v, 5 if k == "error" else 1) if isinstance(v, float) else v for k, v in result.items()},
                flush=True,
            )
        write_report(args.json, "ragged_attention", vars(args), results)


if __name__ == "__main__":
    main()
