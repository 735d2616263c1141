"""What benchmarks check of their options before they load anything."""

import argparse

from jpaged.errors import InvalidParameterError


def check_least(args: argparse.Namespace, **least: int) -> None:
    """Raises InvalidParameterError for an option below its least value, `runs=1` being that of `--runs`.

    An option that may be repeated is checked each time; one that was not given, and is None, is not.
    """
    for name, bound in least.items():
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value < bound:
                raise InvalidParameterError(f"--{name.replace('_', '-')} must be at least {bound}, got {value}.")
