"""The figures of report B over those of report A, case by case.

    python benchmarks/compare.py A.json B.json

Both are reports that a benchmark wrote with `--json`. Cases are matched by name, and so are their numbers. Settings and
environments that differ are listed first. A ratio above 1 means that B's number is larger, which may be good or bad.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from jpaged.api.errors import InvalidParameterError
from jpaged.bench.arguments import HelpFormatter

_NAMES = ("name", "case", "workload", "dataset", "batch", "batch_size", "input_len", "output_len", "variant", "system")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    result.add_argument("a", type=Path, metavar="A.json", help="the report to compare with")
    result.add_argument("b", type=Path, metavar="B.json", help="the report to compare")
    return result


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    a, b = _read(args.a), _read(args.b)
    if a["benchmark"] != b["benchmark"]:
        raise InvalidParameterError(f"{args.a} is of {a['benchmark']!r}, {args.b} of {b['benchmark']!r}; compare like.")
    for part in ("environment", "settings"):
        for key in sorted(set(a[part]) | set(b[part])):
            old, new = a[part].get(key), b[part].get(key)
            if old != new:
                print(f"{part} {key}: {old} -> {new}")
    cases = ratios(a["results"], b["results"])
    if not cases:
        raise InvalidParameterError(f"{args.a} and {args.b} have no case in common.")
    for case, numbers in cases.items():
        print(case)
        for key, (old, new) in numbers.items():
            print(f"    {key:<32} {old:>14,.4g} {new:>14,.4g}   {new / old:.3f}x")
    return 0


def ratios(a: list[dict], b: list[dict]) -> dict[str, dict[str, tuple[float, float]]]:
    """By case that both have: its numbers that both have, A's not zero, as (A's, B's)."""
    of_b = {_name(result): result for result in map(_flat, b)}
    found = {}
    for result in map(_flat, a):
        other = of_b.get(_name(result))
        if other is not None:
            found[_name(result)] = {
                key: (float(value), float(other[key]))
                for key, value in result.items()
                if _is_number(value) and _is_number(other.get(key)) and value and key not in _NAMES
            }
    return found


def _flat(result: dict) -> dict:
    """With percentiles, such as ttft_ms = {"p50": ...}, as numbers of their own: "ttft_ms p50"."""
    inner = {
        f"{key} {name}": x for key, value in result.items() if _is_summary(key, value) for name, x in value.items()
    }
    return {key: value for key, value in result.items() if not _is_summary(key, value)} | inner


def _is_summary(key: str, value: object) -> bool:
    return key.endswith("_ms") and isinstance(value, dict)


def _name(result: dict) -> str:
    """What tells a case from the others of its report."""
    parts = [f"{result[key]}" for key in _NAMES if key in result and not isinstance(result[key], dict)]
    return " ".join(parts) or "result"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text())
    except OSError as error:
        raise InvalidParameterError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise InvalidParameterError(f"{path} is not JSON: {error}.") from error
    if not isinstance(report, dict) or not isinstance(report.get("results"), list) or "benchmark" not in report:
        raise InvalidParameterError(f"{path} is not a report of a benchmark with a list of results.")
    return {"environment": {}, "settings": {}} | report


if __name__ == "__main__":
    sys.exit(main())
