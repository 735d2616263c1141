"""The options of benchmarks: how `--help` shows them, and checks that run before anything is loaded."""

import argparse
from pathlib import Path

from jpaged.api.errors import InvalidParameterError

MOST_SKEW = 4.0
"""Of --expert-skew. Beyond it the first experts have nearly all tokens."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the text above and below the options as it is, and adds each option's default, unless the help text names
    it already, there is none, or the option is off.
    """

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or "(default: " in (action.help or ""):
            return action.help
        return super()._get_help_string(action)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return {int: "N", float: "X"}.get(action.type) or action.dest.upper()  # type: ignore[call-overload]


def bench_parser(name: str, description: str | None, example: str) -> argparse.ArgumentParser:
    """The parser of `jpaged bench NAME`, with the option to write a report.

    example: arguments, shown below the help.
    """
    result = argparse.ArgumentParser(
        prog=f"jpaged bench {name}",
        description=description,
        formatter_class=HelpFormatter,
        epilog=f"example: jpaged bench {name} {example}",
    )
    result.add_argument("--json", type=Path, help="write the figures and the environment to this file")
    return result


def add_kernel_backend_option(parser: argparse.ArgumentParser) -> None:
    """--kernel-backend, an engine's. The engine says which names there are if it does not know one."""
    parser.add_argument(
        "--kernel-backend",
        metavar="NAME",
        help='attention and cache kernels: "hopper" (or "mosaic"), "triton" or "xla" (default: by device)',
    )


def check_expert_skew(skew: float) -> None:
    """Raises InvalidParameterError for a value that --expert-skew does not take."""
    if not 0 < skew <= MOST_SKEW:
        raise InvalidParameterError(f"--expert-skew must be above 0 and at most {MOST_SKEW:g}, got {skew:g}.")


def check_least(args: argparse.Namespace, **least: int) -> None:
    """Raises InvalidParameterError for an option below its least value, `runs=1` being that of `--runs`.

    Every value of a repeated option, or of one with several, is checked; an option that was not given (None) is not.
    """
    for name, bound in least.items():
        given = getattr(args, name)
        for value in given if isinstance(given, list | tuple) else [given]:
            if value is not None and value < bound:
                raise InvalidParameterError(f"--{name.replace('_', '-')} must be at least {bound}, got {value}.")
