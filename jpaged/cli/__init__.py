"""The `jpaged` command.

Exit codes: 0 done; 1 something failed (one line on stderr says what); 2 the command line is wrong; 130 interrupted
with Ctrl-C; 141 the reader of the output went away.
"""

import argparse
import os
import re
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from textwrap import dedent
from typing import Any

from jpaged.api.errors import InvalidParameterError, JPagedError, UnsupportedParameterError, suggestion
from jpaged.api.unknown_names import ENGINE
from jpaged.api.version import __version__
from jpaged.cli import chat, convert, generate, models, quantize, run_batch, score, serve, worker
from jpaged.cli.options import add_debug_option
from jpaged.host.imports import keep_torch_out

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 2, 130, 141

BENCHMARKS = {
    "scheduler": "host time of a decode step with many sequences and no device",
    "kernels": "attention and cache kernels against the device's bandwidth",
    "throughput": "tokens/s of a whole model, offline",
    "latency": "how long a batch takes that has the engine to itself",
    "steps": "a decode step: its time, its floor, its kernels",
    "scoring": "tokens/s of scoring, and the share of the prefill roofline",
    "sequences": "several samples, beams, and swapping to host memory",
    "rollouts": "what an engine beside a training loop costs: new weights, sleep, streams kept",
    "vattention": "the virtual layout: mapping pages, and decode steps beside the paged layout's",
    "serve": "latency and tokens/s of an OpenAI-compatible server under open-loop load",
    "memory": "the PagedAttention paper's figures, simulated: memory, batches, latency, sharing",
}
"""Each is `jpaged.bench.<name>.main(argv)`, with arguments of its own."""


def run() -> int:
    """`main` in a process of its own."""
    keep_torch_out()
    return main()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line (`sys.argv` by default) and returns its exit code."""
    _replace_closed_streams()
    try:
        args = _parser().parse_args(argv)
    except SystemExit as exit_:  # argparse exits after --help, --version and errors
        return exit_.code if isinstance(exit_.code, int) else EXIT_USAGE
    debug = args.debug
    if not debug:  # messages of libraries are shown with --debug only
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _discard_stdout()
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        return EXIT_INTERRUPTED
    except (JPagedError, OSError, UnicodeError) as error:
        if debug:
            traceback.print_exc()
        _complain(_one_line(error))
        is_usage = isinstance(error, InvalidParameterError | UnsupportedParameterError)
        return EXIT_USAGE if is_usage else EXIT_FAILED
    except Exception as error:
        if debug:
            traceback.print_exc()
        _complain(f"{type(error).__name__}: {_one_line(error)} (this is a defect in jpaged; --debug shows where)")
        return EXIT_FAILED


def _replace_closed_streams() -> None:
    """Python leaves None where a standard stream was closed before it started."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  # for the life of the process
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


class _Parser(argparse.ArgumentParser):
    """Suggests the option that was meant where one is misspelt. Its commands' parsers are of this class too."""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        found, rest = super().parse_known_args(args, namespace)
        options = list(self._option_string_actions)
        for word in rest:
            name = word.partition("=")[0]
            if not name.startswith("--"):
                continue
            said = ENGINE.get(name[2:].replace("-", "_")) if "--kernel-backend" in options else None
            if said is not None:
                self.error(f"unrecognized option {name}: {_with_flags(said, options)}")
            if said := suggestion(name, options):
                self.error(f"unrecognized option {name}; {said}")
        return found, rest


def _with_flags(said: str, options: Sequence[str]) -> str:
    """Advice in which names of `EngineArgs` are those of options."""

    def flag(found: re.Match[str]) -> str:
        name = f"--{found[2].replace('_', '-')}"
        return f"{found[1] or ''}{name}" if name in options and (found[1] or "_" in found[2]) else found[0]

    return re.sub(r"\b(it is )?([a-z]+(?:_[a-z]+)*)\b", flag, said)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="jpaged",
        description="Generate text with large language models, on JAX.",
        epilog=dedent("""\
            examples:
              jpaged generate "A story about a brave snail"
              jpaged chat
              jpaged chat --model Qwen/Qwen3-0.6B --system "Answer in one sentence."
              jpaged generate --model path/to/model --file prompts.txt --json > answers.jsonl
              jpaged bench scheduler

            Without --model, a small model that comes with jpaged writes short stories.
            `jpaged COMMAND --help` lists a command's options."""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jpaged {__version__}")
    add_debug_option(parser, default=False)
    commands: Any = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    generate.add_command(commands)
    chat.add_command(commands)
    score.add_command(commands)
    run_batch.add_command(commands)
    serve.add_command(commands)
    worker.add_command(commands)
    convert.add_command(commands)
    quantize.add_command(commands)
    models.add_command(commands)
    _add_bench_command(commands)
    return parser


def _add_bench_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "bench",
        help="measure speed",
        usage="jpaged bench NAME [OPTION ...]",
        description=f"Measure speed.\n\n{_benchmarks()}\n\n`jpaged bench NAME --help` lists the options of one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # Optional here, so that `_run_bench`, not argparse, reports a missing name: it lists the names, a line each.
    parser.add_argument("name", nargs="?", default="", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    add_debug_option(parser)
    parser.set_defaults(run=_run_bench)


def _benchmarks() -> str:
    return "\n".join(["benchmarks:", *(f"  {name:<10}  {what}" for name, what in BENCHMARKS.items())])


def _run_bench(args: argparse.Namespace) -> int:
    if args.name not in BENCHMARKS:
        problem = f"there is no benchmark {args.name!r}" if args.name else "name a benchmark"
        print(f"jpaged bench: error: {problem}\n\n{_benchmarks()}", file=sys.stderr, flush=True)
        return EXIT_USAGE
    try:
        return import_module(f"jpaged.bench.{args.name}").main(args.arguments) or 0
    except SystemExit as exit_:  # its own argparse
        return exit_.code if isinstance(exit_.code, int) else EXIT_FAILED


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _complain(message: str) -> None:
    print(f"jpaged: error: {message}", file=sys.stderr, flush=True)


def _discard_stdout() -> None:
    """Points stdout, whose reader is gone, at /dev/null; otherwise Python reports an error when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
