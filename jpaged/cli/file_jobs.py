"""What commands that work through files, resumably, have in common."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jpaged.api.errors import InvalidParameterError
from jpaged.cli.options import add_model_options, engine_options
from jpaged.cli.terminal import Screen


def add_job_options(
    parser: argparse.ArgumentParser, unit: str, default: int, *, generates: bool = True, compares: bool = False
) -> None:
    """Options of files and of the model; `job` reads them.

    unit: what a shard's size is counted in. default: of them. generates, compares: as of `add_model_options`.
    """
    group = parser.add_argument_group("file options")
    group.add_argument("--overwrite", action="store_true", help="replace the output, drop unfinished work on it")
    group.add_argument(
        "--shard-size", type=int, metavar="N", help=f"{unit} between two commits to the disk (default: {default})"
    )
    group.add_argument(
        "--in-process",
        action="store_true",
        help="run the engine in this process, which then ends with it; else it has one of its own, which is started"
        " again",
    )
    add_model_options(parser, generates=generates, compares=compares)


@contextmanager
def job(args: argparse.Namespace) -> Iterator[tuple[Screen, dict[str, Any]]]:
    """Gives the screen, and keyword arguments for `score_files` or `run_batch`. Says, when Ctrl-C ends the job within,
    that it can go on.

    Raises:
        InvalidParameterError: a value out of range; so before anything is loaded.
    """
    screen = Screen(args.quiet)
    options = engine_options(args, verbose=screen.shows_progress)
    if args.in_process and options.get("data_parallel_size", 1) > 1:
        raise InvalidParameterError("--in-process is for one engine; leave --data-parallel-size out.")
    options["worker_process"] = not args.in_process
    if args.shard_size is not None:
        options["shard_size"] = args.shard_size
    try:
        yield screen, options | {"overwrite": args.overwrite, "use_tqdm": screen.shows_progress}
    except KeyboardInterrupt:
        screen.warn("interrupted; finished shards are kept, and the same command goes on from them")
        raise
