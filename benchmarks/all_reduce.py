"""The cost of an all-reduce by rows: XLA's beside the one-shot kernel.

    python benchmarks/all_reduce.py --devices 2 --json all_reduce_2.json        # four minutes

A case is a program that does 64 times what a decode step does: two small products, then the sum over devices, the
residual and the norm. It is timed over many runs enqueued back to back; the same program without the sum is the
baseline. Each way is checked first: it must be near float64 sums, with the same bits on all devices, before and after
the runs.

XLA reads its flags once, so every way has a process of its own. A process that prints nothing for a while is killed.

    none                no sum over devices: the baseline
    kernel              jpaged.pallas_kernels.all_reduce_add_norm, residual and norm in it
    psum                XLA's default: NCCL, between CUDA graphs

and with --ways also

    psum, graphs        NCCL recorded in CUDA graphs (xla_gpu_enable_command_buffer=+COLLECTIVES)
    psum, one-shot      XLA's own kernel (xla_gpu_experimental_use_collective_kernels=ALL_REDUCE)
    psum, one stream    without the second stream that XLA gives to collectives
    kernel, no graphs   the kernel without CUDA graphs, should these be what fails
"""

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from jpaged.bench.report import write_report

ROOT = Path(__file__).parents[1]
GRAPHS = "--xla_gpu_enable_command_buffer=+COLLECTIVES"
ONE_SHOT = "--xla_gpu_experimental_use_collective_kernels=ALL_REDUCE"
ONE_STREAM = "--xla_gpu_disable_async_collectives=ALLCOLLECTIVES"
WAYS = {
    "none": ("none", ""),
    "kernel": ("kernel", ""),
    "kernel, no graphs": ("kernel", "--xla_gpu_enable_command_buffer="),
    "psum": ("psum", ""),
    "psum, graphs": ("psum", GRAPHS),
    "psum, one-shot": ("psum", ONE_SHOT),
    "psum, one-shot, graphs": ("psum", f"{ONE_SHOT} {GRAPHS}"),
    "psum, graphs, one stream": ("psum", f"{GRAPHS} {ONE_STREAM}"),
    "psum, one stream": ("psum", ONE_STREAM),
}
"""Name -> who adds, and XLA's flags. In order of interest, should time run out."""

