"""Conversations of the kind that the embedded model was trained on, for calibration: a JSON line with "messages" each.

python benchmarks/story_conversations.py --number 64 > stories.jsonl
"""

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "train_story_model"))

from conversations import converse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=64, help="of conversations (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="of their drawing (default: 0)")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    for _ in range(args.number):
        print(json.dumps({"messages": converse(rng)}))


if __name__ == "__main__":
    main()
