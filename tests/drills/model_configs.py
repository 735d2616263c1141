"""Random configurations of every family, tiny, against transformers in float32: the same logits, or a refusal by name.

    python -m tests.drills.model_configs --seconds 600                 # all families in turns, from a seed of its own
    python -m tests.drills.model_configs --family gemma2 --seed 7      # one family
    python -m tests.drills.model_configs --family gemma2 --only 7      # one configuration, by the number that is shown

Every field that changes what a model computes takes the values that transformers takes, in the spellings of
transformers 4 and 5 (`tests/support/config_spaces.py`). Weights are random, of norms, biases and routers
too. What differs by more than rounding explains is listed, and what one of the two refuses, with its reason.

With --engine, an engine also decodes greedily, prompts in chunks, past windows; its tokens must be transformers'.
"""

import argparse
import itertools
import json
import os
import random
import time
from collections import Counter

from tests.support.against_transformers import Refused, compare
from tests.support.config_spaces import SPACES, draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=SPACES, default=list(SPACES), help="default: all")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="default: another each time")
    parser.add_argument("--seconds", type=float, default=60, help="how long (default: %(default)s)")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one configuration, and show it")
    parser.add_argument("--engine", type=float, default=0, metavar="SHARE", help="of configurations, in an engine too")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    begun = time.monotonic()
    counts, refusals, wrong = Counter[str](), Counter[str](), Counter[str]()

    def try_one(family: str, number: int) -> None:
        config = draw(SPACES[family], random.Random(f"{family} {number}"))
        if options.only is not None:
            print(json.dumps(config, indent=1))
        try:
            said = compare(config, number, random.Random(number).random() < options.engine)
        except Refused as refused:
            counts[f"refused, {refused.whose}"] += 1
            refusals[f"{refused.whose}: {family}: {refused}"] += 1
            return
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        counts["wrong" if said else "equal"] += 1
        if said:
            wrong[family] += 1
            print(f"{family} {number}: {said}", flush=True)

    if options.only is not None:
        for family in options.family:
            try_one(family, options.only)
    else:
        for number, family in ((n, family) for n in itertools.count(options.seed) for family in options.family):
            if time.monotonic() - begun > options.seconds:
                break
            try_one(family, number)
        print(f"numbers {options.seed} to {number}")
    for refusal, times in sorted(refusals.items()):
        print(f"{times} x {refusal}")
    print(", ".join(f"{times} {what}" for what, times in counts.items()))
    if wrong:
        raise SystemExit(f"not the same: {dict(wrong)}")


if __name__ == "__main__":
    main()
