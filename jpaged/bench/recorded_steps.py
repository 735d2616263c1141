"""`jpaged bench steps --replay FILE`: the last steps of an engine process that ended, as its flight recorder had them.

The file is one that the server's log names when an engine process has ended (`processes/flight_recorder.py`).
"""

import json
import statistics
from pathlib import Path
from typing import Any

from jpaged.api.errors import InvalidParameterError

_SHOWN = 20


def load(path: Path) -> dict[str, Any]:
    """The file's content. Raises InvalidParameterError: it is no such file."""
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(recorded, dict) and recorded["steps"] and "cause" in recorded:
            return recorded
    except OSError as error:
        raise InvalidParameterError(f"--replay {path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError):
        pass
    raise InvalidParameterError(f"--replay {path} holds no recorded steps; give a file that the server's log names.")


def in_flight(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps that were dispatched and not read."""
    return [step for step in steps if step["read_s"] is None]


def tokens_of(step: dict[str, Any]) -> int:
    """Tokens that a step computes."""
    return len(step["contexts"]) + sum(count for _, _, count, _ in step["chunks"])


def report(recorded: dict[str, Any]) -> list[str]:
    """What there is to see, as lines: the cause, a summary, and the last steps."""
    steps = recorded["steps"]
    lasted = [1e3 * (step["read_s"] - step["dispatched_s"]) for step in steps if step["read_s"] is not None]
    lines = [recorded["cause"], f"{len(steps)} steps recorded, {len(in_flight(steps))} of them not read"]
    if lasted:
        lines.append(
            f"from dispatch to reading: median {statistics.median(lasted):.2f} ms, longest {max(lasted):.2f} ms"
        )
    lines.append(
        f"{'step':>9} {'at s':>9} {'ms':>9} {'decode':>7} {'context':>9} {'chunks':>7} {'tokens':>7}  what else"
    )
    lines += [_line(step) for step in steps[-_SHOWN:]]
    return lines


def _line(step: dict[str, Any]) -> str:
    contexts = step["contexts"]
    took = "not read" if step["read_s"] is None else f"{1e3 * (step['read_s'] - step['dispatched_s']):.2f}"
    names = ("starts", "ends", "copies", "swaps", "beams")
    others = [f"{step[f'num_{name}']} {name}" for name in names if step[f"num_{name}"]]
    return (
        f"{step['step']:>9} {step['dispatched_s']:>9.3f} {took:>9} {len(contexts):>7} {max(contexts, default=0):>9} "
        f"{step['num_chunks']:>7} {tokens_of(step):>7}  {', '.join([step['variant'], *others])}"
    )
