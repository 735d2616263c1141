"""Every model family on eight CPU devices: the tokens of one device, whatever the model is split over.

    python -m tests.drills.tensor_parallel              # about four minutes on two cores

For each family, float32: tensor parallel 1, 2, 4 and 8 give the same greedy tokens, in one go, through preemptions and
after prefix hits, with two all-reduces a layer and one for the embedding in every step program and one small
all-gather in the greedy head; and two replicas of four shards give, through preemptions and prefix hits, the greedy and
the sampled tokens and the scores of one device. The test suite does the same for some of the families.
"""

import argparse
import time

import numpy as np

from tests.parallel.eight_devices import call_with_eight_devices
from tests.parallel.models import CASES
from tests.parallel.tensor_parallel_runs import check_tokens


def check_replicas(name: str) -> None:
    """Two replicas of four shards against one device."""
    found = call_with_eight_devices("tests.parallel.data_parallel_runs:two_replicas_of_four_shards", name)
    for kind in ("greedy", "sampled"):
        one, two = found[kind]
        assert two == one, kind
    assert min(found["preemptions_and_hits"]) > 0
    assert min(found["by_replica"]) > 0
    one, two = found["scores"]
    assert two["greedy"] == one["greedy"]
    np.testing.assert_allclose(two["logprobs"], one["logprobs"], rtol=1e-5, atol=1e-5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=CASES)
    for name in parser.parse_args().models:
        begun = time.monotonic()
        check_tokens(call_with_eight_devices("tests.parallel.tensor_parallel_runs:tokens_by_degree", name))
        check_replicas(name)
        print(f"{name}: the same tokens, {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
