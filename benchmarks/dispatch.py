"""What calling an executable costs the host, by the number of its arguments.

    python benchmarks/dispatch.py [--json OUT.json]

A step's body reads all weights, small ones in bundles, and is donated the KV pool of each layer. Here both are arrays
of eight numbers, so a call is little more than what JAX and XLA do for its arguments. The time is that from a call to
its return, with a numpy array of 32 numbers as the packed input. Copies of such an array to the device and to the host
are timed, too.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.bench.arguments import HelpFormatter, check_least
from jpaged.bench.report import write_report

COUNTS = ((1, 0), (115, 0), (226, 0), (1, 28), (115, 28), (226, 28))
"""Arguments read, and donated. Qwen3-0.6B has 226 weights and 28 layers; its bodies take 115 arrays for the weights."""
UNTIMED = 50
"""Calls before timing begins."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--calls", type=int, default=500, help="calls timed for each number of arguments")
    parser.add_argument("--json", type=Path, help="write the figures and the environment to this file")
    args = parser.parse_args(argv)
    check_least(args, calls=1)
    figures = [{"read": read, "donated": donated} | call(read, donated, args.calls) for read, donated in COUNTS]
    figures += [{"name": name} | figure for name, figure in copies(args.calls).items()]
    for figure in figures:
        what = figure.get("name") or f"{figure['read']:>4} arguments read, {figure['donated']:>3} donated"
        print(f"{what:<36} {figure['us']:6.0f} us ({figure['us_10']:.0f} .. {figure['us_90']:.0f})")
    if args.json:
        write_report(args.json, "dispatch", vars(args), figures)
    return 0


def call(num_read: int, num_donated: int, calls: int) -> dict[str, float]:
    packed = np.zeros(32, np.int32)
    read = tuple(jnp.zeros(8) for _ in range(num_read))
    donated = tuple(jnp.ones(8) for _ in range(num_donated))
    jitted = jax.jit(lambda read, donated, packed: (donated, packed + 1), donate_argnums=1, keep_unused=True)
    executable = jitted.lower(read, donated, packed).compile()
    state = {"donated": donated}

    def once() -> Any:
        state["donated"], result = executable(read, state["donated"], packed)
        return result

    return timed(once, jax.block_until_ready, calls)


def copies(calls: int) -> dict[str, dict[str, float]]:
    """Of an array of 32 numbers, to the device and back."""
    packed, add = np.zeros(32, np.int32), jax.jit(lambda x: x + 1)
    results = iter([add(packed) for _ in range(UNTIMED + calls)])
    jax.block_until_ready(add(packed))
    return {
        "copy to the device": timed(lambda: jax.device_put(packed), jax.block_until_ready, calls),
        "asking for a copy to the host": timed(lambda: _asked(next(results)), np.asarray, calls),
    }


def _asked(array: jax.Array) -> jax.Array:
    array.copy_to_host_async()
    return array


def timed(call: Callable[[], Any], wait: Callable[[Any], object], calls: int) -> dict[str, float]:
    """Microseconds of a call: the median, and what a tenth of the calls stays below and above."""
    seconds = []
    for _ in range(UNTIMED + calls):
        begun = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - begun)
        wait(result)
    tenth, median, nine_tenths = 1e6 * np.percentile(seconds[UNTIMED:], (10, 50, 90))
    return {"us": median, "us_10": tenth, "us_90": nine_tenths}


if __name__ == "__main__":
    sys.exit(main())
