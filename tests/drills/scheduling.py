"""Thousands of random requests through the scheduler, over blocks and over mapped pages: each gets its own tokens.

    make drill-scheduling                                        # minutes on one core; needs no GPU
    make drill-scheduling ARGS="--requests 20000 --seed 7"

The long form of `test_hundreds_of_requests_come_and_go` and of its twin over mapped pages: every policy, way to preempt
and kind of cache group, in the plain loop and in the pipelined one. The seed is fresh unless it is given, and printed.
"""

import argparse
import secrets
import time

from tests.engine.scheduler.test_scheduling_at_random import WALKS, serve_at_random
from tests.executor.cache.virtual.test_random_requests import CHANGES, assert_nothing_leaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=4000, help="of each walk, from 1,000 on (default: 4000)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    options = parser.parse_args()
    if options.requests < 1000:
        parser.error("--requests must be at least 1000: shorter walks may not meet all that they are to meet.")
    print(f"seed {options.seed}")
    for walk in WALKS:
        for depth in (0, 2):
            for name, changes in (("blocks", {}), ("pages", CHANGES)):
                begun = time.perf_counter()
                drive = serve_at_random(*walk, depth, num_requests=options.requests, seed=options.seed, **changes)
                if changes:
                    assert_nothing_leaks(drive.engine.executor)
                preempted = drive.engine.core.stats().num_preemptions
                seconds = time.perf_counter() - begun
                print(*walk, f"depth {depth}, {name}: {preempted:,} preemptions, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
