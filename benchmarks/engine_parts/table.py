"""Prints what `sitecustomize.py` wrote for two engine processes, side by side, in microseconds.

    python benchmarks/engine_parts/table.py OTHER.json THIS.json

The first lines are its `shares`; then come its parts, those that take most time in all first.
"""

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs=2, metavar="FILE")
    both = [json.loads(path.read_text()) for path in parser.parse_args().files]
    for name in both[0]["shares"]:
        print(f"{name:<28}" + "".join(f"{one['shares'][name]:>36.3f}" for one in both))
    print(f"{'':<28}" + 2 * f"{'number':>9}{'mean':>9}{'p50':>9}{'p90':>9}")
    names = {name for one in both for name in one["parts"]}
    for name in sorted(names, key=lambda name: -max(weight(one["parts"].get(name)) for one in both)):
        print(f"{name:<28}" + "".join(cells(one["parts"].get(name)) for one in both))


def weight(part: dict[str, float] | None) -> float:
    return 0.0 if part is None else part["number"] * part["mean_us"]


def cells(part: dict[str, float] | None) -> str:
    if part is None:
        return " " * 36
    return f"{part['number']:>9,.0f}{part['mean_us']:>9.1f}{part['p50_us']:>9.1f}{part['p90_us']:>9.1f}"


if __name__ == "__main__":
    main()
