"""Conversations of the kind that the embedded model was trained on, for calibration: a JSON line with "messages" each.

python benchmarks/story_conversations.py --number 64 > stories.jsonl
python benchmarks/story_conversations.py --number 64 --output stories.jsonl
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
    parser.add_argument("--output", type=Path, help="a file to write them to (default: standard output)")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    lines = [json.dumps({"messages": converse(rng)}) + "\n" for _ in range(args.number)]
    if args.output is None:
        sys.stdout.writelines(lines)
    else:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text("".join(lines))


if __name__ == "__main__":
    main()