ROWS = [1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
"""Up to the largest step that an engine takes by default."""
CALLS = 64
"""Sums in a program: those of a model of 32 layers."""
INNER = 256
NORM_EPS = 1e-5
START_S, CASE_S = 60.0, 40.0
"""Until the first line of a process, and between two."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["none", "kernel", "psum"])
    parser.add_argument("--runs", type=int, default=20, help="of each program")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # in a process of its own
    args = parser.parse_args()
    if args.way is not None:
        for record in measure(args, WAYS[args.way][0]):
            print(json.dumps(record), flush=True)
        return
    cases: list[dict[str, Any]] = []
    devices: dict[str, Any] = {"num_devices": args.devices}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # still writes the report
    try:
        for way in args.ways:
            for record in in_own_process(args, way):
                if "device" in record:
                    devices |= record
                else:
                    cases.append({"way": way} | record)
                    print(json.dumps(cases[-1]), flush=True)
    finally:
        print(table(cases))
        if args.json is not None:
            settings = {name: value for name, value in vars(args).items() if name != "way"}
            write_report(args.json, "all_reduce", settings | {"calls": CALLS}, cases, devices=devices)


def in_own_process(args: argparse.Namespace, way: str) -> Iterator[dict[str, Any]]:
    """What a process of its own prints, then, if it did not end well, how it ended."""
    command = [sys.executable, str(Path(__file__)), "--way", way, "--devices", str(args.devices)]
    command += ["--rows", *map(str, args.rows), "--hidden", *map(str, args.hidden), "--runs", str(args.runs)]
    flags = f"--xla_gpu_autotune_level=0 {os.environ.get('XLA_FLAGS', '')} {WAYS[way][1]}"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": path}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines: queue.Queue[str | None] = queue.Queue()
    errors: list[str] = []

    def forward() -> None:
        for line in process.stdout or ():
            lines.put(line)
        lines.put(None)

    for target in (forward, lambda: errors.append((process.stderr.read() if process.stderr else "")[-1500:])):
        threading.Thread(target=target, daemon=True).start()
    limit_s = START_S
    try:
        while (line := lines.get(timeout=limit_s)) is not None:
            limit_s = CASE_S
            if line.startswith("{"):
                yield json.loads(line)
    except queue.Empty:
        process.kill()
        process.wait()
        yield {"error": f"nothing for {limit_s:g} s"}
        return
    if process.wait():
        yield {"error": f"exit code {process.returncode}", "stderr": "".join(errors)}


def measure(args: argparse.Namespace, adds: str) -> Iterator[dict[str, Any]]:
    """Every case of one way: whether it is right, and what it takes."""
    import jax

    devices = jax.devices()[: args.devices]
    if len(devices) < args.devices:
        raise SystemExit(f"--devices {args.devices}: JAX has {len(devices)}.")
    yield {"device": devices[0].device_kind}
    mesh = jax.sharding.Mesh(devices, ("model",))
    for hidden in args.hidden:
        state = () if adds != "kernel" else _initial_state(mesh, max(args.rows), hidden)
        for rows in args.rows:
            case = {"rows": rows, "hidden": hidden}
            if adds == "kernel" and (reason := _unsupported(hidden, args.devices)) is not None:
                yield case | {"unsupported": reason}
                continue
            if adds != "none":
                state, found = _check(mesh, adds, rows, hidden, state)
                yield case | found
                if not found["right"]:
                    continue
            state, seconds, same = _time(mesh, adds, rows, hidden, state, args.runs)
            found = {"us_per_call": round(seconds / CALLS * 1e6, 2)} if same else {"right": False, "same_bits": False}
            yield case | found


def _check(mesh: Any, adds: str, rows: int, hidden: int, state: tuple) -> tuple[tuple, dict[str, Any]]:
    """A few sums of unrelated numbers against float64, and every device's bits against the first one's.

    One part has NaNs, of all ones, which the kernel may not take for words that have not arrived.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    calls, size = 12 if rows <= 64 else 3, mesh.size
    rng = np.random.default_rng(rows + hidden)
    parts = jnp.asarray(rng.standard_normal((size, calls, rows, hidden)), jnp.bfloat16)
    ones = jax.lax.bitcast_convert_type(jnp.uint16(0xFFFF), jnp.bfloat16)
    parts = parts.at[0, -1, -1, :2].set(ones)
    residual = jnp.asarray(rng.standard_normal((calls, rows, hidden)), jnp.bfloat16)
    scale = jnp.asarray(rng.uniform(0.5, 1.5, hidden), jnp.bfloat16)

    def body(state: tuple, parts: Any, residual: Any, scale: Any) -> tuple:
        found, state = [], _begin(adds, size, state)
        for call in range(calls):
            state, *results = _reduce(adds, size, state, parts[0, call], residual[call], scale)
            found.append(jnp.stack(results))
        return state[:2], jnp.stack(found)[None]

    state, found = _sharded(mesh, body, state, whole=2, split=1)(state, parts, residual, scale)
    found = np.asarray(found)  # [devices, calls, 2, rows, hidden]
    total = np.asarray(parts, np.float64).sum(0) + np.asarray(residual, np.float64)
    normed = total / np.sqrt((total**2).mean(-1, keepdims=True) + NORM_EPS) * np.asarray(scale, np.float64)
    pairs = [(ours, exact) for device in found for ours, exact in ((device[:, 0], total), (device[:, 1], normed))]
    error = max(
        float(np.nanmax(np.abs(ours.astype(np.float64) - exact) / np.maximum(1, np.abs(exact))))
        for ours, exact in pairs
    )
    same_nans = all(np.array_equal(np.isnan(ours), np.isnan(exact)) for ours, exact in pairs)
    same = all(np.array_equal(device.view(np.uint16), found[0].view(np.uint16)) for device in found[1:])
    jax.block_until_ready(state)
    roundings = 1 if adds == "kernel" else size - 1  # NCCL rounds each addition
    right = error < 2**-6 * (1 + roundings) and same_nans and same
    return state, {"right": right, "error": round(error, 5), "same_nans": same_nans, "same_bits": same}


def _time(mesh: Any, adds: str, rows: int, hidden: int, state: tuple, runs: int) -> tuple[tuple, float, bool]:
    """Seconds of a program, the best of three series, and whether all devices had the same bits after each."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    keys = jax.random.split(jax.random.key(0), 3)
    up = jax.random.normal(keys[0], (hidden, INNER), jnp.bfloat16) * hidden**-0.5
    down = jax.random.normal(keys[1], (INNER, hidden), jnp.bfloat16) * INNER**-0.5
    residual = jax.random.normal(keys[2], (rows, hidden), jnp.bfloat16)
    scale = jnp.ones(hidden, jnp.bfloat16)
    # On every device beforehand: copied there by each run, they would cost more than what is measured.
    residual, up, down, scale = jax.device_put((residual, up, down, scale), NamedSharding(mesh, PartitionSpec()))

    def body(state: tuple, residual: Any, up: Any, down: Any, scale: Any) -> tuple:
        normed, state = residual, _begin(adds, mesh.size, state)
        for _ in range(CALLS):
            state, residual, normed = _reduce(adds, mesh.size, state, normed @ up @ down, residual * 0.5, scale)
        return state[:2], normed[None]

    program = _sharded(mesh, body, state, whole=4, split=0)
    best, same = float("inf"), True
    for _ in range(4):  # the first compiles and warms up
        begun = time.perf_counter()
        for _ in range(runs):
            state, normed = program(state, residual, up, down, scale)
        jax.block_until_ready((state, normed))
        best = min(best, (time.perf_counter() - begun) / runs)
        bits = np.asarray(normed).view(np.uint16)
        same = same and all(np.array_equal(device, bits[0]) for device in bits[1:])
    return state, best, same


def _begin(adds: str, size: int, state: tuple) -> tuple:
    """What the sums of a program pass on: the state, and where the peers have theirs."""
    if adds != "kernel":
        return state
    from jpaged.pallas_kernels import all_reduce_peers

    return *state, all_reduce_peers(state[0], axis="model", num_devices=size, backend="hopper")


def _reduce(adds: str, size: int, state: tuple, part: Any, residual: Any, scale: Any) -> tuple:
    """state, the new residual, its norm."""
    from jax import lax

    from jpaged.pallas_kernels.common.numerics import rms_norm

    if adds == "kernel":
        from jpaged.pallas_kernels import all_reduce_add_norm

        how = {"axis": "model", "num_devices": size, "backend": "hopper"}
        inbox, generations, residual, normed = all_reduce_add_norm(
            *state, part, residual, scale=scale, norm_eps=NORM_EPS, **how
        )
        return (inbox, generations, state[2]), residual, normed
    residual = residual + (lax.psum(part, "model") if adds == "psum" else part)
    return state, residual, rms_norm(residual, scale, NORM_EPS)


def _sharded(mesh: Any, body: Callable[..., tuple], state: tuple, *, whole: int, split: int) -> Any:
    """A jitted program over the mesh. Its state is donated."""
    import jax
    from jax.sharding import PartitionSpec

    own, same = PartitionSpec("model"), PartitionSpec()
    specs = (own,) * len(state)

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(specs, *(own,) * split, *(same,) * whole),
        out_specs=(specs, own),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=0)


def _initial_state(mesh: Any, max_rows: int, hidden: int) -> tuple:
    import jax
    import jax.numpy as jnp

    from jpaged.executor.mesh import EXCHANGE, DeviceMesh
    from jpaged.pallas_kernels import initial_all_reduce_state
    from jpaged.pallas_kernels.all_reduce.inbox import EMPTY

    devices = DeviceMesh(mesh.devices.tolist())
    shapes = initial_all_reduce_state(mesh.size, max_rows, hidden, jnp.bfloat16)
    inbox, generations = (devices.split(shape, EXCHANGE) for shape in shapes)
    return jax.block_until_ready((devices.full(inbox, EMPTY), devices.full(generations, 0)))


def _unsupported(hidden: int, size: int) -> str | None:
    from jpaged.pallas_kernels import all_reduce_unsupported
    from jpaged.pallas_kernels.registry import runs_here

    return all_reduce_unsupported(hidden, "bfloat16", size) if runs_here("hopper") else "this is no Hopper GPU"


def table(cases: list[dict[str, Any]]) -> str:
    """Microseconds that a sum over devices adds to a program, by way and case."""
    times = {(c["way"], c["hidden"], c["rows"]): c["us_per_call"] for c in cases if "us_per_call" in c}
    columns = sorted({key[1:] for key in times})
    ways = [way for way in WAYS if any(key[0] == way for key in times)]
    lines = ["", "us a sum, above the program without".ljust(40) + "".join(f"{h} x {r}".rjust(12) for h, r in columns)]
    for way in ways:
        cells = []
        for column in columns:
            own, base = times.get((way, *column)), times.get(("none", *column))
            value = own if way == "none" or own is None or base is None else own - base
            cells.append(("-" if value is None else f"{value:.1f}").rjust(12))
        lines.append((f"({way})" if way == "none" else way).ljust(40) + "".join(cells))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
