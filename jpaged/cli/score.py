"""`jpaged score`: log-likelihoods of the rows of files, into a file."""

import argparse
from textwrap import dedent

from jpaged.cli.file_jobs import add_job_options, job
from jpaged.cli.terminal import Screen

MAX_WARNINGS = 20
"""Skipped rows named on stderr; the errors file has all of them."""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "score",
        help="log-likelihoods of texts, completions or choices in files",
        description=dedent("""\
            Log-likelihoods of the rows of files, into a file. A row has "text", or "prompt" and "completion", or
            "prompt" and "choices". Run again after a crash or Ctrl-C, it goes on where it was."""),
        epilog=dedent("""\
            examples:
              jpaged score texts.jsonl -o scores.jsonl
              jpaged score questions.csv -o answers.parquet --model Qwen/Qwen3-0.6B
              jpaged score part1.jsonl part2.jsonl -o scores.jsonl --logprobs --on-error skip"""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="a .jsonl, .csv or .parquet file")
    parser.add_argument("-o", "--output", required=True, metavar="OUTPUT", help="a .jsonl or .parquet file")
    parser.add_argument("--logprobs", action="store_true", help="with each scored token's id and log-probability")
    parser.add_argument("--window", type=int, metavar="N", help="most tokens at once (default: --max-model-len)")
    parser.add_argument("--stride", type=int, metavar="N", help="how far windows are apart (default: half a window)")
    parser.add_argument(
        "--no-special-tokens",
        dest="add_special_tokens",
        action="store_false",
        help="do not begin texts and prompts with a begin-of-sequence token",
    )
    parser.add_argument(
        "--on-error",
        choices=("fail", "skip"),
        default="fail",
        help="a malformed row ends the run, or is left out and listed in OUTPUT.errors.jsonl (default: fail)",
    )
    add_job_options(parser, "characters", 524288, generates=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns the exit code."""
    with job(args) as (screen, options):
        from jpaged.scoring import score_files

        summary = score_files(
            args.inputs,
            args.output,
            on_error=args.on_error,
            warn=Warnings(screen).add,
            logprobs=args.logprobs,
            window=args.window,
            stride=args.stride,
            add_special_tokens=args.add_special_tokens,
            **options,
        )
    if summary.num_errors:
        screen.warn(f"{summary.num_errors} of {summary.num_rows} rows skipped; {summary.errors_file} lists them")
    screen.note(
        f"{summary.num_rows - summary.num_errors:,} rows, {summary.num_tokens:,} tokens in {summary.seconds:.1f} s"
    )
    return 0


class Warnings:
    """Names the first skipped rows on stderr."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._count = 0

    def add(self, text: str) -> None:
        self._count += 1
        if self._count <= MAX_WARNINGS:
            self._screen.warn(text)
