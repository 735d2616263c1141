"""`jpaged models`: the model families that there are."""

import argparse

from jpaged.cli.options import add_debug_option


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "models",
        help="list the model families",
        description="List the model families that there are, those of installed packages and of JPAGED_MODELS included."
        " docs/adding_a_model.md adds one.",
    )
    parser.add_argument("--markdown", action="store_true", help="as the table of docs/models.md")
    add_debug_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    print(markdown() if args.markdown else plain())
    return 0


def markdown() -> str:
    """A table of all families."""
    from jpaged.models import described_architectures

    rows = [
        f"| {about.name} | {', '.join(f'`{name}`' for name in names)} | {about.models} | {about.features} |"
        for about, names in described_architectures()
    ]
    return "\n".join(["| family | architectures | models | features |", "|---|---|---|---|", *rows])


def plain() -> str:
    """A paragraph for each family."""
    from jpaged.models import described_architectures

    paragraphs = []
    for about, names in described_architectures():
        lines = [("architectures", ", ".join(names)), ("models", about.models), ("features", about.features)]
        said = [f"  {label:14} {text}" for label, text in lines if text]
        paragraphs.append("\n".join([about.name, *said]))
    return "\n\n".join(paragraphs)
