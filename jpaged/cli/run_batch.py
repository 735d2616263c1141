"""`jpaged run-batch`: a file of OpenAI requests, answered into a file."""

import argparse
from textwrap import dedent

from jpaged.cli.file_jobs import add_job_options, job
from jpaged.cli.options import add_parser_options


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "run-batch",
        help="answer a file of OpenAI requests",
        description=dedent("""\
            Answer an OpenAI batch file: a line for each request to /v1/completions, /v1/chat/completions,
            /v1/embeddings, /v1/score or /v1/rerank, and a line for each answer, in the same order. Run again after a
            crash or Ctrl-C, it goes on where it was."""),
        epilog=dedent("""\
            example:
              echo '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body":
                {"messages": [{"role": "user", "content": "A story about a snail"}]}}' | tr -d '\\n' > in.jsonl
              jpaged run-batch -i in.jsonl -o out.jsonl"""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-i", "--input", required=True, metavar="INPUT", help="a .jsonl file of requests")
    parser.add_argument("-o", "--output", required=True, metavar="OUTPUT", help="a .jsonl file")
    parser.add_argument("--seed", type=int, metavar="N", help="of requests that have none (default: 0)")
    add_parser_options(parser)
    add_job_options(parser, "requests", 64, compares=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns the exit code: 1 if a request could not be answered."""
    with job(args) as (screen, options):
        from jpaged.serving.batch import run_batch

        summary = run_batch(
            args.input,
            args.output,
            tool_parser=args.tool_parser,
            reasoning_parser=args.reasoning_parser,
            **options,
        )
    if summary.num_errors:
        screen.warn(f"{summary.num_errors} of {summary.num_rows} requests failed; {args.output} says why")
    screen.note(f"{summary.num_rows:,} requests, {summary.num_tokens:,} tokens in {summary.seconds:.1f} s")
    return 1 if summary.num_errors else 0
